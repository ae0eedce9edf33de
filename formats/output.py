"""A file that is written once, from its first byte to its last, past the system's cache where it is long.

    write   copies into one of two buffers, hashes          a thread   writes the other one to the disk

What is written to a cache first is copied by the processor and waits to be flushed at the end: 4 GB took 2.0 s of
processor time, and take 0.1 s without (O_DIRECT, ext4, 2026-11-30); and a long conversion does not push everything else
out of memory. Where a file system knows no such thing, the same bytes go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash

from .errors import WarptileError

BUFFER = 4 << 20
"""Bytes that go to the disk at once; a multiple of the block of any disk."""
BLOCK = 4096
"""What positions and lengths past the cache must be multiples of."""
LONG = 64 << 20
"""Bytes from which a file goes past the cache: shorter ones are likely to be read again soon."""
DIRECT = getattr(os, "O_DIRECT", 0)


class Output:
    """A new file, or the same one anew. ``finish`` flushes it to the disk; without it, nothing is promised.

    Raises WarptileError, as does every method, when the system refuses: the disk is full, say.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._fill, self._sent = path, 0, 0
        self._hash = xxhash.xxh3_64()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._direct = DIRECT if size >= LONG else 0
        with writing(path):
            try:
                self._file = os.open(path, flags | self._direct, 0o666)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._direct = 0
                self._file = os.open(path, flags, 0o666)
        # Anonymous maps begin at a page, as O_DIRECT wants.
        self._buffers = [mmap.mmap(-1, BUFFER) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1)
        self._busy: Future[None] | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)
        os.close(self._file)

    def write(self, data: bytes | memoryview) -> None:
        """Take some bytes; they are copied, and written before long."""
        self._hash.update(data)
        left = np.frombuffer(data, np.uint8)
        while left.size:
            room = np.frombuffer(self._buffers[0], np.uint8)[self._fill :]
            part, left = left[: room.size], left[room.size :]
            room[: part.size] = part  # numpy copies without the interpreter's lock, slices of a memoryview with it
            self._fill += part.size
            if self._fill == BUFFER:
                self._send(BUFFER)

    def finish(self) -> str:
        """Write what is left and flush it all to the disk. Returns the xxh3 of the file, 64 bits in hexadecimal."""
        whole = self._fill // BLOCK * BLOCK
        rest = self._buffers[0][whole : self._fill]
        if whole:
            self._send(whole)
        self._wait()
        if rest:
            self._cached()
            with writing(self._path):
                _write_all(self._file, memoryview(rest))
        with writing(self._path):
            os.fsync(self._file)
        return self._hash.hexdigest()

    def _send(self, size: int) -> None:
        """Have the thread write the first ``size`` bytes of the buffer, and take the other one."""
        self._wait()
        self._busy = self._thread.submit(self._out, self._buffers[0], size)
        self._buffers.reverse()
        self._fill = 0

    def _wait(self) -> None:
        if self._busy is not None:
            with writing(self._path):
                self._busy.result()
        self._busy = None

    def _out(self, buffer: mmap.mmap, size: int) -> None:
        data = memoryview(buffer)[:size]
        if self._direct:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            if data:  # a nearly full disk, or one of larger blocks: the rest is no place or length for O_DIRECT
                self._cached()
        _write_all(self._file, data)
        self._sent += size
        if not self._direct:
            # Advice that begins to write dirty pages back and does not wait: fsync at the end finds little to do.
            with suppress(OSError, AttributeError):  # not every system takes advice
                os.posix_fadvise(self._file, self._sent - size, size, os.POSIX_FADV_DONTNEED)

    def _cached(self) -> None:
        if self._direct:
            import fcntl  # which is where O_DIRECT is

            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~self._direct)
            self._direct = 0


def _write_all(descriptor: int, data: memoryview) -> None:
    """One call takes no more than 2 GiB, and less where the disk is nearly full."""
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses while ``path`` is written becomes one line: WarptileError."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        do = "free some room, or name a destination on another disk" if full else "name another destination"
        raise WarptileError("cannot be written", file=path, found=e.strerror or e, do=do) from e
