"""Products with strips and x as it is, on Hopper's tensor cores, against float64; batch-invariant ones too.

python -m pytest -q tests/runtime/test_strips_exact.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from launches import H200
from linears import ACTIVATION, InMemory, random_x
from strip_linears import random_strips
from warptile.formats.canonical import dequantize
from warptile.kernels import mmq
from warptile.kernels.mmq_hopper_plan import TILES, refuse_tile
from warptile.kernels.mmq_strips import KINDS
from warptile.runtime import Session

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3}
INSIDE = [kind for kind, facts in KINDS.items() if facts.scales]
MORE = {
    "parts": ("nvfp4", {"shards": (40, 100, 60), "whole": True, "bias": "bf16", "n": 200, "k": 1000}),
    "whole": ("q4_k", {"whole": True, "n": 200, "k": 1000}),
    "large": ("q6_k", {"n": 4096, "k": 4096}),
    "short": ("q5_1", {"n": 1000, "k": 256, "bias": "f16"}),
}
CASES = {**{kind: (kind, {"bias": "f32"}) for kind in INSIDE}, **MORE}


@pytest.fixture(scope="module")
def cp():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs sm_90")
    return cupy


@pytest.fixture(scope="module")
def quants():
    return {name: random_strips(kind, **more) for name, (kind, more) in CASES.items()}


@pytest.fixture(scope="module")
def session(cp, quants):
    with Session(InMemory(quants, {}, mmq)) as s:
        yield s


def times(cp, session, name, x, **more):
    """The product on the device; bf16 travels as bits."""
    y = session.linear(name, cp.asarray(x.view(np.uint16)).view(x.dtype), numerics="exact", **more)
    return y.view("uint16").get().view(x.dtype)


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("name", CASES)
def test_products_of_every_kind_and_m(cp, session, quants, name, dtype):
    q = quants[name]
    x = random_x((300, q.k), dtype)
    want = np.float64(x) @ dequantize(q, np.float64).T + (0 if q.bias is None else np.float64(q.bias))
    for m in (1, 9, 17, 33, 64, 65, 128, 300):
        y = times(cp, session, name, x[:m])
        error = np.linalg.norm(np.float64(y) - want[:m]) / np.linalg.norm(want[:m])
        assert error <= TOLERANCE[dtype], f"m = {m}: {error:.2e}"
        np.testing.assert_array_equal(times(cp, session, name, x[:m]).view(np.uint16), y.view(np.uint16))


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("name", INSIDE)
def test_one_hot_rows_return_the_decoded_weights(cp, quants, name, dtype):
    q, to = random_strips(name), ACTIVATION[dtype]
    once, twice = (np.float32(dequantize(q, first).T.astype(to)) for first in (np.float64, np.float32))
    x = np.eye(q.k, dtype=to)
    with Session(InMemory({"p": q}, {}, mmq)) as s:
        for start in (0, 1024, 2048, 2700):
            y = np.float32(times(cp, s, "p", x[start : start + 180]))
            rows = slice(start, start + 180)
            np.testing.assert_array_equal(y, np.where(y == twice[rows], twice[rows], once[rows]))


@pytest.mark.parametrize("tile", [replace(tile, cut=cut) for tile in TILES for cut in (False, True)], ids=str)
def test_every_tile_and_cut_ones(cp, quants, monkeypatch, tile):
    """The decoded weights again, by features and rows that no tile divides."""
    names = ("q4_0", "q8_0", "short", "whole", "large", "parts")
    names = [name for name in names if refuse_tile(mmq.spec(quants[name].outline()), H200, tile) is None]
    assert len(names) >= 3
    monkeypatch.setattr(mmq, "plan", partial(mmq.plan, variant=tile))
    with Session(InMemory({name: quants[name] for name in names}, {}, mmq)) as s:
        for name in names:
            q = quants[name]
            x = random_x((139, q.k), "float16")
            want = np.float64(x) @ dequantize(q, np.float64).T + (0 if q.bias is None else np.float64(q.bias))
            y = times(cp, s, name, x)
            assert np.linalg.norm(np.float64(y) - want) / np.linalg.norm(want) <= TOLERANCE["float16"]
            np.testing.assert_array_equal(times(cp, s, name, x), y)


def test_many_rows_run_on_tensor_cores_of_16_bits_unless_int8_is_asked_for(session):
    for name in CASES:
        assert "mmq_wgmma" in str(session.explain(name, 64, "bfloat16"))
        assert "mmq_wgmma" not in str(session.explain(name, 64, "bfloat16", numerics="int8"))
        assert "mmq_wgmma" not in str(session.explain(name, 8, "bfloat16"))


@pytest.mark.parametrize("name", ["q4_k", "large", "parts"])
def test_a_batch_invariant_row_has_the_same_bits_whatever_the_others_are(cp, quants, name):
    q = quants[name]
    x = random_x((300, q.k), "bfloat16")
    with Session(InMemory({name: q}, {}, mmq), batch_invariant=True) as s:
        whole = times(cp, s, name, x).view(np.uint16)
        for start, m in ((0, 1), (299, 1), (5, 9), (30, 64), (1, 130), (9, 257)):
            y = times(cp, s, name, x[start : start + m]).view(np.uint16)
            np.testing.assert_array_equal(y, whole[start : start + m], f"m = {m}")


def test_an_expert_a_residual_and_each_step_rounded(cp):
    q = random_strips("q4_k", 136, 700, experts=3, bias="f32")
    x, residual = random_x((70, 700), "bfloat16"), random_x((70, 136), "bfloat16")
    with Session(InMemory({"p": q}, {}, mmq)) as s:
        for expert in range(3):
            want = (
                np.float64(x) @ dequantize(q, np.float64)[expert].T + np.float64(q.bias[expert]) + np.float64(residual)
            )
            r = cp.asarray(residual.view(np.uint16)).view(residual.dtype)
            y = np.float64(times(cp, s, "p", x, expert=expert, residual=r, rounding="each"))
            assert np.linalg.norm(y - want) / np.linalg.norm(want) <= 5e-3
