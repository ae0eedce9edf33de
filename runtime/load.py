"""Artifact tensors -> device memory: mapped pages go through two pinned buffers, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CHUNK = 8 << 20
ALIGN = 256
"""Every tensor starts at a multiple of this: kernels read 16 bytes at once, bulk copies 128."""


@dataclass(frozen=True)
class Weights:
    """The tensors of one module in one allocation."""

    memory: Any
    nbytes: int
    pointers: Mapping[str, int]
    steps: Mapping[str, int]
    """Bytes from one expert to the next; 0 for tensors all experts share."""


class Uploader:
    """Two pinned buffers and a stream of their own. One thread at a time."""

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        pinned = [cupy.cuda.alloc_pinned_memory(CHUNK) for _ in range(2)]
        self._buffers = [np.frombuffer(memory, np.uint8, CHUNK) for memory in pinned]

    def copy(self, pointer: int, source: Array) -> None:
        """The bytes of a host array to ``pointer``; returns when they are there."""
        from cupy.cuda import runtime

        data = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        for i, start in enumerate(range(0, data.size, CHUNK)):
            buffer, event = self._buffers[i % 2], self._events[i % 2]
            event.synchronize()
            part = data[start : start + CHUNK]
            buffer[: part.size] = part
            to_device = runtime.memcpyHostToDevice
            runtime.memcpyAsync(pointer + start, buffer.ctypes.data, part.size, to_device, self._stream.ptr)
            event.record(self._stream)
        self._stream.synchronize()

    def zero(self, pointer: int, nbytes: int) -> None:
        """Clear device memory; returns when it is clear."""
        from cupy.cuda import runtime

        runtime.memsetAsync(pointer, 0, nbytes, self._stream.ptr)
        self._stream.synchronize()

    def upload(self, name: str, tensors: Mapping[str, Array], stacked: Mapping[str, bool]) -> Weights:
        """All tensors of module ``name``; ``stacked`` says which have one slice per expert. Raises MemoryError."""
        offsets, total = {}, 0
        for suffix, array in tensors.items():
            offsets[suffix] = total
            total += -(-array.nbytes // ALIGN) * ALIGN
        memory = allocate(total, f"module {name}")
        for suffix, array in tensors.items():
            self.copy(memory.ptr + offsets[suffix], array)
        steps = {s: array.nbytes // array.shape[0] if stacked[s] else 0 for s, array in tensors.items()}
        return Weights(memory, total, {s: memory.ptr + offset for s, offset in offsets.items()}, steps)


def allocate(nbytes: int, what: str) -> Any:
    """Device memory outside every pool: freed when the last reference goes, after all work of the device.

    Raises MemoryError naming ``what``.
    """
    import cupy

    try:
        return cupy.cuda.Memory(max(nbytes, ALIGN))
    except cupy.cuda.memory.OutOfMemoryError:
        free, total = cupy.cuda.runtime.memGetInfo()
        raise MemoryError(f"{what} needs {nbytes} bytes; the device has {free} of {total} free") from None
