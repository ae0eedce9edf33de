"""``verify()``: that an artifact holds what its spec says, or exactly what its source held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from ..formats import sources
from ..formats.artifact import Artifact, is_artifact, open_artifact, view
from ..formats.canonical import QuantTensor
from ..formats.container import CONFIG, Checkpoint, companion, open_checkpoint
from ..formats.errors import UsageError, VerifyError
from ..formats.options import Options
from ..formats.parts import NARROW, Part, expert_of, parts
from ..formats.stream import Pieces
from ..formats.strict_json import shown
from ..kernels import layouts
from . import compare, origin
from .jobs import open_stream, pack_parts
from .progress import Progress
from .workers import threads

Array = NDArray[Any]
Spec = dict[str, Any]
RECIPROCALS = ", 1 / the divisors that are stored,"
Packed = tuple[Mapping[str, Array | Pieces], Spec]


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
    With: what every module says of its linears but for their codes equals what the source says; packing the source's
    codes gives the module's very bytes, padding included; every other tensor and every file that ``unpack`` gives back
    equals the source's; what ``unpack`` goes by is what the source says; and neither has more. The source is read with
    the options of the conversion, unless others are given. ``workers`` threads pack and compare; 0 is one for every
    core.

    Raises:
        VerifyError: the first module, part and position that differ.
        UsageError: ``against`` is an artifact.
        CorruptError, UnsupportedError: one of the two cannot be read.
    """
    count = threads(workers)
    artifact = open_artifact(Path(path), layouts())
    total = sum(t.nbytes for t in artifact.checkpoint.tensors.values())
    with closing(Progress(total, "verifying", quiet)) as progress, ThreadPoolExecutor(count) as pool:
        if against is None:
            for name in artifact.modules:
                _repack(artifact, name, pool)
                _passed(progress, artifact.checkpoint, artifact.names(name))
            return Verified(Path(path), None, len(artifact.modules), len(artifact.passthrough))
        source = open_checkpoint(Path(against), Options(**(origin.options(artifact.checkpoint) | options)))
        if is_artifact(source):
            what, do = "an artifact, not the checkpoint that one was made from", "give --against that checkpoint"
            raise UsageError(what, file=against, do=do)
        for linear in artifact.parts:
            origin.reader(artifact, linear)
        readers = dict.fromkeys(part.reader for part in artifact.parts.values())
        claimed = {reader: sources()[reader].modules(source) for reader in readers}
        consumed: set[str] = set()
        for name, spec in artifact.modules.items():
            of_expert = groupby(parts(name, spec), key=lambda part: part.expert)
            for expert, where in ((expert, list(run)) for expert, run in of_expert):
                for part in where:
                    if part.name not in claimed[part.reader]:
                        raise VerifyError("the source has no such module", file=source.path, tensor=part.name)
                members = [member for part in where for member in claimed[part.reader][part.name]]
                _compare(artifact, source, name, expert, where, pool)
                consumed.update(members)
                for member in members:
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
        owner = {m: part.name for part in artifact.parts.values() for m in claimed[part.reader][part.name]}
        _compare_origin(artifact, source, owner)
        files = _compare_files(artifact, source)
        return Verified(Path(path), Path(against), len(artifact.modules), len(artifact.passthrough), files)


def _compare_origin(artifact: Artifact, source: Checkpoint, owner: Mapping[str, str]) -> None:
    """Raise VerifyError unless ``unpack`` would give back the source's tensors, in files and an order as theirs."""
    path, found, need = artifact.checkpoint.path, origin.files(artifact), origin.files_of(source, owner)
    names = list(zip(found, need, strict=False)) if path.is_dir() and source.path.is_dir() else []
    for ours, theirs in (*names, *zip_longest(found.values(), need.values())):
        if ours != theirs:
            what = "unpack would not give the source's files back as they are"
            raise VerifyError(what, file=path, found=shown(ours, 300), need=shown(theirs, 300))


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
        compare.same_bytes(path / file.name, file)
        files += 1
    return files


def _passed(progress: Progress, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    for name in names:
        checkpoint.tensors[name].release()
        progress.advance(checkpoint.tensors[name].nbytes)


def _repack(artifact: Artifact, name: str, pool: Executor) -> None:
    """Raise VerifyError unless packing what a module unpacks to gives its very spec and bytes, expert by expert; and
    for a widened code that the narrow element of its linear does not have."""
    spec, stored = artifact.modules[name], artifact.tensors(name)
    layout = layouts()[spec["layout"]]
    if spec["experts"] is None:
        _repack_one(artifact, layout, name, stored, spec, pool)
    for expert in range(spec["experts"] or 0):
        _repack_one(artifact, layout, f"{name} expert {expert}", *expert_of(layout, spec, stored, expert), pool)
    for part in parts(name, spec):
        _in_range(artifact, part, pool)


def _in_range(artifact: Artifact, part: Part, pool: Executor) -> None:
    if NARROW in part.source:
        codes = artifact.stream(part.name, in_range=False)
        compare.codes_of_element(f"{part.name} codes", artifact.checkpoint.path, codes, pool)


def _repack_one(
    artifact: Artifact, layout: ModuleType, name: str, stored: Mapping[str, Array], spec: Spec, pool: Executor
) -> None:
    _same_packed(artifact, name, stored, spec, layout.stream(view(layout, stored, spec)), pool)


def _same_packed(
    artifact: Artifact, name: str, stored: Mapping[str, Array], spec: Spec, packed: Packed, pool: Executor
) -> None:
    """Raise VerifyError unless what a layout packed is what is stored."""
    tensors, found = packed
    for key, value in found.items():
        if spec.get(key) != value:
            raise VerifyError(
                "the spec is not that of its tensors", tensor=name, found=f"{key} = {spec.get(key)}", need=value
            )
    for suffix, need in tensors.items():
        where, held = f"{name}.{suffix}", stored[suffix]
        if isinstance(need, Pieces):
            compare.same_pieces(where, artifact.checkpoint.path, held, need, pool)
        else:
            compare.same(where, artifact.checkpoint.path, held, need)


def _compare(
    artifact: Artifact, source: Checkpoint, name: str, expert: int | None, where: Sequence[Part], pool: Executor
) -> None:
    """Raise VerifyError unless a module, or an expert of it, is what packing its linears ``where`` gives."""
    theirs = {part.name: open_stream(source, part.reader, part.name) for part in where}
    for part in where:
        ours, need = dict(_parts(artifact.stream(part.name).tensor)), dict(_parts(theirs[part.name].tensor))
        for what in (*need, *(p for p in ours if p not in need)):
            place = f"{part.name} {what}"
            if what not in ours or what not in need:
                raise VerifyError("only one of the two has it", file=artifact.checkpoint.path, tensor=place)
            compare.same(place, artifact.checkpoint.path, ours[what], need[what])
    spec, stored = artifact.modules[name], artifact.tensors(name)
    layout = layouts()[spec["layout"]]
    if expert is not None:
        stored, spec = expert_of(layout, spec, stored, expert)
    try:
        _same_packed(artifact, name, stored, spec, pack_parts(layout, where, theirs), pool)
    except VerifyError:
        for part in where:  # the first weight that differs says more than the first byte
            _in_range(artifact, part, pool)
            found = artifact.stream(part.name)
            compare.same_codes(f"{part.name} codes", artifact.checkpoint.path, found, theirs[part.name], pool)
        raise


def _parts(q: QuantTensor) -> Iterator[tuple[str, Any]]:
    """Everything a tensor says but its codes, by name, in the order a difference is looked for."""
    yield "element", q.element.name
    yield "codes' shape", list(q.codes.shape)
    for kind, levels in (("scales", q.scales), ("offsets", q.offsets)):
        for i, level in enumerate(levels):
            yield f"{kind}[{i}] grid", (level.block, level.shards)
            yield f"{kind}[{i}]{RECIPROCALS if level.dtype == 'f64' else ''}", level.data
    yield from ((part, value) for part in ("zero", "perm", "bias") if (value := getattr(q, part)) is not None)
    yield from ((f"residue {suffix}", data) for suffix, data in q.residue.items())
    yield "source entry", dict(q.source)
