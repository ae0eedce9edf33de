"""silu(gate) * up: the bits of two products and a third, whether it is one launch or three."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from linears import ACTIVATION, Case, InMemory, random_quant, random_x
from warptile.kernels import mmq
from warptile.kernels.swiglu import swiglu
from warptile.runtime import Session

PAIRS = {
    "u4b8": Case("u4b8", group=128, n=320, k=512, bias="f16"),
    "u4": Case("u4", zero=True, group=32, n=257, k=520, bias="f32"),
    "short": Case("u4b8", group=16, n=200, k=300),
    "u8": Case("u8b128", scale="f32", group=-1, n=130, k=336),
    "order": Case("u4b8", group=64, n=72, k=200, order=True),
    "e4m3": Case("e4m3", scale="f32", group=128, rows=128, n=200, k=520),
    "nvfp4": Case("e2m1", scale="e4m3", group=16, whole=True, shards=(72, 128), low=1, high=60, n=200, k=520),
    "experts": Case("u4b8", bias="f32", n=136, k=192, experts=3),
}
QUANTS = {
    f"{name}.{side}": random_quant(replace(case, seed=seed))
    for name, case in PAIRS.items()
    for seed, side in enumerate(("gate", "up"))
}
UNLIKE = {"sym": random_quant(Case(n=72, k=200)), "asym": random_quant(Case("u4", zero=True, n=72, k=200, seed=3))}
PLAIN = {"gate.weight": random_x((40, 200), "float16"), "up.weight": random_x((40, 200), "float16", seed=2)}
DTYPES = (*ACTIVATION, "float32")
MS = (0, 1, 3, 4, 8, 9, 40)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def session(request):
    with Session(InMemory({**QUANTS, **UNLIKE}, PLAIN), device=request.param) as s:
        yield s


def same_bits(got, want):
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


def pairs_of(name):
    return (
        ("sym", "asym") if name == "unlike" else ("gate", "up") if name == "plain" else (f"{name}.gate", f"{name}.up")
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*PAIRS, "unlike", "plain"])
def test_it_is_two_products_and_a_third_to_the_bit(session, name, dtype):
    gate, up = pairs_of(name)
    more = {"expert": 2} if name == "experts" else {}
    for m in MS:
        x = random_x((m, session.module(gate).k), dtype)
        y = session.swiglu(gate, up, x, **more)
        same_bits(y, swiglu(session.linear(gate, x, **more), session.linear(up, x, **more)))


def test_out_takes_the_result_of_strided_rows(session):
    x, buffer = random_x((3, 2, 700), "float16"), np.full((6, 400), 7, np.float16)
    out = buffer[:, 9:329].reshape(3, 2, 320)
    assert np.shares_memory(out, buffer)
    assert session.swiglu("u4b8.gate", "u4b8.up", x[:, :, 5:517], out=out) is out
    same_bits(np.ascontiguousarray(out), session.swiglu("u4b8.gate", "u4b8.up", np.ascontiguousarray(x[:, :, 5:517])))
    out[...] = 7
    assert (buffer == 7).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("u4b8.gate", "u4.up"), ValueError, "u4b8.gate is 320 x 512, u4.up 257 x 520; need the same shape"),
        (("u4b8.gate", "u4b8.app"), KeyError, "u4b8.up"),
        (("experts.gate", "experts.up"), ValueError, "holds 3 experts"),
    ],
)
def test_two_that_do_not_fit_are_refused(session, arguments, error, words):
    with pytest.raises(error, match=words):
        session.swiglu(*arguments, random_x((1, 512), "float16"))


def test_strips_are_two_products():
    quants = {side: random_quant(Case(n=72, k=200, seed=seed)) for seed, side in enumerate(("gate", "up"))}
    x = random_x((3, 200), "float16")
    with Session(InMemory(quants, {}, mmq), device="cpu") as s:
        same_bits(s.swiglu("gate", "up", x), swiglu(s.linear("gate", x), s.linear("up", x)))
        assert "both rounded" in str(s.explain("gate", 3, up="up"))


# ---- on a CUDA device ----


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture
def gpu():
    with Session(InMemory({**QUANTS, **UNLIKE}, PLAIN)) as s:
        yield s


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_explain_tells_one_launch_from_three(gpu, name):
    few, many = (str(gpu.explain(f"{name}.gate", m, up=f"{name}.up")) for m in (4, 40))
    assert ("two products" in few) == (name == "order")
    assert "two products" in many
    assert "serves up to 8 rows, this has 40" in many
    assert "element is u4b8 and u4" in str(gpu.explain("sym", 1, up="asym"))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40])
def test_a_captured_graph_replays_with_new_contents(cp, gpu, m):
    stream = cp.cuda.Stream(non_blocking=True)
    x, out = cp.zeros((m, 512), cp.float16), cp.empty((m, 320), cp.float16)
    cp.cuda.Device().synchronize()

    def capture():
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        try:
            gpu.swiglu("u4b8.gate", "u4b8.up", x, out=out)
        finally:
            capture.graph = stream.end_capture()

    with stream, pytest.raises(RuntimeError, match=rf"session\.prepare\({m}"):
        capture()
    gpu.prepare(m, "float16", swiglu=[("u4b8.gate", "u4b8.up")])
    with stream:
        capture()
    for seed in (5, 6):
        fresh = cp.asarray(random_x((m, 512), "float16", seed))
        x[...] = fresh
        cp.cuda.Device().synchronize()
        capture.graph.launch(stream)
        stream.synchronize()
        same_bits(out.get(), gpu.swiglu("u4b8.gate", "u4b8.up", fresh).get())


@pytest.mark.gpu
def test_nothing_is_allocated_after_the_first_call(cp, gpu):
    for m in (1, 40):
        x, out = cp.asarray(random_x((m, 512), "float16")), cp.empty((m, 320), cp.float16)
        gpu.swiglu("u4b8.gate", "u4b8.up", x, out=out)
        cp.cuda.Device().synchronize()
        before = cp.cuda.runtime.memGetInfo()[0], gpu.scratch_bytes
        for _ in range(3):
            gpu.swiglu("u4b8.gate", "u4b8.up", x, out=out)
        cp.cuda.Device().synchronize()
        assert (cp.cuda.runtime.memGetInfo()[0], gpu.scratch_bytes) == before
