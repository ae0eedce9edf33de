"""Random quantised linears, and artifacts that exist in memory only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES, Level, QuantTensor
from warptile.formats.container import Checkpoint
from warptile.kernels import marlin

ACTIVATION = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


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

    def __init__(self, quants: Mapping[str, QuantTensor], plain: Mapping[str, np.ndarray]) -> None:
        packed = {name: marlin.pack(q) for name, q in quants.items()}
        self.modules = {name: spec for name, (_, spec) in packed.items()}
        self._tensors = {name: tensors for name, (tensors, _) in packed.items()}
        names = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int32": "I32", "float8_e4m3fn": "F8_E4M3"}
        tensors = {name: Plain(name, data, names[data.dtype.name]) for name, data in plain.items()}
        self.checkpoint = Checkpoint(Path("in-memory.safetensors"), tensors)
        self.passthrough, self.source_metadata = tuple(tensors), {}

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return self._tensors[name]

    def quant(self, name: str) -> QuantTensor:
        return marlin.unpack(self._tensors[name], self.modules[name])


@dataclass(frozen=True)
class Case:
    """One kind of linear; ``dtype`` is the activations'."""

    element: str = "u4b8"
    zero: bool = False
    scale: str = "f16"
    group: int = 32
    order: bool = False
    bias: str | None = None
    n: int = 72
    k: int = 200
    experts: int | None = None
    dtype: str = "float16"
    seed: int = 0

    def __str__(self) -> str:
        parts = [self.element, "zero" * self.zero, self.scale, f"g{self.group}", "order" * self.order]
        return "-".join([*filter(None, parts), f"bias_{self.bias}" if self.bias else "nobias", f"{self.n}x{self.k}"])


def random_quant(case: Case) -> QuantTensor:
    rng = np.random.default_rng(case.seed)
    lead = () if case.experts is None else (case.experts,)
    element = ELEMENTS[case.element]
    block = case.k if case.group == -1 else case.group
    grid = (*lead, case.n, -(-case.k // block))
    scales = (rng.uniform(0.005, 0.02, grid) * rng.choice([-1, 1], grid)).astype(SCALE_DTYPES[case.scale])
    return QuantTensor(
        element=element,
        codes=rng.integers(0, 2**element.bits, (*lead, case.n, case.k), dtype=np.uint8),
        scales=(Level(scales, (1, block)),),
        zero=rng.integers(0, 2**element.bits, grid, dtype=np.uint8) if case.zero else None,
        perm=rng.permutation(case.k).astype(np.int32) if case.order else None,
        bias=None if case.bias is None else rng.standard_normal((*lead, case.n)).astype(SCALE_DTYPES[case.bias]),
    ).check()


def random_x(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ACTIVATION[dtype])
