"""The shapes the tables use (Llama-class projections), and the bytes one product must move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    n: int
    k: int

    def bytes(self, m: int, bits: int, group: int, scale_bytes: int = 2) -> int:
        """Each weight, scale, activation and output once; activations and outputs in 16 bit."""
        groups = 1 if group == -1 else self.k // group
        return self.n * self.k * bits // 8 + self.n * groups * scale_bytes + 2 * m * (self.n + self.k)


SHAPES = (Shape(4096, 4096), Shape(14336, 4096), Shape(28672, 8192))
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
