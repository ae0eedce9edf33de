"""The same bytes whatever the file system knows: past its cache, through it, or first the one and then the other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from warptile.formats import output
from warptile.formats.errors import WarptileError
from warptile.formats.output import BLOCK, BUFFER, Output

SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 3 * BUFFER + 5 * BLOCK + 7]


@pytest.fixture(params=["past", "through", "not opened", "not written", "short"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the system does of it."""
    opened, written = os.open, os.write
    direct = []

    def open_(path: str, flags: int, *mode: int) -> int:
        if flags & output.DIRECT and request.param == "not opened":
            raise OSError(errno.EINVAL, "Invalid argument")
        direct.append(flags & output.DIRECT)
        return opened(path, flags & ~output.DIRECT if request.param in ("not written", "short") else flags, *mode)

    def write(file: int, data: memoryview) -> int:
        if direct[-1] and request.param == "not written" and len(data) % BLOCK == 0:
            direct.append(0)
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(file, data[:1000] if request.param == "short" else data)

    monkeypatch.setattr(output.os, "open", open_)
    monkeypatch.setattr(output.os, "write", write)
    monkeypatch.setattr(output, "LONG", 1 << 60 if request.param == "through" else 0)
    return str(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [3 << 20, 1 << 30])
def test_a_file_is_what_was_written(size: int, piece: int, way: str, tmp_path: Path) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path / "a"
    path.write_bytes(b"longer before" * 10)
    with Output(path, size) as file:
        for first in range(0, size, piece):
            file.write(data[first : first + piece])
        digest = file.finish()
    assert path.read_bytes() == data
    assert digest == xxhash.xxh3_64_hexdigest(data)


@pytest.mark.parametrize("size", [10, BUFFER + 10, 3 * BUFFER])
@pytest.mark.parametrize("limit", [0, BLOCK, BUFFER + BLOCK + 9])
def test_a_full_disk_is_an_error_however_much_was_written(
    size: int, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written, room = os.write, [limit]

    def write(file: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = written(file, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(output.os, "write", write)
    monkeypatch.setattr(output, "LONG", 0)
    monkeypatch.setattr(output, "DIRECT", 0)

    def put() -> None:
        with Output(tmp_path / "a", size) as file:
            file.write(bytes(size))
            file.finish()

    if limit >= size:
        put()
    else:
        with pytest.raises(WarptileError, match="No space left on device; free some room"):
            put()
