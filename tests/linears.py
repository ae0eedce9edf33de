"""Random quantised linears, and artifacts that exist in memory only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES, Level, QuantTensor, from_shards
from warptile.formats.container import Checkpoint
from warptile.formats.stream import Stream, streamed
from warptile.kernels import marlin

ACTIVATION = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The 16-bit ones."""


@dataclass(frozen=True)
class Plain:
    """A pass-through tensor as a checkpoint lists it."""

    name: str
    data: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def array(self) -> np.ndarray:
        return self.data


class InMemory:
    """What ``open_artifact`` would give for these modules and pass-through tensors."""

    def __init__(
        self, quants: Mapping[str, QuantTensor], plain: Mapping[str, np.ndarray], layout: ModuleType = marlin
    ) -> None:
        self.layout = layout
        packed = {name: layout.pack(q) for name, q in quants.items()}
        self.modules = {name: spec for name, (_, spec) in packed.items()}
        self._tensors = {name: tensors for name, (tensors, _) in packed.items()}
        names = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int32": "I32", "float8_e4m3fn": "F8_E4M3"}
        tensors = {name: Plain(name, data, names[data.dtype.name]) for name, data in plain.items()}
        self.checkpoint = Checkpoint(Path("in-memory.safetensors"), tensors)
        self.passthrough, self.source_metadata = tuple(tensors), {}

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return self._tensors[name]

    def quant(self, name: str) -> QuantTensor:
        q: QuantTensor = self.layout.unpack(self._tensors[name], self.modules[name])
        return q

    def stream(self, name: str) -> Stream:
        return streamed(self.quant(name))


@dataclass(frozen=True)
class Case:
    """One kind of linear; ``dtype`` is the activations'. ``rows`` share a scale, 0: all do; ``low`` to ``high`` are
    scales, or codes of 8-bit scales; ``whole`` adds a float32 for all of them, or for each of ``shards``."""

    element: str = "u4b8"
    zero: bool = False
    scale: str = "f16"
    group: int = 32
    rows: int = 1
    whole: bool = False
    shards: tuple[int, ...] = ()
    low: float = 0.005
    high: float = 0.02
    order: bool = False
    bias: str | None = None
    n: int = 72
    k: int = 200
    experts: int | None = None
    dtype: str = "float16"
    seed: int = 0

    def __str__(self) -> str:
        rows = "" if self.rows == 1 else f"rows_{self.rows or 'all'}"
        parts = [self.element, "zero" * self.zero, self.scale, f"g{self.group}", rows, "whole" * self.whole]
        parts += [f"shards_{len(self.shards)}" * bool(self.shards), "order" * self.order]
        return "-".join([*filter(None, parts), f"bias_{self.bias}" if self.bias else "nobias", f"{self.n}x{self.k}"])


def _scales(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    dtype = SCALE_DTYPES[case.scale]
    if dtype.itemsize == 1:
        return rng.integers(int(case.low), int(case.high), shape, dtype=np.uint8).view(dtype)
    return (rng.uniform(case.low, case.high, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def random_quant(case: Case) -> QuantTensor:
    rng = np.random.default_rng(case.seed)
    lead = () if case.experts is None else (case.experts,)
    element = ELEMENTS[case.element]
    block = case.k if case.group == -1 else case.group
    parts = (*lead, len(case.shards) or 1, 1)
    if case.shards and not case.whole:
        levels = [from_shards(_scales(case, rng, parts), case.shards, case.k)]
    else:
        rows = case.rows or case.n
        levels = [Level(_scales(case, rng, (*lead, -(-case.n // rows), -(-case.k // block))), (rows, block))]
    grid = levels[0].data.shape
    if case.whole:
        data = rng.uniform(0.3, 3, parts).astype(np.float32)
        levels.append(from_shards(data, case.shards, case.k) if case.shards else Level(data, (case.n, case.k)))
    codes = np.flatnonzero(np.isfinite(element.values())).astype(np.uint8)
    return QuantTensor(
        element=element,
        codes=rng.choice(codes, (*lead, case.n, case.k)),
        scales=tuple(levels),
        zero=rng.integers(0, 2**element.bits, grid, dtype=np.uint8) if case.zero else None,
        perm=rng.permutation(case.k).astype(np.int32) if case.order else None,
        bias=None if case.bias is None else rng.standard_normal((*lead, case.n)).astype(SCALE_DTYPES[case.bias]),
    ).check()


def random_x(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ACTIVATION.get(dtype, dtype))
