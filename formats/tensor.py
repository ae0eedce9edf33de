"""A named run of bytes in a file, and the table of the types it can have."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import CorruptError, WarptileError

Array = NDArray[Any]

# safetensors' name -> (numpy dtype, None where numpy has no such type; bits a value)
DTYPES: dict[str, tuple[np.dtype[Any] | None, int]] = {
    "BOOL": (np.dtype(np.bool_), 8),
    "U8": (np.dtype(np.uint8), 8),
    "I8": (np.dtype(np.int8), 8),
    "U16": (np.dtype(np.uint16), 16),
    "I16": (np.dtype(np.int16), 16),
    "U32": (np.dtype(np.uint32), 32),
    "I32": (np.dtype(np.int32), 32),
    "U64": (np.dtype(np.uint64), 64),
    "I64": (np.dtype(np.int64), 64),
    "F16": (np.dtype(np.float16), 16),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "F32": (np.dtype(np.float32), 32),
    "F64": (np.dtype(np.float64), 64),
    "C64": (np.dtype(np.complex64), 64),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F8_E4M3FNUZ": (np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    "F8_E5M2FNUZ": (np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    "F4": (None, 4),
    "F6_E2M3": (None, 6),
    "F6_E3M2": (None, 6),
}
_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items() if dtype is not None}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """safetensors' name of a numpy dtype. KeyError for one it has no name for."""
    return _NAMES[dtype]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor by its safetensors dtype name; values of less than a byte lie side by side."""
    return -(-prod(shape) * DTYPES[dtype][1] // 8)


class State(NamedTuple):
    """What changes when somebody writes to a file or puts another in its place."""

    size: int
    changed: int
    """Nanoseconds."""


def state(file: IO[bytes]) -> State:
    """Of an open file."""
    found = os.fstat(file.fileno())
    return State(found.st_size, found.st_mtime_ns)


def check_state(file: IO[bytes], then: State | None, path: Path) -> None:
    """Raise CorruptError when an open file is not what it was ``then``, if that is known."""
    now = state(file)
    if then is not None and then != now:
        raise CorruptError(
            "the file was changed after it was opened",
            file=path,
            found=f"{now.size} bytes, {then.size} before" if now.size != then.size else "another time of change",
            do="wait until nothing writes to it, and begin again",
        )


@dataclass(frozen=True)
class Tensor:
    """``nbytes`` bytes at ``offset`` of ``file``; nothing is read until ``array`` or ``raw`` is called."""

    name: str
    dtype: str
    """safetensors' name: F16 BF16 I32 F8_E4M3 ..."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    state: State | None = None
    """Of the file when its header was read: offsets say nothing of another."""

    def raw(self) -> Array:
        """uint8 [nbytes], read-only, memory mapped. Raises CorruptError when the file has changed since then."""
        if not self.nbytes:
            empty = np.empty(0, np.uint8)
            empty.setflags(write=False)
            return empty
        mapped = _mapped(self.file, self.state)
        if self.offset + self.nbytes > len(mapped):
            raise CorruptError(
                "the file is shorter than when it was opened",
                file=self.file,
                tensor=self.name,
                found=f"{len(mapped)} bytes",
                need=f"{self.offset + self.nbytes}",
                do="wait until nothing writes to it, and begin again",
            )
        return np.frombuffer(mapped, np.uint8, self.nbytes, self.offset)

    def array(self) -> Array:
        """A read-only mapped view in C order, of ``shape`` and its own dtype; it may be unaligned, as the file is.

        Types numpy has none for come as uint8: [.., last * bits / 8] where rows are whole bytes, else [nbytes].
        """
        dtype, bits = DTYPES[self.dtype]
        if dtype is not None:
            return self.raw().view(dtype).reshape(self.shape)
        if self.shape and self.shape[-1] * bits % 8 == 0:
            return self.raw().reshape(*self.shape[:-1], self.shape[-1] * bits // 8)
        return self.raw()

    def cut(self, first: int, end: int) -> Array:
        """A copy of some of its bytes: uint8 [end - first]."""
        return self.raw()[first:end].copy()

    def expect(self) -> None:
        """Tell the system that all of it is about to be read; reading begins, nobody waits."""
        with suppress(OSError, AttributeError), open(self.file, "rb") as f:  # not every system takes advice
            os.posix_fadvise(f.fileno(), self.offset, self.nbytes, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """Unmap its pages: they stay in the system's cache, but no longer count as this process's."""
        if not self.nbytes:
            return
        mapped = _mapped(self.file, self.state)
        first = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (self.offset + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, first, length)


# One mapping a file, alive as long as a view of it: each one holds a file descriptor.
_MAPS: WeakValueDictionary[tuple[str, int, int, int, int], mmap.mmap] = WeakValueDictionary()
_LOCK = Lock()


def _mapped(file: Path, then: State | None) -> mmap.mmap:
    try:
        with open(file, "rb") as f:
            stat = os.fstat(f.fileno())
            check_state(f, then, file)
            key = (str(file), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            with _LOCK:
                found = _MAPS.get(key)
                if found is None:
                    found = _MAPS[key] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            return found
    except (OSError, ValueError) as e:
        raise WarptileError("cannot be mapped", file=file, found=getattr(e, "strerror", None) or e) from None
