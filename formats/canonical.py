"""The one in-memory form of a quantised linear, and ``dequantize()``, the reference for every test.

    w[n, perm[p]] = (value(codes[n, p]) - zero[n, p]) * product(scales)[n, p] - product(offsets)[n, p]

Readers produce it, layouts consume it; neither knows the other. Grids of scales, zeros and offsets are
indexed by *stored* column p, so that act-order (``perm``) leaves groups contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from math import gcd
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

# Field names of scale types, as they stand in an artifact's spec.
SCALE_DTYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "u6": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
    "f64": np.dtype(np.float64),
}


def scale_words(dtype: str) -> str:
    """A scale type for people, who know f64 from no file: see ``Level``."""
    return "f64 (1 / stored divisors)" if dtype == "f64" else dtype


_SCALE_NAMES = {dtype: name for name, dtype in SCALE_DTYPES.items()}


@dataclass(frozen=True)
class Element:
    """What one code means, as numbers.

    Integers: value = code - bias (two's complement first when ``signed``). Floats (``exponent`` > 0): sign,
    exponent, mantissa with ``bias`` as the exponent bias; ``finite_nan`` marks the all-ones code as NaN (OCP e4m3fn).
    Tables: value = table[code].
    """

    name: str
    bits: int
    bias: int = 0
    signed: bool = False
    exponent: int = 0
    mantissa: int = 0
    finite_nan: bool = False
    table: tuple[int, ...] = ()

    def values(self) -> NDArray[np.float64]:
        """The value of every code: float64 [2**bits]."""
        return _values(self)

    @property
    def is_float(self) -> bool:
        return self.exponent > 0


@cache
def _values(element: Element) -> NDArray[np.float64]:
    code = np.arange(2**element.bits)
    if element.table:
        out = np.array(element.table, np.float64)
    elif element.exponent:
        m = code & (2**element.mantissa - 1)
        e = (code >> element.mantissa) & (2**element.exponent - 1)
        sign = np.where(code >> (element.bits - 1), -1.0, 1.0)
        magnitude = np.where(e > 0, 2**element.mantissa + m, m) * 2.0 ** (
            np.maximum(e, 1) - element.bias - element.mantissa
        )
        out = sign * magnitude
        if element.finite_nan:
            out[code & (2 ** (element.bits - 1) - 1) == 2 ** (element.bits - 1) - 1] = np.nan
    else:
        out = np.where(element.signed & (code >= 2 ** (element.bits - 1)), code - 2**element.bits, code) - float(
            element.bias
        )
    out.setflags(write=False)
    return out


IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ3_TABLE = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)

ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element("u2", 2),
        Element("u2b2", 2, bias=2),
        Element("u3", 3),
        Element("u3b4", 3, bias=4),
        Element("u4", 4),
        Element("u4b8", 4, bias=8),
        Element("u5", 5),
        Element("u5b16", 5, bias=16),
        Element("u6b32", 6, bias=32),
        Element("u8", 8),
        Element("u8b128", 8, bias=128),
        Element("s8", 8, signed=True),
        Element("e4m3", 8, bias=7, exponent=4, mantissa=3, finite_nan=True),
        Element("e2m1", 4, bias=1, exponent=2, mantissa=1),
        Element("iq4", 4, table=IQ4_TABLE),
        Element("iq3", 4, table=IQ3_TABLE),
    )
}


@dataclass(frozen=True)
class Level:
    """One grid of factors: data [(E,) ceil(n/bn), ceil(k/bk)], ``block`` = (bn, bk) in weights.

    The type of the factors is ``data.dtype``; ``u6`` and ``s8`` factors are plain integers. ``f64`` holds the
    reciprocals of factors stored as divisors of 24 bits or fewer: float32(code * f64) equals float32(code / stored)
    for every code of up to 8 bits, and float32(1 / f64) is the stored bits.
    """

    data: Array
    block: tuple[int, int]
    shards: tuple[int, ...] = ()
    """Rows of each part of a fused weight that has one factor a part; data repeats it for every block of rows."""

    @property
    def dtype(self) -> str:
        return _SCALE_NAMES[self.data.dtype]


@dataclass(frozen=True)
class Outline:
    """All that can be known of a tensor without reading its codes; what a layout decides by."""

    element: Element
    n: int
    k: int
    experts: int | None
    scales: tuple[tuple[str, tuple[int, int]], ...]
    """(dtype name, block) of each scale level, finest first."""
    zero_max: int | None = None
    """The largest integer zero point, None when there are none."""
    offsets: tuple[tuple[str, tuple[int, int]], ...] = ()
    perm: bool = False
    order: str = ""
    """``order_digest`` of the permutation, empty without one: linears that agree in it read x in one order."""
    bias: str | None = None
    """The bias's dtype name."""
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What ``read`` will give as ``QuantTensor.source``: a file's header is written before any code is read."""
    residue: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...] = ()
    """(suffix, dtype, shape) of ``QuantTensor.residue``."""
    shards: tuple[int, ...] = ()
    """``Level.shards`` of the coarsest scale level."""

    @property
    def group(self) -> int:
        """Weights per scale along k of the finest level; -1 for one group over all of k."""
        bk = self.scales[0][1][1]
        return -1 if bk >= self.k else bk


@dataclass(frozen=True)
class QuantTensor:
    """A quantised linear, out x in. Arrays may be memory-mapped views; nobody writes into them."""

    element: Element
    codes: Array
    """uint8 [(E,) n, k]; E only for stacked experts."""
    scales: tuple[Level, ...]
    zero: Array | None = None
    """Integers on the grid of scales[0], in code units; any value >= 0 (16 is legal beside 4-bit codes)."""
    offsets: tuple[Level, ...] = ()
    """Their product is subtracted after scaling (the K-quants' minimum)."""
    perm: Array | None = None
    """int32 [k]: stored column p is logical input channel perm[p]."""
    bias: Array | None = None
    """[(E,) n], in its stored dtype and natural order."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """JSON: the source format's name and whatever its writer needs to give the very bytes back."""
    residue: Mapping[str, Array] = field(default_factory=dict)
    """Source tensors by suffix whose bytes nothing else determines; carried along for unpack only."""

    @property
    def n(self) -> int:
        return int(self.codes.shape[-2])

    @property
    def k(self) -> int:
        return int(self.codes.shape[-1])

    @property
    def experts(self) -> int | None:
        return int(self.codes.shape[0]) if self.codes.ndim == 3 else None

    def outline(self) -> Outline:
        """The same tensor without its data."""
        return Outline(
            self.element,
            self.n,
            self.k,
            self.experts,
            tuple((s.dtype, s.block) for s in self.scales),
            None if self.zero is None else int(self.zero.max(initial=0)),
            tuple((s.dtype, s.block) for s in self.offsets),
            self.perm is not None,
            order_digest(self.perm),
            None if self.bias is None else _SCALE_NAMES[self.bias.dtype],
            self.source,
            tuple((suffix, data.dtype, data.shape) for suffix, data in self.residue.items()),
            self.scales[-1].shards,
        )

    def check(self) -> QuantTensor:
        """Assert that all shapes agree; a failure is a bug of the reader that built it. Returns self."""
        lead = self.codes.shape[:-2]
        assert self.codes.dtype == np.uint8, self.codes.dtype
        for level in (*self.scales, *self.offsets):
            assert level.data.shape == (*lead, *grid_shape(self.n, self.k, level.block)), (
                level.data.shape,
                level.block,
            )
            if level.shards:
                first = per_shard(level)
                assert sum(level.shards) == self.n, (level.shards, self.n)
                assert not _differ(level.data, from_shards(first, level.shards, level.block[1]).data), level.shards
        assert self.zero is None or self.zero.shape == self.scales[0].data.shape, "zero points live on the scales' grid"
        assert self.perm is None or (self.perm.shape == (self.k,) and self.perm.dtype == np.int32)
        assert self.bias is None or self.bias.shape == (*lead, self.n)
        return self


def order_digest(perm: Array | None) -> str:
    """SHA-256 of a permutation's numbers, empty for none."""
    return "" if perm is None else sha256(perm.astype("<i4").tobytes()).hexdigest()


def grid_shape(n: int, k: int, block: tuple[int, int]) -> tuple[int, int]:
    """The extents of a block grid over an n x k matrix; the last block of a row or column may be short."""
    return -(-n // block[0]), -(-k // block[1])


def spread(grid: Array, block: tuple[int, int], n: int, k: int) -> Array:
    """A grid [.., ceil(n/bn), ceil(k/bk)] repeated to one entry per weight [.., n, k]."""
    return np.repeat(np.repeat(grid, block[0], axis=-2)[..., :n, :], block[1], axis=-1)[..., :k]


def from_shards(data: Array, shards: tuple[int, ...], block_k: int) -> Level:
    """A level of one row of factors [(E,) s, ..] for each part of a fused weight, ``shards`` [s] rows high."""
    step = gcd(*shards)
    return Level(np.repeat(data, [rows // step for rows in shards], axis=-2), (step, block_k), shards)


def per_shard(level: Level) -> Array:
    """The inverse of ``from_shards``: [(E,) s, ..]."""
    starts = np.cumsum((0, *level.shards[:-1])) // level.block[0]
    return level.data[..., starts, :]


def _product(levels: Iterable[Level], n: int, k: int) -> Array:
    out: Array = np.ones((1, 1))
    for level in levels:
        out = out * spread(level.data.astype(np.float64), level.block, n, k)
    return out


def dequantize(q: QuantTensor, dtype: DTypeLike = np.float32) -> Array:
    """The decoded weights [(E,) n, k] in logical column order, without bias.

    Slow and obvious on purpose: everything in float64, rounded once to ``dtype``.
    """
    w = q.element.values()[q.codes]
    if q.zero is not None:
        w = w - spread(q.zero.astype(np.float64), q.scales[0].block, q.n, q.k)
    w = w * _product(q.scales, q.n, q.k)
    if q.offsets:
        w = w - _product(q.offsets, q.n, q.k)
    if q.perm is not None:
        logical = np.empty_like(w)
        logical[..., q.perm] = w
        w = logical
    with np.errstate(over="ignore"):  # a value beyond dtype is infinite in it
        return w.astype(dtype)


def widened(element: Element) -> Element:
    """The 4-bit element that holds a 2- or 3-bit one losslessly (u2b2 -> u4b8, u3 -> u4), or the element itself."""
    if element.bits not in (2, 3):
        return element
    return ELEMENTS["u4b8" if element.bias else "u4"]


def recode(q: QuantTensor, element: Element) -> QuantTensor:
    """The same integers as codes of another integer element: values, zeros and scales do not change."""
    shift = element.bias - q.element.bias
    return replace(q, element=element, codes=q.codes + np.uint8(shift % 256)) if element != q.element else q


def _differ(x: Array | None, y: Array | None) -> bool:
    """Whether they are not the same bytes of one shape and dtype: a NaN is itself, and -0 is not +0."""
    if x is None or y is None:
        return x is not y
    if x.shape != y.shape or x.dtype != y.dtype:
        return True
    return not np.array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


def same(a: QuantTensor, b: QuantTensor) -> str | None:
    """None when two tensors hold the same bytes everywhere, else the name of the first part that differs."""

    if a.element != b.element:
        return "element"
    for part in ("scales", "offsets"):
        left, right = getattr(a, part), getattr(b, part)
        if [(x.block, x.shards) for x in left] != [(x.block, x.shards) for x in right] or any(
            _differ(x.data, y.data) for x, y in zip(left, right, strict=True)
        ):
            return part
    for part in ("codes", "perm", "bias"):
        if _differ(getattr(a, part), getattr(b, part)):
            return part
    if a.zero is None or b.zero is None:
        return None if a.zero is b.zero else "zero"
    return None if np.array_equal(a.zero, b.zero) else "zero"
