"""``verify()``: that an artifact holds what its spec says, or exactly what its source held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.artifact import Artifact, open_artifact
from ..formats.canonical import QuantTensor
from ..formats.container import Checkpoint, companion, open_checkpoint
from ..formats.errors import VerifyError
from ..formats.options import Options
from ..kernels import layouts
from . import origin
from .progress import Progress

Array = NDArray[Any]


@dataclass(frozen=True)
class Verified:
    """What was compared and found equal."""

    path: Path
    against: Path | None
    modules: int
    passed_through: int
    """Tensors compared byte for byte; 0 without a source."""


def verify(path: str | Path, against: str | Path | None = None, *, quiet: bool = True, **options: Any) -> Verified:
    """Check an artifact; with ``against``, compare all of it with the checkpoint it was made from.

    Without: every spec fits its tensors, and packing what they unpack to gives the same bytes (padding included).
    With: every module's canonical form and every other tensor equals the source's, and neither has more; the source
    is read with the options of the conversion, unless others are given.

    Raises:
        VerifyError: the first module, part and position that differ.
        CorruptError, UnsupportedError: one of the two cannot be read.
    """
    artifact = open_artifact(Path(path), layouts())
    total = sum(t.nbytes for t in artifact.checkpoint.tensors.values())
    with closing(Progress(total, "verifying", quiet)) as progress:
        if against is None:
            for name in artifact.modules:
                _repack(artifact, name)
                progress.advance(sum(t.nbytes for t in artifact.tensors(name).values()))
            return Verified(Path(path), None, len(artifact.modules), 0)
        source = open_checkpoint(Path(against), Options(**(origin.options(artifact.checkpoint) | options)))
        readers = {name: origin.reader(artifact, name) for name in artifact.modules}
        claimed = {reader: reader.modules(source) for reader in dict.fromkeys(readers.values())}
        consumed: set[str] = set()
        for name, reader in readers.items():
            if name not in claimed[reader]:
                raise VerifyError("the source has no such module", file=source.path, tensor=name)
            _compare_module(artifact, source, name, reader)
            consumed.update(claimed[reader][name])
            progress.advance(sum(t.nbytes for t in artifact.tensors(name).values()))
        for name in artifact.passthrough:
            _compare_tensor(artifact.checkpoint, source, name)
            progress.advance(artifact.checkpoint.tensors[name].nbytes)
        for suffix, content in source.companions.items():
            _compare_companion(companion(artifact.checkpoint.path, suffix), content)
        kept = consumed | set(artifact.passthrough)
        missing = [name for name in source.tensors if name not in kept]
        if missing:
            raise VerifyError("the artifact lost a tensor", file=path, tensor=missing[0], need=f"as in {against}")
        return Verified(Path(path), Path(against), len(artifact.modules), len(artifact.passthrough))


def _repack(artifact: Artifact, name: str) -> None:
    spec = artifact.modules[name]
    layout, stored = layouts()[spec["layout"]], artifact.tensors(name)
    packed, again = layout.pack(layout.unpack(stored, spec))
    for key, value in again.items():
        if spec.get(key) != value:
            raise VerifyError(
                "the spec is not that of its tensors", tensor=name, found=f"{key} = {spec.get(key)}", need=value
            )
    for suffix, need in packed.items():
        _same(f"{name}.{suffix}", artifact.checkpoint.path, stored[suffix], need)


def _compare_module(artifact: Artifact, source: Checkpoint, name: str, reader: ModuleType) -> None:
    found, need = dict(_parts(artifact.quant(name))), dict(_parts(reader.read(source, name)))
    for part in (*need, *(p for p in found if p not in need)):
        where = f"{name} {part}"
        if part not in found or part not in need:
            raise VerifyError("only one of the two has it", file=artifact.checkpoint.path, tensor=where)
        _same(where, artifact.checkpoint.path, found[part], need[part])


def _parts(q: QuantTensor) -> Iterator[tuple[str, Any]]:
    """Everything a tensor says, by name, in the order a difference is looked for."""
    yield "element", q.element.name
    yield "codes", q.codes
    for kind, levels in (("scales", q.scales), ("offsets", q.offsets)):
        for i, level in enumerate(levels):
            yield f"{kind}[{i}] grid", (level.block, level.shards)
            yield f"{kind}[{i}]", level.data
    yield from ((part, value) for part in ("zero", "perm", "bias") if (value := getattr(q, part)) is not None)
    yield from ((f"residue {suffix}", data) for suffix, data in q.residue.items())


def _compare_tensor(artifact: Checkpoint, source: Checkpoint, name: str) -> None:
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
    _same(name, artifact.path, found.raw(), need.raw())


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
    unequal = _bits(found) != _bits(need)
    if unequal.any():
        at = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
        raise VerifyError(
            f"differs at {list(at)}, the first of {int(unequal.sum())} places",
            file=file,
            tensor=where,
            found=found[at],
            need=need[at],
        )


def _bits(array: Array) -> Array:
    """Floats as the unsigned integers of their bits, so that NaN equals itself and -0 is not 0."""
    if array.dtype.kind in "iu":
        return array
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
