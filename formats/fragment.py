"""The order of codes inside one 16 (k) x 64 (n) tile of the Marlin layout.

A tile is the A operand of four mma.m16n8k16, one for each 16-wide column block j, with weights as rows: lane
4 * col + t holds k = 2t, 2t + 1, 2t + 8, 2t + 9 of columns col and col + 8. A lane's words lie together, so one 16-byte
load (4 bit) feeds four MMAs. The word order equals the one of the Marlin paper's kernel (Frantar et al. 2024), which
is also what AutoGPTQ writes as ``checkpoint_format: marlin``.

>>> print(TILES[4].picture(4, 10))
  k\\n      0      1      2      3      4      5      6      7      8      9
    0    0.0   16.0   32.0   48.0   64.0   80.0   96.0  112.0    0.2   16.2
    1    0.4   16.4   32.4   48.4   64.4   80.4   96.4  112.4    0.6   16.6
    2    4.0   20.0   36.0   52.0   68.0   84.0  100.0  116.0    4.2   20.2
    3    4.4   20.4   36.4   52.4   68.4   84.4  100.4  116.4    4.6   20.6
>>> print(TILES[8].picture(2, 10))
  k\\n      0      1      2      3      4      5      6      7      8      9
    0    0.0   32.0   64.0   96.0  128.0  160.0  192.0  224.0    1.0   33.0
    1    0.2   32.2   64.2   96.2  128.2  160.2  192.2  224.2    1.2   33.2
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import Tile

Array = NDArray[Any]

TILE_K, TILE_N = 16, 64


def _lane(k: Array, n: Array) -> tuple[Array, Array, Array, Array]:
    """(k, n) in the tile -> (column block j, half b of 8 columns, lane, register r of the fragment)."""
    j, b, col = n // 16, (n % 16) // 8, n % 8
    t, r = (k % 8) // 2, 2 * (k // 8) + k % 2
    return j, b, 4 * col + t, r


def _place4(k: Array, n: Array) -> tuple[Array, Array]:
    j, b, lane, r = _lane(k, n)
    v = 4 * b + r
    return 4 * lane + j, (v >> 1) | ((v & 1) << 2)


def _place8(k: Array, n: Array) -> tuple[Array, Array]:
    j, b, lane, r = _lane(k, n)
    return 8 * lane + 2 * j + b, np.array([0, 2, 1, 3])[r]


TILES = {4: Tile(TILE_K, TILE_N, 4, _place4), 8: Tile(TILE_K, TILE_N, 8, _place8)}


def _column(position: Array) -> Array:
    """Position 8i + v of 64 holds column i + 8v: a lane's column finds its eight columns side by side."""
    column: Array = position // 8 + 8 * (position % 8)
    return column


SCALE_COLUMNS = _column(np.arange(TILE_N))
"""intp [64]: stored position p of every 64 scales is column SCALE_COLUMNS[p]."""


def reorder(grid: Array, columns: Array) -> Array:
    """[.., N] -> [.., N] with stored position p of every ``len(columns)`` taken from column columns[p]."""
    blocks = grid.reshape(*grid.shape[:-1], -1, len(columns))
    return np.ascontiguousarray(blocks[..., columns]).reshape(grid.shape)


def restore(grid: Array, columns: Array) -> Array:
    """The inverse of ``reorder``."""
    return reorder(grid, np.argsort(columns))
