"""What becomes of the linears of a source: each a module for itself, or several in one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..formats.canonical import SCALE_DTYPES, Outline, grid_shape
from ..formats.stream import ACROSS, STEP
from .shards import Stored
from .workers import window

# Bytes for each code that is being worked on, at the worst moment of a pack: read, turned, padded, and the words.
CODE_COPIES = 6
BESIDE = 2
"""Slabs beside those of the window: one that is written, one of the module that is opened."""


@dataclass(frozen=True)
class Linear:
    """One quantised linear of the source."""

    name: str
    source: str
    """The source format's name in the registry."""
    members: tuple[str, ...]
    """Names of the input tensors it consumes."""
    outline: Outline
    """As read; ``--widen`` is not applied to it."""


@dataclass(frozen=True)
class Module:
    """Linears that are stored together, most often one, and what becomes of them."""

    name: str
    units: tuple[tuple[Linear, ...], ...]
    """For each expert that is a part of its own (else once) the linears side by side along n."""
    outline: Outline
    """Of a single linear as read, of several as they are stored."""
    spec: dict[str, Any] | None
    """As it stands in the artifact, ``source`` or ``parts`` and ``residue`` included; None when the layout refused."""
    refusal: str | None
    tensors: tuple[Stored, ...]
    """What is written for it: the packed tensors, or its members as they are."""

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(linear for unit in self.units for linear in unit)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Names of the input tensors it consumes."""
        return tuple(name for linear in self.linears for name in linear.members)

    @property
    def grouped(self) -> bool:
        """Whether it holds several linears, or a stack of one."""
        return self.spec is not None and "parts" in self.spec

    @property
    def stacked(self) -> bool:
        """Whether its linears are experts that are parts of their own, be it a single one."""
        return self.outline.experts != self.linears[0].outline.experts

    @property
    def source(self) -> str:
        """The source formats' names."""
        return ", ".join(dict.fromkeys(linear.source for linear in self.linears))

    @property
    def element(self) -> str:
        """As read, and as stored where that is another."""
        names = "/".join(dict.fromkeys(linear.outline.element.name for linear in self.linears))
        return names if self.spec is None or self.spec["element"] == names else f"{names} as {self.spec['element']}"

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def peak(self, workers: int) -> int:
        """An estimate of the bytes held while threads pack it, expert by expert where they are parts: some slabs of its
        codes; and its factors and whatever else is not codes, for what comes next is opened before it is done."""
        q, parts, slabs = self.outline, len(self.units), window(workers) + BESIDE
        codes = (q.experts or 1) * q.n * q.k
        rest = self.nbytes - max(t.nbytes for t in self.tensors)
        grids = (
            (SCALE_DTYPES[dtype].itemsize, grid_shape(q.n, q.k, block)) for dtype, block in (*q.scales, *q.offsets)
        )
        factors = (q.experts or 1) * sum(size * rows * columns for size, (rows, columns) in grids)
        return (CODE_COPIES * min(codes, slabs * ACROSS * STEP * parts) + 4 * max(rest, factors)) // parts
