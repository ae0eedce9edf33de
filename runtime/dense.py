"""Modules no kernel of ours runs: decoded on the device once, then multiplied by cuBLAS with fp32 accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.canonical import Level, QuantTensor
from .cublas import WORKSPACE, Cublas
from .product import Product
from .scratch import Lane, on

Array = NDArray[Any]

CHUNK = 1 << 24
"""Weights decoded at once: eight bytes each of temporary memory."""


def decode(q: QuantTensor) -> Any:
    """float32 [(E,) n, k] cupy, logical column order, without bias: float64 inside, rounded once."""
    import cupy

    out = cupy.empty(q.codes.shape, cupy.float32)
    if q.experts is None:
        _decode_matrix(q, (), out)
    else:
        for e in range(q.experts):
            _decode_matrix(q, (e,), out[e])
    return out


def _decode_matrix(q: QuantTensor, expert: tuple[int, ...], out: Any) -> None:
    """Row chunk by row chunk, so that float64 temporaries stay small."""
    import cupy

    def grid(data: Array, block: tuple[int, int]) -> Any:
        whole = cupy.asarray(np.ascontiguousarray(data[expert]).astype(np.float64))
        return lambda rows: whole[rows[:, None] // block[0], columns // block[1]]

    def product(levels: tuple[Level, ...]) -> Any:
        grids = [grid(level.data, level.block) for level in levels]

        def at(rows: Any) -> Any:
            factor = grids[0](rows)
            for one in grids[1:]:
                factor = factor * one(rows)
            return factor

        return at

    columns = cupy.arange(q.k)
    values = cupy.asarray(q.element.values())
    to = columns if q.perm is None else cupy.asarray(np.ascontiguousarray(q.perm))
    scale = product(q.scales)
    zero = None if q.zero is None else grid(q.zero, q.scales[0].block)
    offset = product(q.offsets) if q.offsets else None
    step = max(1, CHUNK // max(q.k, 1))
    for start in range(0, q.n, step):
        stop = min(start + step, q.n)
        rows = cupy.arange(start, stop)
        w = values[cupy.asarray(np.ascontiguousarray(q.codes[expert][start:stop]))]
        if zero is not None:
            w -= zero(rows)
        w *= scale(rows)
        if offset is not None:
            w -= offset(rows)
        out[start:stop, to] = w


@cache
def _cast(name: str) -> Any:
    """Elementwise casts on bits, so that they do not depend on which 16-bit types cupy knows."""
    import cupy

    bf16 = "unsigned int u = __float_as_uint(x); u = x != x ? 0x7FC0 : (u + 0x7FFF + ((u >> 16) & 1)) >> 16;"
    f16 = 'short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h));'
    inputs, output, body = {
        "f16 to f32": ("float16 x", "float32 y", "y = x"),
        "bf16 to f32": ("uint16 x", "float32 y", "y = __uint_as_float((unsigned int)x << 16)"),
        "f32 to f32": ("float32 x", "float32 y", "y = x"),
        "f32 to f16": ("float32 x", "float16 y", "y = x"),
        "f32 to bf16": ("float32 x", "uint16 y", f"{bf16} y = u"),
        "f32 through f16": ("float32 x", "float32 y", f16),
        "f32 through bf16": ("float32 x", "float32 y", f"{bf16} y = __uint_as_float(u << 16)"),
        "f16 added": ("float16 x", "float32 y", "y += float(x)"),
        "bf16 added": ("uint16 x", "float32 y", "y += __uint_as_float((unsigned int)x << 16)"),
        "f32 added": ("float32 x", "float32 y", "y += x"),
    }[name]
    return cupy.ElementwiseKernel(inputs, output, body, "warptile_" + name.replace(" ", "_"))


BITS = {"f16": "float16", "bf16": "uint16", "f32": "float32"}
"""The cupy types that the casts take."""


def view(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, owner: Any) -> Any:
    """A cupy array over borrowed memory; ``strides`` in elements."""
    import cupy

    item = np.dtype(dtype).itemsize
    span = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    memory = cupy.cuda.UnownedMemory(pointer, max(span, 1) * item, owner, cupy.cuda.Device().id)
    memptr = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, np.dtype(dtype), memptr, tuple(step * item for step in strides))


@dataclass(frozen=True)
class Dense:
    """Weights [(E,) n, k] in ``dtype`` (x's type, or f32), and the bias in f32."""

    weight: Any
    dtype: str
    bias: Any

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))


def bias_of(bias: Array | None) -> Any:
    """A stored bias as float32 on the device."""
    import cupy

    return None if bias is None else cupy.asarray(np.ascontiguousarray(bias).astype(np.float32))


def dense(w: Any, bias: Array | None, dtype: str) -> Dense:
    """float32 weights as x's type ``dtype``, or as they are when that type cannot hold them to its own precision."""
    import cupy

    if dtype == "f32":
        return Dense(w, "f32", bias_of(bias))
    narrow = cupy.empty(w.shape, BITS[dtype])
    _cast(f"f32 to {dtype}")(w, narrow)
    back = cupy.empty_like(w)
    _cast(f"{dtype} to f32")(narrow, back)
    half_ulp = {"f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
    fits = bool(cupy.isfinite(back).all())
    if fits and float(cupy.linalg.norm((back - w).ravel())) <= half_ulp * float(cupy.linalg.norm(w.ravel())):
        return Dense(narrow, dtype, bias_of(bias))
    return Dense(w, "f32", bias_of(bias))


def multiply(cublas: Cublas, d: Dense, p: Product, lane: Lane, stream: int) -> None:
    """p's y on a stream, into ``p.out``; x, y and residual are matrices of contiguous rows. Hold the lane's lock."""
    x, y, expert = p.x, p.out, p.expert
    assert y is not None
    m, n, k, ldx, ldy = x.rows, y.shape[-1], x.shape[-1], x.row_stride, y.row_stride
    assert ldx is not None
    assert ldy is not None
    weight = (d.weight if expert is None else d.weight[expert]).data.ptr
    bias = None if d.bias is None else d.bias if expert is None else d.bias[expert]
    workspace = lane.buffer("cuBLAS workspace", WORKSPACE)
    ld, pointer = ldx, x.pointer
    with on(stream):
        if d.dtype != x.dtype:
            wide = view(lane.buffer("widened x", m * k * 4), (m, k), (k, 1), "float32", lane)
            _cast(f"{x.dtype} to f32")(view(x.pointer, (m, k), (ldx, 1), BITS[x.dtype], x.owner), wide)
            ld, pointer = k, wide.data.ptr
        if d.dtype == y.dtype and bias is None and p.residual is None:
            cublas.gemm(m, n, k, weight, pointer, ld, d.dtype, y.pointer, ldy, y.dtype, stream, workspace)
            return
        sums = view(lane.buffer("fp32 sums", m * n * 4), (m, n), (n, 1), "float32", lane)
        cublas.gemm(m, n, k, weight, pointer, ld, d.dtype, sums.data.ptr, n, "f32", stream, workspace)
        each = p.rounding == "each"
        if each:
            _round(sums, y.dtype)
        if bias is not None:
            sums += bias
        if p.residual is not None:
            if each:
                _round(sums, y.dtype)
            added = p.residual
            assert added.row_stride is not None
            _cast(f"{y.dtype} added")(
                view(added.pointer, (m, n), (added.row_stride, 1), BITS[y.dtype], added.owner), sums
            )
        _cast(f"f32 to {y.dtype}")(sums, view(y.pointer, (m, n), (ldy, 1), BITS[y.dtype], y.owner))


def _round(sums: Any, dtype: str) -> None:
    """float32 numbers to those of a type, in place."""
    if dtype != "f32":
        _cast(f"f32 through {dtype}")(sums, sums)
