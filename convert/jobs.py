"""One shard, from the source's bytes to a finished file: an independent job that can be sent anywhere.

    pool threads   open the next module; make pieces, a window ahead
    this thread    writes pieces in the order of the file, hashes them

In memory at one time: ``window`` pieces, each of about ``stream.STEP`` codes, and the scales of two modules.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import artifact, sources
from ..formats.container import Checkpoint, Entry, Tensor, dtype_name, write_safetensors
from ..formats.joining import join
from ..formats.parts import Part, packed, parts, shared
from ..formats.stream import Pieces, Stream
from ..kernels import layouts
from . import manifest
from .manifest import Finished
from .modules import Module
from .shards import Stored
from .workers import threads, window

Array = NDArray[Any]
Make = Callable[[], Array]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT = 64 << 20
COPIED = 8 << 20
"""Bytes of a tensor that passes through, copied at a time."""


@cache
def _keep_freed_memory() -> None:
    """Buffers of a slab come and go by the thousand: glibc is told not to give each back and fault it in again."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, KEPT)


@dataclass(frozen=True)
class Job:
    """A shard to be written. ``checkpoint`` holds the tensors it reads and no others."""

    file: str
    path: Path
    """Where it goes; beside the manifest's directory."""
    key: str
    """Of the run it belongs to, as its manifest has it."""
    checkpoint: Checkpoint
    layout: str
    pieces: tuple[tuple[Module | None, tuple[Stored, ...]], ...]
    """(a module and its tensors, or None and a tensor that passes through), in file order."""
    metadata: Mapping[str, str]
    workers: int

    @property
    def tensors(self) -> tuple[Stored, ...]:
        return tuple(stored for _, piece in self.pieces for stored in piece)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors)


def run(job: Job, advance: Callable[[int], None] = lambda _: None) -> Finished:
    """Write the shard, publish it under its name, record it. ``advance`` is told the bytes written.

    Raises:
        WarptileError: as readers and the writer do, or the run has been replaced by another.
    """
    with ThreadPoolExecutor(threads(job.workers)) as pool:
        flow = buffers(job, pool)

        def data() -> Iterator[Array]:
            for last, buffer in flow:
                yield buffer
                advance(buffer.nbytes)
                if last:
                    return

        entries = [Entry(t.name, t.dtype, t.shape, data) for t in job.tensors]
        temporary = manifest.temporary(job.path)
        try:
            digest = write_safetensors(temporary, entries, job.metadata)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    finished = Finished(job.file, temporary.stat().st_size, digest, tuple(job.checkpoint.notes))
    manifest.publish(temporary, job.path, job.key, finished)
    return finished


def buffers(job: Job, pool: Executor) -> Iterator[tuple[bool, Array]]:
    """(whether it is the last of its tensor, some of its bytes) for all that the shard holds, in file order."""
    _keep_freed_memory()
    return ahead(_makers(job, pool), pool, window(threads(job.workers)))


def ahead(makers: Iterator[tuple[bool, Make]], pool: Executor, most: int) -> Iterator[tuple[bool, Array]]:
    """What the makers make, in their order; no more than ``most`` of them at once."""
    waiting: deque[tuple[bool, Future[Array]]] = deque()
    try:
        for last, make in makers:
            waiting.append((last, pool.submit(make)))
            if len(waiting) == most:
                last, future = waiting.popleft()
                yield last, future.result()
        while waiting:
            last, future = waiting.popleft()
            yield last, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


@dataclass(frozen=True)
class _Turn:
    """Tensors of a module that are made in one go, by one expert where experts are parts of their own."""

    module: Module
    unit: int
    tensors: tuple[tuple[Stored, bool], ...]
    """(tensor, whether this turn's bytes are the last of it)."""


def _turns(job: Job, module: Module, piece: Sequence[Stored]) -> list[_Turn]:
    """A stack is written tensor after tensor, each expert after expert: whoever has bytes of it is opened anew."""
    if not module.stacked:
        return [_Turn(module, 0, tuple((stored, True) for stored in piece))]
    assert module.spec is not None
    common = {f"{module.name}.{suffix}" for suffix in shared(layouts()[job.layout], module.spec)}
    kept = {
        f"{module.name}.{artifact.RESIDUE}{part.prefix}{suffix}": part.expert or 0
        for part, linear in zip(parts(module.name, module.spec), module.linears, strict=True)
        for suffix, *_ in linear.outline.residue
    }
    turns = []
    for stored in piece:
        owner = 0 if stored.name in common else kept.get(stored.name)
        units = range(len(module.units)) if owner is None else (owner,)
        turns += [_Turn(module, unit, ((stored, unit == units[-1]),)) for unit in units]
    return turns


def _makers(job: Job, pool: Executor) -> Iterator[tuple[bool, Make]]:
    """(whether it is the last of its tensor, what makes it) for every buffer of the shard's tensors, in file order."""
    todo: list[_Turn | Stored] = []
    for module, piece in job.pieces:
        todo += piece if module is None else _turns(job, module, piece)
    following = {id(turn): after for turn, after in pairwise(one for one in todo if isinstance(one, _Turn))}
    opened: dict[int, Future[dict[str, Array | Pieces]]] = {}

    def ready(turn: _Turn) -> Future[dict[str, Array | Pieces]]:
        if id(turn) not in opened:
            opened[id(turn)] = pool.submit(_open, job, turn.module, turn.unit)
        return opened[id(turn)]

    for one in todo:
        if isinstance(one, Stored):
            tensor = job.checkpoint.tensors[one.name]
            yield from _flagged(_copies(tensor))
            tensor.release()
            continue
        made = ready(one).result()
        if id(one) in following:
            ready(following[id(one)])
        for stored, last in one.tensors:
            part = made.pop(stored.name)
            if not one.module.stacked:
                assert (part.shape, dtype_name(part.dtype)) == (stored.shape, stored.dtype), (stored, part.dtype)
            yield from _flagged(
                part.makers if isinstance(part, Pieces) else [partial(np.ascontiguousarray, part)], last
            )
        del opened[id(one)], made
        for linear in one.module.units[one.unit]:
            for name in linear.members:
                job.checkpoint.tensors[name].release()


def _flagged(makers: Sequence[Make], last: bool = True) -> Iterator[tuple[bool, Make]]:
    end = len(makers) - 1
    return ((last and i == end, make) for i, make in enumerate(makers))


def _copies(tensor: Tensor) -> list[Make]:
    cuts = range(0, max(tensor.nbytes, 1), COPIED)
    return [partial(tensor.cut, first, min(first + COPIED, tensor.nbytes)) for first in cuts]


def _open(job: Job, module: Module, unit: int) -> dict[str, Array | Pieces]:
    """What a module is written as, or one expert's share of it, by full name."""
    assert module.spec is not None
    streams, linears = {}, {linear.name: linear for linear in module.units[unit]}
    for linear in linears.values():
        for name in linear.members:
            job.checkpoint.tensors[name].expect()
        streams[linear.name] = stream = open_stream(job.checkpoint, linear.source, linear.name)
        outline = stream.tensor.check().outline()
        assert outline == linear.outline, f"{linear.source}: describe and read disagree on {linear.name}"
    where = [part for part in parts(module.name, module.spec) if part.name in linears]
    tensors, _ = pack_parts(layouts()[job.layout], where, streams)
    residue = {
        f"{part.prefix}{suffix}": data for part in where for suffix, data in streams[part.name].tensor.residue.items()
    }
    return {f"{module.name}.{suffix}": part for suffix, part in artifact.as_stored(tensors, residue).items()}


def pack_parts(
    layout: ModuleType, where: Sequence[Part], streams: Mapping[str, Stream]
) -> tuple[dict[str, Array | Pieces], dict[str, Any]]:
    """(tensors by suffix, spec) that a layout makes of linears as readers gave them, side by side as ``where`` says."""
    joined = join([packed(streams[part.name], part) for part in where])
    made: tuple[dict[str, Array | Pieces], dict[str, Any]] = layout.stream(joined)
    return made


def open_stream(checkpoint: Checkpoint, source: str, module: str) -> Stream:
    """A module's codes by the slab."""
    stream: Stream = sources()[source].stream(checkpoint, module)
    return stream


def needed(checkpoint: Checkpoint, pieces: tuple[tuple[Module | None, tuple[Stored, ...]], ...]) -> Checkpoint:
    """A checkpoint of just the tensors that a shard reads, with notes of its own."""
    names = {name for module, piece in pieces for name in (module.members if module else (s.name for s in piece))}
    return replace(checkpoint, tensors={n: t for n, t in checkpoint.tensors.items() if n in names}, notes=[])
