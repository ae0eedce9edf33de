"""What an artifact remembers of its source, so that ``unpack`` gives back the same files and ``verify`` reads it alike.

    source_files    {file name: {"metadata": {..}, "tensors": [[name], or [name, dtype, shape, linear] of one that
                    was converted, ..]}}
    source_config   the text of config.json
    source_index    {file name: the text of that index}
    source_options  {field of Options: value}, those that were given

All are texts in the metadata of the first shard only; tensors are in the order of the source's files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from numpy.typing import NDArray

from ..formats import sources, strict_json
from ..formats.artifact import Artifact
from ..formats.container import CONFIG, DTYPES, QUANTIZATION, Checkpoint, dtype_name
from ..formats.directory import INDEX, WEIGHTS
from ..formats.errors import AGAIN, CorruptError, UnsupportedError, UsageError
from ..formats.options import Options
from ..formats.strict_json import shown
from .plan import Plan

Array = NDArray[Any]


@dataclass(frozen=True)
class Origin:
    """A tensor of the source: dtype, shape and linear are None when it passed through."""

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    linear: str | None = None


@dataclass(frozen=True)
class File:
    """A weight file of the source, its tensors in order."""

    metadata: Mapping[str, str]
    tensors: tuple[Origin, ...]


def metadata(plan: Plan) -> dict[str, str]:
    """The entries, for the first shard of an artifact."""
    checkpoint = plan.checkpoint
    owner = {name: linear.name for module in plan.converted for linear in module.linears for name in linear.members}
    files = {
        name: {"metadata": file.metadata, "tensors": [_listed(t) for t in file.tensors]}
        for name, file in files_of(checkpoint, owner).items()
    }
    given = {name: value for name, value in asdict(checkpoint.options).items() if value != getattr(Options(), name)}
    kept = {"source_files": _dump(files), "source_options": _dump(given)}
    config = checkpoint.path / CONFIG
    if config.is_file():
        kept["source_config"] = config.read_bytes().decode()
    if checkpoint.index is not None:
        kept["source_index"] = _dump({checkpoint.index.name: checkpoint.index.read_bytes().decode()})
    return kept


def files_of(checkpoint: Checkpoint, owner: Mapping[str, str]) -> dict[str, File]:
    """The files of a source by name; ``owner`` has the linear of every tensor that is converted."""
    tensors: dict[str, list[Origin]] = {_name(path): [] for path in checkpoint.file_metadata}
    for t in checkpoint.tensors.values():
        converted = (t.dtype, t.shape, owner[t.name]) if t.name in owner else ()
        tensors[_name(t.file)].append(Origin(t.name, *converted))
    return {_name(path): File(said, tuple(tensors[_name(path)])) for path, said in checkpoint.file_metadata.items()}


def _listed(t: Origin) -> list[Any]:
    return [t.name] if t.shape is None else [t.name, t.dtype, list(t.shape), t.linear]


def _name(file: Path) -> str:
    """What a file is called when it comes back, in UTF-8; those of other containers come back as safetensors."""
    return os.fsencode(file.with_suffix(WEIGHTS).name).decode("utf-8", "replace")


def _dump(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def files(artifact: Artifact) -> dict[str, File]:
    """The source's files by name; every tensor that passed through is in one of them.

    Raises:
        UnsupportedError: the artifact does not say.
        CorruptError: it says something that cannot be.
    """
    checkpoint = artifact.checkpoint
    if "source_files" not in checkpoint.metadata:
        raise UnsupportedError("the artifact does not say what its source's files were", file=checkpoint.path, do=AGAIN)

    def corrupt(found: object, need: object = None) -> CorruptError:
        return CorruptError(
            "source_files in its metadata is damaged", file=checkpoint.path, found=found, need=need, do=AGAIN
        )

    listed = _said(checkpoint, "source_files")
    for name, file in listed.items():
        if Path(name).name != name or "\0" in name or not name.endswith(WEIGHTS):
            raise corrupt(shown(name), "a plain file name")
        if not _is_file(file):
            raise corrupt(f"what it says of {shown(name)}", "metadata and tensors")
    found = {
        name: File(file["metadata"], tuple(_origin(*tensor) for tensor in file["tensors"]))
        for name, file in listed.items()
    }
    tensors = [t for file in found.values() for t in file.tensors]
    if len({t.name for t in tensors}) < len(tensors):
        raise corrupt("a name twice")
    if {t.name for t in tensors if t.linear is None} != set(artifact.passthrough):
        raise corrupt("other tensors than the artifact's", "those that passed through")
    if {t.linear for t in tensors if t.linear is not None} != set(artifact.parts):
        raise corrupt("other modules than the artifact's")
    return found


def _said(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    """A table of the metadata, {} where there is none. Raises CorruptError."""
    text = checkpoint.metadata.get(key, "{}")
    return strict_json.parse(text.encode(), checkpoint.path, f"{key} in its metadata", constants=True)


def _is_file(said: object) -> bool:
    if not isinstance(said, dict) or said.keys() != {"metadata", "tensors"} or not isinstance(said["tensors"], list):
        return False
    texts = isinstance(said["metadata"], dict) and all(isinstance(text, str) for text in said["metadata"].values())
    return texts and all(map(_is_tensor, said["tensors"]))


def _is_tensor(said: object) -> bool:
    """[name], or [name, dtype, shape, linear] of fewer than 2^63 bits."""
    if not isinstance(said, list) or len(said) not in (1, 4) or not isinstance(said[0], str):
        return False
    if len(said) == 1:
        return True
    _, dtype, shape, linear = said
    sizes = isinstance(shape, list) and all(type(d) is int and 0 <= d < 2**63 for d in shape)
    named = isinstance(dtype, str) and dtype in DTYPES and isinstance(linear, str)
    return named and sizes and prod(shape) * DTYPES[dtype][1] < 2**63


def _origin(name: str, dtype: str | None = None, shape: list[int] | None = None, linear: str | None = None) -> Origin:
    return Origin(name, dtype, None if shape is None else tuple(shape), linear)


def reader(artifact: Artifact, linear: str) -> ModuleType:
    """The source format a linear came from.

    Raises:
        UnsupportedError: there is no such format here.
    """
    name = artifact.parts[linear].reader
    if name not in sources():
        raise UnsupportedError(
            "unknown source format",
            file=artifact.checkpoint.path,
            tensor=linear,
            found=name,
            need=" or ".join(sources()),
            do="update warptile",
        )
    return sources()[name]


def restored(artifact: Artifact, linear: str, promised: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """The source's tensors of a linear by full name.

    Raises:
        CorruptError: they are not those that are ``promised``, {name: (dtype, shape)}.
    """
    write, q = reader(artifact, linear).write, artifact.quant(linear)
    try:
        tensors: dict[str, Array] = write(linear, q)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptError(
            "its source entry is damaged", file=artifact.checkpoint.path, tensor=linear, found=error, do=AGAIN
        ) from None
    written = {name: (dtype_name(a.dtype), a.shape) for name, a in tensors.items()}
    if written != promised:
        raise CorruptError(
            "unpacks to other tensors than its source had",
            file=artifact.checkpoint.path,
            tensor=linear,
            found=shown(written, 300),
            need=shown(promised, 300),
            do=AGAIN,
        )
    return tensors


def options(artifact: Checkpoint) -> dict[str, Any]:
    """The options the source was read with."""
    said, kinds = _said(artifact, "source_options"), get_type_hints(Options)
    for name, value in said.items():
        if not isinstance(value, kinds.get(name, ())) or (isinstance(value, bool) and kinds[name] is not bool):
            found = f"{shown(name)} = {shown(repr(value))}"
            raise CorruptError("source_options in its metadata is damaged", file=artifact.path, found=found, do=AGAIN)
    try:
        return asdict(Options(**said))
    except UsageError as error:
        raise CorruptError(
            "source_options in its metadata is damaged", file=artifact.path, found=error.what, do=AGAIN
        ) from None


def restored_config(artifact: Checkpoint) -> bytes | None:
    """The source's config.json: the very bytes, or with whatever has been edited in the artifact's since."""
    if not artifact.config:
        return artifact.metadata["source_config"].encode() if "source_config" in artifact.metadata else None
    config = dict(artifact.config)
    ours = config.pop(QUANTIZATION, {})
    if isinstance(ours, dict) and "source" in ours:
        config[QUANTIZATION] = ours["source"]
    if json.dumps(_said(artifact, "source_config"), sort_keys=True) != json.dumps(config, sort_keys=True):  # NaN != NaN
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return artifact.metadata.get("source_config", "{}").encode()


def restored_index(artifact: Checkpoint) -> dict[str, bytes]:
    """{file name: bytes} of the source's index; empty when it had none."""
    said = _said(artifact, "source_index")
    for name, text in said.items():
        if Path(name).name != name or "\0" in name or not name.endswith(INDEX) or not isinstance(text, str):
            raise CorruptError(
                "source_index in its metadata is damaged", file=artifact.path, found=shown(name), do=AGAIN
            )
    return {name: text.encode() for name, text in said.items()}
