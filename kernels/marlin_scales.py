"""Which scales the mma.sync kernels multiply with, and how they find them.

| scales | where they act |
| --- | --- |
| of a column and group | fp32 sums of a run of k |
| the same, of integers and x's type, unless x is in 8 bits | the 16-bit weights, rounded once |
| the same, where code times scale is exact in x's type (e2m1) | the 16-bit weights, times a power of two |
| of a block of whole tiles of columns | fp32 sums of a run of k |
| of a column, all of k | the sum of a warp or tile |
| of the whole, of fused parts, of blocks as long as k; a global | the finished sum: a factor |

So a product of two 16-bit numbers is never formed that could leave their range, and two levels are not multiplied
with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from .factors import NEVER, refuse_parts, starts

Spec = Mapping[str, Any]

FLOATS = ("f16", "bf16", "f32")
STORED = {"u4b8": False, "u4": True, "u8b128": False, "u8": True, "e4m3": False, "e2m1": False}
"""Elements with kernels, and whether zero points come with them as a rule."""
SCALES = {**dict.fromkeys(STORED, FLOATS), "e4m3": (*FLOATS, "e8m0"), "e2m1": ("e8m0", "e4m3")}

TILE = 64


def _parts(spec: Spec) -> bool:
    """Scales with a factor for each fused part, whatever extent their blocks have in common."""
    return "shards" in spec and "global" not in spec


def refuse(spec: Spec) -> str | None:
    """None if kernels multiply with the module's scales, else what they need."""
    block_n, two = spec["scale_block"][0], "global" in spec
    if spec["element"] != "e4m3" and (block_n != 1 or _parts(spec)):
        return "one scale for a column and group"
    if two and spec["scale"] != "e4m3":
        return "one scale for a column and group"
    if reason := refuse_parts(spec):
        return reason
    if spec["group"] != -1 and block_n != 1 and block_n % TILE:
        return f"blocks of a multiple of {TILE} columns, not {block_n}"
    return None


def block(spec: Spec) -> bool:
    """Whether a scale belongs to whole tiles of columns, or, when it also does to all of k, is a factor."""
    return spec["scale_block"][0] != 1 or _parts(spec)


def factor(spec: Spec) -> bool:
    """Whether finished sums have a factor."""
    return "global" in spec or (block(spec) and spec["group"] == -1)


def exact(spec: Spec, x_dtype: str) -> bool:
    """Whether a code times its scale is a number of x's type, to the bit; decode.cuh's ``exact_product``."""
    types = spec["scale"], x_dtype
    return bool(spec["element"] == "e2m1" and types in (("e4m3", "f16"), ("e4m3", "bf16"), ("e8m0", "bf16")))


def mixed(spec: Spec, x_dtype: str, whole: bool = False) -> bool:
    """Scales that would multiply 16-bit weights with more than one rounding, or what x has in ``whole`` numbers: they
    multiply fp32 sums, a second set."""
    other = whole or x_dtype == "f32" or spec["scale"] != x_dtype or ELEMENTS[spec["element"]].is_float
    return bool(spec["group"] != -1 and other and not exact(spec, x_dtype))


def bytes_each(spec: Spec) -> bool:
    """Scales of a byte for each column: four to a register, where others take one or a half each."""
    return not block(spec) and SCALE_DTYPES[spec["scale"]].itemsize == 1


def args(spec: Spec) -> tuple[int, ...]:
    """``columns, part1, part2, part3`` of the kernels: extent of a block of columns, where fused parts begin."""
    columns = spec["scale_block"][0] if block(spec) and len(spec.get("shards", ())) < 2 else NEVER
    return columns, *starts(spec)


def factors(spec: Spec) -> str:
    """The tensor that holds the factors, where there are any."""
    return "global_scale" if "global" in spec or not factor(spec) else "scales"


def kinds(element: str, group: int) -> Iterator[dict[str, Any]]:
    """What a spec may say of an element's scales in groups of ``group``; every kind of kernel is among them."""
    for scale in SCALES[element]:
        one = {"element": element, "scale": scale, "group": group, "zero": "int" if STORED[element] else None}
        yield {**one, "scale_block": [1, group]}
        if element == "e4m3":
            yield {**one, "scale_block": [128, group]}
        elif scale == "e4m3":
            yield {**one, "scale_block": [1, group], "global": "f32"}
