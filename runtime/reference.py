"""The NumPy backend: exact and slow. The product of the decoded weights in float64, rounded once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.quantize import KINDS, dequantize, quantize
from ..kernels.swiglu import swiglu
from .arrays import ACTIVATIONS, Kind, Operand, borrowed, host_view
from .catalog import Catalog, Module
from .product import Pair, Product, Quantized

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

    def __init__(self, catalog: Catalog, why: str, batch_invariant: bool = False) -> None:
        self.catalog, self._invariant = catalog, batch_invariant
        announce(why)

    def linear(self, p: Product) -> Any:
        _on_host(p.module.name, x=p.x, out=p.out, residual=p.residual)
        return _delivered(self._product(p), p, p.out)

    def swiglu(self, p: Pair) -> Any:
        _on_host(p.gate.module.name, x=p.gate.x, out=p.out)
        return _delivered(swiglu(self._product(p.gate), self._product(p.up)), p.gate, p.out)

    def _product(self, p: Product) -> Array:
        """y [.., n], rounded."""
        weight, bias = self.catalog.decoded(p.module, expert=p.expert)
        to = ACTIVATIONS[p.x.dtype]
        y = self._multiply(self._values(p), weight)
        with np.errstate(over="ignore"):
            for more in (bias, None if p.residual is None else host_view(p.residual)):
                if more is not None:
                    y = (y.astype(to).astype(np.float64) if p.rounding == "each" else y) + more.astype(np.float64)
            rounded: Array = y.astype(to)
        return rounded

    def _multiply(self, x: Array, weight: Array) -> Array:
        """x [.., k] @ weight [n, k].T; row by row where no row may depend on how many there are."""
        if not self._invariant:
            return np.asarray(x @ weight.T)
        y = np.empty((*x.shape[:-1], len(weight)))
        for row in np.ndindex(x.shape[:-1]):
            y[row] = weight @ x[row]
        return y

    def _values(self, p: Product) -> Array:
        """x as the product sees it, float64 [.., k]."""
        handle = p.quantized or (self.quantize(p.kind, p.x, p.numerics) if p.numerics in KINDS else None)
        return host_view(p.x).astype(np.float64) if handle is None else handle.memory

    def quantize(self, kind: Kind, x: Operand, numerics: str) -> Quantized:
        """The handle holds d * q in float64."""
        _on_host("quantize", x=x)
        rows = host_view(x).reshape(x.rows, x.shape[-1])
        values = dequantize(*quantize(rows, numerics), numerics, x.shape[-1]).reshape(x.shape)
        return Quantized(self, kind, borrowed(x), numerics, None, values, lambda: None)

    def dequantize(self, module: Module) -> Array:
        return self.catalog.decoded(module, np.float32)[0]

    def tensor(self, name: str) -> Array:
        return self.catalog.tensor(name)

    def explain(self, module: Module, m: int, dtype: str, numerics: str | None) -> tuple[str, ...]:
        x = f" and of x in 8 bits ({numerics})" if numerics in KINDS else ""
        return (f"reference backend: float64 product of the decoded weights{x} on the host, rounded once",)

    def explain_pair(self, gate: Module, up: Module, m: int, dtype: str) -> tuple[str, ...]:
        return (
            *self.explain(gate, m, dtype, None),
            "both rounded, then silu of the first times the second in fp32",
        )

    def load(self, modules: Sequence[Module]) -> None:
        """Nothing to upload."""

    def prepare(
        self, modules: Sequence[Module], ms: Sequence[int], dtypes: Sequence[str], numerics: str | None
    ) -> None:
        """Nothing to compile or allocate."""

    def prepare_pairs(self, pairs: Sequence[tuple[Module, Module]], ms: Sequence[int], dtypes: Sequence[str]) -> None:
        """Nothing to compile or allocate."""

    def release(self) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is held."""


def _delivered(y: Array, p: Product, out: Operand | None) -> Any:
    """y where the caller wants it."""
    if out is not None:
        host_view(out)[...] = y
        return out.owner
    result = p.kind.empty(y.shape, p.x.dtype, p.x.owner)
    host_view(p.kind.target(result))[...] = y
    return p.kind.deliver(result, p.x.owner)


def _on_host(name: str, **operands: Operand | None) -> None:
    for what, operand in operands.items():
        if operand is not None and operand.device is not None:
            raise ValueError(f"{name}: {what} is on cuda:{operand.device}, this session on the cpu; move it")
