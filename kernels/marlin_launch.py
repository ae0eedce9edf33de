"""What the launches of Marlin's mma.sync kernels have in common: template arguments, parameters, and rows of x."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from . import gather, quantize
from . import marlin_scales as scales
from .factors import bias_type
from .launch import At, Device, Part, Plan, Stage

Spec = Mapping[str, Any]

PAIRED = "; each row of x is multiplied as two of f16, which keep 22 bits of its numbers and any size; sums stay fp32"
ROUNDED = "; x is rounded to 8 bits, with one factor for each row"

WHOLE = "int8_row"
"""The kind of ``quantize`` whose codes the mma.sync kernels multiply with: whole numbers as f16."""


def run_of(spec: Spec, most: int) -> int:
    """Slices of 16 k that share a scale in a loop body of ``most``; 0 when all of k does."""
    return 0 if spec["group"] == -1 else gcd(spec["group"] // 16, most)


def variant_of(spec: Spec, x_dtype: str, run: int, *shape: int) -> tuple[int, ...]:
    """The fields every ``Variant`` begins with, then the kernel's own."""
    names, dtypes = list(ELEMENTS), list(SCALE_DTYPES)
    types = names.index(spec["element"]), dtypes.index(x_dtype), dtypes.index(spec["scale"])
    kind = int(spec["zero"] is not None), run, int(scales.block(spec)), int(scales.factor(spec))
    return *types, *kind, *shape


def tensors_of(part: Part, prefix: str = "") -> tuple[str | At, ...]:
    """Where a part's codes, scales, zero points, factors and bias begin."""
    spec = part.spec
    names = ("qweight", "scales", "qzeros", scales.factors(spec), "bias")
    if not part.first:
        return tuple(prefix + name for name in names)
    bits = ELEMENTS[spec["element"]].bits
    column = {"qweight": 16 * bits, "scales": 8 * SCALE_DTYPES[spec["scale"]].itemsize, "qzeros": bits}  # bits of each
    if spec["bias"]:
        column["bias"] = 8 * SCALE_DTYPES[spec["bias"]].itemsize
    return tuple(At(prefix + name, part.first * column.get(name, 0) // 8) for name in names)


def args_of(part: Part, rows: int, gathered: bool, whole: bool = False) -> tuple[str | int | At, ...]:
    """What both kernels begin with; gathered rows are k_padded long, quantised ones have zeros beyond k."""
    x, k, ldx = ("quantized", "k", "ld_quantized") if whole else ("x", "k", "ldx")
    x, k, ldx = ("gathered", "k_padded", "ld_gathered") if gathered else (x, k, ldx)
    operands = (*tensors_of(part), x, "y", "residual", "factors", "scratch", "counters")
    extents = (rows, part.n, k, "n_padded", "k_padded", "group", ldx, "ldy", "ld_residual", "each")
    return (*operands, *extents, bias_type(part.spec), *scales.args(part.spec))


def rows_read(
    spec: Spec, m: int, device: Device, x_dtype: str, aligned: bool, whole: bool = False
) -> tuple[int, Stage | None]:
    """How many rows kernels multiply, and the launch before that makes them where those of x cannot be read; where they
    are ``whole`` numbers, those are what cannot be read through a perm."""
    if whole:
        return m, gather.stage(gather.PERM, m, spec["k_padded"], device, quantized=True) if spec["perm"] else None
    if x_dtype == "f32":
        return 2 * m, _pairs(spec, m, device)
    return m, gather_of(spec, m, device) if spec["perm"] or not aligned else None


def _pairs(spec: Spec, m: int, device: Device) -> Stage:
    return Stage(
        kernel="pairs",
        variant=(int(spec["perm"]),),
        target=f"sm_{device.arch}",
        grid=(min(m, 4 * device.sms), 1, 1),
        block=512,
        shared=0,
        args=("perm", "x", "gathered", "factors", "m", "k", "k_padded", "ldx"),
        overlap=device.overlaps,
    )


def gather_of(spec: Spec, m: int, device: Device) -> Stage:
    return gather.stage(gather.PERM if spec["perm"] else gather.AS_IT_LIES, m, spec["k_padded"], device)


def with_rows(made: Plan, spec: Spec, m: int, x_dtype: str) -> Plan:
    """A plan with the memory that the rows of its first stage take."""
    if len(made.stages) == 1:
        return made
    split = x_dtype == "f32"
    return replace(
        made,
        why=made.why + PAIRED if split else made.why,
        gathered=2 * m * spec["k_padded"] * (2 if split else 1),
        factors=4 * m if split else 0,
    )


def with_whole_rows(made: Plan, spec: Spec, m: int, device: Device, x_dtype: str) -> Plan:
    """A plan that multiplies whole numbers with the launch that makes them, and its memory."""
    quantized, factors = quantize.nbytes(WHOLE, m, spec["k"])
    return replace(
        made,
        stages=(quantize.stage(WHOLE, m, spec["k"], device, x_dtype), *made.stages),
        why=made.why + ROUNDED,
        gathered=2 * m * spec["k_padded"] if len(made.stages) > 1 else 0,
        quantized=quantized,
        factors=factors,
        quantizes=WHOLE,
    )
