"""One .safetensors file: a strict reader of its header, and a deterministic writer.

    u64 header length, JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}, data

The format: https://github.com/huggingface/safetensors. The package's own parser is asked first; the rules below go
beyond it. Its writer is not used: what it writes depends on the run, and strided arrays come out in the wrong order.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from . import strict_json
from .errors import CorruptError, UnsupportedError, WarptileError
from .impostors import HEAD, refuse_impostor
from .output import Output
from .strict_json import shown
from .tensor import DTYPES, State, Tensor, nbytes, state

MAX_HEADER = 100_000_000
MAX_TENSORS = 500_000
MAX_DIMS = 64  # numpy's
MAX_ROW = 4096  # bytes of one tensor's description without its name: 64 dimensions of 19 digits, and padding
MAX_ESCAPE = 12  # bytes of one escaped character, a surrogate pair
MAX_EXPLAINED = 16 << 20
LONG_LIST = re.compile(rb"\[[\d,\s]{65536}")  # the package's parser takes 40 bytes of memory for each number
METADATA = "__metadata__"
SMALLER = "write more, smaller shards"
KEYS = {"dtype", "shape", "data_offsets"}


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, in the order of their bytes, and its ``__metadata__``; no data is read.

    Raises:
        CorruptError: the header, its offsets and the file's length do not all agree.
        UnsupportedError: not a regular file, or a valid header that is beyond us (type, tensor count, dimensions).
        WarptileError: it cannot be opened.
    """
    path = Path(path)
    text, now = _header(path)
    refusal = _gate(path, text)
    found = parse_header(path, text, now.size, now)
    if refusal is not None:
        raise refusal
    return found


def parse_header(
    path: Path, text: bytes, size: int, now: State | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the JSON of a header says of a file of ``size`` bytes; ``path`` is only named. Raises as ``read_header``."""
    header = strict_json.parse(text, path, "the header")
    metadata = _metadata(header.pop(METADATA, {}), path)
    start = 8 + len(text)
    tensors = [_tensor(name, entry, path, start, now) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    end = start
    for t in tensors:
        if t.offset != end:
            raise CorruptError(
                "tensors overlap" if t.offset < end else "bytes belong to no tensor",
                file=path,
                tensor=t.name,
                found=f"data begins at {t.offset - start}",
                need=f"{end - start}, where the tensor before it ends",
            )
        end += t.nbytes
    if end != size:
        raise CorruptError(
            "truncated" if end > size else "bytes after the last tensor",
            file=path,
            found=f"{size} bytes",
            need=f"{end}, by its header",
            do="download or copy it again",
        )
    return {t.name: t for t in tensors}, metadata


def _header(path: Path) -> tuple[bytes, State]:
    """The header's bytes and the file's state. Only regular files are opened: a pipe would never answer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnsupportedError(
                "not a regular file", file=path, need="a .safetensors file", do="name the file itself"
            )
        with open(path, "rb") as f:
            now, head = state(f), f.read(HEAD)
            length = int.from_bytes(head[:8], "little")
            _check_length(path, now.size, head, length)
            f.seek(8)
            return f.read(length), now
    except OSError as e:
        raise WarptileError("cannot be read", file=path, found=e.strerror) from None


def _check_length(path: Path, size: int, head: bytes, length: int) -> None:
    if head[8:9] != b"{":
        refuse_impostor(path, head, "safetensors")
    if size < 10:
        raise CorruptError("too short for a header", file=path, found=f"{size} bytes", do="download or copy it again")
    if length > MAX_HEADER:
        raise CorruptError("the header's length is absurd", file=path, found=length, need=f"<= {MAX_HEADER}")
    if length > size - 8:
        raise CorruptError(
            "truncated inside its header",
            file=path,
            found=f"{size} bytes",
            need=f"{8 + length} for the header alone",
            do="download or copy it again",
        )
    if length < 2 or head[8:9] != b"{":
        raise CorruptError("the header is not a JSON object", file=path, found=repr(head[8:16]), need="{ at byte 8")


def _gate(path: Path, text: bytes) -> CorruptError | None:
    """Ask the package's parser, and refuse a header that would keep ours busy for longer than its tensors are worth.

    Returns what the package refuses, for ours to say in better words; of a long header it is raised at once.
    """
    if LONG_LIST.search(text):
        raise CorruptError("a list in the header is absurdly long", file=path, need=f"shapes of <= {MAX_DIMS} sizes")
    try:
        with safe_open(path, framework="np") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as e:
        refusal = CorruptError("the safetensors package refuses it", file=path, found=shown(e, 200))
        if len(text) > MAX_EXPLAINED:
            raise refusal from None
        return refusal
    if len(names) > MAX_TENSORS:
        need = f"<= {MAX_TENSORS}"
        raise UnsupportedError("too many tensors for one file", file=path, found=len(names), need=need, do=SMALLER)
    strings = sum(map(len, names)) + sum(len(key) + len(text) for key, text in metadata.items())
    most = MAX_ESCAPE * strings + MAX_ROW * (len(names) + len(metadata) + 1)
    if len(text) > most:
        raise CorruptError(
            "the header is longer than what it says", file=path, found=len(text), need=f"<= {most} bytes"
        )
    return None


def _metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict):
        raise CorruptError(f"{METADATA} is not an object", file=path, found=strict_json.kind(value))
    for key, text in value.items():
        if not isinstance(text, str):
            raise CorruptError(
                f"{METADATA} holds a value that is not a string",
                file=path,
                found=f"{strict_json.kind(text)} under {shown(key)!r}",
                need="strings",
            )
    return value


def _tensor(name: str, entry: object, path: Path, start: int, now: State | None) -> Tensor:
    """One row of the header, checked by itself; ``start`` is where the data begins in the file."""

    def corrupt(what: str, found: object, need: object) -> CorruptError:
        return CorruptError(what, file=path, tensor=shown(name, 200), found=shown(found), need=need)

    if not isinstance(entry, dict) or entry.keys() != KEYS:
        found = sorted(entry) if isinstance(entry, dict) else strict_json.kind(entry)
        raise corrupt("not a tensor's description", found, "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise corrupt("the dtype is not a string", strict_json.kind(dtype), "a name")
    if dtype not in DTYPES:
        raise UnsupportedError(
            "unknown dtype",
            file=path,
            tensor=shown(name, 200),
            found=shown(dtype),
            need=", ".join(DTYPES),
            do="save the tensor as one of these",
        )
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 2**63 for v in value):
            raise corrupt(f"{what} is not a list of sizes", value, "integers from 0 to 2^63 - 1")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt("data_offsets is not a range", offsets, "[begin, end]")
    if len(shape) > MAX_DIMS:
        raise UnsupportedError(
            "too many dimensions",
            file=path,
            tensor=shown(name, 200),
            found=len(shape),
            need=f"<= {MAX_DIMS}",
            do="save the tensor with fewer",
        )
    bits = prod(shape) * DTYPES[dtype][1]
    if bits >= 2**63 or (not bits and prod(d for d in shape if d) >= 2**56):
        raise corrupt("the shape overflows", shape, "fewer than 2^63 bits")
    if bits != 8 * (offsets[1] - offsets[0]):
        need = f"{bits / 8:g} for {dtype} {shown(shape)}"
        raise corrupt("size and shape disagree", f"{offsets[1] - offsets[0]} bytes", need)
    return Tensor(name, dtype, tuple(shape), path, start + offsets[0], offsets[1] - offsets[0], now)


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. ``data`` is called once, when its turn has come."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterable[Any]]
    """Yields its bytes in pieces: numpy arrays (any strides; written in C order), or any buffers."""


def write_safetensors(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> str:
    """Write a file of ``entries`` in their order; the same arguments always give the same bytes. Returns its xxh3.

    The header, padded with spaces to a multiple of 8, goes first, then one tensor at a time; at the end the file is
    flushed to the disk and opened with the safetensors package. Permissions are those of the umask.

    Raises:
        WarptileError: the disk is full, or the file cannot be written; what there was of it has been removed.
        UnsupportedError: the header would be longer than the format allows.
    """
    path = Path(path)
    header = _layout(path, entries, metadata)
    start = len(header).to_bytes(8, "little") + header
    return write_stream(path, start, entries, lambda: _check_written(path, entries))


def write_stream(
    path: Path, start: bytes, entries: Sequence[Entry], check: Callable[[], object], align: int = 1
) -> str:
    """Write ``start``, then one tensor at a time, each padded with zeros to ``align``; flush, then ``check`` the file.

    Returns the xxh3 of its bytes, 64 bits in hexadecimal.

    Raises:
        WarptileError: the disk is full, or the file cannot be written; what there was of it has been removed.
    """
    try:
        with Output(path, len(start) + sum(nbytes(entry.dtype, entry.shape) for entry in entries)) as output:
            output.write(start)
            for entry in entries:
                _copy(output, entry)
                output.write(bytes(-nbytes(entry.dtype, entry.shape) % align))
            digest = output.finish()
        check()
        return digest
    except BaseException:
        if path.is_file() or path.is_symlink():
            path.unlink()
        raise


def _layout(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    assert all(isinstance(text, str) for text in metadata.values()), metadata
    end = 0
    for entry in entries:
        assert entry.name not in header, entry.name
        size = nbytes(entry.dtype, entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UnsupportedError(
            "too many tensors for one header",
            file=path,
            found=f"{len(text)} bytes",
            need=f"<= {MAX_HEADER}",
            do=SMALLER,
        )
    return text


def _copy(output: Output, entry: Entry) -> None:
    written = 0
    for buffer in entry.data():
        array = np.asarray(buffer if isinstance(buffer, np.ndarray | np.generic) else memoryview(buffer))
        raw: NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        output.write(raw.data)
        written += raw.size
    assert written == nbytes(entry.dtype, entry.shape), (entry.name, entry.dtype, entry.shape, written)


def _check_written(path: Path, entries: Sequence[Entry]) -> None:
    try:
        with safe_open(path, framework="np") as file:
            found = sorted(file.keys())
    except (SafetensorError, OSError) as e:
        raise WarptileError("does not read back", file=path, found=e, do="check the disk it is on") from None
    assert found == sorted(entry.name for entry in entries), path
