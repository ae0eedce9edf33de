"""GGUF files written from the format's description alone, right or wrong in any one place."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

SCALARS = {"u8": (0, "B"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "u16": (2, "H"), "u64": (10, "Q")}
# Type -> (id, weights of a block, bytes of a block)
TYPES = {
    **{"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "I32": (26, 1, 4), "F64": (28, 1, 8)},
    **{"Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q2_K": (10, 256, 84)},
    **{"TQ1_0": (34, 256, 54), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36)},
}


@dataclass(frozen=True)
class Stored:
    """A tensor as a header states it; ``ne`` runs fastest first. None: what is right."""

    name: str
    type: str
    ne: Sequence[int]
    data: bytes | None = None
    """Zeros when None."""
    offset: int | None = None
    id: int | None = None
    dims: int | None = None

    @property
    def nbytes(self) -> int:
        _, size, nbytes = TYPES[self.type]
        return prod(self.ne) // size * nbytes


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(kind: str, content: Any) -> bytes:
    """i32 type and value: a scalar of SCALARS, ``string``, ``strings``, or ``<scalar>s`` for an array."""
    if kind == "string":
        return struct.pack("<i", 8) + text(content)
    if kind == "strings":
        return struct.pack("<iiQ", 9, 8, len(content)) + b"".join(map(text, content))
    if kind == "raw":
        return bytes(content)
    if kind in SCALARS:
        number, code = SCALARS[kind]
        return struct.pack(f"<i{code}", number, content)
    number, code = SCALARS[kind[:-1]]
    return struct.pack("<iiQ", 9, number, len(content)) + struct.pack(f"<{len(content)}{code}", *content)


def content(
    tensors: Sequence[Stored] = (),
    pairs: Mapping[str, tuple[str, Any]] | Sequence[tuple[str, tuple[str, Any]]] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A whole file. ``alignment`` is that of the bytes; the key is one of ``pairs`` where it is needed."""
    items = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    n_tensors, n_pairs = counts or (len(tensors), len(items))
    out = b"GGUF" + struct.pack("<Iqq", version, n_tensors, n_pairs)
    out += b"".join(text(key) + value(*said) for key, said in items)
    running, data = 0, b""
    for t in tensors:
        dims = len(t.ne) if t.dims is None else t.dims
        number = TYPES[t.type][0] if t.id is None else t.id
        out += text(t.name) + struct.pack(f"<I{len(t.ne)}q", dims, *t.ne)
        out += struct.pack("<iQ", number, running if t.offset is None else t.offset)
        if t.data is not None or t.nbytes < 1 << 20:
            stored = bytes(t.nbytes) if t.data is None else t.data
            data += stored + bytes(-len(stored) % alignment)
            running += len(stored) + -len(stored) % alignment
    return out + bytes(-len(out) % alignment) + data


def write(path: Path, *args: Any, **kwargs: Any) -> Path:
    path.write_bytes(content(*args, **kwargs))
    return path


def model(architecture: str = "llama", **numbers: Any) -> dict[str, tuple[str, Any]]:
    """Key-values of a model: ``head_count=4`` and the like, under ``<architecture>.attention.``."""
    pairs: dict[str, tuple[str, Any]] = {"general.architecture": ("string", architecture)}
    for key, number in numbers.items():
        pairs[f"{architecture}.attention.{key}"] = ("i32s" if isinstance(number, list) else "u32", number)
    return pairs
