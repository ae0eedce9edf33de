"""Activations in 8 bits: what ``quantize.cu`` and ``quantize_rows.cu`` make of x before kernels that multiply them.

| kind | ``quantized`` | ``factors`` |
| --- | --- | --- |
| int8 | int8 [m, kp] | float32 [m, kp/32, 2]: d = amax / 127, and s, the sum of x |
| e4m3 | float8_e4m3fn [m, kp] | float32 [m, kp/128]: d = amax / 448 |
| int8_row | float16 [m, kp], whole numbers | float32 [m, 1]: d = amax / 127 of all of a row |

kp = k rounded up to 256; x counts as 0 for k >= K. amax is the largest absolute value of a block along k. All is
float32 arithmetic, each step rounded to nearest even:

    int8, int8_row   q = x / d, rounded half away from zero, at most 127 in size
    e4m3             q = x / d, at most 448 in size, rounded half to even; it keeps the sign of a zero
    s                e_i = ((x_8i + x_8i+1) + x_8i+2) + .. + x_8i+7; s = (e_0 + e_1) + (e_2 + e_3)

A block whose d is 0 (amax = 0, or so small that the quotient vanishes) has codes 0. A block that holds a NaN or an
infinity has codes 0 and d = s = NaN (0x7FC00000): all of its own row, and no other, becomes NaN. s is infinite where
finite numbers add up to more than float32 holds.

Whole numbers up to 127 are exact in 16 bits, so kernels for 16-bit x multiply those of int8_row. marlin_plan.py says
what the product is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from .launch import Device, Stage

Array = NDArray[Any]

STEP = 256
"""Rows of codes are this many long, or a multiple."""

X_DTYPES = ("f16", "bf16", "f32")


@dataclass(frozen=True)
class Kind:
    """One way to quantise: ``block`` numbers along k, or a row's where it is 0, share ``factors`` float32 numbers."""

    element: str
    dtype: np.dtype[Any]
    block: int
    factors: int
    largest: float


KINDS = {
    "int8": Kind("s8", np.dtype(np.int8), 32, 2, 127.0),
    "e4m3": Kind("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 128, 1, 448.0),
    "int8_row": Kind("s8", np.dtype(np.float16), 0, 1, 127.0),
}


def padded(k: int) -> int:
    return -(-k // STEP) * STEP


def nbytes(kind: str, m: int, k: int) -> tuple[int, int]:
    """Bytes of ``quantized`` and of ``factors`` for m rows of k numbers."""
    kp, of = padded(k), KINDS[kind]
    return m * kp * of.dtype.itemsize, m * (kp // (of.block or kp)) * of.factors * 4


def stage(kind: str, m: int, k: int, device: Device, x_dtype: str) -> Stage:
    """The launch that fills ``quantized`` and ``factors`` from x [m, k]: rows of any stride, from any element on."""
    if not KINDS[kind].block:
        return Stage(
            kernel="quantize_rows",
            variant=_variant(kind, x_dtype),
            target=f"sm_{device.arch}",
            grid=(min(m, 4 * device.sms), 1, 1),
            block=512,
            shared=0,
            args=("x", "quantized", "factors", "m", "k", "ldx", "ld_quantized"),
            overlap=device.overlaps,
        )
    return Stage(
        kernel="quantize",
        variant=_variant(kind, x_dtype),
        target=f"sm_{device.arch}",
        grid=(-(-padded(k) // 2048), min(m, 8 * device.sms), 1),
        block=256,
        shared=0,
        args=("x", "quantized", "factors", "m", "k", "k_padded", "ldx"),
        overlap=device.overlaps,
    )


def variants(arch: int, kinds: Iterable[str] = KINDS) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of every ``stage`` of some kinds."""
    for kind in kinds:
        for x_dtype in X_DTYPES:
            yield "quantize" if KINDS[kind].block else "quantize_rows", _variant(kind, x_dtype), f"sm_{arch}"


def _variant(kind: str, x_dtype: str) -> tuple[int, ...]:
    of, x = KINDS[kind], list(SCALE_DTYPES).index(x_dtype)
    return (x, list(ELEMENTS).index(of.element), of.block) if of.block else (x,)


def quantize(x: Array, kind: str) -> tuple[Array, Array]:
    """``quantized`` [m, kp] and ``factors`` of x [m, k] float16, bfloat16 or float32: every bit as the kernel's."""
    of, (m, k) = KINDS[kind], x.shape
    kp, block = padded(k), of.block or padded(k)
    wide = np.zeros((m, kp), np.float32)
    wide[:, :k] = x
    blocks = wide.reshape(m, kp // block, block)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=2)
        finite = np.isfinite(amax)
        d = np.where(finite, amax / np.float32(of.largest), np.float32(np.nan))
        v = np.where((d > 0)[..., None], blocks / d[..., None], np.float32(0))
        v = np.clip(v, np.float32(-of.largest), np.float32(of.largest))
        if of.element == "s8":
            codes = np.trunc(np.float64(v) + np.copysign(0.5, v)).astype(np.int8).astype(of.dtype)
            factors = np.stack([d, np.where(finite, _sums(blocks), d)], axis=2) if of.factors == 2 else d
        else:
            codes, factors = v.astype(of.dtype), d
    return codes.reshape(m, kp), factors


def dequantize(quantized: Array, factors: Array, kind: str, k: int) -> Array:
    """float64 [m, k]: d * q."""
    of, (m, kp) = KINDS[kind], quantized.shape
    d = factors[..., 0] if of.factors == 2 else factors
    blocks = quantized.reshape(m, kp // (of.block or kp), of.block or kp).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (blocks * d[..., None]).reshape(m, kp)[:, :k]


def _sums(blocks: Array) -> Array:
    """float32 [m, blocks] of [m, blocks, 32], in the kernel's order."""
    eights = blocks.reshape(*blocks.shape[:2], 4, 8)
    e = eights[..., 0]
    for i in range(1, 8):
        e = e + eights[..., i]
    whole: Array = (e[..., 0] + e[..., 1]) + (e[..., 2] + e[..., 3])
    return whole
