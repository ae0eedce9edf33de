"""``verify()``: that an artifact holds what its spec says, or exactly what its source held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import sources
from ..formats.artifact import Artifact, open_artifact
from ..formats.bits import contiguous
from ..formats.canonical import QuantTensor
from ..formats.container import Checkpoint, companion, open_checkpoint
from ..formats.errors import VerifyError
from ..formats.options import Options
from ..formats.stream import Pieces, Stream, rectangles
from ..kernels import layouts
from . import origin
from .jobs import COPIED, ahead, open_stream, threads, window
from .progress import Progress

Array = NDArray[Any]
Position = tuple[int, ...]
Difference = tuple[int, Position, Any, Any]


@dataclass(frozen=True)
class Verified:
    """What was compared and found equal."""

    path: Path
    against: Path | None
    modules: int
    passed_through: int
    """Tensors compared byte for byte; 0 without a source."""


def verify(
    path: str | Path, against: str | Path | None = None, *, workers: int = 0, quiet: bool = True, **options: Any
) -> Verified:
    """Check an artifact; with ``against``, compare all of it with the checkpoint it was made from.

    Without: every spec fits its tensors, and packing what they unpack to gives the same bytes (padding included).
    With: every module's canonical form and every other tensor equals the source's, and neither has more; the source
    is read with the options of the conversion, unless others are given. ``workers`` threads compare slabs of codes;
    0 is one for every core.

    Raises:
        VerifyError: the first module, part and position that differ.
        CorruptError, UnsupportedError: one of the two cannot be read.
    """
    artifact = open_artifact(Path(path), layouts())
    total = sum(t.nbytes for t in artifact.checkpoint.tensors.values())
    with closing(Progress(total, "verifying", quiet)) as progress, ThreadPoolExecutor(threads(workers)) as pool:
        if against is None:
            for name in artifact.modules:
                _repack(artifact, name, pool)
                _passed(progress, artifact.checkpoint, artifact.names(name))
            return Verified(Path(path), None, len(artifact.modules), 0)
        source = open_checkpoint(Path(against), Options(**(origin.options(artifact.checkpoint) | options)))
        readers = {name: artifact.modules[name]["source"]["format"] for name in artifact.modules}
        for name in artifact.modules:
            origin.reader(artifact, name)
        claimed = {reader: sources()[reader].modules(source) for reader in dict.fromkeys(readers.values())}
        consumed: set[str] = set()
        for name, reader in readers.items():
            if name not in claimed[reader]:
                raise VerifyError("the source has no such module", file=source.path, tensor=name)
            _compare_module(artifact, source, name, reader, pool)
            consumed.update(claimed[reader][name])
            for member in claimed[reader][name]:
                source.tensors[member].release()
            _passed(progress, artifact.checkpoint, artifact.names(name))
        for name in artifact.passthrough:
            _compare_tensor(artifact.checkpoint, source, name, pool)
            source.tensors[name].release()
            _passed(progress, artifact.checkpoint, [name])
        for suffix, content in source.companions.items():
            _compare_companion(companion(artifact.checkpoint.path, suffix), content)
        kept = consumed | set(artifact.passthrough)
        missing = [name for name in source.tensors if name not in kept]
        if missing:
            raise VerifyError("the artifact lost a tensor", file=path, tensor=missing[0], need=f"as in {against}")
        return Verified(Path(path), Path(against), len(artifact.modules), len(artifact.passthrough))


def _passed(progress: Progress, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    for name in names:
        checkpoint.tensors[name].release()
        progress.advance(checkpoint.tensors[name].nbytes)


def _repack(artifact: Artifact, name: str, pool: Executor) -> None:
    spec = artifact.modules[name]
    layout, stored = layouts()[spec["layout"]], artifact.tensors(name)
    if hasattr(layout, "stream"):
        packed, again = layout.stream(layout.view(stored, spec))
    else:
        packed, again = layout.pack(layout.unpack(stored, spec))
    for key, value in again.items():
        if spec.get(key) != value:
            raise VerifyError(
                "the spec is not that of its tensors", tensor=name, found=f"{key} = {spec.get(key)}", need=value
            )
    for suffix, need in packed.items():
        where, found = f"{name}.{suffix}", stored[suffix]
        if isinstance(need, Pieces):
            _same_pieces(where, artifact.checkpoint.path, found, need, pool)
        else:
            _same(where, artifact.checkpoint.path, found, need)


def _compare_module(artifact: Artifact, source: Checkpoint, name: str, reader: str, pool: Executor) -> None:
    ours, theirs = artifact.stream(name), open_stream(source, reader, name)
    found, need = dict(_parts(ours.tensor)), dict(_parts(theirs.tensor))
    for part in (*need, *(p for p in found if p not in need)):
        where = f"{name} {part}"
        if part not in found or part not in need:
            raise VerifyError("only one of the two has it", file=artifact.checkpoint.path, tensor=where)
        _same(where, artifact.checkpoint.path, found[part], need[part])
    _same_codes(f"{name} codes", artifact.checkpoint.path, ours, theirs, pool)


def _parts(q: QuantTensor) -> Iterator[tuple[str, Any]]:
    """Everything a tensor says but its codes, by name, in the order a difference is looked for."""
    yield "element", q.element.name
    yield "codes' shape", list(q.codes.shape)
    for kind, levels in (("scales", q.scales), ("offsets", q.offsets)):
        for i, level in enumerate(levels):
            yield f"{kind}[{i}] grid", (level.block, level.shards)
            yield f"{kind}[{i}]", level.data
    yield from ((part, value) for part in ("zero", "perm", "bias") if (value := getattr(q, part)) is not None)
    yield from ((f"residue {suffix}", data) for suffix, data in q.residue.items())


def _compare_tensor(artifact: Checkpoint, source: Checkpoint, name: str, pool: Executor) -> None:
    if name not in source.tensors:
        raise VerifyError("the source has no such tensor", file=source.path, tensor=name)
    found, need = artifact.tensors[name], source.tensors[name]
    if (found.dtype, found.shape) != (need.dtype, need.shape):
        raise VerifyError(
            "a tensor that passed through changed",
            file=artifact.path,
            tensor=name,
            found=f"{found.dtype} {list(found.shape)}",
            need=f"{need.dtype} {list(need.shape)}",
        )

    def task(first: int) -> Difference:
        end = min(first + COPIED, need.nbytes)
        return _difference(found.cut(first, end), need.cut(first, end), lambda at: (first + at[0],))

    _refuse(name, artifact.path, pool.map(task, range(0, need.nbytes, COPIED)))


def _compare_companion(file: Path, need: bytes) -> None:
    if not file.is_file():
        raise VerifyError("the artifact lost a file", file=file)
    found = np.fromfile(file, np.uint8)
    _same("all of it", file, found, np.frombuffer(need, np.uint8))


def _same(where: str, file: Path, found: Any, need: Any) -> None:
    """Raise unless two values, or all bytes of two arrays, are equal; integer arrays compare as numbers."""
    if not isinstance(need, np.ndarray):
        if found != need:
            raise VerifyError("differs", file=file, tensor=where, found=found, need=need)
        return
    if found.shape != need.shape:
        raise VerifyError("differs in shape", file=file, tensor=where, found=list(found.shape), need=list(need.shape))
    _refuse(where, file, [_difference(found, need)])


def _same_codes(where: str, file: Path, found: Stream, need: Stream, pool: Executor) -> None:
    def task(rectangle: tuple[int, slice, slice]) -> Difference:
        expert, rows, columns = rectangle
        ours, theirs = found.slab(*rectangle), need.slab(*rectangle)
        if ours.flags.c_contiguous != theirs.flags.c_contiguous:
            ours, theirs = contiguous(ours), contiguous(theirs)
        lead = () if found.tensor.experts is None else (expert,)
        return _difference(ours, theirs, lambda at: (*lead, rows.start + at[0], columns.start + at[1]))

    _refuse(where, file, pool.map(task, rectangles(need)))


def _same_pieces(where: str, file: Path, found: Array, need: Pieces, pool: Executor) -> None:
    flat, end, differences = found.reshape(-1), 0, []
    for _, piece in ahead(((False, make) for make in need.makers), pool, window(1)):
        start, end = end, end + piece.size
        place = partial(_placed, start, found.shape)
        differences.append(_difference(flat[start:end], piece.reshape(-1), place))
    _refuse(where, file, differences)


def _placed(start: int, shape: tuple[int, ...], at: Position) -> Position:
    return tuple(int(i) for i in np.unravel_index(start + at[0], shape))


def _difference(found: Array, need: Array, place: Callable[[Position], Position] = lambda at: at) -> Difference:
    """(how many places differ, the first of them, what is there in each); ``place`` makes it a place in the whole."""
    unequal = _bits(found) != _bits(need)
    count = int(np.count_nonzero(unequal))
    if not count:
        return 0, (), None, None
    at = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
    return count, place(at), found[at], need[at]


def _refuse(where: str, file: Path, differences: Iterable[Difference]) -> None:
    """Raise VerifyError when there are any."""
    real = [difference for difference in differences if difference[0]]
    if real:
        _, at, found, need = min(real, key=lambda difference: difference[1])
        count = sum(difference[0] for difference in real)
        raise VerifyError(
            f"differs at {list(at)}, the first of {count} places", file=file, tensor=where, found=found, need=need
        )


def _bits(array: Array) -> Array:
    """Floats as the unsigned integers of their bits, so that NaN equals itself and -0 is not 0."""
    if array.dtype.kind in "iu":
        return array
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
