"""Differences between arrays, streams of codes and files: the first place that differs, and how many do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.bits import contiguous
from ..formats.container import Tensor
from ..formats.errors import VerifyError
from ..formats.stream import Pieces, Stream, rectangles
from .jobs import COPIED, ahead
from .workers import window

Array = NDArray[Any]
Position = tuple[int, ...]
Difference = tuple[int, Position, Any, Any]


def same(where: str, file: Path, found: Any, need: Any) -> None:
    """Raise VerifyError unless two values, or all bytes of two arrays, are equal; integers compare as numbers."""
    if not isinstance(need, np.ndarray):
        if found != need:
            raise VerifyError("differs", file=file, tensor=where, found=found, need=need)
        return
    if found.shape != need.shape:
        raise VerifyError("differs in shape", file=file, tensor=where, found=list(found.shape), need=list(need.shape))
    _refuse(where, file, [_difference(found, need)])


def same_bytes(file: Path, need: bytes | Path) -> None:
    """Raise VerifyError unless a file is there and holds these bytes, or those of another file."""
    if not file.is_file():
        raise VerifyError("the artifact lost a file", file=file)
    found, size = file.stat().st_size, need.stat().st_size if isinstance(need, Path) else len(need)
    if found != size:
        raise VerifyError("differs in length", file=file, found=f"{found} bytes", need=f"{size}")
    with open(file, "rb") as ours, open(need, "rb") if isinstance(need, Path) else BytesIO(need) as theirs:
        for first in range(0, size, COPIED):
            held, wanted = (np.frombuffer(f.read(COPIED), np.uint8) for f in (ours, theirs))
            _refuse("all of it", file, [_difference(held, wanted, partial(_from, first))])


def same_tensor(where: str, file: Path, found: Tensor, need: Tensor, pool: Executor) -> None:
    """Raise VerifyError unless two tensors have one type, one shape and the same bytes."""
    if (found.dtype, found.shape) != (need.dtype, need.shape):
        raise VerifyError(
            "a tensor that passed through changed",
            file=file,
            tensor=where,
            found=f"{found.dtype} {list(found.shape)}",
            need=f"{need.dtype} {list(need.shape)}",
        )

    def task(first: int) -> Difference:
        end = min(first + COPIED, need.nbytes)
        return _difference(found.cut(first, end), need.cut(first, end), lambda at: (first + at[0],))

    _refuse(where, file, pool.map(task, range(0, need.nbytes, COPIED)))


def same_codes(where: str, file: Path, found: Stream, need: Stream, pool: Executor) -> None:
    """Raise VerifyError unless all codes of two streams of one shape are equal."""

    def task(rectangle: tuple[int, slice, slice]) -> Difference:
        ours, theirs = found.slab(*rectangle), need.slab(*rectangle)
        if ours.flags.c_contiguous != theirs.flags.c_contiguous:
            ours, theirs = contiguous(ours), contiguous(theirs)
        return _difference(ours, theirs, partial(_in_whole, found, rectangle))

    _refuse(where, file, pool.map(task, rectangles(need)))


def codes_of_element(where: str, file: Path, found: Stream, pool: Executor) -> None:
    """Raise VerifyError unless every code of a stream is one that its element has."""
    element = found.tensor.element
    most = np.uint8(2**element.bits - 1)

    def task(rectangle: tuple[int, slice, slice]) -> Difference:
        codes = found.slab(*rectangle)
        return _difference(codes, np.minimum(codes, most), partial(_in_whole, found, rectangle))

    _refuse(where, file, pool.map(task, rectangles(found)), f"<= {most}, as {element.name}")


def same_pieces(where: str, file: Path, found: Array, need: Pieces, pool: Executor) -> None:
    """Raise VerifyError unless an array has the bytes that the pieces make."""
    flat, end, differences = found.reshape(-1), 0, []
    for _, piece in ahead(((False, make) for make in need.makers), pool, window(1)):
        start, end = end, end + piece.size
        place = partial(_placed, start, found.shape)
        differences.append(_difference(flat[start:end], piece.reshape(-1), place))
    _refuse(where, file, differences)


def _from(start: int, at: Position) -> Position:
    return (start + at[0],)


def _placed(start: int, shape: tuple[int, ...], at: Position) -> Position:
    return tuple(int(i) for i in np.unravel_index(start + at[0], shape))


def _in_whole(stream: Stream, rectangle: tuple[int, slice, slice], at: Position) -> Position:
    expert, rows, columns = rectangle
    lead = () if stream.tensor.experts is None else (expert,)
    return (*lead, rows.start + at[0], columns.start + at[1])


def _difference(found: Array, need: Array, place: Callable[[Position], Position] = lambda at: at) -> Difference:
    """(how many places differ, the first of them, what is there in each); ``place`` makes it a place in the whole."""
    if _equal(found, need):
        return 0, (), None, None
    unequal = _bits(found) != _bits(need)
    count = int(np.count_nonzero(unequal))
    if not count:
        return 0, (), None, None
    at = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
    return count, place(at), found[at], need[at]


def _refuse(where: str, file: Path, differences: Iterable[Difference], need: str | None = None) -> None:
    """Raise VerifyError when there are any; ``need`` says in words what would be right."""
    real = [difference for difference in differences if difference[0]]
    if real:
        _, at, found, value = min(real, key=lambda difference: difference[1])
        count = sum(difference[0] for difference in real)
        what = f"differs at {list(at)}" + (f", the first of {count} places" if count > 1 else "")
        raise VerifyError(what, file=file, tensor=where, found=found, need=need or value)


def _equal(found: Array, need: Array) -> bool:
    """Whether two arrays of one shape and type hold the same bytes, where that is quick to say: eight at a time."""
    if found.flags.f_contiguous and need.flags.f_contiguous:
        found, need = found.T, need.T
    if not (found.flags.c_contiguous and need.flags.c_contiguous and found.dtype == need.dtype):
        return False
    ours, theirs = found.reshape(-1).view(np.uint8), need.reshape(-1).view(np.uint8)
    whole = ours.size // 8 * 8
    return np.array_equal(ours[:whole].view(np.uint64), theirs[:whole].view(np.uint64)) and np.array_equal(
        ours[whole:], theirs[whole:]
    )


def _bits(array: Array) -> Array:
    """Floats as the unsigned integers of their bits, so that NaN equals itself and -0 is not 0."""
    if array.dtype.kind in "iu":
        return array
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
