"""Operands as rows: at most so many at once, packed where a kernel cannot read them, and where quantised ones lie."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ..kernels.quantize import nbytes
from .arrays import Operand
from .dense import view
from .product import Quantized
from .scratch import Lane, on

ROWS = 1 << 18
"""Rows of x in one product: grids and 32-bit extents hold that many for any n and k."""


def given(handle: Quantized, start: int) -> dict[str, int]:
    """Where the quantised rows from ``start`` on lie in a handle's memory."""
    rows, k = prod(handle.shape[:-1]), handle.shape[-1]
    (all_codes, _), (codes, factors) = nbytes(handle.numerics, rows, k), nbytes(handle.numerics, start, k)
    pointer = handle.memory.memory.ptr
    return {"quantized": pointer + codes, "factors": pointer + all_codes + factors}


def some(x: Operand, start: int) -> Operand:
    """At most ROWS rows of an operand of regular rows, as a matrix."""
    if start == 0 and x.rows <= ROWS:
        return x
    stride, width = x.row_stride, x.shape[-1]
    assert stride is not None
    shape = min(ROWS, x.rows - start), width
    return replace(x, pointer=x.pointer + start * stride * x.item, shape=shape, strides=(stride, 1))


def packed(x: Operand, lane: Lane, stream: int) -> Operand:
    """A copy of x in the lane, as contiguous rows."""
    shape, word = (x.rows, x.shape[-1]), f"uint{8 * x.item}"
    with on(stream):
        source = view(x.pointer, x.shape, x.strides, word, x.owner)
        copy = view(lane.buffer("packed x", x.rows * shape[1] * x.item), shape, (shape[1], 1), word, lane)
        copy.reshape(x.shape)[...] = source
    return replace(x, pointer=copy.data.ptr, shape=shape, strides=(shape[1], 1), owner=lane)
