"""``verify()``: that an artifact holds what its spec says, or exactly what its source held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..formats import sources
from ..formats.artifact import NARROW, Artifact, open_artifact
from ..formats.canonical import ELEMENTS, QuantTensor
from ..formats.container import CONFIG, Checkpoint, companion, open_checkpoint
from ..formats.errors import VerifyError
from ..formats.options import Options
from ..formats.stream import Pieces, recoded, streamed
from ..kernels import layouts
from . import compare, origin
from .jobs import open_stream, threads
from .progress import Progress


@dataclass(frozen=True)
class Verified:
    """What was compared and found equal."""

    path: Path
    against: Path | None
    modules: int
    passed_through: int
    """Tensors that belong to no module; they are compared only with a source."""
    files: int = 0
    """config.json, side files and companions that were compared; 0 without a source."""


def verify(
    path: str | Path, against: str | Path | None = None, *, workers: int = 0, quiet: bool = True, **options: Any
) -> Verified:
    """Check an artifact; with ``against``, compare all of it with the checkpoint it was made from.

    Without: every spec fits its tensors, packing what they unpack to gives the same bytes (padding included), and
    widened codes are those of the narrow element. Nothing is known of values, nor of tensors that passed through.
    With: the same, and every module's canonical form, every other tensor and every file that ``unpack`` gives back
    equals the source's, and neither has more; the source is read with the options of the conversion, unless others
    are given. ``workers`` threads compare slabs of codes; 0 is one for every core.

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
            return Verified(Path(path), None, len(artifact.modules), len(artifact.passthrough))
        source = open_checkpoint(Path(against), Options(**(origin.options(artifact.checkpoint) | options)))
        readers = {name: artifact.modules[name]["source"]["format"] for name in artifact.modules}
        for name in artifact.modules:
            origin.reader(artifact, name)
        claimed = {reader: sources()[reader].modules(source) for reader in dict.fromkeys(readers.values())}
        consumed: set[str] = set()
        for name, reader in readers.items():
            if name not in claimed[reader]:
                raise VerifyError("the source has no such module", file=source.path, tensor=name)
            _repack(artifact, name, pool)
            _compare_module(artifact, source, name, reader, pool)
            consumed.update(claimed[reader][name])
            for member in claimed[reader][name]:
                source.tensors[member].release()
            _passed(progress, artifact.checkpoint, artifact.names(name))
        for name in artifact.passthrough:
            if name not in source.tensors:
                raise VerifyError("the source has no such tensor", file=source.path, tensor=name)
            found = artifact.checkpoint.tensors[name]
            compare.same_tensor(name, artifact.checkpoint.path, found, source.tensors[name], pool)
            source.tensors[name].release()
            _passed(progress, artifact.checkpoint, [name])
        kept = consumed | set(artifact.passthrough)
        missing = [name for name in source.tensors if name not in kept]
        if missing:
            raise VerifyError("the artifact lost a tensor", file=path, tensor=missing[0], need=f"as in {against}")
        files = _compare_files(artifact, source)
        return Verified(Path(path), Path(against), len(artifact.modules), len(artifact.passthrough), files)


def _compare_files(artifact: Artifact, source: Checkpoint) -> int:
    """How many files beside the weights were compared. Raises VerifyError for one that would come back changed."""
    path, files = artifact.checkpoint.path, 0
    for suffix, content in source.companions.items():
        compare.same_bytes(companion(path, suffix), content)
        files += 1
    if not (path.is_dir() and source.path.is_dir()):
        return files
    config = source.path / CONFIG
    if config.is_file():
        if origin.restored_config(artifact.checkpoint) != config.read_bytes():
            raise VerifyError("unpack would not give the source's config.json back", file=path / CONFIG)
        files += 1
    if source.index is not None:
        if origin.restored_index(artifact.checkpoint) != {source.index.name: source.index.read_bytes()}:
            raise VerifyError("unpack would not give the source's index back", file=path, tensor=source.index.name)
        files += 1
    for file in source.side_files:
        compare.same_bytes(path / file.name, file.read_bytes())
        files += 1
    return files


def _passed(progress: Progress, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    for name in names:
        checkpoint.tensors[name].release()
        progress.advance(checkpoint.tensors[name].nbytes)


def _repack(artifact: Artifact, name: str, pool: Executor) -> None:
    """Raise VerifyError unless packing what a module unpacks to gives its very spec and bytes."""
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
            compare.same_pieces(where, artifact.checkpoint.path, found, need, pool)
        else:
            compare.same(where, artifact.checkpoint.path, found, need)
    _check_range(artifact, name, pool)


def _check_range(artifact: Artifact, name: str, pool: Executor) -> None:
    """Raise VerifyError for a widened code that the narrow element does not have."""
    spec = artifact.modules[name]
    narrow = spec["source"].get(NARROW)
    if narrow is not None:
        layout, stored = layouts()[spec["layout"]], artifact.tensors(name)
        wide = layout.view(stored, spec) if hasattr(layout, "view") else streamed(layout.unpack(stored, spec))
        codes = recoded(wide, ELEMENTS[narrow])
        compare.codes_of_element(f"{name} codes", artifact.checkpoint.path, codes, pool)


def _compare_module(artifact: Artifact, source: Checkpoint, name: str, reader: str, pool: Executor) -> None:
    ours, theirs = artifact.stream(name), open_stream(source, reader, name)
    found, need = dict(_parts(ours.tensor)), dict(_parts(theirs.tensor))
    for part in (*need, *(p for p in found if p not in need)):
        where = f"{name} {part}"
        if part not in found or part not in need:
            raise VerifyError("only one of the two has it", file=artifact.checkpoint.path, tensor=where)
        compare.same(where, artifact.checkpoint.path, found[part], need[part])
    compare.same_codes(f"{name} codes", artifact.checkpoint.path, ours, theirs, pool)


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
