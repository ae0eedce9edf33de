"""``unpack()``: the checkpoint an artifact was made from; tensor bytes, names, files and config as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..formats.artifact import Artifact, open_artifact
from ..formats.container import CONFIG, Entry, is_companion, names_beside, nbytes, rebuilder, write_safetensors
from ..kernels import layouts
from . import origin
from . import shards as out
from .progress import Progress
from .staging import check_beside, check_left, check_paths, check_space, is_file, staged

Array = NDArray[Any]


@dataclass(frozen=True)
class Unpacked:
    """What ``unpack`` wrote."""

    dst: Path
    files: tuple[str, ...]
    restored: int
    """Linears given back to their source format."""
    passed_through: int
    nbytes: int


def unpack(path: str | Path, dst: str | Path, *, overwrite: bool = False, quiet: bool = True) -> Unpacked:
    """Undo a conversion: the source's tensors byte for byte, in files named and ordered as they were.

    Args:
        dst: one file (all of the source's files in one) when it ends in .safetensors, or like the files of a source
            kind that can be rebuilt, external data then beside it under its own names; else a directory.

    Raises:
        WarptileError: as ``convert``; nothing is left at ``dst`` then.
    """
    path, dst = Path(path), Path(dst)
    check_paths(path, dst, overwrite=overwrite, artifact=False)
    artifact = open_artifact(path, layouts())
    files = origin.files(artifact)
    others = names_beside(dst, artifact.checkpoint)
    check_beside(path, dst, others, overwrite=overwrite)
    if is_file(dst):
        whole = tuple(t for file in files.values() for t in file.tensors)
        files = {dst.name: origin.File(artifact.source_metadata, whole)}
    total = sum(_stored(artifact, t).nbytes for file in files.values() for t in file.tensors)
    side_files = [file for file in artifact.checkpoint.side_files if not is_companion(artifact.checkpoint, file)]
    side_files = [] if is_file(dst) else side_files
    if overwrite and not is_file(dst):
        check_left(dst, [file.name for file in side_files])
    check_space(dst, total + sum(file.stat().st_size for file in side_files))
    promised: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in artifact.parts}
    for tensor in (t for file in files.values() for t in file.tensors):
        if tensor.linear is not None:
            stored = _stored(artifact, tensor)
            promised[tensor.linear][stored.name] = stored.dtype, stored.shape
    batches = {name: out.Batch(partial(origin.restored, artifact, name, promised[name])) for name in promised}
    with staged(dst, overwrite=overwrite) as product, closing(Progress(total, "unpacking", quiet)) as progress:
        shards = [_shard(artifact, name, file, batches, progress.advance) for name, file in files.items()]
        rebuild = rebuilder(dst)
        if rebuild is not None:
            rebuild(product, artifact.checkpoint, shards[0].entries)
            return Unpacked(dst, (*files, *others), len(artifact.parts), len(artifact.passthrough), total)
        for shard in shards:
            write_safetensors(product if is_file(dst) else product / shard.file, shard.entries, shard.metadata)
        if not is_file(dst):
            for name, index in origin.restored_index(artifact.checkpoint).items():
                out.write_bytes(product / name, index)
            config = origin.restored_config(artifact.checkpoint)
            if config is not None:
                out.write_bytes(product / CONFIG, config)
            out.copy_side_files(side_files, product)
    return Unpacked(dst, tuple(files), len(artifact.parts), len(artifact.passthrough), total)


def _stored(artifact: Artifact, tensor: origin.Origin) -> out.Stored:
    if tensor.dtype is None or tensor.shape is None:
        kept = artifact.checkpoint.tensors[tensor.name]
        return out.Stored(kept.name, kept.dtype, kept.shape, kept.nbytes)
    return out.Stored(tensor.name, tensor.dtype, tensor.shape, nbytes(tensor.dtype, tensor.shape))


def _shard(
    artifact: Artifact, name: str, file: origin.File, batches: dict[str, out.Batch], advance: Callable[[int], None]
) -> out.Shard:
    entries = []
    for tensor in file.tensors:
        stored = _stored(artifact, tensor)
        if tensor.linear is None:
            data = out.copied(artifact.checkpoint.tensors[tensor.name])
        else:
            data = batches[tensor.linear].tensor(stored)
        entries.append(Entry(stored.name, stored.dtype, stored.shape, out.counted(data, advance)))
    return out.Shard(name, tuple(entries), file.metadata)
