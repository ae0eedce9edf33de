"""What an artifact remembers of its source, so that ``unpack`` gives back the same files and ``verify`` reads it alike.

    source_files    {file name: {"metadata": {..}, "tensors": [[name], or [name, dtype, shape, module] of one that
                    was converted, ..]}}
    source_config   the text of config.json
    source_options  {field of Options: value}, those that were given

All are texts in the metadata of the first shard only; tensors are in the order of the source's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from ..formats import sources
from ..formats.artifact import Artifact
from ..formats.container import CONFIG, QUANTIZATION, WEIGHTS, Checkpoint, dtype_name
from ..formats.errors import CorruptError, UnsupportedError
from ..formats.options import Options
from .plan import Plan

Array = NDArray[Any]


@dataclass(frozen=True)
class Origin:
    """A tensor of the source: dtype, shape and module are None when it passed through."""

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    module: str | None = None


@dataclass(frozen=True)
class File:
    """A weight file of the source, its tensors in order."""

    metadata: Mapping[str, str]
    tensors: tuple[Origin, ...]


def metadata(plan: Plan) -> dict[str, str]:
    """The entries, for the first shard of an artifact."""
    checkpoint = plan.checkpoint
    owner = {name: module.name for module in plan.converted for name in module.members}
    files: dict[str, dict[str, Any]] = {
        _name(path): {"metadata": said, "tensors": []} for path, said in checkpoint.file_metadata.items()
    }
    for t in checkpoint.tensors.values():
        converted = [t.dtype, list(t.shape), owner[t.name]] if t.name in owner else []
        files[_name(t.file)]["tensors"].append([t.name, *converted])
    given = {name: value for name, value in asdict(checkpoint.options).items() if value != getattr(Options(), name)}
    kept = {"source_files": _dump(files), "source_options": _dump(given)}
    config = checkpoint.path / CONFIG
    if config.is_file():
        kept["source_config"] = config.read_text(encoding="utf-8")
    return kept


def _name(file: Path) -> str:
    """What a file is called when it comes back; those of other containers come back as safetensors."""
    return file.with_suffix(WEIGHTS).name


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
        raise UnsupportedError("the artifact does not say what its source's files were", file=checkpoint.path)

    def corrupt(found: object, need: object = None) -> CorruptError:
        return CorruptError("source_files in its metadata is damaged", file=checkpoint.path, found=found, need=need)

    try:
        listed = json.loads(checkpoint.metadata["source_files"])
        found = {
            name: File(dict(file["metadata"]), tuple(_origin(*tensor) for tensor in file["tensors"]))
            for name, file in listed.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise corrupt(error) from None
    for name in found:
        if Path(name).name != name or not name.endswith(WEIGHTS):
            raise corrupt(name, "a plain file name")
    tensors = [t for file in found.values() for t in file.tensors]
    if len({t.name for t in tensors}) < len(tensors):
        raise corrupt("a name twice")
    if {t.name for t in tensors if t.module is None} != set(artifact.passthrough):
        raise corrupt("other tensors than the artifact's", "those that passed through")
    if {t.module for t in tensors if t.module is not None} != set(artifact.modules):
        raise corrupt("other modules than the artifact's")
    return found


def _origin(name: str, dtype: str | None = None, shape: list[int] | None = None, module: str | None = None) -> Origin:
    return Origin(name, dtype, None if shape is None else tuple(shape), module)


def reader(artifact: Artifact, module: str) -> ModuleType:
    """The source format a module came from.

    Raises:
        UnsupportedError: there is no such format here.
    """
    name = artifact.modules[module]["source"]["format"]
    if name not in sources():
        raise UnsupportedError(
            "unknown source format",
            file=artifact.checkpoint.path,
            tensor=module,
            found=name,
            need=" or ".join(sources()),
            do="update warptile",
        )
    return sources()[name]


def restored(artifact: Artifact, module: str, promised: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """The source's tensors of a module by full name.

    Raises:
        CorruptError: they are not those that are ``promised``, {name: (dtype, shape)}.
    """
    write, q = reader(artifact, module).write, artifact.quant(module)
    try:
        tensors: dict[str, Array] = write(module, q)
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptError(
            "its source entry is damaged", file=artifact.checkpoint.path, tensor=module, found=error
        ) from None
    written = {name: (dtype_name(a.dtype), a.shape) for name, a in tensors.items()}
    if written != promised:
        raise CorruptError(
            "unpacks to other tensors than its source had",
            file=artifact.checkpoint.path,
            tensor=module,
            found=written,
            need=promised,
        )
    return tensors


def options(artifact: Checkpoint) -> dict[str, Any]:
    """The options the source was read with."""
    try:
        return asdict(Options(**json.loads(artifact.metadata.get("source_options", "{}"))))
    except (ValueError, TypeError) as error:
        raise CorruptError("source_options in its metadata is damaged", file=artifact.path, found=error) from None


def restored_config(artifact: Checkpoint) -> bytes | None:
    """The source's config.json: the very bytes, or with whatever has been edited in the artifact's since."""
    if not artifact.config:
        return artifact.metadata["source_config"].encode() if "source_config" in artifact.metadata else None
    config = dict(artifact.config)
    ours = config.pop(QUANTIZATION, {})
    if "source" in ours:
        config[QUANTIZATION] = ours["source"]
    text = artifact.metadata.get("source_config", "{}")
    try:
        edited = json.loads(text) != config
    except ValueError as error:
        raise CorruptError("source_config in its metadata is damaged", file=artifact.path, found=error) from None
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n" if edited else text).encode()
