"""ggml's block types as table rows: where each bit of a block stands, and what its factors multiply.

A block of ``size`` weights of one row is ``nbytes`` bytes. Codes and factors of a few bits stand in ``Bits``: runs of
bytes in which several values share each byte. Both directions come from the rows, so that decoding loses nothing.
Facts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp.

Where ggml adds a minimum (Q4_1, Q5_1: d * q + m) the canonical form subtracts -m, the same bits but for the sign.
Every product of factors and a code has at most 24 bits, and the one sum in d * q - m spans less than 53: computed in
float64 and rounded once they equal ggml's float32 arithmetic bit for bit. (But for one sign: code 8 of e2m1 is minus
zero, where ggml's table has plain 0.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .bits import loops
from .canonical import ELEMENTS, SCALE_DTYPES, Element, Level
from .moves import Fields, extraction, move
from .stream import steps

Array = NDArray[Any]

TOGETHER = 32
"""The most blocks of a row that are read at once."""
ORIGIN = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Bits:
    """``width`` bits of each value of a run. Value (stride * slots) * c + stride * s + i, for i < stride and s < slots,
    has them in byte at + stride * c + i, from bit start + width * s up; they are its bits ``shift`` and up."""

    at: int
    width: int
    stride: int
    slots: int = 0
    """Values that share a byte; 0: as many as fit."""
    start: int = 0
    shift: int = 0
    first: int = 0
    """The run's first value."""
    count: int = 0
    """Values in the run; 0: all."""

    def runs(self, blocks: Array, values: Array) -> list[tuple[Array, Array, int]]:
        """(bytes, values, lowest bit) of each slot: views of blocks [.., nbytes] and values [.., count]."""
        slots = self.slots or 8 // self.width
        chunks = (self.count or values.shape[-1]) // (self.stride * slots)
        stored = blocks[..., self.at : self.at + chunks * self.stride]
        stored = stored.reshape(*stored.shape[:-1], chunks, self.stride)
        part = values[..., self.first : self.first + chunks * slots * self.stride]
        part = part.reshape(*values.shape[:-1], chunks, slots, self.stride)
        return [(stored, part[..., s, :], self.start + self.width * s) for s in range(slots)]


Wanted = tuple[tuple[Bits, ...], int, DTypeLike]
"""(runs, values of a block, type of a value)"""


@dataclass(frozen=True)
class Factor:
    """Factors of ``block`` weights each: value = times * stored + plus. Whole ones from byte ``at``, or ``bits``.

    Of floats only the sign can change (``times`` -1): nothing is rounded, NaN keeps its bits.
    """

    dtype: str
    block: int
    at: int = 0
    bits: tuple[Bits, ...] = ()
    times: int = 1
    plus: int = 0


@dataclass(frozen=True)
class BlockType:
    """One of ggml's types."""

    name: str
    size: int
    nbytes: int
    element: str
    codes: tuple[Bits, ...]
    scales: tuple[Factor, ...]
    offsets: tuple[Factor, ...] = ()
    signs: tuple[Bits, ...] = ()
    """Only with a codebook: ``codes`` are indices of four magnitudes each, and these the signs of the weights."""


def _six(sc: int, four: int) -> tuple[Bits, ...]:
    """8 values of 6 bits: the first four whole in bytes ``sc`` and on, of the others the low bits in bytes 12 to 15,
    from bit ``four`` up, and the high bits above the first four."""
    return (
        Bits(sc, 6, 4, slots=1, count=4),
        Bits(12, 4, 4, slots=1, start=four, first=4, count=4),
        Bits(sc, 2, 4, slots=1, start=6, shift=4, first=4, count=4),
    )


D, M = Factor("f16", 32), Factor("f16", 32, 2, times=-1)
SUPER, LEAST = Factor("f16", 256), Factor("f16", 256, 2)
K_SCALES = Factor("u6", 32, bits=_six(4, 0)), SUPER
K_LEAST = Factor("u6", 32, bits=_six(8, 4)), LEAST

BLOCK_TYPES = {
    row.name: row
    for row in (
        BlockType("Q4_0", 32, 18, "u4b8", (Bits(2, 4, 16),), (D,)),
        BlockType("Q4_1", 32, 20, "u4", (Bits(4, 4, 16),), (D,), (M,)),
        BlockType("Q5_0", 32, 22, "u5b16", (Bits(6, 4, 16), Bits(2, 1, 1, shift=4)), (D,)),
        BlockType("Q5_1", 32, 24, "u5", (Bits(8, 4, 16), Bits(4, 1, 1, shift=4)), (D,), (M,)),
        BlockType("Q8_0", 32, 34, "s8", (Bits(2, 8, 32),), (D,)),
        BlockType(
            *("Q2_K", 256, 84, "u2", (Bits(16, 2, 32),)),
            scales=(Factor("u6", 16, bits=(Bits(0, 4, 16, slots=1),)), Factor("f16", 256, 80)),
            offsets=(Factor("u6", 16, bits=(Bits(0, 4, 16, slots=1, start=4),)), Factor("f16", 256, 82)),
        ),
        BlockType(
            *("Q3_K", 256, 110, "u3b4", (Bits(32, 2, 32), Bits(0, 1, 32, shift=2))),
            scales=(
                Factor("s8", 16, bits=(Bits(96, 4, 8), Bits(104, 2, 4, shift=4)), plus=-32),
                Factor("f16", 256, 108),
            ),
        ),
        BlockType("Q4_K", 256, 144, "u4", (Bits(16, 4, 32),), K_SCALES, K_LEAST),
        BlockType("Q5_K", 256, 176, "u5", (Bits(48, 4, 32), Bits(16, 1, 32, shift=4)), K_SCALES, K_LEAST),
        BlockType(
            *("Q6_K", 256, 210, "u6b32", (Bits(0, 4, 64), Bits(128, 2, 32, shift=4))),
            scales=(Factor("s8", 16, 192), Factor("f16", 256, 208)),
        ),
        BlockType("IQ4_NL", 32, 18, "iq4", (Bits(2, 4, 16),), (D,)),
        BlockType(
            *("IQ4_XS", 256, 136, "iq4", (Bits(8, 4, 16),)),
            scales=(Factor("s8", 32, bits=(Bits(4, 4, 1), Bits(2, 2, 1, shift=4)), plus=-32), SUPER),
        ),
        BlockType(
            *("IQ3_S", 256, 110, "iq3", (Bits(2, 8, 64), Bits(66, 1, 1, shift=8))),
            scales=(Factor("u6", 32, bits=(Bits(106, 4, 1),), times=2, plus=1), SUPER),
            signs=(Bits(74, 1, 1),),
        ),
        BlockType("MXFP4", 32, 17, "e2m1", (Bits(1, 4, 16),), (Factor("e8m0", 32),)),
        BlockType("NVFP4", 64, 36, "e2m1", (Bits(4, 4, 8),), (Factor("e4m3", 16),)),
    )
}


def element(kind: BlockType) -> Element:
    """What a code means."""
    return ELEMENTS[kind.element]


@cache
def fields(runs: tuple[Bits, ...], count: int, nbytes: int) -> Fields:
    """The runs of ``count`` values in a block as one table: runs of their bits' numbers, read as every value is."""
    width = max(run.shift + run.width for run in runs)
    numbers, table = np.arange(8 * nbytes).reshape(nbytes, 8), np.empty((count, width), np.int64)
    for j in range(width):
        for run in runs:
            if run.shift <= j < run.shift + run.width:
                for stored, part, start in run.runs(np.arange(nbytes), table[:, j]):
                    part[...] = numbers[stored, start + j - run.shift]
    return Fields(nbytes, tuple(tuple(bits) for bits in table.tolist()))


def code_fields(kind: BlockType) -> Fields | None:
    """Where the bits of a block's codes stand; None with a codebook, whose codes do not stand there."""
    return None if kind.signs else fields(kind.codes, kind.size, kind.nbytes)


def unpack_codes(kind: BlockType, data: Array) -> Array:
    """Rows of blocks uint8 [.., n, bytes] -> codes uint8 [.., n, k]."""
    blocks = data.reshape(*data.shape[:-1], -1, kind.nbytes)
    if not kind.signs:
        (codes,) = _get([(kind.codes, kind.size, np.uint8)], blocks)
        return _unblocked(codes)
    indices, signs = _get([(kind.codes, kind.size // 4, np.uint16), (kind.signs, kind.size, np.uint8)], blocks)
    return _unblocked(_codebook()[indices].reshape(signs.shape) | signs << 3)


def unpack_factors(kind: BlockType, data: Array) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Rows of blocks uint8 [.., n, bytes] -> (scales, offsets), finest first."""
    blocks = data.reshape(*data.shape[:-1], -1, kind.nbytes)
    factors = *kind.scales, *kind.offsets
    stored = _get([_wanted(factor, kind.size) for factor in factors], blocks)
    levels = [Level(_unblocked(_factor(f, s)), (1, f.block)) for f, s in zip(factors, stored, strict=True)]
    return tuple(levels[: len(kind.scales)]), tuple(levels[len(kind.scales) :])


def pack(kind: BlockType, codes: Array, scales: Sequence[Level], offsets: Sequence[Level]) -> Array:
    """The inverse of ``unpack_codes`` and ``unpack_factors`` together."""
    *lead, k = codes.shape
    blocks = np.zeros((*lead, k // kind.size, kind.nbytes), np.uint8)
    codes = np.ascontiguousarray(codes).reshape(*lead, -1, kind.size)
    if kind.signs:
        _put(kind.signs, blocks, codes >> 3)
        magnitudes = (codes & 7).reshape(*codes.shape[:-1], -1, 4)
        _put(kind.codes, blocks, _indices()[_digits(magnitudes)])
    else:
        _put(kind.codes, blocks, codes)
    for factor, level in zip((*kind.scales, *kind.offsets), (*scales, *offsets), strict=True):
        grid = np.ascontiguousarray(level.data).reshape(*lead, -1, kind.size // factor.block)
        _put_factor(factor, blocks, grid)
    return _unblocked(blocks)


def _unblocked(values: Array) -> Array:
    """[.., blocks, count] -> [.., blocks * count]."""
    return values.reshape(*values.shape[:-2], -1)


def _get(wanted: Sequence[Wanted], blocks: Array) -> list[Array]:
    """Values of blocks uint8 [.., in row, nbytes], each [.., in row, count]."""
    in_row, nbytes = blocks.shape[-2:]
    out = [np.empty((*blocks.shape[:-1], count), dtype) for _, count, dtype in wanted]
    fast, together = loops(sum(values.size for values in out)), _together(in_row)
    if fast is not None and all(together * v.shape[-1] * v.itemsize % 4 == 0 for v in out):
        rows = blocks.reshape(-1, in_row, nbytes)
        plain = [runs == (Bits(runs[0].at, 8, count),) for runs, count, _ in wanted]
        # Whole bytes first: a plain loop brings a block to the cache sooner than one that picks bits.
        turns = sorted(zip(plain, wanted, out, strict=True), key=lambda turn: not turn[0])
        for run in steps(len(rows), 1, in_row * nbytes):
            for whole, (runs, count, _), all_values in turns:
                values = all_values.reshape(len(rows), in_row, count)[run]
                if whole:
                    item = f"u{gcd(count, 8)}"
                    values.view(item)[...] = rows[run, :, runs[0].at : runs[0].at + count].view(item)
                    continue
                cells = values.reshape(-1).view(np.uint32).reshape(len(values), 1, in_row // together, 1, -1)
                table = extraction(fields(runs, count, nbytes), values.itemsize, together)
                move(fast, table, rows[run], ORIGIN, (rows.strides[0], 0, together * rows.strides[1]), cells)
        return out
    for (runs, _, dtype), values in zip(wanted, out, strict=True):
        values[...] = 0
        for piece in runs:
            for stored, part, start in piece.runs(blocks, values):
                part |= (stored >> start & 2**piece.width - 1).astype(dtype) << piece.shift
    return out


def _together(in_row: int) -> int:
    """Blocks of a row that are read at once: of the numbers that divide the row's, the largest that is small."""
    return max(count for count in range(1, TOGETHER + 1) if in_row % count == 0)


def _put(runs: tuple[Bits, ...], blocks: Array, values: Array) -> None:
    for run in runs:
        for stored, part, start in run.runs(blocks, values):
            stored |= (part >> run.shift & 2**run.width - 1).astype(np.uint8) << start


def _wanted(factor: Factor, size: int) -> Wanted:
    """The factors of a block of ``size`` weights: those of a few bits as numbers, others as bytes."""
    count = size // factor.block
    length = count * SCALE_DTYPES[factor.dtype].itemsize
    return (factor.bits, count, np.uint8) if factor.bits else ((Bits(factor.at, 8, length),), length, np.uint8)


def _factor(factor: Factor, stored: Array) -> Array:
    """Factors as numbers, from what ``_wanted`` gave."""
    dtype = SCALE_DTYPES[factor.dtype]
    values = stored if factor.bits else stored.view(dtype)
    if (factor.times, factor.plus) == (1, 0):
        return values
    if dtype.kind == "f":
        return np.negative(values)
    return (values.astype(np.int16) * factor.times + factor.plus).astype(dtype)


def _put_factor(factor: Factor, blocks: Array, values: Array) -> None:
    dtype = SCALE_DTYPES[factor.dtype]
    if dtype.kind == "f" and factor.times != 1:
        values = np.negative(values)
    elif (factor.times, factor.plus) != (1, 0):
        values = (values.astype(np.int16) - factor.plus) // factor.times
    if factor.bits:
        _put(factor.bits, blocks, values)
    else:
        raw = np.ascontiguousarray(values, dtype).view(np.uint8)
        blocks[..., factor.at : factor.at + raw.shape[-1]] = raw


@cache
def _codebook() -> Array:
    """IQ3_S's codebook: uint8 [512, 4], magnitudes 1, 3, .. 15 as 0 .. 7."""
    from gguf import quants

    iq3: Any = quants.IQ3_S
    iq3.init_grid()
    codes: Array = (iq3.grid.reshape(512, 4).astype(np.uint8) - 1) // 2
    return codes


def _digits(magnitudes: Array) -> Array:
    """[.., 4] of 3 bits -> [..], one number of 12 bits."""
    number: Array = magnitudes.astype(np.uint16) @ np.array([512, 64, 8, 1], np.uint16)
    return number


@cache
def _indices() -> Array:
    """The inverse of ``_codebook``: uint16 [4096]; no entry stands there twice."""
    inverse = np.zeros(4096, np.uint16)
    inverse[_digits(_codebook())] = np.arange(512, dtype=np.uint16)
    return inverse
