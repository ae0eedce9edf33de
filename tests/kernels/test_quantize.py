"""x in 8 bits: the contract by a second, slower way of computing it, and the kernel's own source on the host."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from host_kernels import COMPILER, aligned, run, sources
from warptile.kernels.launch import Device
from warptile.kernels.quantize import KINDS, X_DTYPES, dequantize, nbytes, padded, quantize, stage, variants

DEVICE = Device(arch=90, sms=2, shared=232448)
DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def hard(dtype: str, m: int, k: int) -> np.ndarray:
    """Blocks of every size of number, ties, zeros of both signs, the smallest and the largest numbers."""
    rng, to = np.random.default_rng(5), DTYPES[dtype]
    top = float(ml_dtypes.finfo(to).max)
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-20, 12, (m, -(-k // 32))).repeat(32, 1)[:, :k])
    x[0, :32] = (np.arange(32) - 16) * 4 + 2.0  # 127 / d is a whole number: ties
    x[0, 31] = 127
    x[1, :64] = np.tile([0.0, -0.0], 32)
    x[2, :32] = np.linspace(-top, top, 32)
    x[3, :128] = float(ml_dtypes.finfo(to).smallest_subnormal) * rng.integers(-100, 100, 128)
    x[4, :128] = rng.choice(E4M3, 128) * 1.0625
    x[4, 0] = 448
    x[-1, -1] = 1
    with np.errstate(over="ignore"):
        return x.astype(to)


def nearest(v: Fraction, steps: list[Fraction], away: bool) -> int:
    """Index of the step nearest to v >= 0; a tie goes up, or to the even one."""
    best = min(abs(s - v) for s in steps)
    at = [i for i, s in enumerate(steps) if abs(s - v) == best]
    return at[-1] if away or len(at) == 1 else next(i for i in at if i % 2 == 0)


@pytest.mark.parametrize("dtype", X_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_to_x_over_d(kind: str, dtype: str) -> None:
    x = hard(dtype, 6, 200)
    codes, factors = quantize(x, kind)
    of, block, wide = KINDS[kind], KINDS[kind].block or padded(200), np.zeros((6, padded(200)), np.float32)
    wide[:, :200] = x
    steps = [Fraction(float(v)) for v in (E4M3 if kind == "e4m3" else np.arange(128))]
    d = factors.reshape(6, -1, of.factors)[..., 0]
    np.testing.assert_array_equal(
        d, np.float32(np.abs(wide).reshape(6, -1, block).max(2)) / np.float32(of.largest), strict=True
    )
    assert codes.dtype == of.dtype
    for row, p in np.ndindex(wide.shape):
        by, v = d[row, p // block], wide[row, p]
        size = Fraction(float(np.abs(v) / by)) if by else Fraction(0)
        assert abs(float(codes[row, p])) == steps[nearest(size, steps, kind != "e4m3")]
        assert by == 0 or float(codes[row, p]) * float(v) >= 0


def test_the_sum_is_that_of_x_and_not_of_the_codes() -> None:
    x = hard("f32", 6, 200)[[0, 1, 3, 4, 5]]
    _, factors = quantize(x, "int8")
    wide = np.zeros((5, padded(200)))
    wide[:, :200] = x
    exact = wide.reshape(5, -1, 32).sum(2)
    bound = np.abs(wide).reshape(5, -1, 32).sum(2) * 2.0**-21
    assert (np.abs(factors[..., 1] - exact) <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(kind: str, bad: float) -> None:
    x = hard("f16", 6, 300)
    clean = [a.copy() for a in quantize(x, kind)]
    x[5, 130] = bad
    codes, factors = quantize(x, kind)
    block = KINDS[kind].block or padded(300)
    at = 130 // block
    assert not codes[5].reshape(-1, block)[at].astype(np.float32).any()
    assert (factors[5, at].view(np.uint32) == 0x7FC00000).all()
    for now, before in zip((codes, factors), clean, strict=True):
        np.testing.assert_array_equal(now[:5], before[:5])
    assert np.isnan(dequantize(codes, factors, kind, 300)[5, 130])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("dtype", X_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "ldx", "first"), [(512, 512, 0), (299, 301, 0), (200, 208, 3)])
def test_the_kernel_equals_the_reference_bit_for_bit(
    kind: str, dtype: str, k: int, ldx: int, first: int, folder: Path
) -> None:
    x = hard(dtype, 7, k)
    x[5, 130], x[6, 3] = np.nan, np.inf
    buffer = np.full(first + 7 * ldx, 99, x.dtype)
    np.lib.stride_tricks.as_strided(buffer[first:], (7, k), (ldx * x.itemsize, x.itemsize))[...] = x
    codes, factors = (np.full(size, 0xA5, np.uint8) for size in nbytes(kind, 7, k))
    memory = {"x": aligned(buffer), "quantized": aligned(codes), "factors": aligned(factors)}
    scalars = {"m": 7, "k": k, "k_padded": padded(k), "ldx": ldx, "ld_quantized": padded(k)}
    run(stage(kind, 7, k, DEVICE, dtype), memory, scalars, folder, x=first * x.itemsize)
    want = quantize(x, kind)
    np.testing.assert_array_equal(memory["quantized"], want[0].view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(memory["factors"].view(np.uint32), want[1].view(np.uint32).reshape(-1))


def test_every_stage_is_among_those_built_ahead() -> None:
    ahead = {row[:2] for row in variants(90)}
    for kind in KINDS:
        for dtype in X_DTYPES:
            made = stage(kind, 3, 100, DEVICE, dtype)
            assert (made.kernel, made.variant) in ahead
