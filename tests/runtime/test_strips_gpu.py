"""Products with strips on a CUDA device, x in 8 bits, against the same arithmetic in float64.

python -m pytest -q tests/runtime/test_strips_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from linears import ACTIVATION, InMemory
from strip_linears import assert_close_to_exact, assert_is_in_8_bits, random_rows, random_strips
from warptile.kernels import mmq
from warptile.kernels.epilogue import finish
from warptile.kernels.mmq_tiled_plan import TILES, refuse_tile
from warptile.runtime import Session

pytestmark = pytest.mark.gpu

MS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 100)
FP8 = 2.0**-10
"""What the tensor cores lose of 128 products of e4m3, of the sum of their sizes."""

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4, parts": ("nvfp4", {"shards": (40, 100, 60), "whole": True, "bias": "bf16", "n": 200, "k": 1000}),
    "fp8, rows": ("fp8", {"block": (1, 2880), "scale": "bf16", "bias": "f16"}),
    "fp8, parts": ("fp8", {"shards": (60, 40), "n": 100}),
    "fp8, powers": ("fp8", {"block": (48, 256), "scale": "e8m0", "whole": True, "n": 300, "k": 1500}),
    "fp8, halves": ("fp8", {"block": (128, 128), "scale": "f16", "n": 300}),
    "short k": ("q4_k", {"n": 1000, "k": 256, "bias": "f32"}),
    "long k": ("q6_k", {"n": 72, "k": 16384}),
    "many rows": ("q4_0", {"n": 20000, "k": 256}),
    "square": ("q8_0", {"n": 2048, "k": 2048}),
}
CASES = {**{kind: (kind, {"bias": "f32"}) for kind in mmq.KINDS}, **MORE}


def numerics(kind: str) -> str:
    return "e4m3" if kind == "fp8" else "int8"


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture(scope="module")
def quants():
    return {name: random_strips(kind, **more) for name, (kind, more) in CASES.items()}


@pytest.fixture(scope="module")
def session(cp, quants):
    with Session(InMemory(quants, {}, mmq)) as s:
        yield s


def times(cp, session, name, x, **more):
    """The product on the device; bf16 travels as bits."""
    kind, bits = CASES[name][0], f"u{x.itemsize}"
    more = {key: cp.asarray(v.view(bits)).view(v.dtype) if hasattr(v, "view") else v for key, v in more.items()}
    y = session.linear(name, cp.asarray(x.view(bits)).view(x.dtype), numerics=numerics(kind), **more)
    return y.view(bits).get().view(x.dtype)


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("name", CASES)
def test_products_of_every_kind_and_m(cp, session, quants, name, dtype):
    q, loses = quants[name], FP8 if CASES[name][0] == "fp8" else 2.0**-20
    for m in MS:
        x = random_rows(m, q.k, dtype, seed=m)
        y = times(cp, session, name, x)
        assert_is_in_8_bits(y, q, x, loses=loses)
        assert_close_to_exact(y, q, x)
        np.testing.assert_array_equal(times(cp, session, name, x).view(np.uint16), y.view(np.uint16))


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_ours_run(session, name):
    for m in MS:
        assert "mmq_" in str(session.explain(name, m, numerics=numerics(CASES[name][0])))


@pytest.mark.parametrize("tile", [*TILES, *(replace(tile, cut=True) for tile in TILES)], ids=str)
def test_every_tile_and_cut_ones(cp, quants, monkeypatch, tile):
    """With as many streams as the device has SMs, so that tiles of all parts are cut."""
    real, names = mmq.plan, ("q4_k", "q6_k", "fp8", "square")
    monkeypatch.setattr(mmq, "plan", partial(real, variant=tile))
    with Session(InMemory({name: quants[name] for name in names}, {}, mmq)) as s:
        for name in names:
            if refuse_tile(mmq.spec(quants[name].outline()), s._live.ready.facts, tile):
                continue
            q, loses = quants[name], FP8 if name == "fp8" else 2.0**-20
            x = random_rows(100, q.k, "float16")
            y = times(cp, s, name, x)
            assert_is_in_8_bits(y, q, x, loses=loses)
            np.testing.assert_array_equal(times(cp, s, name, x).view(np.uint16), y.view(np.uint16))


@pytest.mark.parametrize("name", mmq.KINDS)
def test_single_numbers_return_the_decoded_weights(cp, session, quants, name):
    q = quants[name]
    for start in range(0, q.k, q.k // 9):
        rows = np.arange(start, min(start + 8, q.k))
        x = np.zeros((len(rows), q.k), np.float16)
        x[np.arange(len(rows)), rows] = 448 if name == "fp8" else 127  # their factor is 1
        assert_is_in_8_bits(times(cp, session, name, x), q, x, loses=2.0**-22)


def test_nan_and_inf_reach_only_their_own_row(cp, session, quants):
    for name, m in product(mmq.KINDS, (4, 20)):
        x = random_rows(m, quants[name].k, "float16")
        clean = times(cp, session, name, x)
        x[1, 5], x[3, -1] = np.nan, np.inf
        y = times(cp, session, name, x)
        assert np.isnan(y[[1, 3]]).all()
        rest = [row for row in range(m) if row not in (1, 3)]
        np.testing.assert_array_equal(y[rest], clean[rest])


@pytest.mark.parametrize("kind", ["q4_k", "nvfp4", "fp8"])
def test_an_expert_is_picked_from_a_stack(cp, kind):
    q = random_strips(kind, 136, 700, experts=3, bias="f32")
    with Session(InMemory({kind: q}, {}, mmq)) as s:
        for m, expert in product((1, 20), range(3)):
            x = random_rows(m, 700, "bfloat16")
            y = times(cp, s, kind, x, expert=expert)
            assert_is_in_8_bits(y, q, x, expert, loses=FP8 if kind == "fp8" else 2.0**-20)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "mxfp4", "fp8"])
def test_float32_rows_give_sums_that_residuals_are_added_to(cp, session, quants, name):
    """By the epilogue's own reference."""
    q, loses = quants[name], FP8 if name == "fp8" else 2.0**-20
    for m in (1, 8, 20, 100):
        x = random_rows(m, q.k, "float16")
        y = times(cp, session, name, np.float32(x))
        assert_is_in_8_bits(y, q, np.float32(x), loses=loses)
        residual = random_rows(m, 100, "float16", seed=5)
        got = times(cp, session, name, x, residual=residual)
        want = finish(y - np.float32(q.bias), x.dtype, q.bias, residual)
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2**-10, atol=2**-12 * np.abs(y).max())


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "mxfp4", "square"])
def test_batch_invariant_rows_have_the_same_bits_for_every_m(cp, quants, name):
    with Session(InMemory({name: quants[name]}, {}, mmq), batch_invariant=True) as s:
        x = random_rows(100, quants[name].k, "float16")
        y = times(cp, s, name, x)
        assert_is_in_8_bits(y, quants[name], x)
        for m in (1, 5, 17, 64):
            np.testing.assert_array_equal(times(cp, s, name, x[:m]), y[:m])


def test_quantized_rows_are_shared_and_exact_stays_exact(cp, session, quants):
    x = random_rows(5, 2880, "float16")
    with session.quantize(cp.asarray(x)) as handle:
        for name in ("q4_0", "q6_k", "mxfp4"):
            np.testing.assert_array_equal(session.linear(name, handle).get(), times(cp, session, name, x))
    exact = session.linear("q4_0", cp.asarray(x), numerics="exact").get()
    assert not np.array_equal(exact, times(cp, session, "q4_0", x))
