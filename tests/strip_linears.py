"""Random linears for every kind of strip, and what kernels that multiply x in 8 bits compute, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from linears import ACTIVATION
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES, Level, QuantTensor, dequantize, from_shards
from warptile.kernels.mmq_strips import KINDS
from warptile.kernels.quantize import dequantize as values
from warptile.kernels.quantize import quantize

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
INTEGERS = {"u6": (0, 64), "s8": (-128, 128), "e8m0": (112, 124), "e4m3": (1, 0x50)}


def random_strips(
    kind: str,
    n: int = 100,
    k: int = 2880,
    *,
    experts: int | None = None,
    bias: str | None = None,
    shards: tuple[int, ...] = (),
    whole: bool = False,
    scale: str = "f32",
    block: tuple[int, int] = (128, 128),
    seed: int = 0,
) -> QuantTensor:
    """A linear that takes ``kind``; ``scale`` and ``block`` are fp8's, ``whole`` adds a global, one for each shard."""
    rng, of = np.random.default_rng(seed), KINDS[kind]
    lead = () if experts is None else (experts,)
    element = ELEMENTS[next(iter(of.elements))]

    def level(dtype: str, bn: int, bk: int, size: float) -> Level:
        shape, to = (*lead, -(-n // bn), -(-k // bk)), SCALE_DTYPES[dtype]
        if dtype in INTEGERS:
            return Level(rng.integers(*INTEGERS[dtype], shape).astype(np.int8).view(to), (bn, bk))
        return Level((rng.uniform(size, 2 * size, shape) * rng.choice([-1, 1], shape)).astype(to), (bn, bk))

    sizes = (0.01, 0.0005)
    scales = [level(d, 1, own, size) for (d, own), size in zip(of.scales, sizes, strict=False)]
    if not of.scales:
        scales = [level(scale, *block, 0.01)]
        if shards and not whole:
            scales = [from_shards(np.float32(rng.uniform(0.01, 0.02, (*lead, len(shards), 1))), shards, k)]
    minima = [level(d, 1, own, 4 * size) for (d, own), size in zip(of.minima, sizes, strict=False)]
    if whole:
        data = rng.uniform(0.5, 2, (*lead, len(shards) or 1, 1)).astype(np.float32)
        one = from_shards(data, shards, k) if shards else Level(data, (n, k))
        scales, minima = [*scales, one], [*minima, one] if minima else []
    codes = np.flatnonzero(np.isfinite(element.values())).astype(np.uint8)
    return QuantTensor(
        element=element,
        codes=rng.choice(codes, (*lead, n, k)),
        scales=tuple(scales),
        offsets=tuple(minima),
        bias=None if bias is None else rng.standard_normal((*lead, n)).astype(SCALE_DTYPES[bias]),
    ).check()


def _picked(q: QuantTensor, expert: int | None) -> QuantTensor:
    if expert is None:
        return q
    pick = lambda levels: tuple(replace(level, data=level.data[expert]) for level in levels)  # noqa: E731
    bias = None if q.bias is None else q.bias[expert]
    return replace(q, codes=q.codes[expert], scales=pick(q.scales), offsets=pick(q.offsets), bias=bias)


def in_8_bits(q: QuantTensor, x: np.ndarray, expert: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(y, size) float64 [m, n]: decoded codes times x as ``quantize`` rounds it, minima times its sums, and the same
    sums of sizes, which bound what float32 arithmetic may lose."""
    q = _picked(q, expert)
    numerics = "e4m3" if q.element.name == "e4m3" else "int8"
    codes, factors = quantize(x, numerics)
    rounded = values(codes, factors, numerics, q.k)
    w = dequantize(replace(q, offsets=(), bias=None), np.float64)
    y, size = rounded @ w.T, np.abs(rounded) @ np.abs(w).T
    if q.offsets:
        zero = replace(q, codes=np.zeros_like(q.codes), element=ELEMENTS["u8"], bias=None)
        minima = -dequantize(zero, np.float64)[:, ::32]
        sums = np.float64(factors[:, : minima.shape[1], 1])
        y, size = y - sums @ minima.T, size + np.abs(sums) @ np.abs(minima).T
    return y + (0 if q.bias is None else np.float64(q.bias)), size


def assert_is_in_8_bits(
    y: np.ndarray, q: QuantTensor, x: np.ndarray, expert: int | None = None, loses: float = 2.0**-20
) -> None:
    """Every element within one rounding to its type, and what float32 sums lose."""
    want, size = in_8_bits(q, x, expert)
    bound = ROUNDING[y.dtype.name] * np.abs(want) * 1.01 + loses * size + 2.0**-24
    assert y.shape == want.shape
    error = np.abs(np.float64(y) - want) / bound
    assert (error <= 1).all(), f"{error.max():.1f} times the bound"


def assert_close_to_exact(y: np.ndarray, q: QuantTensor, x: np.ndarray, expert: int | None = None) -> None:
    """NMSE against x as it is, by llama.cpp's threshold for int8 (x in e4m3 has 3 bits of mantissa)."""
    q = _picked(q, expert)
    want = np.float64(x) @ dequantize(q, np.float64).T + (0 if q.bias is None else np.float64(q.bias))
    nmse = ((np.float64(y) - want) ** 2).sum() / (want**2).sum()
    assert nmse <= (2e-3 if q.element.name == "e4m3" else 5e-4), f"NMSE {nmse:.1e}"


def random_rows(m: int, k: int, dtype: str, seed: int = 1) -> np.ndarray:
    """Normal rows, then, where there is room for them, one of zeros and some with a single number."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k))
    if m > 4:
        x[1] = 0
        x[2:4] = 0
        x[2, rng.integers(k)] = 127
        x[3, k - 1] = -3
    return x.astype(ACTIVATION.get(dtype, dtype))
