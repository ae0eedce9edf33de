"""ONNX models: initializers as named byte views, and the nodes that use them.

The ``onnx`` package parses everything but the bytes of weights: the graph without its initializers, and every
initializer's header. A small walk over the protobuf fields finds where the bytes lie, so that they are mapped like any
other file's and a model is never read whole. Field numbers are those of onnx.proto: ModelProto.graph 7,
GraphProto.initializer 5, TensorProto.raw_data 9.

A checkpoint has its ``tensors`` in file order, and as ``quantization``

    {"quant_method": "onnx", "opsets": {domain: version}, "nodes": [{"op", "domain", "inputs", "attributes"}, ..],
     "graph": SHA-256 of the companion (``onnx_companion.py``), where there is one}

with the nodes, those of inner graphs too, that take an initializer, and the whole numbers and texts among their
attributes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import onnx_companion
from .container import Checkpoint, Entry
from .directory import check_inside
from .errors import CorruptError, UnsupportedError, WarptileError
from .impostors import HEAD, ONNX, refuse_impostor
from .onnx_companion import DIGEST, EXTERNAL, LOCATION, METHOD, locations
from .onnx_fields import Span, fields
from .onnx_table import is_place
from .strict_json import shown
from .tensor import State, Tensor, nbytes, state

Array = NDArray[Any]

MAX_PARSED = 64 << 20
"""Bytes of a graph, or of one initializer, that are not raw data."""
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9

# TensorProto.DataType -> safetensors' name
DTYPES = {
    **{1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16", 11: "F64"},
    **{12: "U32", 13: "U64", 14: "C64", 16: "BF16", 17: "F8_E4M3", 18: "F8_E4M3FNUZ", 19: "F8_E5M2"},
    **{20: "F8_E5M2FNUZ", 24: "F8_E8M0"},
}
# Those of less than a byte, which pass as bytes: -> bits
NARROW = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2}


@dataclass(frozen=True)
class Held(Tensor):
    """A small initializer whose values are protobuf numbers and not bytes of the file."""

    data: bytes = b""

    def raw(self) -> Array:
        """uint8 [nbytes], read-only."""
        return np.frombuffer(self.data, np.uint8)


def fill(checkpoint: Checkpoint) -> None:
    """Take in the model at ``checkpoint.path``.

    Raises:
        WarptileError: the ``onnx`` package is missing, or the file cannot be read.
        CorruptError: not a model, truncated, or external data that is missing, short or outside its directory.
        UnsupportedError: initializers of a type that has no bytes, or not a regular file.
    """
    onnx = _package(checkpoint.path)
    path = checkpoint.path
    if not path.is_file():
        raise UnsupportedError("not a regular file", file=path, need="an .onnx file", do="name the file itself")
    try:
        with open(path, "rb") as f:
            head = f.read(HEAD)
        if not head.startswith(ONNX):
            refuse_impostor(path, head, "an ONNX model")
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            now = state(f)
            model, spans, elsewhere = _skeleton(onnx, data, path)
            for span in spans:
                _add(checkpoint, onnx, data, span, now)
        kept = _kept(checkpoint, now, elsewhere)
    except OSError as e:
        raise WarptileError("cannot be read", file=path, found=e.strerror or e) from None
    except (ValueError, TypeError) as e:  # of mmap: an empty file; of the package: values that do not fit a shape
        raise CorruptError("not an ONNX model", file=path, found=shown(e)) from None
    if model.graph.sparse_initializer:
        checkpoint.note("", f"{len(model.graph.sparse_initializer)} sparse initializers belong to the graph")
    nodes = _nodes(checkpoint, onnx, model.graph)
    checkpoint.companions = {} if kept is None else {onnx_companion.GRAPH: kept}
    checkpoint.quantization = {
        "quant_method": METHOD,
        "opsets": {_text(opset.domain, path): opset.version for opset in model.opset_import},
        "nodes": [node for node in nodes if not checkpoint.tensors.keys().isdisjoint(node["inputs"])],
        **({DIGEST: hashlib.sha256(kept).hexdigest()} if kept is not None else {}),
    }
    checkpoint.quantization_file = path.name
    for file in dict.fromkeys([path, *(tensor.file for tensor in checkpoint.tensors.values())]):
        checkpoint.file_metadata[file] = {}


def _kept(checkpoint: Checkpoint, now: State, elsewhere: Iterable[str | bytes]) -> bytes | None:
    """The companion of an artifact; None, and a note, when no artifact could give the model back."""
    path = checkpoint.path
    tensors = [tensor for tensor in checkpoint.tensors.values() if not isinstance(tensor, Held)]
    try:
        try:
            others = [_beside(path, _text(location, path), "its graph") for location in elsewhere]
        except CorruptError as e:  # nothing that is converted needs it
            raise UnsupportedError(e.what, found=e.found, do=e.do) from None
        return onnx_companion.collect(path, now, tensors, others)
    except UnsupportedError as e:
        why = e.what if e.found is None else f"{e.what} ({e.found})"
    except OSError as e:  # where it concerns tensors, they say so themselves
        why = f"{e.filename} cannot be read ({e.strerror})"
    checkpoint.note("", f"no .onnx can be made of an artifact again: {why}")
    return None


def rebuild(path: Path, artifact: Checkpoint, entries: Sequence[Entry]) -> None:
    """Write the model that ``artifact`` was made from. Raises as ``onnx_companion.rebuild``."""
    onnx_companion.rebuild(path, artifact, entries, fill)


def names_beside(artifact: Checkpoint) -> tuple[str, ...]:
    """The files of external data that ``rebuild`` writes. Raises as it does, and without the package as ``fill``."""
    _package(artifact.path)
    return onnx_companion.names(artifact)


def _package(path: Path) -> Any:
    try:
        import onnx
    except ImportError:
        raise WarptileError(
            "an ONNX model needs the onnx package", file=path, do="pip install 'warptile[onnx]'"
        ) from None
    return onnx


def _skeleton(onnx: Any, data: mmap.mmap, path: Path) -> tuple[Any, list[Span], list[str | bytes]]:
    """(the model without initializers, where each initializer is, the external data that something else has)."""
    kept, graph, spans = [], [], []
    for number, whole, inner in fields(data, (0, len(data)), path):
        if number != GRAPH:
            kept.append(whole)
            continue
        for field, part, body in fields(data, inner, path):
            if field == INITIALIZER:
                spans.append(body)
            else:
                graph.append(part)
    head, rest = _joined(data, kept, path), _joined(data, graph, path)
    model = _parse(onnx.ModelProto(), head, path)
    if not model.opset_import or not graph:
        raise CorruptError("not an ONNX model", file=path, need="a graph and its operator sets")
    _parse(model.graph, rest, path)
    named = any(LOCATION.encode() in part for part in (head, rest))
    return model, spans, [*locations(model)] if named else []


def _joined(data: mmap.mmap, spans: list[Span], path: Path) -> bytes:
    """The bytes of some fields, for the package to parse. Raises UnsupportedError when they are too many."""
    size = sum(end - start for start, end in spans)
    if size > MAX_PARSED:
        raise UnsupportedError(
            "too much beside the bytes of weights",
            file=path,
            found=f"{size} bytes",
            need=f"<= {MAX_PARSED}",
            do="store its initializers as raw data",
        )
    return b"".join(data[start:end] for start, end in spans)


def _parse(message: Any, data: bytes, path: Path) -> Any:
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(data)
    except DecodeError as e:
        raise CorruptError("not an ONNX model", file=path, found=str(e).splitlines()[0]) from None
    return message


def _add(checkpoint: Checkpoint, onnx: Any, data: mmap.mmap, span: Span, now: State) -> None:
    """Take in one initializer."""
    path, header, raw = checkpoint.path, [], None
    for number, whole, body in fields(data, span, path):
        if number == RAW_DATA:
            raw = body
        else:
            header.append(whole)
    proto = _parse(onnx.TensorProto(), _joined(data, header, path), path)
    name, shape = _text(proto.name, path), tuple(proto.dims)
    if name in checkpoint.tensors or not name or min(shape, default=0) < 0:
        raise CorruptError(
            "an initializer needs a name of its own and a shape", file=path, tensor=name or None, found=list(shape)
        )
    if prod(extent for extent in shape if extent) >= 2**56:
        raise CorruptError("the shape overflows", file=path, tensor=name, found=list(shape), need="fewer than 2^56")
    bits = NARROW.get(proto.data_type)
    dtype = "U8" if bits else DTYPES.get(proto.data_type)
    if dtype is None or (bits and raw is None and proto.data_location != EXTERNAL):
        kinds = {number: kind for kind, number in onnx.TensorProto.DataType.items()}
        kind = kinds.get(proto.data_type, proto.data_type)
        do = "quantise the model without it, or keep it out of the file"
        raise UnsupportedError("an initializer without bytes", file=path, tensor=name, found=kind, do=do)
    if bits:
        checkpoint.note("", f"{name} has {bits}-bit values, shape {list(shape)}: it passes through as bytes")
        shape = (-(-prod(shape) * bits // 8),)
    if proto.data_location == EXTERNAL:
        tensor = _external(checkpoint, proto, dtype, shape)
    elif raw is not None:
        tensor = Tensor(name, dtype, shape, path, raw[0], raw[1] - raw[0], now)
    else:
        held = onnx.numpy_helper.to_array(proto).tobytes()
        tensor = Held(name, dtype, shape, path, span[0], len(held), data=held)
    if tensor.nbytes != nbytes(dtype, shape):
        raise CorruptError(
            "an initializer's bytes are not those of its shape",
            file=tensor.file,
            tensor=name,
            found=f"{tensor.nbytes} bytes",
            need=f"{nbytes(dtype, shape)} for {dtype} {list(shape)}",
        )
    checkpoint.tensors[name] = tensor


def _text(value: str | bytes, path: Path) -> str:
    """A string of the model; protobuf passes on the bytes of one that is not UTF-8. Raises CorruptError."""
    if isinstance(value, bytes):
        raise CorruptError("a name is not UTF-8", file=path, found=shown(repr(value)))
    return value


def _beside(path: Path, location: str, tensor: str) -> Path:
    """The file of external data, by its name in the model at ``path``. Raises CorruptError."""
    where: dict[str, Any] = {"file": path, "tensor": tensor}
    if not is_place(location):
        raise CorruptError(
            "external data outside the model's directory",
            **where,
            found=repr(location),
            need="a file beside the model",
            do="do not trust this model",
        )
    file = path.parent / PurePosixPath(location)
    if not os.path.lexists(file):
        raise CorruptError("external data is missing", **where, need=location, do="put the file beside the model")
    check_inside(path.parent, location)
    if not file.is_file():
        raise CorruptError("external data is not a regular file", **where, found=location)
    return file


def _external(checkpoint: Checkpoint, proto: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """An initializer in a file of its own, or in one that it shares; the place is relative to the model's directory."""
    path = checkpoint.path
    said = {_text(entry.key, path): _text(entry.value, path) for entry in proto.external_data}
    location, where = said.get("location", ""), {"file": path, "tensor": proto.name}
    file = _beside(path, location, proto.name)
    offset, length = said.get("offset", "0"), said.get("length", str(nbytes(dtype, shape)))
    if not all(number.isascii() and number.isdigit() and len(number) < 40 for number in (offset, length)):
        raise CorruptError(
            "external data without a place",
            **where,
            found=f"offset {shown(repr(offset))}, length {shown(repr(length))}",
        )
    with open(file, "rb") as f:
        now = state(f)
    if int(offset) + int(length) > now.size:
        raise CorruptError(
            "external data is truncated",
            **where,
            found=f"{now.size} bytes in {location}",
            need=f"{int(offset) + int(length)}",
            do="download or copy it again",
        )
    return Tensor(proto.name, dtype, shape, file, int(offset), int(length), now)


def _nodes(checkpoint: Checkpoint, onnx: Any, graph: Any) -> Iterator[dict[str, Any]]:
    """Every node, those of inner graphs (branches, loop bodies) after the one that has them."""
    path = checkpoint.path
    for node in graph.node:
        attributes: dict[str, int | str] = {}
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                attributes[_text(attribute.name, path)] = attribute.i
            elif attribute.type == onnx.AttributeProto.STRING:
                attributes[_text(attribute.name, path)] = attribute.s.decode("utf-8", "replace")
        yield {
            "op": _text(node.op_type, path),
            "domain": _text(node.domain, path),
            "inputs": [_text(name, path) for name in node.input],
            "attributes": attributes,
        }
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                if inner.initializer:
                    checkpoint.note(
                        "", f"{len(inner.initializer)} initializers inside {node.op_type} belong to its graph"
                    )
                yield from _nodes(checkpoint, onnx, inner)
