"""x in 8 bits with one factor for each row, on Marlin tiles of integers: through a session, on host and device.

Scales are one power of two, so that fp32 sums are exact in any order and every kernel gives the bits of the definition.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from linears import ACTIVATION, Case, InMemory, random_quant, random_x
from warptile.formats.canonical import dequantize
from warptile.formats.errors import UnsupportedError
from warptile.kernels.epilogue import ROUNDINGS, finish
from warptile.kernels.quantize import quantize
from warptile.runtime import Session

EVEN = {"low": 0.25, "high": 0.25}
CASES = {
    "u4b8": Case("u4b8", group=128, n=320, k=512, bias="f16", **EVEN),
    "ragged": Case("u4", zero=True, scale="bf16", group=32, n=257, k=521, bias="f32", **EVEN),
    "short": Case("u8", zero=True, group=16, n=200, k=300, bias="f32", **EVEN),
    "order": Case("u8b128", scale="f32", group=64, n=72, k=200, order=True, bias="bf16", **EVEN),
    "odd": Case("u4", zero=True, group=48, n=70, k=203, order=True, **EVEN),
    "channel": Case("u4b8", group=-1, n=130, k=336, **EVEN),
    "s8": Case("s8", group=32, n=130, k=200, **EVEN),
}
QUANTS = {name: random_quant(case) for name, case in CASES.items()}
EXPERTS = random_quant(Case("u4", zero=True, group=32, n=136, k=192, experts=3, **EVEN))
FLOAT = random_quant(Case("e2m1", scale="e8m0", low=115, high=123, n=72, k=200))
DTYPES = {**ACTIVATION, "float32": np.dtype(np.float32)}
MS = (1, 4, 8, 9, 17, 64, 129, 300)


def sums(q, x, expert=None):
    """float32 [m, n] by the definition: an exact sum, times the row's factor."""
    codes, d = quantize(x, "int8_row")
    weights = dequantize(q, np.float64)
    exact = np.float64(codes[:, : q.k]) @ (weights if expert is None else weights[expert]).T
    assert (np.float32(exact) == exact).all()
    return np.float32(exact) * d


@pytest.fixture
def session():
    with Session(InMemory({**QUANTS, "experts": EXPERTS, "float": FLOAT}, {}), device="cpu") as s:
        yield s


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_multiplies_rounded_rows_and_rounds_once(session, name, dtype):
    x = random_x((2, 3, CASES[name].k), dtype)
    y, want = session.linear(name, x, numerics="int8_row"), sums(QUANTS[name], x.reshape(6, -1))
    bias = 0 if QUANTS[name].bias is None else np.float64(QUANTS[name].bias)
    close = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}[dtype]
    np.testing.assert_allclose(np.float64(y).reshape(6, -1), want + bias, rtol=close, atol=1e-5)
    assert not np.array_equal(y, session.linear(name, x))
    with session.quantize(x, "int8_row") as shared:
        np.testing.assert_array_equal(session.linear(name, shared), y)


def test_a_row_that_is_no_number_spoils_no_other_on_the_reference(session):
    x = random_x((4, 512), "float16")
    clean = session.linear("u4b8", x, numerics="int8_row")
    x[1, 7], x[2] = np.inf, 0
    y = session.linear("u4b8", x, numerics="int8_row")
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 3]], clean[[0, 3]])
    np.testing.assert_array_equal(y[2], QUANTS["u4b8"].bias)


def test_only_integers_are_multiplied_so(session):
    assert session.module("s8").numerics == ("exact", "int8_row")
    assert "x in 8 bits (int8_row)" in str(session.explain("u4b8", 4, numerics="int8_row"))
    for x in (random_x((2, 200), "float16"), session.quantize(random_x((2, 200), "float16"), "int8_row")):
        with pytest.raises(UnsupportedError, match="float: marlin modules do not multiply with int8_row activations"):
            session.linear("float", x, numerics="int8_row")


# ---- on a CUDA device ----


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture(scope="module")
def gpu():
    with Session(InMemory({**QUANTS, "experts": EXPERTS}, {})) as s:
        s.prepare(MS, list(DTYPES), numerics="int8_row")
        yield s


def on_device(cp, x):
    """bfloat16 travels as bits."""
    return cp.asarray(x.view(f"u{x.itemsize}")).view(x.dtype)


def bits(y):
    return y.view(f"uint{8 * y.itemsize}").get()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_bits_of_the_definition(cp, gpu, name, dtype):
    q, to, rng = QUANTS[name], DTYPES[dtype], np.random.default_rng(6)
    for m in MS:
        x = random_x((m, q.k), dtype)
        x[m // 2] *= to.type(2.0**-9)
        there = on_device(cp, x)
        for rounding, added in product(ROUNDINGS, (False, True)):
            residual = (rng.standard_normal((m, q.n)) * 30).astype(to) if added else None
            more = {"residual": on_device(cp, residual) if added else None, "rounding": rounding}
            want = finish(sums(q, x), to, q.bias, residual, rounding).view(f"u{to.itemsize}")
            y = gpu.linear(name, there, numerics="int8_row", **more)
            np.testing.assert_array_equal(bits(y), want, err_msg=f"{m} {rounding} {added}")
            with gpu.quantize(there, "int8_row") as shared:
                np.testing.assert_array_equal(bits(gpu.linear(name, shared, **more)), want)


@pytest.mark.gpu
def test_rows_of_any_stride_and_place_are_read(cp, gpu):
    for m, name in product((3, 40), ("u4b8", "odd")):
        x = random_x((m, CASES[name].k + 4), "float16")
        want = finish(sums(QUANTS[name], x[:, 1:-3]), x.dtype, QUANTS[name].bias)
        y = gpu.linear(name, cp.asarray(x)[:, 1:-3], numerics="int8_row")
        np.testing.assert_array_equal(bits(y), want.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40])
def test_each_expert_is_multiplied_with_its_own(cp, gpu, m):
    x = random_x((m, 192), "bfloat16")
    for expert in range(3):
        y = gpu.linear("experts", on_device(cp, x), expert=expert, numerics="int8_row")
        np.testing.assert_array_equal(bits(y), finish(sums(EXPERTS, x, expert), x.dtype).view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_rows_spoil_no_other(cp, gpu, dtype):
    for m in (5, 40):
        x = random_x((m, 512), dtype)
        clean = bits(gpu.linear("u4b8", on_device(cp, x), numerics="int8_row"))
        x[1, 7], x[2, 9], x[3] = np.nan, -np.inf, 0
        y = gpu.linear("u4b8", on_device(cp, x), numerics="int8_row")
        host = bits(y).view(x.dtype)
        assert np.isnan(np.float32(host[1:3])).all()
        np.testing.assert_array_equal(host[3], QUANTS["u4b8"].bias.astype(x.dtype))
        rest = [0, *range(4, m)]
        np.testing.assert_array_equal(bits(y)[rest], clean[rest])


@pytest.mark.gpu
def test_random_scales_differ_by_roundings_of_float32(cp):
    quants = {name: random_quant(replace(case, low=0.005, high=0.02, bias=None)) for name, case in CASES.items()}
    with Session(InMemory(quants, {})) as s:
        for (name, q), m in product(quants.items(), (1, 8, 40, 300)):
            x = random_x((m, q.k), "float32")
            codes, d = quantize(x, "int8_row")
            want = np.float64(codes[:, : q.k]) @ dequantize(q, np.float64).T * d
            error = np.abs(s.linear(name, cp.asarray(x), numerics="int8_row").get() - want)
            assert (error <= np.abs(want).max() * 2.0**-20).all(), (name, m)


@pytest.mark.gpu
def test_a_batch_invariant_row_has_the_same_bits_whatever_the_others_are(cp):
    q, x = random_quant(Case("u4", zero=True, group=64, order=True, n=200, k=520)), random_x((300, 520), "float16")
    with Session(InMemory({"p": q}, {}), batch_invariant=True) as s:
        whole = bits(s.linear("p", cp.asarray(x), numerics="int8_row"))
        for start, m in ((0, 1), (299, 1), (3, 8), (30, 9), (7, 64), (60, 130)):
            y = bits(s.linear("p", cp.asarray(x[start : start + m]), numerics="int8_row"))
            np.testing.assert_array_equal(y, whole[start : start + m], f"m = {m}")


@pytest.mark.gpu
def test_a_prepared_product_is_captured(cp, gpu):
    stream, x = cp.cuda.Stream(non_blocking=True), on_device(cp, random_x((17, 200), "float16"))
    out = cp.empty((17, 72), cp.float16)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        gpu.linear("order", x, out=out, numerics="int8_row")
        graph = stream.end_capture()
    x *= 3
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(bits(out), bits(gpu.linear("order", x, numerics="int8_row")))


@pytest.mark.gpu
def test_explain_says_that_rows_are_rounded(gpu):
    for m in (1, 64):
        text = str(gpu.explain("order", m, numerics="int8_row"))
        assert "x is rounded to 8 bits, with one factor for each row" in text
        assert "quantize_rows<" in text
        assert "8 bits" not in str(gpu.explain("order", m))
