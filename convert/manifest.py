"""Which shards of a product are finished, so that a run that was killed goes on where it was.

    DST.partial/.manifest/run            the key of the run: source, options and plan, hashed
    DST.partial/.manifest/<shard>.json   {"nbytes", "xxh3", "notes"} of a shard that is whole and on the disk

A shard is written to ``DST.partial/.tmp-<random>``, flushed, recorded, then renamed into the product: a record without
its shard says nothing, and a shard under its name always has a record. Each is a file of its own, so shards of several
machines need no common one.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..formats.errors import WarptileError
from ..formats.output import writing

DIRECTORY = ".manifest"
KEY = "run"
TEMPORARY = ".tmp-"
CHUNK = 16 << 20


@dataclass(frozen=True)
class Finished:
    """What is recorded of a shard."""

    file: str
    nbytes: int
    xxh3: str
    """Of the whole file, 64 bits in hexadecimal."""
    notes: tuple[tuple[str, str], ...] = ()
    """What readers had to say while its modules were read."""


def staging(shard: Path) -> Path:
    """The ``.partial`` directory a shard is in, at once or below the product's directory."""
    return next(parent for parent in shard.parents if (parent / DIRECTORY).is_dir())


def temporary(shard: Path) -> Path:
    """A name that no other run, alive or dead, writes to."""
    return staging(shard) / f"{TEMPORARY}{uuid.uuid4().hex}"


def begin(partial: Path, key: str) -> None:
    """Say which run the manifest is of."""
    path = partial / DIRECTORY / KEY
    path.parent.mkdir(exist_ok=True)
    _write(path, key)


def kept(partial: Path, key: str | None, shards: Iterable[Path]) -> set[Path]:
    """The files of a dead run that one with ``key`` can use: finished shards, and the records of them."""
    run = partial / DIRECTORY / KEY
    if key is None or not run.is_file() or run.read_text() != key:
        return set()
    whole = finished(partial, shards)
    shards = [shard for shard in shards if shard.name in whole]
    return {run, *shards, *(_record(partial, shard) for shard in shards)}


def _record(partial: Path, shard: Path) -> Path:
    return partial / DIRECTORY / f"{shard.name}.json"


def publish(written: Path, shard: Path, key: str, finished: Finished) -> None:
    """Record a shard and give it its name.

    Raises:
        WarptileError: another run has taken the destination since then; what was written is removed.
    """
    partial = staging(shard)
    if (partial / DIRECTORY / KEY).read_text() != key:
        written.unlink()
        raise WarptileError("another run has replaced this one", file=shard.parent)
    content = {"nbytes": finished.nbytes, "xxh3": finished.xxh3, "notes": finished.notes}
    _write(_record(partial, shard), json.dumps(content))  # first: a shard that has its name is never made again
    with writing(shard):
        written.rename(shard)
        sync(shard.parent)


def finished(partial: Path, shards: Iterable[Path]) -> dict[str, Finished]:
    """Those that are recorded and are what the record says, by file name."""
    found = {}
    for shard in shards:
        try:
            said = json.loads(_record(partial, shard).read_text())
            notes = tuple((module, text) for module, text in said["notes"])
            record = Finished(shard.name, said["nbytes"], said["xxh3"], notes)
            if shard.stat().st_size == record.nbytes and checksum(shard) == record.xxh3:
                found[shard.name] = record
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def checksum(file: Path) -> str:
    """xxh3 of a file's bytes, 64 bits in hexadecimal."""
    digest, buffer = xxhash.xxh3_64(), bytearray(CHUNK)
    with open(file, "rb", buffering=0) as f:
        while size := f.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """A small file, whole or not there."""
    beside = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    with writing(path):
        beside.write_text(text)
        sync(beside)
        beside.rename(path)
        sync(path.parent)
