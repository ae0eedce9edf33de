"""What an artifact can multiply with, by name: converted modules, and passed-through ones that can be decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import sources
from ..formats.artifact import Artifact
from ..formats.canonical import Outline, QuantTensor, dequantize
from ..formats.container import Checkpoint
from ..formats.errors import WarptileError
from ..formats.joining import pick
from ..formats.parts import parts
from ..formats.stream import Stream, whole
from ..kernels import layouts

Array = NDArray[Any]

PLAIN = {"F16": "f16", "BF16": "bf16", "F32": "f32"}


@dataclass(frozen=True)
class Module:
    """A linear of ``n`` outputs and ``k`` inputs. ``layout`` is None when it passed through conversion as it was."""

    name: str
    n: int
    k: int
    experts: int | None
    element: str
    """``u4b8``, ``u8``, ...; for plain weights their dtype."""
    layout: str | None
    group: int | None = None
    scale: str | None = None
    zero: bool = False
    act_order: bool = False
    bias: bool = False
    numerics: tuple[str, ...] = ("exact",)
    """What ``Session.linear`` may be asked for: x as it is, or in 8 bits."""
    stored_in: str | None = None
    """The module it is a part of, where conversion grouped it with others."""
    rows: tuple[int, int] | None = None
    """Which of that module's outputs are its own: first, and one past the last."""
    expert: int | None = None
    """Which of that module's experts it is."""


def _converted(name: str, spec: dict[str, Any]) -> Module:
    return Module(
        name=name,
        n=spec["n"],
        k=spec["k"],
        experts=spec["experts"],
        element=spec["element"],
        layout=spec["layout"],
        group=spec["group"],
        scale=spec["scale"],
        zero=spec["zero"] is not None,
        act_order=bool(spec["perm"]),
        bias=bool(spec["bias"]),
        numerics=layouts()[spec["layout"]].numerics(spec),
    )


def _views(whole: Module, spec: dict[str, Any]) -> Iterator[Module]:
    """The linears that a module of several was made of, under their own names."""
    for part in parts(whole.name, spec) if "parts" in spec else ():
        yield replace(
            whole,
            name=part.name,
            n=part.rows.stop - part.rows.start,
            experts=whole.experts if part.expert is None else None,
            element=part.symmetric or whole.element,
            zero=whole.zero and part.symmetric is None,
            stored_in=whole.name,
            rows=(part.rows.start, part.rows.stop),
            expert=part.expert,
        )


def _foreign(name: str, q: Outline) -> Module:
    return Module(
        name=name,
        n=q.n,
        k=q.k,
        experts=q.experts,
        element=q.element.name,
        layout=None,
        group=q.group,
        scale=q.scales[0][0],
        zero=q.zero_max is not None or bool(q.offsets),
        act_order=q.perm,
        bias=bool(q.bias),
    )


class Catalog:
    """The linears and pass-through tensors of one artifact; reads no weights until asked."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._rest = _untouched(artifact)
        self._readers: dict[str, ModuleType] = {}
        self._refused: dict[str, WarptileError] = {}
        self.modules = {name: _converted(name, spec) for name, spec in artifact.modules.items()}
        views = [view for name, spec in artifact.modules.items() for view in _views(self.modules[name], spec)]
        self.modules |= {view.name: view for view in views}
        for source in sources().values():
            for name in source.modules(self._rest):
                self._readers[name] = source
                try:
                    self.modules[name] = _foreign(name, source.describe(self._rest, name))
                except WarptileError as error:
                    self._refused[name] = error
        tensors = self._rest.tensors
        for full, tensor in tensors.items():
            name = full.removesuffix(".weight")
            if (
                name != full
                and name not in self.modules
                and name not in self._readers
                and tensor.dtype in PLAIN
                and len(tensor.shape) == 2
            ):
                n, k = tensor.shape
                self.modules[name] = Module(name, n, k, None, PLAIN[tensor.dtype], None, bias=f"{name}.bias" in tensors)

    def module(self, name: str) -> Module:
        """By name, with or without ``.weight``. Raises TypeError, KeyError naming close matches, or what its reader
        refused."""
        if not isinstance(name, str):
            raise TypeError(f"a linear's name is a string, not {type(name).__name__}")
        short = name.removesuffix(".weight")
        found = self.modules.get(name) or self.modules.get(short) or self.modules.get(f"{name}.weight")
        if found is not None:
            return found
        if short in self._refused:
            raise self._refused[short]
        raise KeyError(_unknown("linear", name, self.modules))

    def stored(self, module: Module) -> Module:
        """The module that holds a linear: most often itself."""
        return module if module.stored_in is None else self.modules[module.stored_in]

    def tensor(self, name: str) -> Array:
        """A pass-through tensor as it is stored, memory mapped. Raises KeyError naming close matches."""
        tensors = self._rest.tensors
        if name not in tensors:
            raise KeyError(_unknown("pass-through tensor", name, tensors))
        array: Array = tensors[name].array()
        return array

    def stream(self, module: Module) -> Stream | None:
        """The canonical form, its codes by the slab; None for plain weights."""
        if module.layout is not None:
            return self.artifact.stream(module.name)
        if module.name in self._readers:
            stream: Stream = self._readers[module.name].stream(self._rest, module.name)
            return stream
        return None

    def quant(self, module: Module) -> QuantTensor | None:
        """The canonical form, or None for plain weights."""
        stream = self.stream(module)
        return None if stream is None else whole(stream)

    def plain(self, module: Module) -> tuple[Array, Array | None]:
        """Weights [n, k] and bias [n] of a plain module, as stored."""
        return self.tensor(f"{module.name}.weight"), self.tensor(f"{module.name}.bias") if module.bias else None

    def decoded(self, module: Module, dtype: Any = np.float64, expert: int | None = None) -> tuple[Array, Array | None]:
        """Weights [(E,) n, k], or [n, k] of one expert, in logical order, rounded once to ``dtype``, and the bias as
        stored."""
        stream = self.stream(module)
        if stream is not None:
            q = whole(stream if expert is None else pick(stream, expert))
            return dequantize(q, dtype), q.bias
        weight, bias = self.plain(module)
        return weight.astype(dtype), bias


def _untouched(artifact: Artifact) -> Checkpoint:
    """What passed through conversion, as the source's own reader would have seen it."""
    checkpoint = artifact.checkpoint
    return replace(
        checkpoint,
        tensors={name: checkpoint.tensors[name] for name in artifact.passthrough},
        quantization=checkpoint.quantization.get("source", {}),
        metadata=artifact.source_metadata,
        file_metadata={},
    )


def _unknown(what: str, name: str, known: dict[str, Any]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)[:3]
    return f"no {what} named {name!r}; close: {', '.join(close) or 'none, there are no such names'}"
