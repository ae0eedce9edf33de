"""Where the fields of a protobuf message lie in a file, without parsing what is in them.

https://protobuf.dev/programming-guides/encoding: a key, number << 3 | kind, then a value: 0 a varint, 1 eight bytes, 2
a length and so many bytes, 5 four bytes. Groups (3, 4) are obsolete and refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from .errors import CorruptError

Span = tuple[int, int]


def fields(data: mmap.mmap, span: Span, path: Path) -> Iterator[tuple[int, Span, Span]]:
    """(number, the whole field, its value) of each field in a span. Raises CorruptError."""
    at, end = span
    while at < end:
        start = at
        key, at = _varint(data, at, end, path)
        kind = key & 7
        if not key >> 3:  # no field has number 0: a run of zeros, and in a sparse file one without end
            raise CorruptError("not an ONNX model", file=path, found=f"field 0 at byte {start}")
        if kind == 2:
            length, at = _varint(data, at, end, path)
        elif kind == 0:
            _, after = _varint(data, at, end, path)
            length = after - at
        else:
            length = {1: 8, 5: 4}.get(kind, end)  # groups are not in ONNX
        if length > end - at:
            raise CorruptError(
                "not an ONNX model, or a truncated one",
                file=path,
                found=f"{length} bytes at byte {at} of a part that ends at {end}",
                do="download or copy it again",
            )
        yield key >> 3, (start, at + length), (at, at + length)
        at += length


def _varint(data: mmap.mmap, at: int, end: int, path: Path) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise CorruptError("not an ONNX model, or a truncated one", file=path, found=f"an unfinished number at byte {at}")
