"""One product from pieces of known size: which shard holds what, the shard files, their index, and the side files.

Nothing here knows what the pieces are; converting and unpacking write through the same functions.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.container import Entry, Tensor, dtype_name
from ..formats.directory import INDEX, WEIGHTS
from ..formats.errors import UsageError
from .manifest import sync

Array = NDArray[Any]
Source = Callable[[], Iterable[Array]]

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Shard:
    """One file of the product: an independent job."""

    file: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Stored:
    """A tensor of a product, without its bytes: dtype by its safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Batch:
    """Tensors that are made together: when the first is asked for, each forgotten once it is taken."""

    def __init__(self, make: Callable[[], dict[str, Array]]) -> None:
        self._make, self._ready = make, dict[str, Array]()

    def tensor(self, stored: Stored) -> Source:
        """The bytes of one of them, as an entry wants them."""

        def data() -> Iterable[Array]:
            if stored.name not in self._ready:
                self._ready = self._make()
            array = self._ready.pop(stored.name)
            assert (array.shape, dtype_name(array.dtype)) == (stored.shape, stored.dtype), (stored, array.dtype)
            yield np.ascontiguousarray(array)

        return data


def copied(tensor: Tensor) -> Source:
    """A tensor's bytes as they stand in its checkpoint."""
    return lambda: (tensor.raw(),)


def counted(data: Source, advance: Callable[[int], None]) -> Source:
    """The same buffers, telling ``advance`` the bytes of each once it has been taken."""

    def counting() -> Iterable[Array]:
        for buffer in data():
            yield buffer
            advance(buffer.nbytes)

    return counting


def parse_size(text: str | int) -> int:
    """``"5GB"``, ``"200MiB"``, ``"1000"`` -> bytes; decimal and binary units as they are written."""
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)", str(text).strip(), re.ASCII)
    unit = match and UNITS.get(match[2].upper())
    if not match or unit is None:
        units = ", ".join(("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB"))
        raise UsageError(f"--max-shard-size {str(text)[:40]!r} is not a size", need=f"bytes, or a number with {units}")
    size = int(Fraction(match[1]) * unit)
    if size < 1:
        raise UsageError(f"--max-shard-size {text} leaves no room for a byte", need="1 byte or more")
    return size


def assign(sizes: Sequence[int], limit: int) -> list[range]:
    """Cut pieces, in order, into shards of at most ``limit`` bytes; a larger piece gets a shard of its own."""
    shards, start, filled = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > limit:
            shards.append(range(start, i))
            start, filled = i, 0
        filled += size
    return [*shards, range(start, len(sizes))]


def names(count: int) -> list[str]:
    """File names of a product of ``count`` shards."""
    if count == 1:
        return [f"model{WEIGHTS}"]
    return [f"model-{i:05d}-of-{count:05d}{WEIGHTS}" for i in range(1, count + 1)]


def write_index(files: Mapping[str, str], directory: Path, total: int) -> None:
    """``model.safetensors.index.json``: {tensor: shard} of a directory of several; ``total`` in bytes of tensors."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    write_json(directory / f"model{INDEX}", content)


def write_json(path: Path, content: object) -> None:
    """JSON as checkpoints have it: two spaces, one line end."""
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """A small file, flushed to the disk."""
    path.write_bytes(content)
    sync(path)


def copy_side_files(files: Iterable[Path], directory: Path) -> None:
    """The bytes of files that are no weights (tokenizer, templates), never links to them."""
    for file in files:
        target = directory / file.name
        shutil.copyfile(file, target)
        sync(target)
