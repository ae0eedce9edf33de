"""Which kernels multiply with MMQ strips: a function of (module, m, device) and nothing else.

| m | kernel | work of a block |
| --- | --- | --- |
| 1 to 8 | mmq_decode | rows of strips, k split over its warps: time is reading W once |
| above | mmq_tiled | 128 features x 16 to 128 tokens |
| from 9, 17 or 33 on Hopper; any with x exact | mmq_wgmma (mmq_hopper_plan) | 256 x 16 to 256 and others, x as it is |

The first two multiply x in 8 bits (quantize.py): int8 with the integers of a strip, e4m3 with fp8. A stage before them
rounds it, or mmq_decode itself where rows are few. On sm_75 they multiply integers with the instructions it has
(turing.cuh), and y may be bf16 too: rounding to it is arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

from ..formats.canonical import scale_words
from ..formats.errors import UnsupportedError
from . import mmq_hopper_plan as hopper
from . import mmq_tiled_plan as tiled
from . import quantize
from .factors import refuse_parts
from .launch import Device, Plan
from .mmq_decode_plan import Decode, choose_decode, decode, rounds
from .mmq_launch import DECODE_TOKENS, Spec
from .mmq_strips import KINDS
from .mmq_tiled_plan import Tiled
from .wgmma_plan import Wgmma

X_DTYPES = ("f16", "bf16", "f32")
IN_8_BITS = ("int8", "e4m3")
"""Kinds of ``quantize`` that kernels multiply with."""
GRIDS = ("f16", "bf16", "f32", "e8m0")
"""Types of scales beside strips that kernels read."""


def _in_8_bits(spec: Spec) -> str:
    """What x is rounded to for a kind's codes."""
    return "e4m3" if spec["kind"] == "fp8" else "int8"


def numerics(spec: Spec) -> tuple[str, ...]:
    """What a product may be asked for: x in the 8 bits that a kind's codes multiply with, or as it is."""
    return _in_8_bits(spec), "exact"


def _supported(spec: Spec, device: Device, x_dtype: str, kind: str) -> None:
    need = "sm_89" if kind == "e4m3" else "sm_75"
    if device.arch < int(need[3:]):
        found = f"sm_{device.arch}"
        raise UnsupportedError(
            f"no kernel for {kind} activations on this GPU",
            found=found,
            need=f"{need} or newer",
            do="dequantize instead",
        )
    if x_dtype not in X_DTYPES:
        raise UnsupportedError(
            "no kernel for these types", found=f"{x_dtype} activations", need=f"{', '.join(X_DTYPES)} activations"
        )
    if (reason := _refused_scales(spec)) is not None:
        raise UnsupportedError("no kernel for these scales", need=reason)


def _refused_scales(spec: Spec) -> str | None:
    if reason := refuse_parts(spec):
        return reason
    if KINDS[spec["kind"]].scales:
        return None
    if spec["scale"] not in GRIDS:
        return f"scales of {' or '.join(GRIDS)}, not {scale_words(spec['scale'])}"
    if spec["group"] != -1 and spec["scale_block"][1] % 128:
        return f"scales of a multiple of 128 k, not {spec['scale_block'][1]}"
    if spec["group"] == -1 and "global" in spec:
        return "one factor for all of k, not two"
    return None


def plan(
    spec: Spec,
    m: int,
    device: Device,
    x_dtype: str,
    aligned: bool = True,
    variant: Decode | Tiled | Wgmma | None = None,
    numerics: str | None = None,
    batch_invariant: bool = False,
    quantized: bool = False,
) -> Plan:
    """The launches of y[m, n] = x[m, k] @ W.T for a module that ``mmq.spec`` describes.

    ``x_dtype``: "f16", "bf16" or "f32", also y's. ``variant`` replaces the choice, for measuring. ``numerics`` is one
    of ``numerics(spec)``, None for what suits the device and m. ``batch_invariant``: a row of y has the same bits
    whatever m is and the other rows are. ``quantized``: x may come in 8 bits, so a stage of its own rounds it.
    Raises ``UnsupportedError`` where no kernel of ours runs.
    """
    if m == 0:
        return Plan((), "no rows")
    refused = hopper.refuse(spec, device, x_dtype)
    exact = refused is None and (batch_invariant or m >= hopper.fewest(spec, x_dtype))
    kind = numerics or ("exact" if exact else _in_8_bits(spec))
    if kind == "exact":
        if refused is not None:
            found = f"{spec['kind']}, {x_dtype} activations"
            raise UnsupportedError(
                "no kernel multiplies strips with activations as they are", found=found, need=refused,
                do="dequantize instead",
            )  # fmt: skip
        if isinstance(variant, Wgmma):
            return hopper.launch(spec, m, device, x_dtype, variant)
        tile, rejected = hopper.choose(spec, m, device, x_dtype, batch_invariant)
        return replace(hopper.launch(spec, m, device, x_dtype, tile), rejected=rejected)
    assert kind == _in_8_bits(spec), kind
    assert not isinstance(variant, Wgmma), variant
    _supported(spec, device, x_dtype, kind)
    if variant is None and m <= DECODE_TOKENS and not batch_invariant:
        variant = choose_decode(spec, device)
    rejected = (("tiled", f"its smallest tile has 16 tokens, m is {m}"),)
    if variant is None:
        variant, rejected = tiled.choose_tile(spec, m, device, batch_invariant)
    if isinstance(variant, Decode):
        rounding = not quantized and rounds(spec, m, variant)
        made = decode(spec, device, x_dtype, variant, rounding)
        if rounding:
            return replace(made, rejected=rejected)
    else:
        made = tiled.launch(spec, m, device, x_dtype, variant)
    codes, factors = quantize.nbytes(kind, m, spec["k"])
    first = quantize.stage(kind, m, spec["k"], device, x_dtype)
    return Plan(
        (first, *made.stages),
        made.why,
        made.scratch,
        counters=made.counters,
        quantized=codes,
        factors=factors,
        quantizes=kind,
        rejected=rejected,
    )
