"""Tensors too large to be held whole: codes by the rectangle on one side, stored bytes by the piece on the other.

A source has ``stream(checkpoint, P) -> Stream``: ``read`` without the codes, and a function that gives those of any
rectangle. A layout has ``stream(Stream) -> {suffix: array or Pieces}, spec`` and ``view(tensors, spec) -> Stream``: its
``pack`` and ``unpack``. Whoever uses them holds a few megabytes of codes at a time, not a byte a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .canonical import Element, QuantTensor
from .moves import Fields

Array = NDArray[Any]

STEP = 1 << 20
"""Codes that are worked on at once: they and what is made of them fit the cache of a core."""
ACROSS = 4
"""Times as many where a slab takes a piece of every row: shorter pieces waste the lines they are read in."""

Slab = Callable[[int, slice, slice], Array]


@dataclass(frozen=True)
class Blocks:
    """Codes as blocks of a row's stored bytes, for a layout that moves their bits without making codes of them."""

    fields: Fields
    rows: Callable[[int, slice], Array]
    """(expert, rows) -> uint8 [rows, bytes]. Any thread may call it."""


@dataclass(frozen=True)
class Stream:
    """A quantised linear whose codes are made when they are asked for."""

    tensor: QuantTensor
    """Everything but the codes, which have their shape and no content."""
    slab: Slab
    """(expert, rows, columns) -> uint8 [rows, columns], in any strides; expert 0 where there are none. Any thread may
    call it; bounds are plain and lie inside [n, k]."""
    along: int = 1
    """The axis of [n, k] across which slabs are cheap: 0 where rows lie together in the file, else 1."""
    blocks: Blocks | None = None
    """The codes once more, where they stand row by row in blocks; None also where they are not plain bits."""


@dataclass(frozen=True)
class Pieces:
    """A stored tensor as functions that make its bytes: in C order, one after the other."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    makers: Sequence[Callable[[], Array]]
    """Independent of each other; any thread may call them."""


def hollow(*shape: int) -> Array:
    """uint8 codes of a shape, without content and without memory."""
    return np.broadcast_to(np.uint8(0), shape)


def streamed(q: QuantTensor) -> Stream:
    """A tensor that is in memory, or mapped, as a stream."""
    experts = q.codes if q.codes.ndim == 3 else q.codes[None]
    by_rows = experts.strides[-1] == 1
    return Stream(
        replace(q, codes=hollow(*q.codes.shape)),
        lambda e, rows, columns: experts[e, rows, columns],
        0 if by_rows else 1,
    )


def whole(stream: Stream) -> QuantTensor:
    """The tensor with all of its codes."""
    q = stream.tensor
    everything = slice(0, q.n), slice(0, q.k)
    if q.experts is None:
        return replace(q, codes=stream.slab(0, *everything))
    codes = np.empty(q.codes.shape, np.uint8)
    for expert in range(q.experts):
        codes[expert] = stream.slab(expert, *everything)
    return replace(q, codes=codes)


def recoded(stream: Stream, element: Element) -> Stream:
    """``canonical.recode`` of a stream."""
    q = stream.tensor
    shift = np.uint8((element.bias - q.element.bias) % 256)
    return replace(
        stream,
        blocks=None,
        tensor=replace(q, element=element),
        slab=lambda expert, rows, columns: stream.slab(expert, rows, columns) + shift,
    )


def steps(extent: int, unit: int, other: int, *, across: bool = False) -> list[slice]:
    """Cut an extent into runs of whole units that have about ``STEP`` codes each; ``other`` is the other extent."""
    length = max(1, STEP * (ACROSS if across else 1) // max(1, other * unit)) * unit
    return [slice(first, min(first + length, extent)) for first in range(0, extent, length)]


def rectangles(stream: Stream, unit: int = 128) -> list[tuple[int, slice, slice]]:
    """(expert, rows, columns) of slabs that cover a tensor, in the direction that is cheap for it.

    A unit is a whole number of the rows or columns that any layout keeps together.
    """
    n, k = stream.tensor.n, stream.tensor.k
    if stream.along:
        slabs = [(slice(0, n), columns) for columns in steps(k, unit, n)]
    else:
        slabs = [(rows, slice(0, k)) for rows in steps(n, unit, k)]
    return [(expert, *slab) for expert in range(stream.tensor.experts or 1) for slab in slabs]


def joined(pieces: Array | Pieces) -> Array:
    """All of a stored tensor."""
    if isinstance(pieces, np.ndarray):
        return pieces
    out = np.empty(pieces.shape, pieces.dtype)
    flat, end = out.reshape(-1), 0
    for make in pieces.makers:
        piece = make().reshape(-1)
        flat[end : end + piece.size] = piece
        end += piece.size
    assert end == out.size, (end, pieces.shape)
    return out


def assembled(tensors: Mapping[str, Array | Pieces], spec: dict[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """What a layout's ``stream`` gives as its ``pack`` gives it."""
    return {suffix: joined(tensor) for suffix, tensor in tensors.items()}, spec
