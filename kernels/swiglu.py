"""silu(gate) * up, bit for bit as ``silu.cuh`` computes it, and the launch for products that are already rounded.

    silu(v) = v / (1 + exp(-v))            v >= 0
            = (v * e) / (1 + e), e = exp(v)    v < 0, and NaN

Each step is float32, rounded to nearest even. exp(v), v <= 0, is 2^n times the series of exp(r) up to r^7 with
n = round(v / ln 2), r = v - n ln 2; 0 for v <= -104. Its error is below two units in the last place. silu(-inf) is NaN.
y = silu(gate) * up is one more multiplication, rounded once to the type of gate, up and y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.canonical import SCALE_DTYPES
from .launch import Device, Stage

Array = NDArray[Any]

F = np.float32
LOG2_E, LN2_HIGH, LN2_LOW = F(1.44269504), F(0.693359375), F(-2.12194440e-4)
SERIES = [F(1) / F(factorial) for factorial in (5040, 720, 120, 24, 6, 2, 1, 1)]
Y_DTYPES = ("f16", "bf16", "f32")


def stage(m: int, n: int, device: Device, dtype: str) -> Stage:
    """The launch that makes y [m, n] of ``gate`` and ``up``, both contiguous."""
    return Stage(
        kernel="swiglu",
        variant=(list(SCALE_DTYPES).index(dtype),),
        target=f"sm_{device.arch}",
        grid=(-(-n // 256), min(m, 4096), 1),
        block=256,
        shared=0,
        args=("gate", "up", "y", "m", "n", "ldy"),
        overlap=device.overlaps,
    )


def variants(arch: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of every ``stage``."""
    yield from (("swiglu", (list(SCALE_DTYPES).index(dtype),), f"sm_{arch}") for dtype in Y_DTYPES)


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up in the type of both: float16, bfloat16 or float32."""
    with np.errstate(all="ignore"):
        return (silu(gate.astype(F)) * up.astype(F)).astype(gate.dtype)


def silu(v: Array) -> Array:
    """float32 of float32."""
    with np.errstate(all="ignore"):
        e = _exp(-np.abs(v))
        return np.where(v >= 0, v / (F(1) + e), (v * e) / (F(1) + e))


def _exp(v: Array) -> Array:
    """exp of float32 numbers <= 0, or NaN."""
    live = v > F(-104)
    n = np.rint(np.where(live, v, F(0)) * LOG2_E)
    r = (v - n * LN2_HIGH) - n * LN2_LOW
    e = np.full_like(v, SERIES[0])
    for coefficient in SERIES[1:]:
        e = e * r + coefficient
    whole = n.astype(np.int32)
    half = np.trunc(whole / 2).astype(np.int32)
    e = (e * np.exp2(half.astype(F))) * np.exp2((whole - half).astype(F))
    return np.where(live, e, np.where(np.isnan(v), v, F(0)))
