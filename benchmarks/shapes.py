"""The shapes the tables use (Llama-class projections)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    n: int
    k: int


SHAPES = (Shape(4096, 4096), Shape(14336, 4096), Shape(28672, 8192))
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
