"""The directory of a checkpoint: its names, the index among them, where their links may lead, and their JSON.

A name in an index is a plain file name. A link may lead anywhere inside the directory and, in a Hugging Face cache
(``models--*/snapshots/<revision>/``), to ``models--*/blobs/``; a file that lies elsewhere is refused. Hidden files are
not looked at, and pickles (.bin .pt .ckpt) are never opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from . import strict_json
from .errors import CorruptError, UnsupportedError, WarptileError
from .strict_json import shown

WEIGHTS = ".safetensors"
INDEX = ".safetensors.index.json"

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_WEIGHTS = (*PICKLES, ".h5", ".msgpack", ".gguf", ".onnx")
MAX_INDEX = 256 << 20
MAX_VALUES = 2_000_000
"""Commas and opening brackets in a config or an index: two for each tensor of the largest header, four times over."""
PICKLE_ADVICE = "pickle is code and is never opened: save it as safetensors with the tool that made it"


def visible(directory: Path) -> list[str]:
    """The names in a directory but for hidden ones, in order. Raises WarptileError."""
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError as e:
        raise WarptileError("cannot be read", file=directory, found=e.strerror) from None


def no_weights(directory: Path, listing: list[str]) -> UnsupportedError:
    """What there is to say about a directory without safetensors."""
    others = [name for name in listing if name.endswith(OTHER_WEIGHTS)]
    pickled = any(name.endswith(PICKLES) for name in others)
    return UnsupportedError(
        "no .safetensors in this directory",
        file=directory,
        found=", ".join(others[:3]) or None,
        do=PICKLE_ADVICE if pickled else f"name {others[0]} itself" if others else "name what holds the weights",
    )


def find_index(directory: Path, listing: list[str]) -> str | None:
    """The name of the directory's index. Raises UnsupportedError when there are several and none is ``model``'s."""
    found = [name for name in listing if name.endswith(INDEX)]
    if f"model{INDEX}" in found:
        return f"model{INDEX}"
    if len(found) > 1:
        raise UnsupportedError("several indexes", file=directory, found=", ".join(found), do="keep one of them there")
    return found[0] if found else None


def read_index(directory: Path, index: str) -> dict[str, str]:
    """{tensor: shard} of an index; every shard is a plain file name. Raises CorruptError."""
    file = directory / index
    check_inside(directory, index)
    weight_map = read_json(file, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError("the index has no weight_map", file=file, found=strict_json.kind(weight_map))
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptError("a shard's name is not a string", file=file, tensor=name, found=strict_json.kind(shard))
        if not shard.endswith(WEIGHTS) or shard.startswith(".") or any(c in "/\\:\0" for c in shard):
            raise CorruptError(
                "not a shard's name",
                file=file,
                tensor=shown(name),
                found=repr(shown(shard)),
                need=f"a plain file name ending in {WEIGHTS}",
                do="do not trust this checkpoint",
            )
    return weight_map


def inside(directory: Path, name: str) -> bool:
    """Whether a file, its links followed, lies in its directory or in the blobs of that Hugging Face cache entry."""
    root = Path(os.path.realpath(directory))
    target = Path(os.path.realpath(root / name))
    if target.is_relative_to(root):
        return True
    repository = root.parent.parent
    cached = root.parent.name == "snapshots" and repository.name.startswith("models--")
    return cached and target.is_relative_to(repository / "blobs")


def check_inside(directory: Path, name: str) -> None:
    """Refuse a file that a link takes out of its directory. Raises CorruptError."""
    if not inside(directory, name):
        raise CorruptError(
            "a link that leads out of its directory",
            file=directory / name,
            found=os.path.realpath(directory / name),
            do="put the file itself there",
        )
    if not os.path.exists(directory / name):
        raise CorruptError("a link to nothing", file=directory / name, do="download the file again")


def read_json(file: Path, limit: int) -> dict[str, Any]:
    """A config or an index of at most ``limit`` bytes. Raises CorruptError; WarptileError where it cannot be read."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CorruptError("not a regular file", file=file)
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size > limit:
                raise CorruptError("too long for JSON", file=file, found=f"{size} bytes", need=f"<= {limit}")
            data = f.read(size)
            if (values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_VALUES:
                raise CorruptError("too many values for JSON", file=file, found=values, need=f"<= {MAX_VALUES}")
    except OSError as e:
        raise WarptileError("cannot be read", file=file, found=e.strerror) from None
    return strict_json.parse(data, file, "it", constants=True)
