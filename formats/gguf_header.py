"""The header of one GGUF file (versions 2 and 3), checked against the file before anything believes it.

    "GGUF", u32 version, i64 tensors, i64 key-values
    key-values   string key, i32 type, value             string = u64 length, bytes
    tensors      string name, u32 n_dims, i64 ne[n_dims], i32 type, u64 offset
    data         from the next multiple of general.alignment (32); each tensor padded to one

ne[0] runs fastest. The format: docs/gguf.md of https://github.com/ggml-org/ggml. The gguf package knows the types and
their sizes; its reader is not used: it trusts counts and takes seconds for a vocabulary.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from . import impostors
from .errors import CorruptError, UnsupportedError, WarptileError
from .impostors import refuse_impostor
from .safetensors_file import MAX_TENSORS
from .strict_json import shown
from .tensor import State, state

MAGIC = b"GGUF"
HEAD = 24
"""Bytes of magic, version and the two counts."""
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32

# Type of a value -> how it is stored; 8 is a string, 9 an array of one of the others.
SCALARS = {
    number: Struct(f"<{code}")
    for number, code in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}.items()
} | {10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d")}
U32, STRING, ARRAY = 4, 8, 9
LENGTH = SCALARS[10]

MAX_NAME = 63  # bytes; ggml keeps 64 with the final zero
MAX_DIMS = 4
MAX_KEY = 65535
MAX_LIST = 65536
"""Longest array whose numbers are kept: one for each layer; vocabularies are passed over."""
MAX_TEXT = 1 << 20
"""Longest string that is kept: a chat template; whole tokenizers are passed over."""
MAX_PAIRS = 64 << 20
"""Bytes of all key-values. Vocabularies of a quarter of a million words take 15 million; in a sparse file, zeros look
like empty strings without end."""
LEAST_PAIR, LEAST_TENSOR = 13, 24  # bytes that one key-value and one tensor take at least


@dataclass(frozen=True)
class Info:
    """A tensor: its ggml type's name, its extents as numpy orders them, and where its bytes are in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says."""

    version: int
    alignment: int
    values: dict[str, Any]
    """Scalars, strings and arrays of numbers by key; None for what is too long, and for arrays of strings."""
    spans: dict[str, tuple[int, int]]
    """Where each key-value begins and ends, in file order."""
    tensors: tuple[Info, ...]
    trailing: int
    """Bytes after the last tensor and its padding."""
    state: State | None = None
    """Of the file, when it was read from one."""


@cache
def type_sizes() -> dict[int, tuple[str, int, int]]:
    """{type id: (name, weights of a block, bytes of a block)} of all that the gguf package knows."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, size, nbytes) for kind, (size, nbytes) in GGML_QUANT_SIZES.items()}


def padded(size: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def read_header(path: Path) -> Header:
    """The header of a file; no tensor is read.

    Raises:
        CorruptError: truncated, or sizes, counts, names and offsets that cannot be.
        UnsupportedError: not GGUF, of another version or byte order, or a type that the gguf package does not know.
        WarptileError: it cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnsupportedError("not a regular file", file=path, need="a .gguf file", do="name the file itself")
        with open(path, "rb") as f:
            now = state(f)
            _check_head(path, f.read(impostors.HEAD))
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return replace(parse_header(path, data), state=now)
    except (OSError, ValueError) as e:
        raise WarptileError("cannot be read", file=path, found=getattr(e, "strerror", None) or e) from None


def parse_header(path: Path, data: bytes | mmap.mmap) -> Header:
    """The header of a file with the content ``data``; ``path`` is only named. Raises as ``read_header``."""
    version = _check_head(path, data[: impostors.HEAD])
    return _Parser(path, data).header(version)


def _check_head(path: Path, head: bytes) -> int:
    """The version. Raises UnsupportedError for what is no GGUF of ours, CorruptError for a stump of one."""
    if not head.startswith(MAGIC):
        refuse_impostor(path, head, "a GGUF file")
        raise UnsupportedError(
            "not a GGUF file", file=path, found=repr(head[:4]), need=repr(MAGIC), do="check what it is"
        )
    if len(head) < HEAD:
        raise CorruptError("truncated", file=path, found=f"{len(head)} bytes", do="download or copy it again")
    version = int.from_bytes(head[4:8], "little")
    if version and version % 65536 == 0:
        raise UnsupportedError(
            "a big-endian file", file=path, need="little endian", do="convert it with gguf-convert-endian"
        )
    if version not in VERSIONS:
        raise UnsupportedError(
            "unknown GGUF version", file=path, found=version, need="2 or 3", do="convert the model again with llama.cpp"
        )
    return version


class _Parser:
    """A position in the header, moved by whatever is read there."""

    def __init__(self, path: Path, data: bytes | mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 8

    def header(self, version: int) -> Header:
        count = self._count("tensors", LEAST_TENSOR)
        pairs = self._count("key-values", LEAST_PAIR)
        if count > MAX_TENSORS:
            need = f"<= {MAX_TENSORS}"
            raise UnsupportedError("too many tensors", file=self.path, found=count, need=need, do="split it in files")
        values: dict[str, Any] = {}
        spans = {}
        for _ in range(pairs):
            start = self.at
            key = self._text("a key", MAX_KEY)
            if key in values:
                raise CorruptError("a key twice", file=self.path, found=repr(shown(key)), need="every key once")
            values[key] = self._value(key)
            spans[key] = start, self.at
            self._check_room(0)
        alignment = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CorruptError("no such alignment", file=self.path, found=alignment, need="a power of two")
        stated = [self._tensor() for _ in range(count)]
        start = padded(self.at, alignment)
        tensors, end = self._placed(stated, start, alignment)
        return Header(version, alignment, values, spans, tensors, max(0, self.size - start - end))

    def _take(self, form: Struct, what: str) -> Any:
        if self.at + form.size > self.size:
            raise self._truncated(what)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def _truncated(self, what: str) -> CorruptError:
        return CorruptError(
            "truncated, or a length that is not true",
            file=self.path,
            found=f"{what} at byte {self.at} does not end within {self.size} bytes",
            do="download or copy it again",
        )

    def _check_room(self, length: int) -> None:
        """Raise UnsupportedError when key-values that go on for ``length`` more bytes would be too long."""
        if self.at + length > MAX_PAIRS:
            found = f"{self.at + length} bytes and more"
            raise UnsupportedError(
                "too many key-values",
                file=self.path,
                found=found,
                need=f"<= {MAX_PAIRS}",
                do="get the file again, or remove the longest with gguf-new-metadata",
            )

    def _count(self, what: str, least: int) -> int:
        count: int = self._take(SCALARS[11], "a count")
        if not 0 <= count <= self.size // least:
            raise CorruptError(
                f"truncated, or a count of {what} that is not true",
                file=self.path,
                found=count,
                need=f"at most {self.size // least} in {self.size} bytes",
                do="download or copy it again",
            )
        return count

    def _bytes(self, what: str, limit: int) -> bytes:
        length = self._take(LENGTH, what)
        if length > self.size - self.at:
            raise self._truncated(what)
        if length > limit:
            raise CorruptError(f"{what} is too long", file=self.path, found=f"{length} bytes", need=f"<= {limit}")
        self.at += length
        return self.data[self.at - length : self.at]

    def _text(self, what: str, limit: int) -> str:
        text = self._bytes(what, limit)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptError(f"{what} is not UTF-8", file=self.path, found=shown(repr(text))) from None

    def _value(self, key: str) -> Any:
        kind = self._take(SCALARS[U32], f"the type of {key}")
        if key == ALIGNMENT and kind != U32:
            raise CorruptError(f"{ALIGNMENT} of another type", file=self.path, found=kind, need=f"{U32} (u32)")
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise CorruptError("unknown type of a value", file=self.path, found=f"{kind} for {shown(key)}", need="0-12")
        return self._take(SCALARS[kind], f"the value of {key}")

    def _string(self, key: str) -> str | None:
        length = self._take(LENGTH, f"the value of {key}")
        if length > self.size - self.at:
            raise self._truncated(f"the value of {key}")
        self.at += length
        return None if length > MAX_TEXT else self.data[self.at - length : self.at].decode("utf-8", "replace")

    def _array(self, key: str) -> list[Any] | None:
        kind = self._take(SCALARS[U32], f"the type of {key}")
        count = self._take(LENGTH, f"the length of {key}")
        if kind == ARRAY:
            do = "get the file again, or remove it with gguf-new-metadata"
            raise UnsupportedError("an array of arrays", file=self.path, found=shown(key), need="plain arrays", do=do)
        if kind != STRING and kind not in SCALARS:
            raise CorruptError("unknown type of a value", file=self.path, found=f"{kind} for {shown(key)}", need="0-12")
        size = LENGTH.size if kind == STRING else SCALARS[kind].size
        if count > (self.size - self.at) // size:
            raise CorruptError(
                f"truncated, or the array {shown(key)} is longer than the file",
                file=self.path,
                found=f"{count} entries at byte {self.at}",
                need=f"at most {(self.size - self.at) // size} in {self.size} bytes",
                do="download or copy it again",
            )
        self._check_room(count * size)
        if kind == STRING:
            self._skip_strings(key, count)
            return None
        self.at += count * size
        if count > MAX_LIST:
            return None
        form = SCALARS[kind]
        return [number for (number,) in form.iter_unpack(self.data[self.at - count * size : self.at])]

    def _skip_strings(self, key: str, count: int) -> None:
        unpack, data, at, last = LENGTH.unpack_from, self.data, self.at, self.size - LENGTH.size
        for _ in range(count):
            if at > last:
                break
            at += 8 + unpack(data, at)[0]
        else:
            if at <= self.size:
                self.at = at
                return
        raise self._truncated(f"the array {shown(key)}")

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """(name, type, shape, stated offset, bytes) of one tensor, checked by itself."""
        name = self._text("a tensor's name", MAX_NAME)
        where: dict[str, Any] = {"file": self.path, "tensor": name}
        dims = self._take(SCALARS[U32], "n_dims")
        if dims > MAX_DIMS:
            raise CorruptError("too many dimensions", **where, found=dims, need=f"<= {MAX_DIMS}")
        ne = [self._take(SCALARS[11], "a dimension") for _ in range(dims)]
        number, offset = self._take(SCALARS[5], "a type"), self._take(LENGTH, "an offset")
        if number not in type_sizes():
            raise UnsupportedError(
                "unknown type", **where, found=f"type id {number}", do="a newer gguf package may know it"
            )
        kind, size, nbytes = type_sizes()[number]
        if not name or any(extent < 1 for extent in ne) or prod(ne) >= 2**63:
            found = f"{name!r} {ne}"
            raise CorruptError(
                "not a tensor's name and extents", **where, found=found, need="1 or more each, fewer than 2^63 together"
            )
        if (columns := ne[0] if ne else 1) % size:
            found, need = f"{columns} columns", f"a multiple of {size}"
            raise CorruptError(f"rows are not whole blocks of {kind}", **where, found=found, need=need)
        return name, kind, tuple(reversed(ne)), offset, prod(ne) // size * nbytes

    def _placed(
        self, stated: Sequence[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> tuple[tuple[Info, ...], int]:
        """The tensors by their places in the file, and where their padded data ends, from ``start``."""
        found: dict[str, Info] = {}
        end = 0
        for name, kind, shape, offset, nbytes in stated:
            where: dict[str, Any] = {"file": self.path, "tensor": name}
            if name in found:
                raise CorruptError("two tensors have one name", **where, need="names that differ")
            if offset != end:
                what = "tensors overlap" if offset < end else "bytes belong to no tensor"
                raise CorruptError(what, **where, found=f"offset {offset}", need=f"{end}, where the one before it ends")
            if start + offset + nbytes > self.size:
                raise CorruptError(
                    "the data ends after the file",
                    **where,
                    found=f"{self.size} bytes",
                    need=start + offset + nbytes,
                    do="download or copy it again",
                )
            found[name] = Info(name, kind, shape, start + offset, nbytes)
            end = padded(offset + nbytes, alignment)
        return tuple(found.values()), end
