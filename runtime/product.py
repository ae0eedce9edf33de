"""What one call asks for, once it has been checked: the product a backend carries out, and x in 8 bits to share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from ..formats.errors import UnsupportedError
from ..kernels.launch import NUMERICS
from .arrays import Kind, Operand
from .catalog import Module


class Quantized:
    """x [.., k] in 8 bits on one stream: what ``Session.quantize`` gives and ``Session.linear`` takes in x's place.

    It holds the values that x had at the call. Its memory counts as the session's scratch, and goes back to it when the
    handle is closed or forgotten; memory that a captured graph uses stays with the graph.
    """

    def __init__(
        self, owner: Any, kind: Kind, x: Operand, numerics: str, lane: Any, memory: Any, release: Callable[[], None]
    ) -> None:
        self.numerics, self.shape, self.dtype = numerics, x.shape, x.dtype
        self.owner, self.kind, self.x, self.lane, self.memory = owner, kind, x, lane, memory
        self._release = weakref.finalize(self, release)
        self._release.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; the handle cannot be used any more."""
        self.memory = None
        self._release()

    def check(self, owner: Any, name: str, k: int, numerics: str | None) -> None:
        """Refuse a use that was not meant. Raises ValueError, or RuntimeError where the memory is gone."""
        if self.owner is not owner:
            raise ValueError(f"{name}: x was quantized by another session; use this one's quantize()")
        if self.memory is None:
            raise RuntimeError(f"{name}: the quantized x was closed; call quantize() again")
        if self.shape[-1] != k:
            raise ValueError(f"{name}: x was quantized with shape {list(self.shape)}; need [.., {k}]")
        if numerics not in (None, self.numerics):
            raise ValueError(f"{name}: x was quantized to {self.numerics}, numerics is {numerics}; need the same")


@dataclass(frozen=True)
class Product:
    """y = x @ W.T (+ bias) (+ residual), all of it checked.

    With ``quantized``, ``x`` has a shape, a type and a place, but no memory.
    """

    module: Module
    kind: Kind
    x: Operand
    out: Operand | None = None
    expert: int | None = None
    numerics: str | None = None
    quantized: Quantized | None = None
    residual: Operand | None = None
    rounding: str = "once"


@dataclass(frozen=True)
class Pair:
    """y = silu(x @ G.T) * (x @ U.T), all of it checked: both products have the same x, and no ``out`` of their own."""

    gate: Product
    up: Product
    out: Operand | None = None


def check_numerics(module: Module, numerics: str | None) -> None:
    """Raises ValueError for a name that is none, UnsupportedError where the module's layout cannot do it."""
    if numerics is None:
        return
    if numerics not in NUMERICS:
        raise ValueError(f"numerics is {numerics!r}; need {', '.join(NUMERICS)} or None")
    known = module.numerics
    if numerics not in known:
        what = "weights that passed through conversion" if module.layout is None else f"{module.layout} modules"
        raise UnsupportedError(
            f"{what} do not multiply with {numerics} activations",
            tensor=module.name,
            found=f"numerics {numerics}",
            need=f"{' or '.join(known)}, or None",
        )
