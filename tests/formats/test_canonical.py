"""Element values against ml_dtypes and arithmetic; dequantize against loops; recode and same."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from warptile.formats.canonical import (
    ELEMENTS,
    SCALE_DTYPES,
    Level,
    QuantTensor,
    dequantize,
    from_shards,
    per_shard,
    recode,
    same,
    widened,
)


def test_float_elements_equal_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    e4m3 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(ELEMENTS["e4m3"].values(), e4m3)
    e2m1 = codes[:16].astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(ELEMENTS["e2m1"].values(), e2m1)
    assert np.signbit(ELEMENTS["e2m1"].values()[8]), "nibble 8 is minus zero"


@pytest.mark.parametrize("name", [n for n, e in ELEMENTS.items() if not e.is_float and not e.table])
def test_integer_elements_are_code_minus_bias(name: str) -> None:
    element = ELEMENTS[name]
    values = element.values()
    assert len(values) == 2**element.bits
    for code in (0, 1, 2**element.bits - 1):
        signed = code - 2**element.bits if element.signed and code >= 2 ** (element.bits - 1) else code
        assert values[code] == signed - element.bias


def test_values_are_shared_and_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        ELEMENTS["u4"].values()[0] = 1


def tensor(n: int = 6, k: int = 10, group: int = 4, **parts: object) -> QuantTensor:
    rng = np.random.default_rng(7)
    q = QuantTensor(
        ELEMENTS["u4"],
        rng.integers(0, 16, (n, k), dtype=np.uint8),
        (Level(rng.standard_normal((n, -(-k // group))).astype(np.float16), (1, group)),),
    )
    return replace(q, **parts)  # type: ignore[arg-type]


def test_dequantize_equals_the_formula_weight_by_weight() -> None:
    rng = np.random.default_rng(1)
    perm = rng.permutation(10).astype(np.int32)
    zero = rng.integers(0, 17, (6, 3))
    second = Level(rng.standard_normal((3, 1)).astype(np.float32), (2, 10))
    minimum = (
        Level(rng.integers(0, 64, (6, 3)).astype(np.uint8), (1, 4)),
        Level(np.full((1, 1), 0.5, np.float16), (6, 10)),
    )
    base = tensor()
    q = replace(base, zero=zero, perm=perm, scales=(*base.scales, second), offsets=minimum).check()
    w = dequantize(q)
    assert w.dtype == np.float32
    for n in range(6):
        for p in range(10):
            value = float(q.codes[n, p]) - float(zero[n, p // 4])
            value *= float(q.scales[0].data[n, p // 4]) * float(second.data[n // 2, 0])
            value -= float(minimum[0].data[n, p // 4]) * 0.5
            assert w[n, perm[p]] == np.float32(value)


def test_dequantize_experts_and_block_scales() -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 127, (2, 5, 7), dtype=np.uint8)
    grid = rng.standard_normal((2, 2, 3)).astype(np.float32)
    q = QuantTensor(ELEMENTS["e4m3"], codes, (Level(grid, (4, 3)),)).check()
    w = dequantize(q, np.float64)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for e, n, k in np.ndindex(2, 5, 7):
        assert w[e, n, k] == values[e, n, k] * np.float64(grid[e, n // 4, k // 3])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "e8m0", "e4m3"])
def test_every_scale_dtype_has_a_name_and_scales(dtype: str) -> None:
    data = np.array([[1.0, 2.0, 0.5]] * 6).astype(SCALE_DTYPES[dtype])
    q = tensor(scales=(Level(data, (1, 4)),))
    assert q.outline().scales == ((dtype, (1, 4)),)
    np.testing.assert_array_equal(dequantize(q)[:, 4:8], q.codes[:, 4:8] * 2.0)


def test_recode_keeps_every_value() -> None:
    for name in ("u2", "u2b2", "u3", "u3b4"):
        narrow = ELEMENTS[name]
        q = tensor(element=narrow, codes=np.arange(60, dtype=np.uint8).reshape(6, 10) % 2**narrow.bits)
        wide = recode(q, widened(narrow))
        assert wide.element.bits == 4
        np.testing.assert_array_equal(dequantize(wide), dequantize(q))
        assert same(recode(wide, narrow), q) is None
    assert widened(ELEMENTS["u8"]) is ELEMENTS["u8"]


def test_a_value_beyond_the_dtype_is_infinite_in_it() -> None:
    q = tensor(codes=np.full((6, 10), 15, np.uint8), scales=(Level(np.full((6, 3), 3e38, np.float32), (1, 4)),))
    assert np.isinf(dequantize(q)).all()
    assert np.isfinite(dequantize(q, np.float64)).all()


def test_same_names_the_part_that_differs() -> None:
    q = tensor(zero=np.ones((6, 3), np.uint8), perm=np.arange(10, dtype=np.int32), bias=np.zeros(6, np.float16))
    assert same(q, tensor(zero=np.ones((6, 3), np.int64), perm=q.perm, bias=q.bias)) is None
    flipped = q.codes.copy()
    flipped[3, 3] ^= 1
    negative_zero = -np.zeros(6, np.float16)
    for part, other in (
        ("codes", replace(q, codes=flipped)),
        ("zero", replace(q, zero=None)),
        ("zero", replace(q, zero=np.zeros((6, 3), np.uint8))),
        ("perm", replace(q, perm=None)),
        ("bias", replace(q, bias=negative_zero)),
        ("scales", replace(q, scales=(Level(q.scales[0].data.astype(np.float32), (1, 4)),))),
        ("offsets", replace(q, offsets=q.scales)),
        ("element", replace(q, element=ELEMENTS["u4b8"])),
    ):
        assert same(q, other) == part


def test_check_catches_grids_that_disagree() -> None:
    with pytest.raises(AssertionError):
        tensor(k=11, scales=tensor(k=20).scales).check()


@pytest.mark.parametrize("rows", [(6,), (4, 2), (2, 2, 2), (1, 5), (3, 1, 2)])
def test_one_factor_a_shard(rows: tuple[int, ...]) -> None:
    """A plain grid to those who only multiply, and one row a shard to those who store it."""
    data = np.arange(1, len(rows) + 1, dtype=np.float32).reshape(-1, 1)
    level = from_shards(data, rows, 10)
    q = tensor(scales=(tensor().scales[0], level)).check()
    np.testing.assert_array_equal(per_shard(level), data)
    want = dequantize(tensor(), np.float64) * np.repeat(data[:, 0].astype(np.float64), rows)[:, None]
    np.testing.assert_array_equal(dequantize(q, np.float64), want)
    assert q.outline().shards == rows
    assert same(q, replace(q, scales=(q.scales[0], Level(level.data, level.block)))) == "scales"


def test_check_catches_shards_that_are_not_constant() -> None:
    level = Level(np.array([[1.0], [2.0], [2.0]], np.float32), (2, 10), (4, 2))
    with pytest.raises(AssertionError):
        tensor(scales=(tensor().scales[0], level)).check()


def test_float64_reciprocals_divide_exactly() -> None:
    """float32(code * f64) is float32(code / stored) for every code of 8 bits, and float32(1 / f64) is stored."""
    rng = np.random.default_rng(5)
    stored = rng.integers(1, 0x7F800000, 20000, dtype=np.uint32).view(np.float32)
    reciprocal = 1 / stored.astype(np.float64)
    np.testing.assert_array_equal((1 / reciprocal).astype(np.float32), stored)
    with np.errstate(over="ignore", under="ignore"):
        for code in (1, 3, 15, 127, 255, 448, 240 / 512):
            divided = np.float32(code) / stored
            np.testing.assert_array_equal((code * reciprocal).astype(np.float32), divided)
