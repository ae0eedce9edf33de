"""The smallest and the most ragged products: right on every device, and for compute-sanitizer on a GPU.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -q -m memcheck

On a GPU every tensor of a module, x and y lie in allocations of their own without a pool, as long as the runtime
promises its kernels and no longer: whatever is read or written beside them is an error of the sanitizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from linears import ACTIVATION, Case, InMemory, random_quant, random_x
from numpy.lib.stride_tricks import as_strided
from strip_linears import assert_is_in_8_bits, random_rows, random_strips
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.kernels import mmq
from warptile.runtime import Session, load

DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.memcheck])]
TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3}
# One row, one input; odd ones; one more than a tile of rows and of inputs, of either kernel.
SHAPES = ((1, 1), (1, 40), (33, 17), (65, 129), (130, 300))
MS = (1, 3, 8, 9, 16, 17, 32, 65)
STRIP_MS = (1, 2, 5, 8, 9, 33)

KINDS = {
    "u4b8 f16 g32": Case("u4b8", group=32, bias="f16"),
    "u4 bf16 g64, in order": Case("u4", zero=True, scale="bf16", group=64, order=True, bias="f32"),
    "u8b128 f32 g-1": Case("u8b128", scale="f32", group=-1),
    "u8 f16 g16": Case("u8", zero=True, group=16, bias="bf16"),
    "e4m3 blocks": Case("e4m3", scale="f32", group=128, rows=128, bias="bf16"),
    "e4m3 whole": Case("e4m3", scale="bf16", group=-1, rows=0),
    "e2m1 e8m0": Case("e2m1", scale="e8m0", low=115, high=123, bias="f32"),
    "e2m1 e4m3": Case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=60),
}
STRIPS = tuple(mmq.KINDS)


@contextmanager
def apart() -> Iterator[None]:
    """cupy without its pool, and each tensor of a module in memory of its own."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    pooled = cupy.cuda.get_allocator()

    def upload(self: load.Uploader, name: str, tensors: Mapping[str, Any], stacked: Mapping[str, bool]) -> load.Weights:
        held = {s: load.allocate(-(-a.nbytes // load.ALIGN) * load.ALIGN, f"{name}.{s}") for s, a in tensors.items()}
        for suffix, array in tensors.items():
            self.copy(held[suffix].ptr, array)
        steps = {s: array.nbytes // array.shape[0] if stacked[s] else 0 for s, array in tensors.items()}
        total = sum(memory.size for memory in held.values())
        return load.Weights(tuple(held.values()), total, {s: memory.ptr for s, memory in held.items()}, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.Uploader, "upload", upload)
        cupy.cuda.set_allocator(None)
        try:
            yield
        finally:
            cupy.cuda.set_allocator(pooled)


class Here:
    """A session on a device, fed from and read back to the host."""

    def __init__(self, device: str, q: QuantTensor, layout: Any = None) -> None:
        self._device, self._q, self._layout = device, q, layout

    def __enter__(self) -> Here:
        artifact = InMemory({"p": self._q}, {}, *([self._layout] if self._layout else []))
        self._apart = None if self._device == "cpu" else apart()
        if self._apart is not None:
            self._apart.__enter__()
        self._session = Session(artifact, device=self._device).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._session.__exit__(*error)
        if self._apart is not None:
            self._apart.__exit__(*error)

    def times(self, x: np.ndarray, beside: int = 0, **more: Any) -> np.ndarray:
        """y, in memory of exactly its size; with ``beside`` x begins off its alignment, in longer rows."""
        m, k = x.shape
        rows, where = np.zeros(m * (k + beside), x.dtype), ((m, k), (x.itemsize * (k + beside), x.itemsize))
        as_strided(rows[beside:], *where)[...] = x
        if self._device == "cpu":
            y = np.empty((m, self._q.n), x.dtype)
            self._session.linear("p", as_strided(rows[beside:], *where), out=y, **more)
            return y
        import cupy

        flat = cupy.asarray(rows.view(np.uint16)).view(x.dtype)
        there = cupy.lib.stride_tricks.as_strided(flat[beside:], *where)
        out = cupy.empty((m, self._q.n), cupy.uint16).view(x.dtype)
        self._session.linear("p", there, out=out, **more)
        return out.view("uint16").get().view(x.dtype)


def assert_close(y: np.ndarray, q: QuantTensor, x: np.ndarray, expert: int | None = None) -> None:
    w, bias = dequantize(q, np.float64), 0 if q.bias is None else np.float64(q.bias)
    if expert is not None:
        w, bias = w[expert], bias[expert]
    want = np.float64(x) @ w.T + bias
    error = np.linalg.norm(np.float64(y) - want) / max(np.linalg.norm(want), 1e-300)
    assert error <= TOLERANCE[x.dtype.name], f"error {error:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_every_kind(kind: str, shape: tuple[int, int], device: str) -> None:
    n, k = shape
    case = KINDS[kind]
    q = random_quant(Case(**{**vars(case), "n": n, "k": k, "seed": n}))
    dtype = list(ACTIVATION)[(n + len(kind)) % 2]
    with Here(device, q) as here:
        for m, beside in product(MS, (0, 1)):
            x = random_x((m, k), dtype)
            assert_close(here.times(x, beside), q, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 256), (33, 300), (130, 1100)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("kind", STRIPS)
def test_strips_of_every_kind(kind: str, shape: tuple[int, int], device: str) -> None:
    n, k = shape
    q = random_strips(kind, n, k, bias="f32", seed=n)
    numerics, loses = ("e4m3", 2.0**-10) if kind == "fp8" else ("int8", 2.0**-20)
    if device == "cpu":
        loses = 2.0**-8  # the reference multiplies minima with x as it was rounded, kernels with the sums beside it
    with Here(device, q, mmq) as here:
        for m, beside in product(STRIP_MS, (0, 1)):
            x = random_rows(m, k, list(ACTIVATION)[m % 2], seed=m)
            assert_is_in_8_bits(here.times(x, beside, numerics=numerics), q, x, loses=loses)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["u4b8 f16 g32", "e4m3 blocks", "e2m1 e4m3"])
def test_each_expert_of_a_stack(kind: str, device: str) -> None:
    q = random_quant(Case(**{**vars(KINDS[kind]), "n": 65, "k": 129, "experts": 3, "bias": "f32"}))
    with Here(device, q) as here:
        for m, expert in product((1, 9, 40), range(3)):
            x = random_x((m, 129), "float16")
            assert_close(here.times(x, expert=expert), q, x, expert)
