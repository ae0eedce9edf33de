"""Checkpoints: which files belong together, their tensors, their configuration. Files are checked behind this door.

| SRC | weights are |
| --- | --- |
| a file | that file; of a split GGUF set all parts |
| a directory with ``*.safetensors.index.json`` | what the index lists, and it must agree with every shard both ways |
| any other directory | every ``*.safetensors`` in it, when no tensor is twice; not artifacts beside other weights |

Which names count and where links may lead is said in directory.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from . import strict_json
from .directory import (
    INDEX,
    OTHER_WEIGHTS,
    PICKLE_ADVICE,
    PICKLES,
    WEIGHTS,
    check_inside,
    find_index,
    inside,
    no_weights,
    read_index,
    read_json,
    visible,
)
from .errors import CorruptError, UnsupportedError, WarptileError
from .options import Options
from .safetensors_file import Entry, read_header, write_safetensors
from .strict_json import shown
from .tensor import DTYPES, Tensor, dtype_name, nbytes

__all__ = [
    "ARTIFACT",
    "DTYPES",
    "Checkpoint",
    "Entry",
    "Tensor",
    "beside",
    "companion",
    "dtype_name",
    "is_companion",
    "is_model",
    "names_beside",
    "nbytes",
    "open_checkpoint",
    "rebuilder",
    "write_safetensors",
]

CONFIG = "config.json"
# Where a quantisation config may be, first found first believed; config.json has it under QUANTIZATION.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")
QUANTIZATION = "quantization_config"
ARTIFACT = "warptile"
"""The metadata key by which our own files are known."""

READERS = {".onnx": "onnx_file", ".gguf": "gguf_file"}
"""Files of other kinds, by suffix -> the module whose ``fill(checkpoint)`` takes them in.

One that can also be written has ``rebuild(path, artifact, entries)``, the way back from an artifact's tensors, and when
that writes other files in ``beside(path)``, ``names_beside(artifact)``: what they are called.
"""

MAX_CONFIG = 16 << 20


@dataclass
class Checkpoint:
    """One model: its tensors and everything that is said about them."""

    path: Path
    """As it was given: a file or a directory."""
    tensors: dict[str, Tensor]
    """Files in the order of their names, tensors in the order of their bytes."""
    config: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    quantization_file: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    """``__metadata__`` of the files, merged; the first file that has a key is believed."""
    side_files: tuple[Path, ...] = ()
    """Files of a directory that are neither weights, index nor config.json."""
    index: Path | None = None
    """The index by which a directory's weights were found."""
    companions: dict[str, bytes] = field(default_factory=dict)
    """{suffix: content} of what an artifact keeps in files of its own (``companion``)."""
    options: Options = field(default_factory=Options)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(module or "", text): what was assumed, and warnings."""
    file_metadata: dict[Path, dict[str, str]] = field(default_factory=dict)
    """``__metadata__`` of each file."""
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a reader has worked out of all of it once, for every module to use; ``replace`` begins anew."""

    @property
    def stated_in(self) -> str:
        """The file that ``quantization`` stands in, for messages; the checkpoint where it says nothing."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return str(folder / self.quantization_file if self.quantization_file else self.path)

    def note(self, module: str, text: str) -> None:
        """Record an assumption or a warning, once."""
        if (module, text) not in self.notes:
            self.notes.append((module, text))


def open_checkpoint(path: str | os.PathLike[str], options: Options | None = None) -> Checkpoint:
    """Headers, index and configs of a file (``READERS`` has the kinds) or a directory; no tensor is read.

    Raises:
        WarptileError: there is no such file, or it cannot be read.
        UnsupportedError: not safetensors, or several models in one directory.
        CorruptError: a file lies about itself, or the index about the files.
    """
    path = Path(path)
    try:
        directory = stat.S_ISDIR(path.stat().st_mode)
    except OSError as e:
        raise WarptileError("cannot be read", file=path, found=e.strerror) from None
    checkpoint = Checkpoint(path, {}, options=options or Options())
    reader = READERS.get(path.suffix.lower())
    if reader is not None and not directory:
        import_module(f".{reader}", __package__).fill(checkpoint)
    elif directory:
        listing = visible(path)
        files = _weights(checkpoint, path, listing)
        _configure(checkpoint, path, listing)
        _keep_side_files(checkpoint, path, listing, files)
    else:
        if path.suffix.lower() == ".json":
            raise UnsupportedError("JSON holds no weights", file=path, do="give the directory it lies in")
        if path.suffix.lower() in PICKLES:
            raise UnsupportedError("not safetensors", file=path, do=PICKLE_ADVICE)
        if path.suffix.lower() != WEIGHTS and not is_model(path):
            kinds = ", ".join((WEIGHTS, *READERS))
            need = f"a file of {kinds}, or a directory of {WEIGHTS} files"
            raise UnsupportedError("no model", file=path, need=need, do="name one of these")
        _add(checkpoint, path)
        if ARTIFACT not in checkpoint.metadata:
            _configure_file(checkpoint)
    return checkpoint


def companion(artifact: Path, suffix: str) -> Path:
    """Where an artifact keeps a companion: ``<file><suffix>`` beside a file, ``model<suffix>`` in a directory."""
    return artifact / f"model{suffix}" if artifact.is_dir() else artifact.with_name(artifact.name + suffix)


def is_companion(artifact: Checkpoint, file: Path) -> bool:
    """Whether a file of an artifact's directory is a companion, and so none of its source: ``model.<kind>-<what>``."""
    kind = artifact.quantization.get("source", {}).get("quant_method")
    return f".{kind}" in READERS and file.name.startswith(f"model.{kind}-")


def beside(product: Path) -> Path:
    """The directory in which ``rebuild`` puts files that belong beside what it writes."""
    return product.with_name(".beside")


def rebuilder(path: Path) -> Callable[[Path, Checkpoint, Sequence[Entry]], None] | None:
    """What writes files that end like ``path``, where that is another kind than safetensors, else None."""
    return getattr(_reader(path), "rebuild", None)


def names_beside(path: Path, artifact: Checkpoint) -> tuple[str, ...]:
    """The other files, relative to its directory, that ``rebuilder(path)`` makes. Raises as that does."""
    names: tuple[str, ...] = getattr(_reader(path), "names_beside", lambda _: ())(artifact)
    return names


def _reader(path: Path) -> ModuleType | None:
    """The reader of files that end like ``path``; None where they are safetensors, or nothing we know."""
    reader = READERS.get(path.suffix.lower())
    return import_module(f".{reader}", __package__) if reader else None


def _add(checkpoint: Checkpoint, file: Path) -> dict[str, Tensor]:
    """Take in all tensors of a file. Raises CorruptError when an earlier file has one of them."""
    tensors, metadata = read_header(file)
    for name in tensors:
        if name in checkpoint.tensors:
            raise CorruptError(
                "the tensor is in two files", file=file, tensor=name, found=f"in {checkpoint.tensors[name].file} too"
            )
    checkpoint.tensors.update(tensors)
    checkpoint.file_metadata[file] = metadata
    checkpoint.metadata = metadata | checkpoint.metadata
    return tensors


def _weights(checkpoint: Checkpoint, directory: Path, listing: list[str]) -> set[str]:
    """Open the weight files of a directory; returns their names."""
    present = [name for name in listing if name.endswith(WEIGHTS)]
    index = find_index(directory, listing)
    if index is not None:
        checkpoint.index = directory / index
        files = _add_indexed(checkpoint, directory, index)
        extra = [name for name in present if name not in files]
        if extra:
            checkpoint.note("", f"not listed in {index}, left out: {', '.join(extra)}")
        return files
    if not present:
        raise no_weights(directory, listing)
    for name in present:
        check_inside(directory, name)
    files = set(present)
    if len(present) > 1:
        files -= _artifacts(directory, present)
        files = files or set(present)
        if len(files) < len(present):
            checkpoint.note("", f"already converted, left out: {', '.join(sorted(set(present) - files))}")
    for name in sorted(files):
        try:
            _add(checkpoint, directory / name)
        except CorruptError as e:
            if e.tensor in checkpoint.tensors:
                raise UnsupportedError(
                    "several files have this tensor and no index says which counts",
                    file=directory,
                    tensor=e.tensor,
                    found=f"in {checkpoint.tensors[e.tensor].file.name} and {name}",
                    do="name one of the files",
                ) from None
            raise
    return files


def _artifacts(directory: Path, names: Iterable[str]) -> set[str]:
    """Those that are artifacts; a product lies beside its source when a lone file was converted."""
    return {name for name in names if ARTIFACT in read_header(directory / name)[1]}


def _add_indexed(checkpoint: Checkpoint, directory: Path, index: str) -> set[str]:
    weight_map = read_index(directory, index)
    promised: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        promised.setdefault(shard, []).append(name)
    for shard in promised:
        if not os.path.lexists(directory / shard):
            raise CorruptError(
                "a shard is missing", file=directory / shard, need=f"it, by {index}", do="download it again"
            )
        check_inside(directory, shard)
    for shard, names in sorted(promised.items()):
        file = directory / shard
        tensors = _add(checkpoint, file)
        for name in names:
            if name not in tensors:
                raise CorruptError("the tensor is missing", file=file, tensor=name, need=f"it, by {index}")
        for name in tensors:
            if weight_map.get(name) != shard:
                elsewhere = weight_map.get(name, "nowhere")
                raise CorruptError("a tensor the index does not have here", file=file, tensor=name, found=elsewhere)
    return set(promised)


def _configure(checkpoint: Checkpoint, directory: Path, listing: list[str]) -> None:
    """Find config.json and the quantisation config among the files of a directory."""
    names = [name for name in (*QUANTIZATION_FILES, CONFIG) if name in listing]
    for name in names:
        check_inside(directory, name)
    configs = {name: read_json(directory / name, MAX_CONFIG) for name in names}
    checkpoint.config = configs.get(CONFIG, {})
    inner = checkpoint.config.get(QUANTIZATION)
    if not isinstance(inner, dict | None):
        raise CorruptError(
            f"{QUANTIZATION} is not an object", file=directory / CONFIG, found=strict_json.kind(inner), need="{...}"
        )
    found = {name: config for name, config in configs.items() if name != CONFIG and config}
    if inner:
        found[CONFIG] = inner
    if not found:
        return
    first, *others = found
    checkpoint.quantization_file, checkpoint.quantization = first, found[first]
    for other in others:
        for key in ("bits", "group_size"):
            a, b = found[first].get(key), found[other].get(key)
            if a is not None and b is not None and a != b:
                text = f"{key} is {shown(repr(a))} in {first} and {shown(repr(b))} in {other}: {first} is believed"
                checkpoint.note("", text)


def _configure_file(checkpoint: Checkpoint) -> None:
    """The configs beside a lone file count when it is that directory's model: its only weights, or in its index."""
    file = checkpoint.path
    listing = visible(file.parent)
    configs = [name for name in (*QUANTIZATION_FILES, CONFIG) if name in listing]
    if not configs:
        return
    others = [name for name in listing if name.endswith(WEIGHTS) and name != file.name]
    index = find_index(file.parent, listing)
    if index is not None:
        belongs = file.name in read_index(file.parent, index).values()
    else:
        belongs = all(is_model(file.parent / name, artifact=True) for name in others)
    if belongs:
        _configure(checkpoint, file.parent, listing)
        checkpoint.note("", f"read beside the file: {', '.join(configs)}")
    else:
        checkpoint.note("", f"beside other weights, so not known to be this file's and not read: {', '.join(configs)}")


def is_model(file: Path, *, artifact: bool = False) -> bool:
    """Whether a file's header reads as that of weights, or of an artifact."""
    reader = READERS.get(file.suffix.lower())
    try:
        if reader is not None:
            import_module(f".{reader}", __package__).fill(Checkpoint(file, {}))
            return not artifact
        _, metadata = read_header(file)
        return ARTIFACT in metadata or not artifact
    except WarptileError:
        return False


def _keep_side_files(checkpoint: Checkpoint, directory: Path, listing: list[str], weights: set[str]) -> None:
    kept: list[str] = []
    left: list[str] = []
    for name in listing:
        file = directory / name
        if name in weights or name == CONFIG or name.endswith((WEIGHTS, INDEX)):
            continue
        plain = file.is_file() and inside(directory, name)
        (kept if plain and not name.lower().endswith(OTHER_WEIGHTS) else left).append(name)
    checkpoint.side_files = tuple(directory / name for name in kept)
    if left:
        checkpoint.note("", f"not side files (other weights, directories, links that lead out): {', '.join(left)}")
