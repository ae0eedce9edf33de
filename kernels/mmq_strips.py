"""What an MMQ strip is: planes of code bits as index maps, the kinds of strips as table rows, and both directions.

A strip is 16 rows x 256 k. Lane 4g + t of a fragment of ``mma.m16n8k32`` (s8) holds, in byte b of register r, row
g + 8 (r & 1) and k = 16 (r >> 1) + 4t + b of a unit of 16 x 32; every plane of codes is in the order of lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.bits import Tile, loops
from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from ..formats.moves import BYTES as BYTE_FIELDS
from ..formats.moves import Fields, Moves, move, moves

Array = NDArray[Any]

ROWS, DEPTH, UNIT = 16, 256, 32
STRIPS = 8
BLOCK = STRIPS * ROWS
"""Rows of the strips that lie together, what one block of a kernel takes."""


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


def pack_codes(kind: Kind, codes: Array, out: Array) -> None:
    """The planes of codes uint8 [N, K], as they are stored, into strips uint8 [N/128, 8, K/256, strip]."""
    fast = loops(codes.size)
    if fast is not None and codes.flags.c_contiguous:
        return move_codes(fast, kind, 0, BYTE_FIELDS, codes, out)
    blocks, _, steps, _ = out.shape
    turned, at = codes.T, 0
    for plane in kind.codes:
        part = turned if len(kind.codes) == 1 else turned >> plane.shift & 2**plane.tile.bits - 1
        stored = plane.tile.pack(part).view(np.uint8).reshape(steps, blocks, STRIPS, plane.nbytes)
        out[..., at : at + plane.nbytes] = np.moveaxis(stored, 0, 2)
        at += plane.nbytes


def move_codes(fast: ModuleType, kind: Kind, flip: int, fields: Fields, rows: Array, out: Array) -> None:
    """``pack_codes`` of the codes, XORed with ``flip``, of rows of blocks uint8 [N, bytes], each contiguous."""
    assert rows.strides[1] == 1, rows.strides
    length, at = rows.strides[0], 0
    steps = STRIPS * ROWS * length, ROWS * length, DEPTH // fields.size * fields.nbytes
    for plane in kind.codes:
        words = out[..., at : at + plane.nbytes].view(np.uint32)[..., None, :]
        move(fast, _planted(plane, fields, flip), rows, np.arange(ROWS) * length, steps, words)
        at += plane.nbytes


@cache
def _planted(plane: Codes, fields: Fields, flip: int) -> Moves:
    """From the rows of a strip in blocks to its plane of some bits of the codes."""
    bits = plane.tile.bits
    k, row, j = np.meshgrid(np.arange(DEPTH), np.arange(ROWS), np.arange(bits), indexing="ij")
    word, field = plane.tile.place(k, row)
    source = np.stack([fields.places(k[..., 0], plane.shift + b) for b in range(bits)], axis=-1)
    flips = sum((flip >> plane.shift & 2**bits - 1) << low for low in range(0, 32, bits))
    return moves(plane.nbytes // 4, word, bits * field + j, row, source, DEPTH // fields.size * fields.nbytes, flips)


def _factor_planes(kind: Kind) -> list[tuple[int, int, int]]:
    """(first byte, bytes of a row of each grid, bytes of one factor) of every level's plane."""
    planes, at = [], sum(plane.nbytes for plane in kind.codes)
    for name, own in kind.scales:
        size = SCALE_DTYPES[name].itemsize
        planes.append((at, DEPTH // own * size, size))
        at += ROWS * (2 if kind.minima else 1) * DEPTH // own * size
    assert at == kind.strip
    return planes


def pack_factors(kind: Kind, levels: Sequence[Sequence[Array]], out: Array) -> None:
    """The planes of factors into strips uint8 [N/128, 8, K/256, strip].

    levels[i] are the factors of level i, each [N, K / weights]: its scales, and its minima where the kind has them.
    """
    blocks, _, steps, _ = out.shape
    for (at, length, size), grids in zip(_factor_planes(kind), levels, strict=True):
        plane = _by_rows(kind, out[..., at : at + ROWS * len(grids) * length], length, size)
        for target, grid in zip(plane, grids, strict=True):
            target[...] = grid.view(plane.dtype).reshape(blocks, STRIPS, ROWS, steps, -1).swapaxes(2, 3)


def unpack_codes(kind: Kind, flip: int, strips: Array) -> Array:
    """Strips uint8 [N/128, 8, K/256, strip] -> codes uint8 [N, K], XORed with ``flip``."""
    blocks, _, steps, _ = strips.shape
    shape = steps * DEPTH, blocks * STRIPS * ROWS
    fast = loops(prod(shape))
    if fast is not None:
        return _gather_codes(fast, kind, flip, strips)
    codes, at = np.full(shape, flip, np.uint8), 0
    for plane in kind.codes:
        words = np.ascontiguousarray(np.moveaxis(strips[..., at : at + plane.nbytes], 2, 0)).view(np.int32)
        codes ^= plane.tile.unpack(words.reshape(steps, -1)) << plane.shift
        at += plane.nbytes
    return codes.T


def _gather_codes(fast: ModuleType, kind: Kind, flip: int, strips: Array) -> Array:
    blocks, _, steps, _ = strips.shape
    codes = np.empty((blocks, STRIPS, ROWS, steps, DEPTH), np.uint8)
    size = sum(plane.nbytes for plane in kind.codes)
    stored = strips[..., :size]
    cells = codes.view(np.uint32).swapaxes(2, 3)
    table = _gathered(kind.codes, flip)
    move(fast, table, stored, np.zeros(1, int), stored.strides[:3], cells)
    return codes.reshape(-1, steps * DEPTH)


@cache
def _gathered(planes: tuple[Codes, ...], flip: int) -> Moves:
    """From the planes of a strip to its codes, a byte each, row by row."""
    ways, at = [], 0
    for plane in planes:
        bits = plane.tile.bits
        k, row, j = (x.reshape(-1) for x in np.meshgrid(np.arange(DEPTH), np.arange(ROWS), np.arange(bits)))
        word, field = plane.tile.place(k, row)
        source = 8 * at + 32 * word + bits * field + j
        ways.append((DEPTH // 4 * row + k // 4, 8 * (k % 4) + plane.shift + j, np.zeros_like(row), source))
        at += plane.nbytes
    word, bit, lane, source = (np.concatenate(part) for part in zip(*ways, strict=True))
    return moves(ROWS * DEPTH // 4, word, bit, lane, source, at, 0x01010101 * flip)


def unpack_factors(kind: Kind, strips: Array) -> list[list[Array]]:
    """Strips uint8 [N/128, 8, K/256, strip] -> ``levels`` as ``pack_factors`` takes them."""
    blocks, _, steps, _ = strips.shape
    levels, parts = [], 2 if kind.minima else 1
    for (at, length, size), (name, _) in zip(_factor_planes(kind), kind.scales, strict=True):
        plane = _by_rows(kind, strips[..., at : at + ROWS * parts * length], length, size)
        shape = blocks * STRIPS * ROWS, steps * (length // size)
        grids = [np.ascontiguousarray(plane[i].swapaxes(2, 3)) for i in range(parts)]
        levels.append([grid.view(SCALE_DTYPES[name]).reshape(shape) for grid in grids])
    return levels


def _by_rows(kind: Kind, plane: Array, length: int, size: int) -> Array:
    """A view [grids, N/128, 8, K/256, 16, items] of a plane of factors, of ``size`` bytes each.

    A row's factors of a strip lie together in a grid too; those of pairs alternate here. Items are as large as that
    allows: they are quicker to move."""
    item, parts = size if kind.pairs else gcd(length, 8), 2 if kind.minima else 1
    items = plane.view(f"u{item}").reshape(*plane.shape[:-1], ROWS, *((-1, parts) if kind.pairs else (parts, -1)))
    return np.moveaxis(items, -1 if kind.pairs else -2, 0)


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
