"""What the launches of the kernels for MMQ strips have in common: template arguments, parameters, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats.canonical import SCALE_DTYPES
from .factors import NEVER, bias_type, starts
from .mmq_strips import DEPTH, KINDS, ROWS

Spec = Mapping[str, Any]

DECODE_TOKENS = 8
"""Most rows of mmq_decode."""
RESERVED = 1024
"""Bytes of shared memory the system takes for each block."""


def beside(spec: Spec) -> bool:
    """Scales for blocks along k that lie beside the strips."""
    return not KINDS[spec["kind"]].scales and spec["group"] != -1


def variant_of(spec: Spec, x_dtype: str, *shape: int) -> tuple[int, ...]:
    """The fields every ``Variant`` begins with, then the kernel's own."""
    dtypes = list(SCALE_DTYPES)
    grid = "f32" if KINDS[spec["kind"]].scales else spec["scale"]
    types = list(KINDS).index(spec["kind"]), dtypes.index(x_dtype), dtypes.index(grid)
    return *types, int(beside(spec)), *shape


def args_of(spec: Spec) -> tuple[str | int, ...]:
    """What both kernels begin with."""
    own, (block_n, block_k) = KINDS[spec["kind"]].scales, spec["scale_block"]
    whole = not own and spec["group"] == -1
    factors = "scales" if whole else "global_scale"
    columns = block_n if whole and len(spec.get("shards", ())) < 2 else NEVER
    operands = ("strips", "scales", factors, "bias", "quantized", "factors", "y", "residual", "scratch", "counters")
    grid = (block_n, block_k, -(-spec["n"] // block_n), -(-spec["k"] // block_k)) if beside(spec) else (1, 128, 1, 1)
    extents = ("m", "n", "k_padded", "ldy", "ld_residual", "each")
    return (*operands, *extents, bias_type(spec), columns, *starts(spec), *grid)


def extent_of(spec: Spec) -> tuple[int, int]:
    """(rows of strips that hold real rows, steps of 256 k)."""
    return -(-spec["n"] // ROWS), spec["k_padded"] // DEPTH
