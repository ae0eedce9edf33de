"""The loops of ``bits.py`` compiled by numba: the same functions of the same tables, several codes an instruction.

Nothing here knows a layout: where a code goes is in the tables that ``bits.Tile`` derives from its index map. Every
loop releases the interpreter, so threads run them side by side. Arrays are C-contiguous and aligned.
Machine code is kept beside this file, or in the user's cache where that cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """As machine code for the types of its first call, kept on disk."""
    return cast(F, njit(nogil=True, cache=True)(function))


BESIDE = 16  # words of a row of the result that ``take_columns`` fills at once: a cache line
EDGE = 8  # blocks below one another that ``transpose`` turns in a row: they fill a cache line of the result


@compiled
def pack_tiles(codes: Array, members: Array, shifts: Array, firsts: Array, folds: Array, out: Array) -> None:
    """uint8 [K, N] -> uint32 [K / k, N / n * words a tile], tables as in ``bits.Tables``."""
    sets, size = members.shape
    n, words, length = shifts.shape[1], firsts.size, members.shape[0] * shifts.shape[1]
    quads = size - size % 4
    parts = np.empty(length, np.uint32)
    for i in range(out.shape[0]):
        for j in range(codes.shape[1] // n):
            top, left = i * sets * size, j * n
            for s in range(sets):
                part = parts[s * n : (s + 1) * n]
                if quads == 0:
                    part[:] = 0
                for r in range(0, quads, 4):
                    m0, m1, m2, m3 = members[s, r], members[s, r + 1], members[s, r + 2], members[s, r + 3]
                    a, b, c, d = shifts[m0], shifts[m1], shifts[m2], shifts[m3]
                    w = codes[top + m0, left : left + n]
                    x = codes[top + m1, left : left + n]
                    y = codes[top + m2, left : left + n]
                    z = codes[top + m3, left : left + n]
                    if r == 0:
                        for v in range(n):
                            low = np.uint32(w[v]) << a[v] | np.uint32(x[v]) << b[v]
                            part[v] = low | np.uint32(y[v]) << c[v] | np.uint32(z[v]) << d[v]
                    else:
                        for v in range(n):
                            low = np.uint32(w[v]) << a[v] | np.uint32(x[v]) << b[v]
                            part[v] |= low | np.uint32(y[v]) << c[v] | np.uint32(z[v]) << d[v]
                for r in range(quads, size):
                    row, shift = codes[top + members[s, r], left : left + n], shifts[members[s, r]]
                    for v in range(n):
                        part[v] |= np.uint32(row[v]) << shift[v]
            tile = out[i, j * words : (j + 1) * words]
            if folds.size == 1:
                far = parts[folds[0] :]
                for v in range(words):
                    tile[v] = parts[firsts[v]] | far[firsts[v]]
            else:
                for v in range(words):
                    value = parts[firsts[v]]
                    for f in range(folds.size):
                        value |= parts[firsts[v] + folds[f]]
                    tile[v] = value


@compiled
def unpack_tiles(words: Array, members: Array, shifts: Array, places: Array, mask: Any, out: Array) -> None:
    """The inverse of ``pack_tiles``."""
    sets, size = members.shape
    n = shifts.shape[1]
    tiles = out.shape[1] // n
    count = words.shape[1] // tiles
    part = np.empty(n, np.uint32)
    for i in range(words.shape[0]):
        for j in range(tiles):
            tile = words[i, j * count : (j + 1) * count]
            for s in range(sets):
                place = places[s]
                for x in range(n):
                    part[x] = tile[place[x]]
                for r in range(size):
                    row = out[i * sets * size + members[s, r], j * n : (j + 1) * n]
                    shift = shifts[members[s, r]]
                    for x in range(n):
                        row[x] = np.uint8((part[x] >> shift[x]) & mask)


@compiled
def unpack_rows(words: Array, starts: Array, bits: int, out: Array) -> None:
    """uint32 [W, N] -> uint8 [P, N]: row p is the ``bits`` bits of every column from bit starts[p] on."""
    n = out.shape[1]
    mask = np.uint32((1 << bits) - 1)
    for p in range(out.shape[0]):
        row = out[p]
        first = words[starts[p] >> 5]
        low = np.uint32(starts[p] & 31)
        if low + bits <= 32:
            for x in range(n):
                row[x] = np.uint8((first[x] >> low) & mask)
        else:
            second = words[(starts[p] >> 5) + 1]
            high = np.uint32(32 - low)
            for x in range(n):
                row[x] = np.uint8((first[x] >> low | second[x] << high) & mask)


@compiled
def take_columns(stored: Array, step: int, columns: Array, out: Array) -> None:
    """uint8 [bytes], rows of ``step`` of them -> uint32 [c, rows]: in each row the words ``columns``, turned."""
    for first in range(0, out.shape[1], BESIDE):
        last = min(first + BESIDE, out.shape[1])
        for c in range(out.shape[0]):
            at = np.uint64(first * step + 4 * columns[c])
            for r in range(first, last):
                value = np.uint32(stored[at])
                for byte in range(1, 4):
                    value |= np.uint32(stored[at + np.uint64(byte)]) << np.uint32(8 * byte)
                out[c, r] = value
                at += np.uint64(step)


@compiled
def pack_rows(values: Array, starts: Array, bits: int, out: Array) -> None:
    """The inverse of ``unpack_rows``, into words that are zero."""
    n = out.shape[1]
    for p in range(values.shape[0]):
        row = values[p]
        first = out[starts[p] >> 5]
        low = np.uint32(starts[p] & 31)
        for x in range(n):
            first[x] |= np.uint32(row[x]) << low
        if low + bits > 32:
            second = out[(starts[p] >> 5) + 1]
            high = np.uint32(32 - low)
            for x in range(n):
                second[x] |= np.uint32(row[x]) >> high


@compiled
def move_nibbles(stored: Array, froms: Array, tos: Array, out: Array) -> None:
    """Eight nibbles of each uint32 or uint64 of [c], from bits froms[b] on to bits tos[b] on of as many in ``out``;
    both tables uint64."""
    f0, f1, f2, f3, f4, f5, f6, f7 = froms[0], froms[1], froms[2], froms[3], froms[4], froms[5], froms[6], froms[7]
    t0, t1, t2, t3, t4, t5, t6, t7 = tos[0], tos[1], tos[2], tos[3], tos[4], tos[5], tos[6], tos[7]
    low = np.uint64(15)
    for x in range(out.size):
        w = np.uint64(stored[x])
        four = (w >> f0 & low) << t0 | (w >> f1 & low) << t1 | (w >> f2 & low) << t2 | (w >> f3 & low) << t3
        out[x] = four | (w >> f4 & low) << t4 | (w >> f5 & low) << t5 | (w >> f6 & low) << t6 | (w >> f7 & low) << t7


@compiled
def _swap(block: Array, far: int, mask: Any) -> None:
    """Exchange the masked bytes of each row with those of the row ``far`` below, ``far`` bytes further up."""
    shift = np.uint64(8 * far)
    for r in range(8):
        if r & far == 0:
            changed = ((block[r] >> shift) ^ block[r + far]) & mask
            block[r + far] ^= changed
            block[r] ^= changed << shift


@compiled
def transpose(matrix: Array, out: Array) -> None:
    """uint8 [a, b] -> [b, a]; both multiples of 8. Blocks of 8 x 8, each halved three times."""
    rows, columns = matrix.shape[0] // 8, matrix.shape[1] // 8
    source, target = matrix.view(np.uint64), out.view(np.uint64)
    block = np.empty(8, np.uint64)
    for first in range(0, rows, EDGE):
        for j in range(columns):
            for i in range(first, min(first + EDGE, rows)):
                for r in range(8):
                    block[r] = source[8 * i + r, j]
                _swap(block, 4, np.uint64(0x00000000FFFFFFFF))
                _swap(block, 2, np.uint64(0x0000FFFF0000FFFF))
                _swap(block, 1, np.uint64(0x00FF00FF00FF00FF))
                for r in range(8):
                    target[8 * j + r, i] = block[r]


@compiled
def has_masked(words: Array, mask: Any) -> bool:
    """Whether a byte of uint64 [c] has all bits of the byte that ``mask`` repeats; its top bit is not set."""
    found, top = np.uint64(0), np.uint64(0x8080808080808080)
    for x in range(words.size):
        found |= top - ((words[x] & mask) ^ mask)
    return bool((found & top) != np.uint64(0))


@compiled
def _window(stored: Array, at: Any, shift: Any) -> Any:
    """The 64 bits from byte ``at``, wherever that is, rotated right: a load and an instruction when compiled."""
    value = np.uint64(stored[at])
    for byte in range(1, 8):
        value |= np.uint64(stored[at + np.uint64(byte)]) << np.uint64(8 * byte)
    right = np.uint64(shift)
    return value >> right | value << (np.uint64(64) - right & np.uint64(63))


@compiled
def move_bits(
    stored: Array, steps: Array, offsets: Array, shifts: Array, masks: Array, flips: Array, out: Array
) -> None:
    """``moves.move`` with tables of ``moves.Moves`` whose factors are 1; offsets are from the first byte stored."""
    terms, words = masks.shape[0], out.shape[4]
    for a in range(out.shape[0]):
        for b in range(out.shape[1]):
            for c in range(out.shape[2]):
                start = np.uint64(a) * steps[0] + np.uint64(b) * steps[1] + np.uint64(c) * steps[2]
                for h in range(out.shape[3]):
                    row, these = out[a, b, c, h], slice(h * words, (h + 1) * words)
                    row[:] = flips[these]
                    for t in range(terms):
                        offset, shift, mask = offsets[t, these], shifts[t, these], masks[t, these]
                        for w in range(words):
                            row[w] ^= np.uint32(_window(stored, start + offset[w], shift[w])) & mask[w]


@compiled
def spread_bits(
    stored: Array,
    steps: Array,
    offsets: Array,
    shifts: Array,
    froms: Array,
    factors: Array,
    masks: Array,
    flips: Array,
    out: Array,
) -> None:
    """``move_bits`` with factors."""
    words = out.shape[4]
    for a in range(out.shape[0]):
        for b in range(out.shape[1]):
            for c in range(out.shape[2]):
                start = np.uint64(a) * steps[0] + np.uint64(b) * steps[1] + np.uint64(c) * steps[2]
                for h in range(out.shape[3]):
                    row, first = out[a, b, c, h], h * words
                    row[:] = flips[first : first + words]
                    for t in range(masks.shape[0]):
                        for w in range(words):
                            x = first + w
                            bits = np.uint32(_window(stored, start + offsets[t, x], shifts[t, x])) & froms[t, x]
                            row[w] ^= np.uint32(bits * factors[t, x]) & masks[t, x]
