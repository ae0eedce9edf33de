"""Pieces of MMQ strips from a stream: bits that move where blocks are known, else codes, with padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.bits import loops
from ..formats.canonical import QuantTensor
from ..formats.stream import Stream
from .mmq_strips import BLOCK, DEPTH, STRIPS, Kind, move_codes, pack_codes, pack_factors

Array = NDArray[Any]


def piece(source: Stream, kind: Kind, flip: int, kp: int, expert: int, run: slice) -> Array:
    """uint8 [run / 128, kp / 256, 8, strip] of the padded rows ``run``; codes are XORed with ``flip``."""
    q, count = source.tensor, run.stop - run.start
    out = np.empty((count // BLOCK, kp // DEPTH, STRIPS, kind.strip), np.uint8)
    strips = out.swapaxes(1, 2)
    rows, columns = _moved(source, kind, flip, expert, slice(run.start, min(run.stop, q.n)), strips)
    for top, end, left in ((0, rows, columns), (rows, count, 0)):
        if top < end and left < kp:
            codes = _codes(source, flip, expert, slice(run.start + top, run.start + end), slice(left, kp))
            pack_codes(kind, codes, strips[top // BLOCK : end // BLOCK, :, left // DEPTH :])
    pack_factors(kind, _levels(q, kind, kp, expert, run), strips)
    return out


def _moved(source: Stream, kind: Kind, flip: int, expert: int, rows: slice, strips: Array) -> tuple[int, int]:
    """Fill what needs no padding straight from stored blocks, where they are known: (rows, columns) that are done."""
    blocks, k = source.blocks, source.tensor.k // DEPTH * DEPTH
    count = (rows.stop - rows.start) // BLOCK * BLOCK
    fast = loops(count * k)
    if blocks is None or fast is None or DEPTH % blocks.fields.size:
        return 0, 0
    stored = blocks.rows(expert, slice(rows.start, rows.start + count))
    move_codes(fast, kind, flip, blocks.fields, stored, strips[: count // BLOCK, :, : k // DEPTH])
    return count, k


def _codes(source: Stream, flip: int, expert: int, rows: slice, columns: slice) -> Array:
    """uint8 [rows, columns] of the padded matrix, as they are stored."""
    q = source.tensor
    inside = slice(rows.start, min(rows.stop, q.n)), slice(columns.start, min(columns.stop, q.k))
    codes = source.slab(expert, *inside)
    shape = rows.stop - rows.start, columns.stop - columns.start
    if codes.shape == shape and not flip:
        return codes
    out = np.zeros(shape, np.uint8, order="F" if codes.flags.f_contiguous else "C")
    out[: codes.shape[0], : codes.shape[1]] = codes ^ np.uint8(flip)
    return out


def _levels(q: QuantTensor, kind: Kind, kp: int, expert: int, run: slice) -> list[list[Array]]:
    """The factors of the padded rows ``run``, as ``pack_factors`` takes them."""
    levels = []
    for i, (_, own) in enumerate(kind.scales):
        grids = [q.scales[i]] + ([q.offsets[i]] if kind.minima else [])
        held = [grid.data.reshape(-1, *grid.data.shape[-2:])[expert, run] for grid in grids]
        if kind.pairs:
            held[1] = np.negative(held[1])
        if grids[0].block[1] != own:
            group = np.arange(-(-q.k // own)) * own // grids[0].block[1]
            held = [data[:, group] for data in held]
        levels.append([_padded(data, run.stop - run.start, kp // own) for data in held])
    return levels


def _padded(grid: Array, rows: int, columns: int) -> Array:
    """[r, c] -> [rows, columns], new entries zero bytes."""
    if grid.shape == (rows, columns):
        return np.ascontiguousarray(grid)
    out = np.zeros((rows, columns), grid.dtype)
    out[: grid.shape[0], : grid.shape[1]] = grid
    return out
