"""What goes into a product and what happens to its sums, on a CUDA device: float32 rows, bias, residual, rounding.

Weights are small whole numbers times a power of two and x are small whole numbers, so that fp32 sums are exact in any
order and every kernel must give the bits of ``epilogue.finish``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from linears import ACTIVATION, Case, InMemory, random_quant, random_x
from warptile.formats.canonical import dequantize
from warptile.kernels.epilogue import ROUNDINGS, finish
from warptile.runtime import Session

pytestmark = pytest.mark.gpu

WHOLE = {"low": 0.25, "high": 0.25}
CASES = {
    "u4b8": Case("u4b8", group=128, n=320, k=512, bias="f16", **WHOLE),
    "ragged": Case("u4", zero=True, group=32, n=257, k=520, bias="f32", **WHOLE),
    "short": Case("u4b8", group=16, n=200, k=300, bias="f32", **WHOLE),
    "order": Case("u8b128", group=64, n=72, k=200, order=True, bias="bf16", **WHOLE),
    "channel": Case("u4b8", group=-1, n=130, k=336, **WHOLE),
    "e4m3": Case("e4m3", scale="f32", group=128, rows=128, n=200, k=520, bias="f16", low=2.0**-4, high=2.0**-4),
}
QUANTS = {name: random_quant(case) for name, case in CASES.items()}
# Codes of 1, 1.5, 2, 3, 4: fp32 sums of any e4m3 would not be exact.
SMALL = np.random.default_rng(1).choice(np.uint8([0x38, 0x3C, 0x40, 0x44, 0xC8]), QUANTS["e4m3"].codes.shape)
QUANTS["e4m3"] = replace(QUANTS["e4m3"], codes=SMALL)
PLAIN = {"lm_head.weight": np.float16(np.random.default_rng(0).integers(-8, 9, (72, 200))) / np.float16(4)}
DTYPES = {**ACTIVATION, "float32": np.dtype(np.float32)}
MS = (1, 4, 8, 9, 17, 64, 129, 300)


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture(scope="module")
def session():
    with Session(InMemory(QUANTS, PLAIN)) as s:
        s.prepare(MS, list(DTYPES))
        yield s


def on_device(cp, x):
    """bfloat16 travels as bits."""
    return cp.asarray(x.view(f"u{x.itemsize}")).view(x.dtype)


def bits(y):
    return y.view(f"uint{8 * y.itemsize}").get()


def whole(m, k, dtype, seed=4):
    return np.random.default_rng(seed).integers(-8, 9, (m, k)).astype(dtype)


def sums(name, x):
    if name == "lm_head":
        return np.float32(np.float64(x) @ np.float64(PLAIN["lm_head.weight"]).T)
    exact = np.float64(x) @ dequantize(QUANTS[name], np.float64).T
    assert (np.float32(exact) == exact).all()
    return np.float32(exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, "lm_head"])
def test_bias_and_residual_are_rounded_as_the_reference_rounds_them(cp, session, name, dtype):
    to, module = DTYPES[dtype], session.module(name)
    bias = QUANTS[name].bias if name in QUANTS else None
    rng = np.random.default_rng(6)
    for m, rounding, added in product(MS, ROUNDINGS, (False, True)):
        x = whole(m, module.k, to)
        residual = (rng.standard_normal((m, module.n)) * 30).astype(to) if added else None
        there = on_device(cp, residual) if added else None
        y = session.linear(name, on_device(cp, x), residual=there, rounding=rounding)
        want = finish(sums(name, x), to, bias, residual, rounding)
        np.testing.assert_array_equal(bits(y), want.view(f"u{to.itemsize}"), err_msg=f"{m} {rounding} {added}")


@pytest.mark.parametrize("m", MS)
def test_a_residual_may_be_strided_and_be_the_result(cp, session, m):
    x, rng = whole(m, 512, np.float16), np.random.default_rng(2)
    buffer = cp.asarray(rng.standard_normal((m, 401)).astype(np.float16))
    before = buffer.get()
    out = buffer[:, 5:325]
    assert session.linear("u4b8", cp.asarray(x), out=out, residual=out) is out
    want = finish(sums("u4b8", x), np.dtype(np.float16), QUANTS["u4b8"].bias, before[:, 5:325])
    before[:, 5:325] = want
    np.testing.assert_array_equal(bits(buffer), before.view(np.uint16))


@pytest.mark.parametrize("name", [*CASES, "lm_head"])
def test_float32_rows_of_any_size_are_multiplied_to_nearly_their_own_precision(cp, session, name):
    module = session.module(name)
    weight = np.float64(PLAIN["lm_head.weight"]) if name == "lm_head" else dequantize(QUANTS[name], np.float64)
    bias = np.float64(QUANTS[name].bias) if name in QUANTS and QUANTS[name].bias is not None else 0
    for m in MS:
        sizes = np.float32([1e-30, 1, 3e20, 1e30, 1e-6])[np.arange(m) % 5, None]
        x = random_x((m, module.k), "float32") * sizes
        exact = np.float64(x) @ weight.T + bias
        for there in (cp.asarray(x), cp.asarray(np.pad(x, ((0, 0), (1, 2))))[:, 1:-2]):
            y = session.linear(name, there)
            assert y.dtype == np.float32
            error = np.linalg.norm(y.get() - exact, axis=1) / np.linalg.norm(exact, axis=1)
            assert (error < 3e-6).all(), (m, error)
    np.testing.assert_array_equal(session.linear(name, x), y.get())


def test_a_bad_float32_row_spoils_no_other(cp, session):
    for m in (3, 40):
        x = random_x((m, 512), "float32")
        clean = session.linear("u4b8", cp.asarray(x)).get()
        x[1, 7], x[2, 9] = np.nan, np.inf
        y = session.linear("u4b8", cp.asarray(x)).get()
        assert np.isnan(y[1:3]).all()
        rest = np.arange(m) > 2
        np.testing.assert_array_equal(y[rest], clean[rest])
        np.testing.assert_array_equal(y[0], clean[0])


def test_explain_says_what_happens_to_float32_rows(session):
    for m in (1, 64):
        text = str(session.explain("u4b8", m, "float32"))
        assert "two of f16" in text
        assert "pairs<" in text
    assert "pairs" not in str(session.explain("u4b8", 1))


def test_torch_float32_in_and_out(session):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = random_x((5, 512), "float32")
    y = session.linear("u4b8", torch.from_numpy(x).cuda())
    assert y.dtype == torch.float32
    np.testing.assert_array_equal(y.cpu().numpy(), session.linear("u4b8", x))


def test_a_residual_is_read_when_the_graph_is_replayed(cp, session):
    stream, x = cp.cuda.Stream(non_blocking=True), cp.asarray(whole(16, 512, np.float16))
    residual, out = cp.zeros((16, 320), cp.float16), cp.empty((16, 320), cp.float16)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        session.linear("u4b8", x, out=out, residual=residual)
        graph = stream.end_capture()
    residual += 3
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(bits(out), bits(session.linear("u4b8", x, residual=residual)))


def test_unbiased_products_round_once_however_they_are_asked(cp, session):
    x = on_device(cp, random_x((40, 336), "float16"))
    once, each = (session.linear("channel", x, rounding=r) for r in ROUNDINGS)
    np.testing.assert_array_equal(bits(once), bits(each))
