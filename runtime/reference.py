"""The NumPy backend: exact and slow. The product of the decoded weights in float64, rounded once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import ACTIVATIONS, Kind, Operand, host_view
from .catalog import Catalog, Module

Array = NDArray[Any]


@cache
def announce(why: str) -> None:
    """Say once per process that this is not the fast path."""
    print(f"warptile: NumPy reference backend, exact and slow ({why})", file=sys.stderr)


class Reference:
    """Multiplies on the host. Nothing is cached: every call decodes the module again."""

    device = "cpu"
    scratch_bytes = 0
    weight_bytes = 0

    def __init__(self, catalog: Catalog, why: str) -> None:
        self.catalog = catalog
        announce(why)

    def linear(self, module: Module, kind: Kind, x: Operand, out: Operand | None, expert: int | None) -> Any:
        for what, operand in (("x", x), ("out", out)):
            if operand is not None and operand.device is not None:
                raise ValueError(f"{module.name}: {what} is on cuda:{operand.device}, this session on the cpu; move it")
        weight, bias = self.catalog.decoded(module)
        if expert is not None:
            weight, bias = weight[expert], None if bias is None else bias[expert]
        y = host_view(x).astype(np.float64) @ weight.T
        if bias is not None:
            y += bias.astype(np.float64)
        with np.errstate(over="ignore"):
            rounded = y.astype(ACTIVATIONS[x.dtype])
        if out is not None:
            host_view(out)[...] = rounded
            return out.owner
        result = kind.empty(y.shape, x.dtype, x.owner)
        host_view(kind.target(result))[...] = rounded
        return kind.deliver(result, x.owner)

    def dequantize(self, module: Module) -> Array:
        return self.catalog.decoded(module, np.float32)[0]

    def tensor(self, name: str) -> Array:
        return self.catalog.tensor(name)

    def explain(self, module: Module, m: int, dtype: str) -> tuple[str, ...]:
        return ("reference backend: float64 product of the decoded weights on the host, rounded once",)

    def load(self, modules: Sequence[Module]) -> None:
        """Nothing to upload."""

    def prepare(self, modules: Sequence[Module], ms: Sequence[int], dtypes: Sequence[str]) -> None:
        """Nothing to compile or allocate."""

    def release(self) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is held."""
