"""GGUF models: tensors as named byte views, split sets as one model, and the way back to a file.

A checkpoint has the tensors in file order: F32, F16, BF16, F64 and integers as what they are, every block type as
U8 [.., n, bytes of a row]. What safetensors has no name for stands in ``quantization``, which an artifact keeps:

    quant_method      gguf
    types             {tensor: block type}
    architecture      general.architecture
    heads             [of q, of k], each a number or one for each layer; absent where the model does not say
    undo_rope_order   true when it was asked for, so that what passes through is read in the order of what is converted
    key_values        SHA-256 of the companion

The companion, ``<artifact>.gguf-kv``, is a GGUF file without tensors: the model's key-values, byte for byte.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .container import Checkpoint, companion
from .directory import check_inside
from .errors import CorruptError, UnsupportedError, WarptileError
from .gguf_header import MAGIC, Header, Info, padded, read_header, type_sizes
from .safetensors_file import Entry, write_stream
from .tensor import State, Tensor, check_state, nbytes

METHOD = "gguf"
KEY_VALUES = ".gguf-kv"
NATIVE = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
"""Types that safetensors has, under the same names."""
PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
SPLIT = "split."
UNDO = "undo_rope_order"


def fill(checkpoint: Checkpoint) -> None:
    """Take in the model at ``checkpoint.path``, with the other parts when it is one of a split set.

    Raises:
        CorruptError, UnsupportedError, WarptileError: as ``read_header``; parts that are missing or do not belong
            together; a tensor that is in two of them.
    """
    parts = _parts(checkpoint.path)
    named: dict[str, str] = {}
    for path, header in parts.items():
        for info in header.tensors:
            if info.name in checkpoint.tensors:
                other = checkpoint.tensors[info.name].file
                raise CorruptError("the tensor is in two parts", file=path, tensor=info.name, found=f"in {other} too")
            checkpoint.tensors[info.name] = _tensor(path, info, header.state)
            if info.type not in NATIVE:
                named[info.name] = info.type
        if header.trailing:
            text = f"{header.trailing} bytes after the last tensor of {path.name} belong to no tensor: not kept"
            checkpoint.note("", text)
        if _is_padded_oddly(path, header):
            checkpoint.note("", f"{path.name} is not padded with zeros behind every tensor: unpack writes it so")
        checkpoint.file_metadata[path] = {}
    path, first = next(iter(parts.items()))
    kept = _key_values(path, first)
    checkpoint.companions = {KEY_VALUES: kept}
    checkpoint.quantization = {
        "quant_method": METHOD,
        "types": named,
        **_model(first.values),
        **({UNDO: True} if checkpoint.options.undo_rope_order else {}),
        "key_values": hashlib.sha256(kept).hexdigest(),
    }
    checkpoint.quantization_file = path.name


def _is_padded_oddly(path: Path, header: Header) -> bool:
    """Whether what stands behind a tensor is other than zeros up to the alignment."""
    try:
        with open(path, "rb") as f:
            for info in header.tensors:
                end = info.offset + info.nbytes
                f.seek(end)
                size = -info.nbytes % header.alignment
                if f.read(size) != bytes(size):
                    return True
    except OSError as e:
        raise WarptileError("cannot be read", file=path, found=e.strerror) from None
    return False


def types(quantization: Mapping[str, Any]) -> dict[str, str]:
    """{tensor: block type} of a checkpoint's ``quantization``, or of the one an artifact kept; none for others."""
    if quantization.get("quant_method") != METHOD:
        return {}
    named = quantization.get("types")
    pairs = named.items() if isinstance(named, dict) else ()
    return {name: kind for name, kind in pairs if isinstance(kind, str)}


def _tensor(path: Path, info: Info, state: State | None) -> Tensor:
    if info.type in NATIVE:
        return Tensor(info.name, info.type, info.shape, path, info.offset, info.nbytes, state)
    *lead, columns = info.shape or (1,)
    _, size, block = next(row for row in type_sizes().values() if row[0] == info.type)
    return Tensor(info.name, "U8", (*lead, columns // size * block), path, info.offset, info.nbytes, state)


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture and its numbers of heads, so far as they are said."""
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    q = values.get(f"{architecture}.attention.head_count")
    k = values.get(f"{architecture}.attention.head_count_kv", q)
    return {"architecture": architecture, **({} if q is None or k is None else {"heads": [q, k]})}


def _parts(path: Path) -> dict[Path, Header]:
    """The headers of all files of the model, the first part first."""
    header = read_header(path)
    count = header.values.get("split.count", 0)
    if count in (0, 1):
        return {path: header}
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise UnsupportedError(
            "one part of a split set under another name",
            file=path,
            found=f"split.count {count}",
            need=f"<name>-00001-of-{count:05d}.gguf" if isinstance(count, int) else "a number",
            do="give the parts their names back",
        )
    parts = {}
    for number in range(count):
        part = path.with_name(f"{named['prefix']}-{number + 1:05d}-of-{named['count']}{path.suffix}")
        if part != path:
            if not part.exists():
                raise CorruptError("a part of the split set is missing", file=part, do="put it beside the others")
            check_inside(path.parent, part.name)
        parts[part] = _check_part(part, header if part == path else read_header(part), number, count)
    total = sum(len(h.tensors) for h in parts.values())
    promised = header.values.get("split.tensors.count", total)
    if promised != total:
        do = "get all parts again, from one place"
        raise CorruptError("a split set without all its tensors", file=path, found=total, need=promised, do=do)
    return parts


def _check_part(path: Path, header: Header, number: int, count: int) -> Header:
    found = header.values.get("split.no"), header.values.get("split.count")
    if found != (number, count):
        raise CorruptError(
            "not the part of the split set that its name says",
            file=path,
            found=f"split.no {found[0]}, split.count {found[1]}",
            need=f"{number} and {count}",
            do="give the parts their names back",
        )
    return header


def _key_values(path: Path, header: Header) -> bytes:
    """A GGUF file without tensors: the key-values of the model, but for those that say how it was split."""
    spans = [span for key, span in header.spans.items() if not key.startswith(SPLIT)]
    start = min((at for at, _ in spans), default=0)
    try:
        with open(path, "rb") as f:
            check_state(f, header.state, path)
            f.seek(start)
            data = f.read(max((end for _, end in spans), default=0) - start)
    except OSError as e:
        raise WarptileError("cannot be read", file=path, found=e.strerror) from None
    pairs = b"".join(data[at - start : end - start] for at, end in spans)
    return MAGIC + struct.pack("<Iqq", header.version, 0, len(spans)) + pairs


def rebuild(path: Path, artifact: Checkpoint, entries: Sequence[Entry]) -> None:
    """Write the model that ``artifact`` was made from as one .gguf file; ``entries`` are its tensors as ``fill`` named
    them.

    Raises:
        UnsupportedError: the artifact was not made from a GGUF file.
        CorruptError: its key-values are not beside it, or not those of the model.
        WarptileError: it cannot be written.
    """
    source = artifact.quantization.get("source", {})
    if source.get("quant_method") != METHOD:
        raise UnsupportedError(
            "not made from a GGUF file", file=artifact.path, do="name a .safetensors or a directory instead"
        )
    file = companion(artifact.path, KEY_VALUES)
    header = read_header(file) if file.exists() else None
    if header is None:
        raise CorruptError("the key-values of the model are missing", file=file, do="put them back there")
    kept = b"" if header.tensors or header.trailing else file.read_bytes()
    if hashlib.sha256(kept).hexdigest() != source.get("key_values"):
        do = "put back the file that the conversion wrote there"
        raise CorruptError("not the key-values that the artifact was made with", file=file, do=do)
    ids = {name: (number, size, nbytes) for number, (name, size, nbytes) in type_sizes().items()}
    named, infos, offset = types(source), [], 0
    for entry in entries:
        kind = named.get(entry.name, entry.dtype)
        if kind not in ids:
            what, do = "a type GGUF has no name for", "unpack it to a .safetensors file or a directory"
            raise UnsupportedError(what, file=artifact.path, tensor=entry.name, found=kind, do=do)
        number, size, block = ids[kind]
        *lead, row = entry.shape or (1,)
        columns = row if kind in NATIVE else row // block * size
        ne = [columns, *reversed(lead)] if entry.shape else []
        name = entry.name.encode()
        form = f"<Q{len(name)}sI{len(ne)}qiQ"
        infos.append(struct.pack(form, len(name), name, len(ne), *ne, number, offset))
        offset = padded(offset + nbytes(entry.dtype, entry.shape), header.alignment)
    start = MAGIC + struct.pack("<Iq", header.version, len(entries)) + kept[16:] + b"".join(infos)
    start += bytes(-len(start) % header.alignment)
    write_stream(path, start, entries, lambda: read_header(path), align=header.alignment)
