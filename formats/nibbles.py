"""Codes of four bits, two a byte along k with the even one low, and a grid of scales: what MXFP4 and NVFP4 share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks
from .bits import split_nibbles
from .canonical import ELEMENTS, Level, QuantTensor
from .container import Tensor
from .errors import CorruptError
from .moves import NIBBLES
from .rows import unpack_columns
from .stream import Blocks, Stream, hollow

Array = NDArray[Any]


@dataclass(frozen=True)
class Parts:
    """One module as its headers describe it."""

    packed: Tensor
    """U8 [(E,) n, k / 2], or k in blocks over two axes."""
    scale: Tensor
    bias: Tensor | None
    kept: Mapping[str, Tensor]
    """What belongs to the module and says nothing of its weights, by suffix."""
    lead: list[int]
    n: int
    k: int
    source: Mapping[str, Any]

    @property
    def experts(self) -> int | None:
        return self.lead[0] if self.lead else None

    @property
    def bias_dtype(self) -> str | None:
        return None if self.bias is None else self.bias.dtype.lower()

    def residue(self) -> tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]:
        """The kept tensors as an ``Outline`` lists them."""
        return tuple((suffix, t.array().dtype, t.shape) for suffix, t in self.kept.items())

    def rows(self, expert: int, rows: slice) -> Array:
        """uint8 [rows, k / 2]."""
        return self.packed.array().reshape(-1, self.n, self.k // 2)[expert, rows]

    def slab(self, expert: int, rows: slice, columns: slice) -> Array:
        """The codes of a rectangle, as a ``Stream`` gives them."""
        stored = self.rows(expert, rows)
        if self.k % 8 == 0:
            return unpack_columns(stored.view(np.uint32), 4, 4 * np.arange(columns.start, columns.stop))
        codes = split_nibbles(stored[:, columns.start // 2 : -(-columns.stop // 2)])
        return codes[:, columns.start % 2 :][:, : columns.stop - columns.start]

    def stream(self, *scales: Level) -> Stream:
        """The module with its codes as they are stored."""
        return Stream(self.tensor(*scales), self.slab, along=0, blocks=Blocks(NIBBLES, self.rows))

    def codes_at(self, positions: Array) -> Array:
        """The codes at flat positions of [(E,) n, k]."""
        pairs = self.packed.array().reshape(-1)[positions // 2]
        codes: Array = pairs >> (4 * (positions % 2)).astype(np.uint8) & 0x0F
        return codes

    def tensor(self, *scales: Level, residue: Mapping[str, Array] | None = None) -> QuantTensor:
        """The module without its codes; ``residue`` beside what is kept."""
        return QuantTensor(
            element=ELEMENTS["e2m1"],
            codes=hollow(*self.lead, self.n, self.k),
            scales=scales,
            bias=checks.bias_values(self.bias),
            source=self.source,
            residue={suffix: t.array() for suffix, t in self.kept.items()} | dict(residue or {}),
        )


def extents(tensor: Tensor, logical: Tensor | None) -> tuple[list[int], int, int]:
    """(experts or nothing, n, k) of u8 [(E,) n, k / 2]; ``logical`` is its stored shape, if any.

    Raises CorruptError.
    """
    if len(tensor.shape) not in (2, 3) or 0 in tensor.shape:
        raise CorruptError("not a matrix", file=tensor.file, tensor=tensor.name, found=list(tensor.shape))
    *lead, n, k = *tensor.shape[:-1], 2 * tensor.shape[-1]
    if logical is not None:
        checks.dtype(logical, "I64", "I32", "U64", "U32")
    if logical is not None and (said := [int(d) for d in logical.array().reshape(-1)]) != [*lead, n, k]:
        odd = bool(said) and said[-1] % 2 == 1
        raise CorruptError(
            "an odd number of input channels cannot be packed two a byte" if odd else "shapes disagree",
            file=tensor.file,
            tensor=logical.name,
            found=said,
            need=f"{[*lead, n, k]} for {list(tensor.shape)} bytes of {tensor.name}",
        )
    return lead, n, k
