"""GPTQ checkpoints saved as Marlin tiles (AutoGPTQ's ``checkpoint_format: marlin``): symmetric 4 bit, group 128 or -1.

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| ``P.B`` | int32 [K/16, 2N] | tiles of ``fragment.TILES[4]`` |
| ``P.s`` | f16 [G, N] | ``SCALE_COLUMNS`` with several groups, ``SINGLE_COLUMNS`` with one |
| ``P.bias`` | [N] | natural order |
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fragment import SCALE_COLUMNS, TILE_K, TILE_N, TILES, reorder, restore

Array = NDArray[Any]

BITS = 4
GROUP = 128


def _single(position: Array) -> Array:
    """Position 8i + 2u + v of 32 holds column 2i + 8u + v."""
    i, u, v = position // 8, (position % 8) // 2, position % 2
    column: Array = 2 * i + 8 * u + v
    return column


SINGLE_COLUMNS = _single(np.arange(32))
"""intp [32]: the order of a single row of scales, that of the accumulator's columns in a lane."""


def extents(tiles: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(n, k, groups) of ``B`` and ``s`` shapes, None when they disagree or are no whole tiles."""
    if len(tiles) != 2 or len(scales) != 2:
        return None
    (rows, words), (groups, n) = tiles, scales
    if not rows or not n or words != 2 * n or n % TILE_N or not groups:
        return None
    return n, rows * TILE_K, groups


def _columns(groups: int) -> Array:
    return SCALE_COLUMNS if groups > 1 else SINGLE_COLUMNS


def natural(scales: Array) -> Array:
    """Stored [G, N] -> [G, N] in natural order."""
    return restore(scales, _columns(scales.shape[0]))


def pack(codes: Array, scales: Array) -> tuple[Array, Array]:
    """codes uint8 [K, N], scales [G, N] in natural order -> ``B``, ``s``."""
    return TILES[BITS].pack(codes), reorder(scales, _columns(scales.shape[0]))
