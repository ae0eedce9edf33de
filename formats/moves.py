"""Bits that move from stored bytes to 32-bit words, where two index maps put together say so.

One map says where the bits of a code stand in what was read, the other where they shall stand in what is written. A
bit's way is the difference of the two places; bits of a word that go the same way go together, so a whole word of
codes often costs one load, one shift and one mask. Nothing here knows a format or a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Fields:
    """Codes in a block of bytes: bit j of code i is bit ``bits[i][j]`` of the block, counted from its first byte on."""

    nbytes: int
    bits: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.bits)

    def places(self, k: Array, j: int) -> Array:
        """The bit of a row of blocks at which bit j of its codes k stands."""
        block, inner = np.divmod(k, self.size)
        places: Array = 8 * self.nbytes * block + np.array([bits[j] for bits in self.bits])[inner]
        return places


NIBBLES = Fields(1, ((0, 1, 2, 3), (4, 5, 6, 7)))
"""Two codes a byte, the even one low."""
BYTES = Fields(1, (tuple(range(8)),))


WINDOW = 8
"""Bytes that are read at once."""
SPREAD = 0x00204081
"""Times this, bits 0 to 3 become the lowest bits of four bytes, and others, all apart, between them."""


@dataclass(frozen=True)
class Moves:
    """Word w of a cell is flips[w] and, XORed into it for every t, what ``lanes[t, w]`` has in the 64 bits that begin
    ``offsets[t, w]`` bytes after its start: rotated right by ``shifts``, masked by ``froms``, times ``factors``, masked
    by ``masks``; the lowest 32 bits of it. The 64 bits lie inside the lane, so nothing beside it is ever read."""

    lanes: Array
    offsets: Array
    shifts: Array
    froms: Array
    factors: Array
    masks: Array
    flips: Array

    @property
    def spread(self) -> bool:
        """Whether there is a factor but 1."""
        return bool((self.factors > 1).any())


def moves(words: int, word: Array, bit: Array, lane: Array, source: Array, extent: int, flips: int = 0) -> Moves:
    """The moves of single bits, as arrays of one shape: to ``bit`` of ``word``, from bit ``source`` of ``lane``.

    A lane has ``extent`` bytes, eight or more.
    """
    assert extent >= WINDOW, extent
    word, bit, lane, source = (np.broadcast_to(x, np.shape(word)).reshape(-1) for x in (word, bit, lane, source))
    together = np.stack((word, lane, source - bit, np.zeros_like(bit)))
    # Four bits in a row that go to four bytes: as if they were 0, 8, 16 and 24 bits up there already.
    apart = np.stack((word, lane, source - bit // 8 - bit % 8, 1 + bit % 8))
    ways = np.where(_company(apart) > _company(together), apart, together)
    ways, which = np.unique(ways, axis=1, return_inverse=True)
    masks = np.zeros(ways.shape[1], np.int64)
    np.bitwise_or.at(masks, which.reshape(-1), 1 << bit)
    low = ways[3] - 1
    froms, factors = np.where(low < 0, 0xFFFFFFFF, 15 << np.maximum(low, 0)), np.where(low < 0, 1, SPREAD)
    term = np.arange(ways.shape[1]) - np.searchsorted(ways[0], ways[0])
    tables = np.zeros((6, term.max(initial=0) + 1, words), np.int64)
    first = np.clip(ways[2] // 8, 0, extent - WINDOW)
    tables[:, term, ways[0]] = ways[1], first, (ways[2] - 8 * first) % 64, froms, factors, masks
    lanes, offsets, shifts, *others = tables
    froms, factors, masks = (table.astype(np.uint32) for table in others)
    return Moves(lanes, offsets, shifts.astype(np.uint8), froms, factors, masks, np.full(words, flips, np.uint32))


def _company(ways: Array) -> Array:
    """How many bits go each one's way."""
    _, which, counts = np.unique(ways, axis=1, return_inverse=True, return_counts=True)
    company: Array = counts[which.reshape(-1)]
    return company


@cache
def extraction(fields: Fields, itemsize: int, blocks: int) -> Moves:
    """From some blocks of one row to their values, whole numbers of ``itemsize`` bytes."""
    value, bit = np.meshgrid(np.arange(fields.size * blocks), np.arange(len(fields.bits[0])), indexing="ij")
    source = np.stack([fields.places(value[:, 0], j) for j in range(value.shape[1])], axis=-1)
    byte = itemsize * value
    words, lane = fields.size * blocks * itemsize // 4, np.zeros_like(value)
    return moves(words, byte // 4, 8 * (byte % 4) + bit, lane, source, blocks * fields.nbytes)


def spanned(array: Array) -> Array:
    """uint8: the memory from an array's first byte to its last, whatever lies between them; strides are positive."""
    assert min(array.strides) >= 0, array.strides
    last = sum((extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array.view(np.uint8), (last + array.itemsize,), (1,), writeable=False)


def move(fast: ModuleType, table: Moves, stored: Array, starts: Array, steps: Sequence[int], out: Array) -> None:
    """Fill the cells of ``out``.

    Args:
        stored: uint8, of which what lies in memory from the first to the last is read by the steps.
        starts: byte at which each lane of the first cell starts.
        steps: three numbers, bytes from one cell's lanes to those of the next along each axis of cells.
        out: uint32 [a, b, c, h, w]: the cells along three axes, each of h rows that are contiguous.
    """
    offsets = (starts[table.lanes] + table.offsets).astype(np.uint32)
    loop = fast.spread_bits if table.spread else fast.move_bits
    ways = (table.shifts, table.froms, table.factors, table.masks) if table.spread else (table.shifts, table.masks)
    loop(spanned(stored), np.array(steps, np.uint64), offsets, *ways, table.flips, out)
