"""Scratch, counters and staging memory: one lane for each stream, and one of its own for each captured graph.

Two products in flight at once never share a lane, so they share no scratch and no counter. A lane that a graph was
captured with is never freed or reused before the session closes; every other lane is only a cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .load import Uploader, allocate


@dataclass(frozen=True)
class _Handle:
    """A stream's handle, as the CUDA stream protocol hands it over."""

    value: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.value


def on(stream: int) -> Any:
    """A context in which cupy works on the stream with this handle."""
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(stream))


def capture_id(stream: int) -> int | None:
    """The id of the capture in progress on a stream, None when there is none."""
    from cuda.bindings import driver

    status, state, ident, *_ = driver.cuStreamGetCaptureInfo(stream)
    if status or state == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        return None
    return int(ident)


@contextmanager
def allocating() -> Iterator[None]:
    """Lets this thread allocate and free although some stream is being captured (torch captures in global mode)."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


@dataclass
class Loan:
    """Memory of a lane that its holder keeps over several calls, and gives back by setting ``free``.

    The next holder works on the same stream, or in the same capture, and so after the last one.
    """

    memory: Any
    nbytes: int
    free: bool = False


class Lane:
    """Buffers by purpose, each as large as the largest request. Hold ``lock`` from the first buffer to the launch."""

    def __init__(self, uploader: Uploader, captured: bool) -> None:
        self.lock = threading.RLock()
        self.captured = captured
        self.grown = False
        self._uploader = uploader
        self._buffers: dict[str, tuple[Any, int]] = {}
        self._retired: list[tuple[Any, int]] = []
        self._loans: list[Loan] = []

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in [*self._buffers.values(), *self._retired]) + sum(x.nbytes for x in self._loans)

    @property
    def lent(self) -> bool:
        return not all(loan.free for loan in self._loans)

    def lend(self, nbytes: int, what: str) -> Loan:
        """At least ``nbytes`` of undefined contents: the smallest free loan that holds them, else a new one."""
        fitting = [loan for loan in self._loans if loan.free and nbytes <= loan.nbytes]
        if fitting:
            loan = min(fitting, key=lambda loan: loan.nbytes)
            loan.free = False
            return loan
        with allocating():
            loan = Loan(allocate(nbytes, what), nbytes)
        self._loans.append(loan)
        self.grown = True
        return loan

    def buffer(self, purpose: str, nbytes: int) -> int:
        """A pointer to at least ``nbytes``, 0 for none. ``counters`` are zero, the rest is undefined."""
        if not nbytes:
            return 0
        held = self._buffers.get(purpose)
        if held is None or held[1] < nbytes:
            with allocating():
                if held is not None:
                    if self.captured:
                        self._retired.append(held)
                    del self._buffers[purpose], held
                held = allocate(nbytes, f"{purpose} memory"), nbytes
                if purpose == "counters":
                    self._uploader.zero(held[0].ptr, nbytes)
            self._buffers[purpose] = held
            self.grown = True
        return int(held[0].ptr)

    def recall(self) -> None:
        """Free what is lent, whoever still holds it."""
        for loan in self._loans:
            loan.memory = None

    def reset(self) -> None:
        """Forget the counters: after a failed launch they may not be zero."""
        held = self._buffers.pop("counters", None)
        if held is not None and self.captured:
            self._retired.append(held)


class Lanes:
    """The lanes of a session, least recently used first, within ``limit`` bytes between calls."""

    def __init__(self, limit: int, uploader: Uploader) -> None:
        self.limit = limit
        self._uploader = uploader
        self._lanes: OrderedDict[tuple[str, int], Lane] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, stream: int) -> Lane:
        """The lane of a stream, or of the capture in progress on it. Streams go by id: handles are reused."""
        from cuda.bindings import driver

        capture = capture_id(stream)
        key = ("capture", capture) if capture is not None else ("stream", int(driver.cuStreamGetId(stream)[1]))
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(self._uploader, capture is not None)
            self._lanes.move_to_end(key)
            return lane

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(lane.nbytes for lane in self._lanes.values())

    def settle(self, lane: Lane) -> None:
        """After a call: back under the cap, if the lane grew."""
        if lane.grown:
            lane.grown = False
            self.trim()

    def trim(self, limit: int | None = None) -> None:
        """Free lanes that no graph and no thread uses, oldest first, until the rest fits ``limit``."""
        limit = self.limit if limit is None else limit
        with self._lock, allocating():
            total = sum(lane.nbytes for lane in self._lanes.values())
            for key in list(self._lanes):
                lane = self._lanes[key]
                if total > limit and not lane.captured and lane.lock.acquire(blocking=False):
                    if not lane.lent:
                        total -= lane.nbytes
                        del self._lanes[key]
                    lane.lock.release()
                del lane  # the last reference: freed inside the guard

    def clear(self) -> None:
        """Free every lane, captured ones too, and what they have lent."""
        with self._lock, allocating():
            for lane in self._lanes.values():
                lane.recall()
            self._lanes.clear()
