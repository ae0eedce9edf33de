"""The table of an ONNX model's companion: which of the model's bytes it keeps, and where tensors go between them.

Numbers are little-endian, a text is a u32 and so many bytes of UTF-8:

    u32                       files, the model's first
    text, u32                 of each: its name, relative to the model's directory ("" is the model); tensors in it
        u64, text                 of each tensor: bytes that are kept between it and what is before it; its name
        u64                       bytes that are kept after the last
    ..                        all that is kept, in this order

Nothing in it is a place in a file, so nothing can overlap or lie outside.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import CorruptError, UnsupportedError
from .strict_json import shown

MAX_KEPT = 64 << 20
"""Bytes of a companion without its table: they are held in memory."""
MAX_TABLE = 16 << 20
MAX_TENSORS, MAX_FILES = 200_000, 50_000
SMALLER = "save the model with less in it"
MAX_NAME, MAX_PART = 1024, 255
"""Characters of a file's name; bytes between two slashes, as file systems have it."""


@dataclass(frozen=True)
class File:
    """One file of a model."""

    name: str
    """Relative to the model's directory; empty for the model itself."""
    tensors: tuple[tuple[int, str], ...]
    """(bytes that are kept before it, name)."""
    rest: int
    """Bytes that are kept after the last tensor."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Bytes that are kept before each tensor and after the last."""
        return (*(size for size, _ in self.tensors), self.rest)


def is_place(location: str) -> bool:
    """Whether the name of external data is that of a file in the model's directory or below."""
    place = PurePosixPath(location)
    sound = place.parts and not place.is_absolute() and ".." not in place.parts
    return bool(sound) and not any(c in location for c in "\\:\0")


def is_written(name: str) -> bool:
    """Whether a file may come back under a name: hidden files (a user's settings) are left alone."""
    parts = name.split("/")
    plain = is_place(name) and str(PurePosixPath(name)) == name and not any(part[0] == "." for part in parts)
    return plain and len(name) <= MAX_NAME and all(len(part.encode()) <= MAX_PART for part in parts)


def table(path: Path, files: Sequence[File]) -> bytes:
    """The table of a companion, without what is kept. Raises UnsupportedError when all of it would be too much."""

    def text(name: str) -> bytes:
        data = name.encode()
        return struct.pack("<I", len(data)) + data

    kept = sum(sum(file.kept) for file in files)
    tensors = sum(len(file.tensors) for file in files)
    for what, found, most in (
        ("bytes beside its tensors", kept, MAX_KEPT),
        ("tensors", tensors, MAX_TENSORS),
        ("files", len(files), MAX_FILES),
    ):
        if found > most:
            raise UnsupportedError(f"too many {what}", file=path, found=found, need=f"<= {most}", do=SMALLER)
    rows = [struct.pack("<I", len(files))]
    for file in files:
        rows.append(text(file.name) + struct.pack("<I", len(file.tensors)))
        rows += (struct.pack("<Q", before) + text(name) for before, name in file.tensors)
        rows.append(struct.pack("<Q", file.rest))
    if sum(map(len, rows)) > MAX_TABLE:
        raise UnsupportedError("too long names", file=path, need=f"<= {MAX_TABLE} bytes of them", do=SMALLER)
    return b"".join(rows)


def parse(data: bytes, path: Path) -> tuple[tuple[File, ...], int]:
    """(the files, where what is kept begins) of a companion; ``path`` is only named. Raises CorruptError."""
    at = 0

    def corrupt(what: str, found: object = None) -> CorruptError:
        return CorruptError(f"the graph's table is damaged: {what}", file=path, found=found)

    def take(size: int) -> bytes:
        nonlocal at
        if size > len(data) - at:
            raise corrupt("it ends too early", f"{len(data)} bytes")
        at += size
        return data[at - size : at]

    def count(most: int) -> int:
        number = int.from_bytes(take(4), "little")
        if number > most:
            raise corrupt("a number is absurd", number)
        return number

    def size() -> int:
        return int.from_bytes(take(8), "little")

    def text() -> str:
        try:
            return take(count(len(data))).decode()
        except UnicodeDecodeError:
            raise corrupt("a name is not UTF-8") from None

    files: list[File] = []
    seen: set[str] = set()
    for _ in range(count(MAX_FILES)):
        name, tensors = text(), []
        for _ in range(count(MAX_TENSORS - len(seen))):
            before, tensor = size(), text()
            if tensor in seen:
                raise corrupt("a tensor is in two places", shown(tensor))
            seen.add(tensor)
            tensors.append((before, tensor))
        files.append(File(name, tuple(tensors), size()))
    if not files or files[0].name:
        raise corrupt("the model is not its first file")
    names = {file.name for file in files}
    for file in files[1:]:
        if not is_written(file.name) or any(str(p) in names for p in PurePosixPath(file.name).parents):
            raise corrupt("no name of external data", shown(repr(file.name)))
    if len(names) < len(files):
        raise corrupt("a file is in it twice")
    kept = sum(sum(file.kept) for file in files)
    if kept != len(data) - at:
        raise corrupt("other bytes than it says", f"{len(data) - at} bytes where it has {shown(kept)}")
    return tuple(files), at
