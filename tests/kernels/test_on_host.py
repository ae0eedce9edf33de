"""The mma.sync kernels' own source, compiled for the host and run thread by thread: index maths, decoding and scales.

What it cannot show is what the hardware does: occupancy, races between warps, subnormal numbers of its units.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product as product_of
from pathlib import Path

import numpy as np
import pytest
from host_kernels import COMPILER, aligned, run, sources
from host_products import DEVICE, TYPES, carried_out
from linears import ACTIVATION, Case, random_quant, random_x
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.kernels import marlin
from warptile.kernels import swiglu as gated
from warptile.kernels.epilogue import ROUNDINGS, finish
from warptile.kernels.launch import Device, Part
from warptile.kernels.marlin_decode_plan import Decode
from warptile.kernels.marlin_pair_plan import plan_pair
from warptile.kernels.marlin_plan import plan
from warptile.kernels.marlin_tiled_plan import Tiled

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

TURING = replace(DEVICE, arch=75, shared=65536)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


def product(
    q: QuantTensor,
    x: np.ndarray,
    variant: Decode | Tiled | None,
    folder: Path,
    expert: int = 0,
    residual: np.ndarray | None = None,
    rounding: str = "once",
    device: Device = DEVICE,
) -> np.ndarray:
    tensors, spec = marlin.pack(q)
    made = plan(spec, len(x), device, TYPES[x.dtype.name], x.shape[1] % 8 == 0, variant)
    return carried_out(made, tensors, spec, x, folder, expert, residual, rounding)


NVFP4 = Case("e2m1", scale="e4m3", group=16, whole=True, shards=(100, 60, 40), low=1, high=60, n=200, k=300)
FP8 = Case("e4m3", scale="f32", group=128, rows=128, n=200, k=300)
MXFP4 = Case("e2m1", scale="e8m0", low=0, high=4, n=72, k=200, experts=3)


@pytest.mark.parametrize(
    ("case", "m", "dtype", "variant"),
    [
        (Case("u4", zero=True, group=48, order=True, bias="f32"), 3, "float16", None),
        (replace(FP8, bias="bf16"), 5, "bfloat16", None),
        (replace(FP8, group=-1, rows=0, scale="bf16"), 17, "float16", Tiled(4, 4, 2, 1, cut=True)),
        (NVFP4, 8, "float16", Decode(4, 2, 3)),
        (NVFP4, 40, "bfloat16", Tiled(2, 4, 1, 1, cut=True)),
        (replace(MXFP4, low=115, high=123), 20, "float16", Tiled(8, 2, 8, 1)),
        (MXFP4, 2, "bfloat16", None),
        (Case("u4", zero=True, group=48, order=True, bias="f32"), 13, "float16", Decode(8, 1, 1, 2)),
        (Case("u4", zero=True, scale="f32", group=128, n=200, k=520), 31, "bfloat16", Decode(8, 1, 1, 2)),
        (Case("u4b8", group=64, bias="f16", n=200, k=520), 11, "bfloat16", Decode(6, 2, 2, 1)),
        (Case("u8b128", scale="f16", group=64, n=130, k=336), 32, "float16", Decode(4, 2, 1, 1)),
        (Case("u8", zero=True, scale="bf16", group=32, n=130, k=336), 9, "bfloat16", Decode(12, 1, 1, 2)),
        (replace(FP8, bias="bf16"), 16, "float16", Decode(4, 2, 1, 2)),
        (replace(FP8, group=-1, rows=0, scale="bf16"), 17, "bfloat16", Decode(4, 1, 3, 1)),
        (NVFP4, 16, "bfloat16", Decode(8, 2, 1, 2)),
        (NVFP4, 27, "float16", Decode(8, 1, 2, 2)),
        (MXFP4, 20, "bfloat16", Decode(2, 2, 1, 1)),
    ],
    ids=str,
)
def test_kernels_multiply_and_one_hot_rows_return_the_weights(
    case: Case, m: int, dtype: str, variant: Decode | Tiled | None, folder: Path
) -> None:
    q, to, expert = random_quant(case), ACTIVATION[dtype], 2 if case.experts else 0
    w = dequantize(q, np.float64).reshape(-1, case.n, case.k)[expert]
    bias = 0 if q.bias is None else np.float64(q.bias)
    if not (case.scale == "e8m0" and case.low == 0):  # sums of those would be subnormal
        x = random_x((m, case.k), dtype)
        want = np.float64(x) @ w.T + bias
        error = np.linalg.norm(np.float64(product(q, x, variant, folder, expert)) - want) / np.linalg.norm(want)
        assert error < {"float16": 1e-3, "bfloat16": 3e-3}[dtype]
    rows = np.random.default_rng(1).permutation(case.k)[:m]
    got = np.float32(product(replace(q, bias=None), np.eye(case.k, dtype=to)[rows], variant, folder, expert))
    once, twice = (np.float32(w.T[rows].astype(first).astype(to)) for first in (np.float64, np.float32))
    np.testing.assert_array_equal(got, np.where(got == twice, twice, once))


EXACT = Case("u4b8", scale="f16", group=32, low=0.25, high=0.25, n=72, k=200)
"""Small whole numbers times a quarter: fp32 sums are exact in any order."""


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("m", "variant"), [(3, None), (17, Tiled(2, 4, 2, 1, cut=True)), (40, None)], ids=str)
def test_instructions_of_sm_75_make_the_products_of_newer_ones(
    dtype: str, m: int, variant: Tiled | None, folder: Path
) -> None:
    q, x = random_quant(EXACT), np.random.default_rng(0).integers(-4, 5, (m, EXACT.k)).astype(dtype)
    old, new = (product(q, x, variant, folder, device=device) for device in (TURING, DEVICE))
    np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(old, np.float64(x) @ dequantize(q, np.float64).T)


FEW = (Decode(4, 2, 1), Decode(16, 1, 2))
SHARING = (Decode(4, 2, 1), Decode(8, 1, 1, 2))


@pytest.mark.parametrize(
    ("variant", "ms"),
    [*product_of(FEW, [(1, 3, 8)]), *product_of(SHARING, [(9, 16), (17, 32)])],
    ids=str,
)
@pytest.mark.parametrize(
    ("group", "device"),
    [(32, TURING), (16, DEVICE), (32, DEVICE), (-1, DEVICE)],
    ids=lambda v: str(getattr(v, "arch", v)),
)
def test_decode_multiplies_any_number_of_rows_tile_after_tile(
    group: int, variant: Decode, ms: tuple[int, ...], device: Device, folder: Path
) -> None:
    """Warps with several loop bodies of k, with a part of one and with none."""
    if device is TURING and max(ms) > 8:
        pytest.skip("has no clusters")
    q = random_quant(replace(EXACT, group=group, n=136, k=408))
    rng = np.random.default_rng(2)
    for m in ms:
        x = rng.integers(-4, 5, (m, 408)).astype(np.float16)
        got = product(q, x, variant, folder, device=device)
        np.testing.assert_array_equal(got, np.float64(x) @ dequantize(q, np.float64).T)


@pytest.mark.parametrize("device", [TURING, DEVICE], ids=lambda d: f"sm_{d.arch}")
def test_copies_end_where_a_row_of_x_ends(device: Device, folder: Path) -> None:
    """k is no multiple of the eight numbers of a copy, and what lies behind it is no number."""
    q = random_quant(replace(EXACT, k=203, group=-1))
    x = np.full((33, 208), np.nan, np.float16)
    x[:, :203] = np.random.default_rng(0).integers(-4, 5, (33, 203))
    tensors, spec = marlin.pack(q)
    made = plan(spec, 33, device, "f16", True)
    assert [stage.kernel for stage in made.stages] == ["marlin_tiled"]
    want = np.float64(x[:, :203]) @ dequantize(q, np.float64).T
    np.testing.assert_array_equal(carried_out(made, tensors, spec, x, folder), want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bias", [None, "f16", "f32"])
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("variant", [Decode(4, 2, 1), Tiled(2, 4, 1, 1, cut=True)], ids=str)
def test_bias_and_residual_are_rounded_as_the_reference_rounds_them(
    variant: Decode | Tiled, added: bool, bias: str | None, rounding: str, dtype: str, folder: Path
) -> None:
    q, to, m = random_quant(replace(EXACT, bias=bias)), np.dtype(ACTIVATION.get(dtype, dtype)), 4
    rng = np.random.default_rng(3)
    x = rng.integers(-30, 31, (m, 200)).astype(to)
    sums = np.float32(np.float64(x) @ dequantize(q, np.float64).T)
    residual = (rng.standard_normal((m, 72)) * 100).astype(to) if added else None
    got = product(q, x, variant, folder, residual=residual, rounding=rounding)
    bits = f"u{to.itemsize}"
    np.testing.assert_array_equal(got.view(bits), finish(sums, to, q.bias, residual, rounding).view(bits))
    once, each = (finish(sums, to, q.bias, residual, r) for r in ROUNDINGS)
    assert (once.tobytes() == each.tobytes()) == (dtype == "float32" or not (added or bias))


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        (Case("u4", zero=True, scale="f32", group=48, order=True, bias="f32"), Decode(4, 1, 2)),
        (Case("u8b128", scale="f16", group=64, n=130, k=336), Tiled(4, 4, 2, 1, cut=True)),
        (replace(FP8, scale="bf16", group=-1, rows=0), None),
        (replace(NVFP4, bias="bf16"), Tiled(2, 4, 1, 1)),
    ],
    ids=str,
)
def test_float32_rows_are_multiplied_to_nearly_their_own_precision(
    case: Case, variant: Decode | Tiled | None, folder: Path
) -> None:
    """Rows of any size: what would overflow f16, or vanish in it, does neither."""
    q = random_quant(case)
    x = random_x((4, case.k), "float32") * np.float32([[1e-30], [1], [3e20], [1e30]])
    x[1, ::2] *= np.float32(1e-6)
    y = product(q, x, variant, folder)
    exact = np.float64(x) @ dequantize(q, np.float64).T + (0 if q.bias is None else np.float64(q.bias))
    assert y.dtype == np.float32
    error = np.linalg.norm(y - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert (error < 2e-6).all(), error


def test_float32_rows_keep_22_bits_and_bad_rows_are_not_a_number(folder: Path) -> None:
    k = 200
    q = replace(random_quant(EXACT), codes=np.full((72, k), 9, np.uint8))  # ones, times a quarter
    one_hot = np.eye(k, dtype=np.float32)[[0, 7, 199]] * np.float32([[1 / 3], [-np.pi * 1e30], [2e-44]])
    y = product(q, one_hot, None, folder)
    want = np.float64(one_hot) @ dequantize(q, np.float64).T
    np.testing.assert_allclose(y, want, rtol=2.0**-21, atol=2.0**-150)
    one_hot[0, 5], one_hot[2, 6] = np.nan, -np.inf
    y = product(q, one_hot, None, folder)
    assert np.isnan(y[[0, 2]]).all()
    np.testing.assert_allclose(y[1], want[1], rtol=2.0**-21)


PAIRS = (
    Case("u4", zero=True, group=32, bias="f16", n=136, k=256),
    replace(NVFP4, bias="f32"),
    Case("u8b128", scale="f32", group=-1, n=130, k=200),
)


@pytest.mark.parametrize("variant", [Decode(4, 1, 1), Decode(4, 3, 2)], ids=str)
@pytest.mark.parametrize(("case", "dtype"), [*zip(PAIRS, TYPES, strict=True)], ids=str)
def test_a_pair_is_two_products_rounded_and_then_multiplied(
    case: Case, variant: Decode, dtype: str, folder: Path
) -> None:
    gate, up = random_quant(case), random_quant(replace(case, seed=5))
    x = random_x((3, case.k), dtype)
    (tensors, spec), (others, other) = marlin.pack(gate), marlin.pack(up)
    made = plan_pair(Part(spec, 0, case.n), Part(other, 0, case.n), 3, DEVICE, TYPES[dtype], True, variant)
    both = {**tensors, **{f"up.{suffix}": tensor for suffix, tensor in others.items()}}
    y = carried_out(made, both, spec, x, folder)
    want = gated.swiglu(*(product(q, x, variant, folder) for q in (gate, up)))
    bits = f"u{x.dtype.itemsize}"
    np.testing.assert_array_equal(y.view(bits), want.view(bits))


def test_a_pair_may_be_two_parts_of_one_module(folder: Path) -> None:
    case = Case("u4", zero=True, group=32, bias="f32", n=64 + 136, k=256)
    q, x = random_quant(case), random_x((2, 256), "float16")
    tensors, spec = marlin.pack(q)
    for first, second, n in ((0, 64, 64), (64, 0, 64), (128, 64, 64)):
        made = plan_pair(Part(spec, first, n), Part(spec, second, n), 2, DEVICE, "f16")
        both = {**tensors, **{f"up.{suffix}": tensor for suffix, tensor in tensors.items()}}
        y = carried_out(made, both, {**spec, "n": n}, x, folder)
        whole = product(q, x, None, folder)
        want = gated.swiglu(whole[:, first : first + n], whole[:, second : second + n])
        np.testing.assert_array_equal(y.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("device", [TURING, DEVICE], ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("dtype", TYPES)
def test_silu_of_rounded_products_is_the_reference_bit_for_bit(dtype: str, device: Device, folder: Path) -> None:
    to = np.dtype(ACTIVATION.get(dtype, dtype))
    rng = np.random.default_rng(0)
    gate = np.concatenate(
        [
            rng.standard_normal(300) * 10.0 ** rng.integers(-6, 3, 300),
            [0, -0.0, np.inf, -np.inf, np.nan, -103.9, -87.5, 136, 136],
        ]
    )[None].astype(to)
    up = rng.standard_normal(gate.shape).astype(to)
    up[0, -2:] = 1.0625, 1.1875  # 144.5 and 161.5: halfway for bf16
    stage = gated.stage(1, gate.shape[1], device, TYPES[dtype])
    memory = {"gate": aligned(gate), "up": aligned(up), "y": aligned(np.full(gate.shape, 7, to))}
    run(stage, memory, {"m": 1, "n": gate.shape[1], "ldy": gate.shape[1]}, folder)
    got, want = memory["y"].view(to).reshape(gate.shape), gated.swiglu(gate, up)
    live = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~live)
    np.testing.assert_array_equal(got[live].tobytes(), want[live].tobytes())
    with np.errstate(all="ignore"):
        exact = np.float64(gate) / (1 + np.exp(-np.float64(gate))) * np.float64(up)
    tiny = 2.0**-140 if dtype == "float32" else float(np.finfo(np.float16).tiny)
    close = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-21}[dtype]
    np.testing.assert_allclose(np.float64(want)[:, :300], exact[:, :300], rtol=close, atol=tiny)
