"""What an ONNX model is beside the bytes of its tensors, and the way back to its files.

The companion, ``<artifact>.onnx-graph``, holds every byte of the model's file, and of the files of its external data,
that is not one of a tensor in the artifact: a table (``onnx_table.py``), then those bytes. Initializers whose values
are protobuf numbers are kept as they stand. Bytes that two tensors share are those of the one that begins first.
"""

from __future__ import annotations

import hashlib
import io
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .container import Checkpoint, beside, companion
from .errors import CorruptError, UnsupportedError, WarptileError
from .onnx_fields import Span
from .onnx_table import MAX_KEPT, MAX_TABLE, File, is_written, parse, table
from .output import writing
from .safetensors_file import Entry, write_stream
from .strict_json import shown
from .tensor import State, Tensor, check_state, state

METHOD = "onnx"
GRAPH = ".onnx-graph"
DIGEST = "graph"
"""The key of ``quantization`` that has the companion's SHA-256."""

EXTERNAL, LOCATION = 1, "location"
"""TensorProto.data_location, and the key of the file's name."""
ELSEWHERE = "name a .safetensors or a directory instead"


def collect(path: Path, now: State, tensors: Iterable[Tensor], others: Iterable[Path]) -> bytes:
    """The companion of the model at ``path``.

    Args:
        now: the state of its file.
        tensors: those whose bytes lie in its files.
        others: files of external data that belong to the graph alone.

    Raises:
        UnsupportedError: no artifact could give the files back.
        CorruptError: a file has changed since it was looked at.
        OSError: one cannot be read.
    """
    held: dict[Path, list[Tensor]] = {path: []}
    for tensor in tensors:
        held.setdefault(tensor.file, []).append(tensor)
    for other in others:
        held.setdefault(other, [])
    files: list[File] = []
    spans: list[tuple[Path, State, list[Span]]] = []
    for file, inside in held.items():
        name = "" if file == path else file.relative_to(path.parent).as_posix()
        if name and not is_written(name):
            raise UnsupportedError(
                "external data in a hidden file, or one of too long a name",
                file=path,
                found=shown(name),
                do="save the model with its data under another name",
            )
        then = now if file == path else inside[0].state if inside else _state(file)
        assert then is not None, file
        placed = _apart(inside)
        ends = [0, *(t.offset + t.nbytes for t in placed)]
        gaps = [*zip(ends, (*(t.offset for t in placed), then.size), strict=True)]
        *before, rest = (end - start for start, end in gaps)
        files.append(File(name, tuple(zip(before, (t.name for t in placed), strict=True)), rest))
        spans.append((file, then, [(start, end) for start, end in gaps if end > start]))
    whole = io.BytesIO()
    whole.write(table(path, files))
    for file, then, kept in spans:
        with open(file, "rb") as f:
            check_state(f, then, file)
            for start, end in kept:
                f.seek(start)
                if whole.write(f.read(end - start)) < end - start:
                    raise CorruptError("the file is shorter than when it was opened", file=file, need=f"{end} bytes")
    return whole.getvalue()


def locations(message: Any) -> Iterator[str | bytes]:
    """The names of external data that tensors anywhere in a protobuf message have."""
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for inner in (value,) if hasattr(value, "ListFields") else value:
            if descriptor.message_type.name == "TensorProto" and inner.data_location == EXTERNAL:
                yield from (entry.value for entry in inner.external_data if entry.key == LOCATION)
            else:
                yield from locations(inner)


def _state(file: Path) -> State:
    with open(file, "rb") as f:
        return state(f)


def _apart(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that have bytes, in their order in a file, without any that begins inside another."""
    found: list[Tensor] = []
    end = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset, -t.nbytes)):
        if tensor.nbytes and tensor.offset >= end:
            found.append(tensor)
            end = tensor.offset + tensor.nbytes
    return found


def _opened(artifact: Checkpoint) -> tuple[tuple[File, ...], memoryview]:
    """(the files, what is kept) of the model that ``artifact`` was made from. Raises as ``rebuild``."""
    source = artifact.quantization.get("source", {})
    if source.get("quant_method") != METHOD:
        raise UnsupportedError("not made from an ONNX model", file=artifact.path, do=ELSEWHERE)
    if DIGEST not in source:
        raise UnsupportedError("was made without its model's graph", file=artifact.path, do=ELSEWHERE)
    path = companion(artifact.path, GRAPH)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnsupportedError("not a regular file", file=path, need="the model's graph", do="put that back there")
        with open(path, "rb") as f:
            size = state(f).size
            data = f.read(size) if size <= MAX_TABLE + MAX_KEPT else b""
    except FileNotFoundError:
        raise CorruptError("the graph of the model is missing", file=path, do="put it back there") from None
    except OSError as e:
        raise WarptileError("cannot be read", file=path, found=e.strerror) from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != source[DIGEST]:
        raise CorruptError("not the graph that the artifact was made with", file=path, do="put that one there")
    files, start = parse(data, path)
    return files, memoryview(data)[start:]


def names(artifact: Checkpoint) -> tuple[str, ...]:
    """The files of external data that ``rebuild`` writes, relative to the model's directory. Raises as it does."""
    return tuple(file.name for file in _opened(artifact)[0][1:])


def rebuild(path: Path, artifact: Checkpoint, entries: Sequence[Entry], fill: Callable[[Checkpoint], None]) -> None:
    """Write the model that ``artifact`` was made from; ``entries`` are its tensors as ``fill`` named them.

    External data goes into ``beside(path)``, and first: what is left of a module in memory when the large tensors have
    been written is small. Then ``fill`` reads all of it again.

    Raises:
        UnsupportedError: the artifact was not made from an ONNX model, or its graph was not kept.
        CorruptError: the graph is not beside it, or not that of the model; or files and tensors make no such model.
        WarptileError: it cannot be written.
    """
    files, kept = _opened(artifact)
    left = {entry.name: entry for entry in entries}
    missing = [name for file in files for _, name in file.tensors if name not in left]
    if missing:
        raise CorruptError("the artifact lacks a tensor of the graph", file=artifact.path, tensor=shown(missing[0]))
    starts = np.cumsum([0, *(sum(file.kept) for file in files)]).tolist()
    for number in (*range(1, len(files)), 0):
        file, at = files[number], starts[number]
        target = beside(path) / (file.name or path.name)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        pieces = []
        for before, name in file.tensors:
            pieces += [_piece(kept[at : at + before]), left.pop(name)]
            at += before
        pieces.append(_piece(kept[at : at + file.rest]))
        write_stream(target, b"", pieces, lambda: None)
    _check_written(target, artifact, entries, left, fill)
    with writing(path):
        target.rename(path)


def _piece(data: memoryview) -> Entry:
    return Entry("", "U8", (len(data),), lambda: (data,))


def _check_written(
    path: Path,
    artifact: Checkpoint,
    entries: Iterable[Entry],
    left: Mapping[str, Entry],
    fill: Callable[[Checkpoint], None],
) -> None:
    """Raise CorruptError unless ``path`` is read as the model of that graph and those tensors.

    ``left`` are tensors whose bytes stood in the graph.
    """

    def corrupt(what: str, tensor: str | None = None, found: object = None) -> CorruptError:
        return CorruptError(what, file=artifact.path, tensor=tensor, found=found, do="convert the model again")

    back = Checkpoint(path, {})
    try:
        fill(back)
    except WarptileError as e:
        raise corrupt("graph and tensors make no model", e.tensor, e.what) from None
    if back.quantization.get(DIGEST) != artifact.quantization["source"][DIGEST]:
        raise corrupt("graph and tensors make another model")
    promised: dict[str, Any] = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    for tensor in back.tensors.values():
        if promised.pop(tensor.name, None) != (tensor.dtype, tensor.shape):
            raise corrupt("the graph has it of another type or shape", tensor.name)
    if promised:
        raise corrupt("the graph has no such tensor", next(iter(promised)))
    for name, entry in left.items():
        raw, at = back.tensors[name].raw(), 0
        for buffer in entry.data():
            piece = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
            if not np.array_equal(piece, raw[at : at + piece.size]):
                raise corrupt("the graph has other values of it", name)
            at += piece.size
