"""What an MMQ strip is: planes of code bits as index maps, the kinds of strips as table rows, and both directions.

A strip is 16 rows x 256 k. Lane 4g + t of a fragment of ``mma.m16n8k32`` (s8) holds, in byte b of register r, row
g + 8 (r & 1) and k = 16 (r >> 1) + 4t + b of a unit of 16 x 32; every plane of codes is in the order of lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.bits import Tile
from ..formats.canonical import ELEMENTS, SCALE_DTYPES

Array = NDArray[Any]

ROWS, DEPTH, UNIT = 16, 256, 32


def _fragment(k: Array, row: Array) -> tuple[Array, Array, Array, Array]:
    """(k, row) in the strip -> (unit of 32 k, lane, register, byte)."""
    inner = k % UNIT
    return k // UNIT, 4 * (row % 8) + inner % 16 // 4, row // 8 + 2 * (inner // 16), inner % 4


def _byte(k: Array, row: Array) -> tuple[Array, Array]:
    """Whole bytes: a unit is 128 words, byte 16 L + 4r + b."""
    unit, lane, r, b = _fragment(k, row)
    return 128 * unit + 4 * lane + r, b


def _nibble(k: Array, row: Array) -> tuple[Array, Array]:
    """Four bits: two units share 128 words, the even one in the low nibbles."""
    unit, lane, r, b = _fragment(k, row)
    return 128 * (unit // 2) + 4 * lane + r, 2 * b + unit % 2


def _bit(k: Array, row: Array) -> tuple[Array, Array]:
    """The fifth bits: [32 lanes][4 pairs of units], bit 8b + 2r + s of a word."""
    unit, lane, r, b = _fragment(k, row)
    return 4 * lane + unit // 2, 8 * b + 2 * r + unit % 2


def _two_bits(k: Array, row: Array) -> tuple[Array, Array]:
    """The top two bits: [4 pairs of units][32 lanes][2 units], bits 8b + 2r of a word."""
    unit, lane, r, b = _fragment(k, row)
    return 64 * (unit // 2) + 2 * lane + unit % 2, 4 * b + r


@dataclass(frozen=True)
class Codes:
    """A plane of some bits of every code."""

    shift: int
    tile: Tile

    @property
    def nbytes(self) -> int:
        return ROWS * DEPTH * self.tile.bits // 8


BYTES = Codes(0, Tile(DEPTH, ROWS, 8, _byte))
NIBBLES = Codes(0, Tile(DEPTH, ROWS, 4, _nibble))
FIFTH = Codes(4, Tile(DEPTH, ROWS, 1, _bit))
TOP = Codes(4, Tile(DEPTH, ROWS, 2, _two_bits))


@dataclass(frozen=True)
class Kind:
    """What a strip holds. Factors are (dtype, weights along k), finest first; each level is a plane after the codes:
    its scales, and beside them its minima."""

    elements: Mapping[str, int]
    """Element -> what its codes are XORed with."""
    codes: tuple[Codes, ...]
    scales: tuple[tuple[str, int], ...] = ()
    minima: tuple[tuple[str, int], ...] = ()
    pairs: bool = False
    """Minima are added, not subtracted, and stand right after their scale, not after all scales of the row."""

    @property
    def strip(self) -> int:
        """Bytes."""
        factors = sum(SCALE_DTYPES[dtype].itemsize * DEPTH // bk for dtype, bk in (*self.scales, *self.minima))
        return sum(plane.nbytes for plane in self.codes) + ROWS * factors


K_FACTORS = (("u6", 32), ("f16", 256))

KINDS = {
    "q8_0": Kind({"s8": 0, "u8b128": 0x80}, (BYTES,), (("f16", 32),)),
    "q4_0": Kind({"u4b8": 8}, (NIBBLES,), (("f16", 32),)),
    "q4_1": Kind({"u4": 0}, (NIBBLES,), (("f16", 32),), (("f16", 32),), pairs=True),
    "q5_0": Kind({"u5b16": 0}, (NIBBLES, FIFTH), (("f16", 32),)),
    "q5_1": Kind({"u5": 0}, (NIBBLES, FIFTH), (("f16", 32),), (("f16", 32),), pairs=True),
    "q4_k": Kind({"u4": 0}, (NIBBLES,), K_FACTORS, K_FACTORS),
    "q5_k": Kind({"u5": 0}, (NIBBLES, FIFTH), K_FACTORS, K_FACTORS),
    "q6_k": Kind({"u6b32": 32}, (NIBBLES, TOP), (("s8", 16), ("f16", 256))),
    "iq4_nl": Kind({"iq4": 0}, (NIBBLES,), (("f16", 32),)),
    "iq4_xs": Kind({"iq4": 0}, (NIBBLES,), (("s8", 32), ("f16", 256))),
    "mxfp4": Kind({"e2m1": 0}, (NIBBLES,), (("e8m0", 32),)),
    "nvfp4": Kind({"e2m1": 0}, (NIBBLES,), (("e4m3", 16),)),
    "fp8": Kind({"e4m3": 0}, (BYTES,)),
}
GRIDS = ("f16", "bf16", "f32", "e8m0", "f64")
"""Scale types of kind fp8."""


def pack(kind: Kind, codes: Array, levels: Sequence[Sequence[Array]]) -> Array:
    """uint8 [N/16, K/256, strip]: the strips of codes uint8 [N, K], as they are stored.

    levels[i] are the factors of level i, each [N, K / weights]: its scales, and its minima where the kind has them.
    """
    rows, steps = codes.shape[0] // ROWS, codes.shape[1] // DEPTH
    out, at = np.empty((rows, steps, kind.strip), np.uint8), 0
    turned = codes.T
    for plane in kind.codes:
        part = turned if len(kind.codes) == 1 else turned >> plane.shift & 2**plane.tile.bits - 1
        words = plane.tile.pack(part)
        stored = words.view(np.uint8).reshape(steps, rows, plane.nbytes)
        out[..., at : at + plane.nbytes] = stored.swapaxes(0, 1)
        at += plane.nbytes
    for (_, own), grids in zip(kind.scales, levels, strict=True):
        parts = [g.view(np.uint8).reshape(rows, ROWS, steps, DEPTH // own, -1).swapaxes(1, 2) for g in grids]
        plane_bytes = np.stack(parts, axis=4 if kind.pairs else 3).reshape(rows, steps, -1)
        out[..., at : at + plane_bytes.shape[-1]] = plane_bytes
        at += plane_bytes.shape[-1]
    assert at == kind.strip
    return out


def unpack_codes(kind: Kind, strips: Array) -> Array:
    """uint8 [N/16, K/256, strip] -> codes uint8 [N, K], as they are stored."""
    rows, steps, _ = strips.shape
    codes, at = np.zeros((steps * DEPTH, rows * ROWS), np.uint8), 0
    for plane in kind.codes:
        words = np.ascontiguousarray(strips[..., at : at + plane.nbytes].swapaxes(0, 1)).view(np.int32)
        codes |= plane.tile.unpack(words.reshape(steps, -1)) << plane.shift
        at += plane.nbytes
    return codes.T


def unpack_factors(kind: Kind, strips: Array) -> list[list[Array]]:
    """uint8 [N/16, K/256, strip] -> ``levels`` as ``pack`` takes them."""
    rows, steps, _ = strips.shape
    at, levels = sum(plane.nbytes for plane in kind.codes), []
    parts = 2 if kind.minima else 1
    for name, own in kind.scales:
        dtype, per = SCALE_DTYPES[name], DEPTH // own
        size = ROWS * parts * per * dtype.itemsize
        stored = np.ascontiguousarray(strips[..., at : at + size]).view(dtype)
        stored = stored.reshape(rows, steps, ROWS, *((per, parts) if kind.pairs else (parts, per)))
        each = np.moveaxis(stored, 4 if kind.pairs else 3, 0).swapaxes(2, 3)
        levels.append([grid.reshape(rows * ROWS, steps * per) for grid in each])
        at += size
    return levels


def _integers(kind: Kind) -> tuple[Array, int]:
    """What kernels make of stored codes: int8 [2^bits] and how far to shift them right for the values."""
    name, flip = next(iter(kind.elements.items()))
    element = ELEMENTS[name]
    values, up = element.values()[np.arange(2**element.bits) ^ flip], 0
    if element.bias and not element.is_float:
        up = 8 - element.bits
    elif any(values % 1):
        up = 1
    return (values * 2**up).astype(np.int8), up


def header() -> str:
    """``strips.h``: ``KINDS`` as C++, so that kernels and ``pack`` cannot disagree."""
    rows = []
    for kind in KINDS.values():
        fine, own = kind.scales[0] if kind.scales else ("f32", DEPTH)
        bits, high = kind.codes[0].tile.bits, sum(plane.tile.bits for plane in kind.codes[1:])
        words, up, linear = [0] * 4, 0, True
        if kind.scales:
            table, up = _integers(kind)
            linear = len(set(np.diff(np.sort(table)))) == 1
            words = [] if linear else [int(word) for word in table.view("<u4")]
        first = int(table[0]) if kind.scales else 0
        facts = [bits, high, up, int(linear and first < 0), int(not linear), list(SCALE_DTYPES).index(fine), own]
        facts += [int(len(kind.scales) > 1), int(bool(kind.minima)), int(kind.pairs), kind.strip]
        rows.append(f"    {{{', '.join(map(str, facts))}, {{{', '.join(f'{w:#x}u' for w in words or [0] * 4)}}}}}")
    listed = ",\n".join(rows)
    return (
        "// Generated from kernels/mmq_strips.py.\n#pragma once\n"
        f"enum class Kind : int {{ {', '.join(KINDS)} }};\n"
        "struct KindFacts {\n  int bits, high, up, flip, lookup, fine, own, coarse, minima, pairs, strip;\n"
        "  unsigned table[4];\n};\n"
        "constexpr __host__ __device__ KindFacts facts(Kind k) {\n"
        f"  constexpr KindFacts rows[] = {{\n{listed}}};\n  return rows[int(k)];\n}}\n"
    )
