"""x in 8 bits with one factor for each row, on Marlin tiles: the product as it is defined, and the kernels on the host.

The definition adds as marlin_tiled does without warps along k and without cuts: then every bit is the same.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path

import numpy as np
import pytest
from host_kernels import COMPILER, sources
from host_products import DEVICE, TYPES, carried_out
from launches import A100, H200, RTX_3090, T4, fields, parameters, spec_of, type_of
from linears import ACTIVATION, Case, random_quant, random_x
from warptile.formats.canonical import QuantTensor
from warptile.kernels import marlin
from warptile.kernels.epilogue import ROUNDINGS, finish
from warptile.kernels.launch import Device
from warptile.kernels.marlin_decode_plan import Decode
from warptile.kernels.marlin_plan import numerics, plan, refuse_device
from warptile.kernels.marlin_tiled_plan import Tiled
from warptile.kernels.marlin_variants import variants
from warptile.kernels.quantize import nbytes

DTYPES = {**ACTIVATION, "float32": np.dtype(np.float32)}
ORDERED = Tiled(4, 2, 8, 1)
"""Adds from the first k to the last."""


def defined(q: QuantTensor, x: np.ndarray, run: int = 0) -> np.ndarray:
    """float32 [m, n]: d[m] * sum over runs of scale * (sum over k of q[m, k] * (code - zero), an integer)."""
    scale, group, values = np.float32(q.scales[0].data), q.scales[0].block[1], q.element.values().astype(int).tolist()
    run, sums = run or 16 * gcd(group // 16, 4), np.zeros((len(x), q.n), np.float32)  # a tile scales sums of 64 k
    for m, row in enumerate(np.float32(x)):
        d = np.abs(row).max() / np.float32(127)
        parts = [float(v / d) if d > 0 else 0.0 for v in (row if q.perm is None else row[q.perm])]
        codes = [min(int(abs(v) + 0.5), 127) * (1 if v > 0 else -1) for v in parts]
        for n, first in product(range(q.n), range(0, q.k, run)):
            zero, g = 0 if q.zero is None else int(q.zero[n, first // group]), first // group
            ks = range(first, min(first + run, q.k))
            whole = sum(codes[k] * (values[q.codes[n, k]] - zero) for k in ks)
            assert abs(whole) <= 2**24
            sums[m, n] = np.float64(scale[n, g]) * whole + np.float64(sums[m, n])  # in 53 bits, then rounded once
        sums[m] *= d
    return sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


def multiplied(
    q: QuantTensor, x: np.ndarray, variant: Decode | Tiled | None, folder: Path, expert: int = 0, **more: object
) -> np.ndarray:
    tensors, spec = marlin.pack(q)
    made = plan(spec, len(x), DEVICE, TYPES[x.dtype.name], x.shape[1] % 8 == 0, variant, "int8_row")
    return carried_out(made, tensors, spec, x, folder, expert, **more)


def bits(y: np.ndarray) -> np.ndarray:
    return y.view(f"u{y.itemsize}")


CASES = (
    Case("u4b8", scale="f16", group=128, bias="f16", n=72, k=296),
    Case("u4", zero=True, scale="bf16", group=48, order=True, bias="f32", n=70, k=203),
    Case("u8b128", scale="f32", group=64, n=130, k=200),
    Case("u8", zero=True, scale="f16", group=16, bias="bf16", n=65, k=131),
    Case("s8", scale="bf16", group=32, order=True, n=40, k=96),
)
host = pytest.mark.skipif(COMPILER is None, reason="no g++")


@host
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*zip(CASES, ["float32"] * 5, strict=True), (CASES[0], "float16"), (CASES[1], "bfloat16"), (CASES[3], "float16")],
    ids=str,
)
def test_kernels_give_the_bits_of_the_definition_where_they_add_in_its_order(
    case: Case, dtype: str, folder: Path
) -> None:
    q, x = random_quant(case), random_x((3, case.k), dtype)
    x[1] *= x.dtype.type(1e-3)
    want = finish(defined(q, x), x.dtype, q.bias)
    np.testing.assert_array_equal(bits(multiplied(q, x, ORDERED, folder)), bits(want))


@host
@pytest.mark.parametrize("variant", [Decode(4, 2, 1), Tiled(2, 4, 1, 1, cut=True), None], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_orders_differ_by_roundings_of_float32(case: Case, variant: Decode | Tiled | None, folder: Path) -> None:
    """Scales of one power of two make every sum of a row exact, and so the bits the same in any order."""
    q, x = random_quant(replace(case, low=0.25, high=0.25)), random_x((4, case.k), "float32")
    want = finish(defined(q, x), x.dtype, q.bias)
    np.testing.assert_array_equal(bits(multiplied(q, x, variant, folder)), bits(want))
    q = random_quant(case)
    want = finish(defined(q, x), x.dtype, q.bias)
    error = np.abs(multiplied(q, x, variant, folder) - want)
    assert (error <= np.abs(want).max() * 2.0**-20).all()


@host
@pytest.mark.parametrize("variant", [Decode(4, 1, 2), ORDERED, Tiled(4, 4, 2, 1, cut=True)], ids=str)
@pytest.mark.parametrize("case", [Case("u4b8", group=-1, k=500), Case("u8", zero=True, group=-1, k=510)], ids=str)
def test_scales_of_all_of_k_multiply_integers(case: Case, variant: Decode | Tiled, folder: Path) -> None:
    """All of them at their largest: 127 * 255 * 510 and 127 * 8 * 500 are below 2^24."""
    q = random_quant(replace(case, low=0.25, high=0.25))
    q = replace(q, codes=np.zeros_like(q.codes), zero=None if q.zero is None else np.full_like(q.zero, 255))
    x = np.full((2, case.k), 127, np.float32)
    x[1, ::3] = -126
    np.testing.assert_array_equal(multiplied(q, x, variant, folder), defined(q, x, case.k))


@host
@pytest.mark.parametrize("variant", [Decode(4, 1, 1), ORDERED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_rows_that_are_no_numbers_spoil_no_other(
    variant: Decode | Tiled, dtype: str, folder: Path
) -> None:
    q, x = random_quant(CASES[0]), random_x((6, CASES[0].k), dtype)
    clean = multiplied(q, x, variant, folder)
    x[1], x[2, 7], x[3, 290], x[4, 0] = 0, np.nan, np.inf, -np.inf
    y = multiplied(q, x, variant, folder)
    np.testing.assert_array_equal(bits(y[[0, 5]]), bits(clean[[0, 5]]))
    np.testing.assert_array_equal(y[1], q.bias.astype(x.dtype))
    assert np.isnan(np.float32(y[2:5])).all()


@host
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [Decode(4, 2, 1), ORDERED, Tiled(2, 4, 1, 1, cut=True)], ids=str)
def test_bias_and_residual_are_rounded_as_the_reference_rounds_them(
    variant: Decode | Tiled, dtype: str, rounding: str, folder: Path
) -> None:
    q, x = random_quant(Case("u4b8", group=32, bias="f32", low=0.25, high=0.25)), random_x((4, 200), dtype)
    residual = (np.random.default_rng(3).standard_normal((4, 72)) * 100).astype(x.dtype)
    got = multiplied(q, x, variant, folder, residual=residual, rounding=rounding)
    np.testing.assert_array_equal(bits(got), bits(finish(defined(q, x), x.dtype, q.bias, residual, rounding)))


@host
@pytest.mark.parametrize("variant", [Decode(4, 1, 1), ORDERED], ids=str)
def test_each_expert_is_multiplied_with_its_own(variant: Decode | Tiled, folder: Path) -> None:
    q, x = random_quant(Case("u4", zero=True, group=32, n=72, k=96, experts=3)), random_x((2, 96), "float16")
    for expert in range(3):
        one = replace(
            q, codes=q.codes[expert], zero=q.zero[expert], scales=(replace(q.scales[0], data=q.scales[0].data[expert]),)
        )
        got, want = multiplied(q, x, variant, folder, expert), multiplied(one, x, variant, folder)
        np.testing.assert_array_equal(bits(got), bits(want))
    np.testing.assert_allclose(np.float32(got), defined(one, x), rtol=2e-3, atol=1e-3)


INTEGERS = [
    spec_of(28672, 8192),
    spec_of(4096, 4096, 16, bias="f16"),
    spec_of(14336, 4096, 32, element="u8", zero="int", scale="f32"),
    spec_of(200, 300, 48, perm=True, bias="f32", scale="bf16"),
    spec_of(64, 100001, -1, element="u8b128"),
    spec_of(151936, 16, 16, element="u4", zero="int", experts=4),
    spec_of(28672, 8192, 16, scale="f32"),
]
HOPPER = Device(90, 132, 232448, (13, 5))


@pytest.mark.parametrize("device", [H200, HOPPER, RTX_3090, A100, T4], ids=lambda d: f"sm_{d.arch}_{d.nvrtc[0]}")
def test_every_launch_fits_its_kernel_and_the_device(device: Device) -> None:
    ahead = set(variants(device.arch))
    dtypes = [dtype for dtype in ("f16", "bf16", "f32") if refuse_device(device.arch, dtype) is None]
    for spec, m, x_dtype, invariant in product(INTEGERS, (1, 8, 9, 64, 1024, 70000), dtypes, (0, 1)):
        made = plan(spec, m, device, x_dtype, False, None, "int8_row", bool(invariant))
        kernels = [stage.kernel for stage in made.stages]
        kernel = "marlin_decode" if m <= 8 and not invariant else "marlin_tiled"
        assert kernels == ["quantize_rows", *["gather"] * spec["perm"], kernel]
        assert "x" not in made.stages[-1].args
        assert made.quantizes == "int8_row"
        assert (made.quantized, made.factors) == nbytes("int8_row", m, spec["k"])
        assert made.gathered == (2 * m * spec["k_padded"] if spec["perm"] else 0)
        assert "x is rounded to 8 bits, with one factor for each row" in made.why
        assert not invariant or made.counters == 0
        for stage in made.stages:
            assert [type_of(a) for a in stage.args] == parameters(stage.kernel)
            assert len(stage.variant) == fields(stage.kernel)
            assert stage.shared + 128 <= device.shared
            assert (stage.kernel, stage.variant, stage.target) in ahead


def test_no_plan_scales_weights_before_they_are_added() -> None:
    for m in (9, 4096):
        made = plan(spec_of(28672, 8192), m, HOPPER, "f16", numerics="int8_row")
        assert dict(made.rejected)["wgmma"] == "most of its tiles scale weights before they add, not sums of integers"
        assert plan(spec_of(28672, 8192), m, HOPPER, "f16").stages[-1].kernel == "marlin_wgmma"


def test_only_integers_may_be_multiplied_so() -> None:
    assert all(numerics(spec) == ("exact", "int8_row") for spec in INTEGERS)
    assert numerics(spec_of(256, 512, 32, element="e2m1", scale="e8m0")) == ("exact",)
    assert numerics(spec_of(256, 512, element="e4m3")) == ("exact",)
