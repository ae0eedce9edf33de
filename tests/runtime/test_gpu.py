"""The session on a CUDA device. Needs cupy, cuda-bindings and an sm_75 or newer GPU; torch cases skip without torch.

    python -m pytest -q tests/runtime/test_gpu.py

Cold, most of the time goes into NVRTC; WARPTILE_CUBINS may name a folder of kernels built ahead. Errors are
||y - ref|| / ||ref|| against the float64 product of the decoded weights: 1e-3 in float16, 3e-3 in bfloat16.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from linears import ACTIVATION, Case, InMemory, random_quant, random_x
from warptile.formats.canonical import dequantize
from warptile.formats.errors import UnsupportedError
from warptile.kernels import marlin
from warptile.runtime import Session

pytestmark = pytest.mark.gpu

MS = (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 100, 257)
TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3}
SHAPES = ((64, 256), (72, 200), (130, 336), (257, 520), (200, 1003), (320, 192))


EXPONENTS = {"low": 115, "high": 123}
NVFP4 = Case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=60)
# Shards are where parts begin, in twelfths. Scales of 8 bits lie around 2^-6, below which an e4m3 is subnormal.
FLOATS = [
    *(Case("e4m3", scale=s, group=128, rows=128) for s in ("f32", "bf16", "f16")),
    *(Case("e4m3", scale=s, group=g, rows=r) for s, g, r in (("f32", 32, 64), ("bf16", 48, 192), ("f16", 64, 64))),
    *(Case("e4m3", scale=s, group=g) for s, g in product(("f32", "bf16", "f16"), (16, 32, 64, -1))),
    *(Case("e4m3", scale=s, group=-1, rows=r) for s, r in product(("f32", "bf16", "f16"), (0, 48, 128))),
    *(Case("e4m3", scale="f32", group=-1, shards=parts) for parts in ((6,), (7, 9), (3, 5, 6))),
    *(Case("e4m3", scale="e8m0", group=g, rows=r, **EXPONENTS) for g, r in ((128, 128), (32, 1), (-1, 1), (-1, 0))),
    *(Case("e2m1", scale="e8m0", group=g, **EXPONENTS) for g in (16, 32, 64, 128, -1)),
    *(Case("e2m1", scale="e4m3", group=g, low=1, high=60) for g in (16, 32, 128)),
    *(replace(NVFP4, shards=parts) for parts in ((), (8,), (2, 7), (3, 5, 6))),
]


def _matrix() -> dict[str, Case]:
    """Every element, scale type and group; shape, act-order and bias drawn so that all of them occur with each."""
    draw, cases = random.Random(7), []
    elements = (("u4b8", False), ("u4", True), ("u8b128", False), ("u8", True))
    for (element, zero), scale, group in product(elements, ("f16", "bf16", "f32"), (16, 32, 64, 128, -1, 48)):
        n, k = draw.choice(SHAPES)
        order, bias = draw.random() < 0.5 and group != -1, draw.choice([None, "f16", "bf16", "f32"])
        cases.append(Case(element, zero, scale, group, order=order, bias=bias, n=n, k=k, seed=len(cases)))
    for case in FLOATS:
        n, k = draw.choice(SHAPES)
        shards = tuple(n * i // 12 - n * j // 12 for j, i in pairwise((0, *case.shards, 12))) if case.shards else ()
        bias = draw.choice([None, "f16", "bf16", "f32"])
        cases.append(replace(case, shards=shards, bias=bias, n=n, k=k, seed=len(cases)))
    return {str(case): case for case in cases}


CASES = _matrix()
SOME = ("u4b8", "u4", "u8b128", "u8")
LARGE = Case("u4b8", group=128, n=4096, k=4096)
LARGE_FLOATS = (
    Case("e4m3", scale="f32", group=128, rows=128, n=4096, k=4096),
    Case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=100, n=4096, k=4096),
    Case("e2m1", scale="e8m0", bias="bf16", low=115, high=123, n=5760, k=2880),
)
# What would vanish or overflow if scales multiplied 16-bit weights, or were flushed to zero.
EXTREMES = (
    Case("e4m3", scale="f32", group=128, rows=128, low=1e-5, high=3e-5, n=200, k=520),
    Case("e4m3", scale="f32", group=-1, low=1e-5, high=3e-5, n=200, k=520),
    Case("e4m3", scale="f16", group=64, low=2**-24, high=2**-20, n=200, k=520),
    Case("e4m3", scale="e8m0", group=-1, rows=0, low=110, high=111, n=200, k=520),
    Case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=8, n=200, k=520),
    Case("e2m1", scale="e4m3", group=16, whole=True, low=90, high=105, n=200, k=520),
)
LAST_EXPONENTS = (
    Case("e2m1", scale="e8m0", low=0, high=3, n=200, k=520),
    Case("e2m1", scale="e8m0", low=245, high=252, n=200, k=520),
    Case("e2m1", scale="e8m0", group=128, low=0, high=255, n=200, k=520),
    Case("e4m3", scale="e8m0", group=128, rows=128, low=0, high=3, n=200, k=520),
)


@pytest.fixture(scope="module")
def cp():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture(scope="module")
def quants():
    return {name: random_quant(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def matrix(quants):
    """All cases in one session, every kernel compiled in parallel beforehand."""
    with Session(InMemory(quants, {})) as s:
        s.prepare(MS)
        yield s


@pytest.fixture(scope="module")
def unbiased(quants):
    """The same weights without bias."""
    with Session(InMemory({name: replace(q, bias=None) for name, q in quants.items()}, {})) as s:
        yield s


Q = random_quant(Case("u4", zero=True, group=64, order=True, bias="f16", n=200, k=520))
EXPERTS = random_quant(Case("u4b8", bias="f32", n=136, k=192, experts=3))
PLAIN = {
    "lm_head.weight": random_x((200, 136), "bfloat16"),
    "lm_head.bias": random_x((200,), "float16"),
    "wide.weight": np.float32(random_x((40, 64), "float16")) * np.float32(1e6),
    "tiny.weight": np.float32(random_x((40, 64), "float16")) * np.float32(1e-9),
    "norm.weight": random_x((136,), "bfloat16"),
}


@pytest.fixture
def session():
    """A fresh one for each test: cold, no scratch."""
    with Session(InMemory({"p": Q, "experts": EXPERTS}, PLAIN)) as s:
        yield s


def on_device(cp, x):
    """A numpy array on the device; bf16 travels as bits."""
    return cp.asarray(x.view(np.uint16)).view(x.dtype)


def on_host(y):
    """A cupy or torch array as numpy."""
    if type(y) is np.ndarray:
        return y
    if hasattr(y, "get"):
        return y.view("uint16").get().view(y.dtype)
    return y.detach().float().cpu().numpy()


def exact(q, x, expert=None):
    w, bias = dequantize(q, np.float64), q.bias
    if expert is not None:
        w, bias = w[expert], bias[expert]
    return np.float64(x) @ w.T + (0 if bias is None else np.float64(bias))


def assert_close(y, want, dtype):
    assert y.shape == want.shape
    assert np.isfinite(np.float64(y)).all()
    error = np.linalg.norm(np.float64(y) - want) / max(np.linalg.norm(want), 1e-300)
    assert error <= TOLERANCE[dtype], f"error {error:.2e}"


class Capture:
    """Captures what a stream is given into ``graph``; ended whatever happens, so one failure spoils no other test."""

    def __init__(self, cp, stream, mode="streamCaptureModeRelaxed"):
        self._stream, self._mode = stream, getattr(cp.cuda.runtime, mode)

    def __enter__(self):
        self._stream.__enter__()
        self._stream.begin_capture(self._mode)
        return self

    def __exit__(self, kind, error, at):
        try:
            self.graph = self._stream.end_capture()
        finally:
            self._stream.__exit__(None, None, None)


def bits(y):
    return on_host(y).view(np.uint16)


# ---- values ----


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("name", CASES)
def test_products_of_every_kind_and_m(cp, matrix, quants, name, dtype):
    x = random_x((max(MS), CASES[name].k), dtype)
    want = exact(quants[name], x)
    for m in MS:
        y = matrix.linear(name, on_device(cp, x[:m]))
        assert y.dtype == x.dtype
        assert y.shape == (m, CASES[name].n)
        if m:
            assert_close(on_host(y), want[:m], dtype)


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("name", CASES)
def test_one_hot_rows_return_the_decoded_weights(cp, unbiased, quants, name, dtype):
    """Bit for bit; float32 scales may be rounded by way of float32."""
    q, k, to = quants[name], CASES[name].k, ACTIVATION[dtype]
    once, twice = (np.float32(dequantize(q, first).T.astype(to)) for first in (np.float64, np.float32))
    one_hot = np.eye(k, dtype=to)
    for rows in (np.arange(k), np.arange(1, k, k // 8)[:8], np.arange(0, k, k // 14)[:14], np.array([k - 1])):
        y = np.float32(on_host(unbiased.linear(name, on_device(cp, one_hot[rows]))))
        np.testing.assert_array_equal(y, np.where(y == twice[rows], twice[rows], once[rows]))


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_change_from_run_to_run(cp, matrix, name):
    for m in (1, 16, 257):
        x = on_device(cp, random_x((m, CASES[name].k), "float16"))
        first = bits(matrix.linear(name, x))
        for _ in range(3):
            np.testing.assert_array_equal(bits(matrix.linear(name, x)), first)


def assert_one_hot(cp, session, name, q, dtype, ms):
    to = ACTIVATION[dtype]
    with np.errstate(over="ignore"):
        once, twice = (np.float32(dequantize(q, first).T.astype(to)) for first in (np.float64, np.float32))
    one_hot = np.eye(q.k, dtype=to)
    for m in ms:
        for start in range(0, q.k, max(m, 64)):
            rows = np.arange(start, min(start + m, q.k))
            y = np.float32(on_host(session.linear(name, on_device(cp, one_hot[rows]))))
            np.testing.assert_array_equal(y, np.where(y == twice[rows], twice[rows], once[rows]))


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("case", EXTREMES, ids=str)
def test_small_and_large_scales_keep_their_bits(cp, case, dtype):
    q = random_quant(case)
    with Session(InMemory({"p": q}, {})) as s:
        assert_one_hot(cp, s, "p", q, dtype, (1, 8, 16, 520))
        for m in (1, 16, 100):
            x = random_x((m, case.k), dtype)
            assert_close(on_host(s.linear("p", on_device(cp, x))), exact(q, x), dtype)


@pytest.mark.parametrize("case", LAST_EXPONENTS, ids=lambda c: f"{c}-{c.low}-{c.high}")
def test_powers_of_two_reach_from_the_smallest_to_the_largest_bfloat16(cp, case):
    """2^-127 and its products are subnormal; weights beyond the largest number are infinite."""
    q = random_quant(case)
    with Session(InMemory({"p": q}, {})) as s:
        assert_one_hot(cp, s, "p", q, "bfloat16", (1, 8, 16, 520))


@pytest.mark.parametrize("kind", [
    Case("e4m3", scale="f32", group=128, rows=128), Case("e4m3", scale="bf16", group=-1, rows=0),
    Case("e4m3", scale="f16", group=-1), Case("e2m1", scale="e8m0", low=115, high=123),
    Case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=60),
    Case("e2m1", scale="e4m3", group=16, whole=True, shards=(100, 36), low=1, high=60),
], ids=str)  # fmt: skip
def test_experts_have_scales_and_factors_of_their_own(cp, kind):
    q = random_quant(replace(kind, bias="f32", n=136, k=192, experts=3))
    with Session(InMemory({"p": q}, {})) as s:
        for m, expert in product((1, 40), range(3)):
            x = random_x((m, 192), "float16")
            assert_close(on_host(s.linear("p", on_device(cp, x), expert=expert)), exact(q, x, expert), "float16")


def test_floats_run_on_kernels_of_ours(cp, matrix):
    for name, case in CASES.items():
        for m in (1, 16):
            assert "marlin_" in str(matrix.explain(name, m)), case


INVARIANT = (
    LARGE,
    Case("u4", zero=True, group=64, order=True, bias="f16", n=200, k=520),
    Case("u8b128", group=48, n=320, k=192),
    *LARGE_FLOATS,
)


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_a_batch_invariant_row_has_the_same_bits_whatever_the_others_are(cp, case, dtype):
    q, x = random_quant(case), random_x((400, case.k), dtype)
    with Session(InMemory({"p": q}, {}), batch_invariant=True) as s:
        whole = bits(s.linear("p", on_device(cp, x)))
        for start, m in ((0, 1), (399, 1), (5, 2), (3, 8), (30, 9), (1, 17), (100, 33), (7, 64), (60, 130), (9, 257)):
            y = bits(s.linear("p", on_device(cp, x[start : start + m])))
            np.testing.assert_array_equal(y, whole[start : start + m], f"m = {m}")


def test_a_batch_invariant_session_refuses_what_cublas_would_multiply(cp):
    refused = pytest.raises(UnsupportedError, match=r"lm_head.*cuBLAS would choose its order")
    with Session(InMemory({}, PLAIN), batch_invariant=True) as s, refused:
        s.linear("lm_head", on_device(cp, random_x((2, 136), "bfloat16")))


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("case", [LARGE, *LARGE_FLOATS], ids=str)
def test_a_large_matrix(cp, case, dtype):
    q = random_quant(case)
    bias = 0 if q.bias is None else np.float64(q.bias)
    w = cp.asarray(dequantize(q, np.float64))
    with Session(InMemory({"p": q}, {})) as s:
        for m in (1, 3, 16, 31, 128, 300):
            x = random_x((m, case.k), dtype)
            want = (cp.asarray(np.float64(x)) @ w.T).get() + bias
            y = s.linear("p", on_device(cp, x))
            assert_close(on_host(y), want, dtype)
            np.testing.assert_array_equal(bits(s.linear("p", on_device(cp, x))), bits(y))


def test_nan_and_inf_reach_only_their_own_row(cp, matrix, quants):
    for name in list(CASES)[::5]:
        x = random_x((20, CASES[name].k), "float16")
        want = exact(quants[name], x)
        x[3, 5], x[7, -1] = np.nan, np.inf
        y = on_host(matrix.linear(name, on_device(cp, x)))
        clean = [row for row in range(20) if row not in (3, 7)]
        assert np.isnan(y[3]).all()
        assert not np.isfinite(y[7]).any()
        assert_close(y[clean], want[clean], "float16")


@pytest.mark.parametrize("expert", range(3))
def test_an_expert_is_picked_from_a_stack(cp, session, expert):
    for m in (1, 40):
        x = random_x((m, 192), "float16")
        y = session.linear("experts", on_device(cp, x), expert=expert)
        assert_close(on_host(y), exact(EXPERTS, x, expert), "float16")


def test_dequantize_is_exact(cp, session):
    np.testing.assert_array_equal(session.dequantize("p").get(), dequantize(Q))
    np.testing.assert_array_equal(session.dequantize("experts").get(), dequantize(EXPERTS))
    np.testing.assert_array_equal(session.dequantize("lm_head").get(), np.float32(PLAIN["lm_head.weight"]))


def test_pass_through_tensors_come_as_stored(session):
    for name in ("norm.weight", "wide.weight"):
        stored, there = PLAIN[name], session.tensor(name)
        np.testing.assert_array_equal(there.get().view(f"u{stored.itemsize}"), stored.view(f"u{stored.itemsize}"))


# ---- the caller's arrays ----

X = random_x((4, 6, 1100), "float16", seed=3)
VIEWS = {
    "offset": np.s_[0, :, 1:521],
    "offset by eight": np.s_[0, :, 8:528],
    "row stride": np.s_[:, 0, 7:527],
    "reversed": np.s_[::-1, :, 100:620],
    "every other column": np.s_[..., 1:1041:2],
    "hole in the middle": np.s_[:, 1:5, 3:523],
    "one row": np.s_[0, :1, 5:525],
    "vector": np.s_[2, 3, 5:525],
    "many rows": np.s_[:, :, 3:523],
    "no rows": np.s_[:0, :, 3:523],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_x_is_read_as_cupy_reads_it(cp, session, view):
    x = cp.asarray(X)[view]
    y = session.linear("p", x)
    assert y.shape == (*x.shape[:-1], 200)
    if x.size:
        assert_close(on_host(y), exact(Q, X[view]), "float16")


@pytest.mark.parametrize("m", [1, 8, 100])
def test_out_takes_the_result_and_nothing_beside_it(cp, session, m):
    x, buffer = random_x((m, 520), "float16"), cp.full((m + 2, 301), 7, cp.float16)
    out = buffer[1:-1, 11:211]
    assert session.linear("p", cp.asarray(x), out=out) is out
    assert_close(on_host(cp.ascontiguousarray(out)), exact(Q, x), "float16")
    out[...] = 7
    assert bool((buffer == 7).all())


def test_with_out_nothing_is_allocated_after_the_first_call(cp, session):
    for name, k in (("p", 520), ("lm_head", 136)):
        for m in (1, 40):
            x, out = cp.asarray(random_x((m, k), "float16")), cp.empty((m, 200), cp.float16)
            session.linear(name, x, out=out)
            cp.cuda.Device().synchronize()
            before, scratch = cp.cuda.runtime.memGetInfo()[0], session.scratch_bytes
            calls, pool = [], cp.cuda.MemoryPool()

            def malloc(size, pool=pool, calls=calls):
                calls.append(size)
                return pool.malloc(size)

            with cp.cuda.using_allocator(malloc):
                for _ in range(3):
                    session.linear(name, x, out=out)
            cp.cuda.Device().synchronize()
            assert not calls
            assert (cp.cuda.runtime.memGetInfo()[0], session.scratch_bytes) == (before, scratch)


def test_results_are_not_overwritten_by_later_calls(cp, session):
    x = cp.asarray(random_x((40, 520), "float16"))
    first = session.linear("p", x)
    kept = bits(first)
    for _ in range(3):
        session.linear("p", -x)
    np.testing.assert_array_equal(bits(first), kept)


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("m", [0, 1, 40])
def test_numpy_in_numpy_out(session, m, dtype):
    x = random_x((m, 520), dtype)
    y = session.linear("p", x)
    assert type(y) is np.ndarray
    assert y.dtype == x.dtype
    assert_close(y, exact(Q, x), dtype)
    out = np.zeros((m, 400), x.dtype)[:, 3:203]
    assert session.linear("p", x, out=out) is out
    np.testing.assert_array_equal(out, y)


@pytest.mark.parametrize("dtype", ACTIVATION)
def test_torch_in_torch_out_on_torchs_stream(torch, session, dtype):
    x = random_x((40, 520), dtype)
    there = torch.from_numpy(np.float32(x)).to("cuda", getattr(torch, dtype))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = there * 0
        torch.cuda._sleep(20_000_000)
        late += there  # a product on another stream would see zeros
        y = session.linear("p", late)
    stream.synchronize()
    assert y.dtype == there.dtype
    assert y.device == there.device
    assert_close(on_host(y), exact(Q, x), dtype)
    out = torch.empty(40, 333, dtype=there.dtype, device="cuda")[:, 5:205]
    assert session.linear("p", there, out=out) is out
    torch.cuda.synchronize()
    assert torch.equal(out, y)


def test_a_torch_tensor_on_the_host_is_refused(torch, session):
    with pytest.raises(ValueError, match="x is on the cpu, this session on cuda:0"):
        session.linear("p", torch.zeros(1, 520, dtype=torch.float16))


def test_an_array_on_another_device_is_refused_and_the_callers_device_stays(cp, session):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    x = random_x((40, 520), "float16")
    with cp.cuda.Device(1):
        elsewhere = cp.asarray(x)
    with pytest.raises(ValueError, match="x is on cuda:1, this session on cuda:0"):
        session.linear("p", elsewhere)
    with Session(InMemory({"p": Q}, {}), device="cuda:1") as other:
        y = other.linear("p", elsewhere)
        assert y.device.id == 1
        assert cp.cuda.runtime.getDevice() == 0
        assert_close(on_host(y), exact(Q, x), "float16")


def test_overlap_is_refused_and_column_slices_are_not(cp, session):
    buffer = cp.zeros((4, 800), cp.float16)
    with pytest.raises(ValueError, match="overlaps"):
        session.linear("p", buffer[:, :520], out=buffer[:, 500:700])
    x = random_x((4, 520), "float16")
    buffer[:, :520] = cp.asarray(x)
    session.linear("p", buffer[:, :520], out=buffer[:, 520:720])
    assert_close(on_host(cp.ascontiguousarray(buffer[:, 520:720])), exact(Q, x), "float16")


# ---- streams, graphs, memory ----


@pytest.mark.parametrize("m", [1, 16, 257])
def test_two_streams_use_one_session_at_once(cp, m):
    q = random_quant(LARGE)
    with Session(InMemory({"p": q}, {})) as s:
        xs = [on_device(cp, random_x((m, LARGE.k), "float16", seed)) for seed in range(2)]
        want = [bits(s.linear("p", x)) for x in xs]
        cp.cuda.Device().synchronize()
        streams = [cp.cuda.Stream(non_blocking=True) for _ in xs]
        got: list[list] = [[], []]

        def work(i):
            cp.cuda.Device(0).use()
            with streams[i]:
                got[i] = [s.linear("p", xs[i]) for _ in range(30)]
            streams[i].synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, ys in enumerate(got):
            assert len(ys) == 30
            for y in ys:
                np.testing.assert_array_equal(bits(y), want[i])


@pytest.mark.parametrize("name", ["p", "lm_head"])
@pytest.mark.parametrize("m", [1, 16, 100])
def test_a_captured_graph_replays_with_new_contents(cp, session, m, name):
    k = session.module(name).k
    session.prepare(m)
    stream = cp.cuda.Stream(non_blocking=True)
    x, out = cp.zeros((m, k), cp.float16), cp.zeros((m, 200), cp.float16)
    cp.cuda.Device().synchronize()
    with Capture(cp, stream) as captured:
        session.linear(name, x, out=out)
    graph = captured.graph
    session.release()
    held = session.scratch_bytes
    session.linear(name, cp.ones((m + 1, k), cp.float16))
    session.release()
    assert session.scratch_bytes == held
    for seed in (5, 6):
        fresh = cp.asarray(random_x((m, k), "float16", seed))
        x[...] = fresh
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(bits(out), bits(session.linear(name, fresh)))


def test_two_graphs_of_one_stream_replay_at_the_same_time(cp):
    q = random_quant(LARGE)
    with Session(InMemory({"p": q}, {})) as s:
        stream = cp.cuda.Stream(non_blocking=True)
        xs = [on_device(cp, random_x((16, LARGE.k), "float16", seed)) for seed in range(2)]
        outs = [cp.zeros((16, LARGE.n), cp.float16) for _ in xs]
        want = [bits(s.linear("p", x)) for x in xs]
        graphs = []
        for x, out in zip(xs, outs, strict=True):
            with Capture(cp, stream) as captured:
                for _ in range(10):
                    s.linear("p", x, out=out)
            graphs.append(captured.graph)
        cp.cuda.Device().synchronize()
        elsewhere = [cp.cuda.Stream(non_blocking=True) for _ in graphs]
        for _ in range(5):
            for graph, other in zip(graphs, elsewhere, strict=True):
                graph.launch(other)
        cp.cuda.Device().synchronize()
        for out, bit in zip(outs, want, strict=True):
            np.testing.assert_array_equal(bits(out), bit)


@pytest.mark.parametrize("name", ["p", "lm_head"])
@pytest.mark.parametrize("mode", ["streamCaptureModeRelaxed", "streamCaptureModeGlobal"])
def test_a_cold_call_inside_a_capture_names_prepare(cp, session, name, mode):
    stream = cp.cuda.Stream(non_blocking=True)
    x, out = cp.zeros((4, session.module(name).k), cp.float16), cp.zeros((4, 200), cp.float16)
    with Capture(cp, stream, mode), pytest.raises(RuntimeError, match=r"session\.prepare\(4\)"):
        session.linear(name, x, out=out)
    session.prepare(4)
    with Capture(cp, stream, mode) as captured:
        session.linear(name, x, out=out)
    captured.graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(bits(out), bits(session.linear(name, x)))


def test_torch_captures_a_graph(torch, session):
    session.prepare(16, "float16")
    x = torch.zeros(16, 520, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = session.linear("p", x)
    fresh = random_x((16, 520), "float16")
    x.copy_(torch.from_numpy(fresh))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(on_host(y), exact(Q, fresh), "float16")


def test_scratch_has_a_cap_and_can_be_released(cp):
    q = random_quant(replace(Case(), order=True, n=512, k=2048))
    x = on_device(cp, random_x((300, 2048), "float16"))
    with Session(InMemory({"p": q}, {}), scratch_limit=0) as s:
        first = bits(s.linear("p", x))
        assert s.scratch_bytes == 0
    with Session(InMemory({"p": q}, {})) as s:
        s.linear("p", x[:, ::-1])
        assert s.scratch_bytes > 0
        s.release()
        assert s.scratch_bytes == 0
        np.testing.assert_array_equal(bits(s.linear("p", x)), first)
        assert s.weight_bytes >= q.codes.size // 2


def test_closing_gives_the_memory_back(cp):
    q = random_quant(LARGE)

    def free():
        cp.get_default_memory_pool().free_all_blocks()
        cp.cuda.Device().synchronize()
        return cp.cuda.runtime.memGetInfo()[0]

    def use():
        with Session(InMemory({"p": q}, PLAIN)) as s:
            s.load()
            s.linear("p", random_x((40, LARGE.k), "float16"))
            assert s.weight_bytes > q.codes.size // 2

    use()
    before = free()
    use()
    assert free() >= before - (1 << 20)


# ---- failures, and what our kernels do not run ----


@pytest.mark.parametrize("change", [{"block": 4096}, {"shared": 1 << 20}, {"grid": (1, 1, 70000)}], ids=str)
@pytest.mark.parametrize("m", [1, 64])
def test_a_failed_launch_names_everything_and_leaves_the_session_usable(cp, session, monkeypatch, m, change):
    """The last stage is broken, so that with act-order and m > 16 an earlier one has already run."""
    real = marlin.plan

    def broken(*args, **kwargs):
        plan = real(*args, **kwargs)
        return replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], **change)))

    named = rf"p: stage (\d) of \1 failed: .*CUDA_ERROR_INVALID_VALUE.*marlin_.*m={m}, n=200, k=520"
    with monkeypatch.context() as patch:
        patch.setattr(marlin, "plan", broken)
        with pytest.raises(RuntimeError, match=named):
            session.linear("p", cp.zeros((m, 520), cp.float16))
    for rows in (m + 1, m + 2, m + 1):
        x = random_x((rows, 520), "float16")
        assert_close(on_host(session.linear("p", cp.asarray(x))), exact(Q, x), "float16")


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("name", ["lm_head", "wide", "tiny"])
def test_passed_through_linears_run_on_cublas(cp, session, name, dtype):
    assert "cuBLAS" in str(session.explain(name, 4))
    weight, bias = np.float64(PLAIN[f"{name}.weight"]), np.float64(PLAIN.get(f"{name}.bias", 0))
    for m in (0, 1, 7, 64):
        x = random_x((m, weight.shape[1]), dtype) * ACTIVATION[dtype].type(2.0**-12 if name == "wide" else 1)
        want = x.astype(np.float64) @ weight.T + bias
        if name == "tiny" and dtype == "float16":
            want = np.float64(want.astype(np.float16))  # all of it below the smallest float16
            np.testing.assert_array_equal(on_host(session.linear(name, on_device(cp, x))), want)
        else:
            assert_close(on_host(session.linear(name, on_device(cp, x))), want, dtype)


@pytest.mark.parametrize("dtype", ACTIVATION)
def test_on_a_gpu_too_old_for_our_kernels_converted_linears_run_on_cublas(cp, session, dtype):
    session._live.ready.facts = replace(session._live.ready.facts, arch=70)
    assert "cuBLAS" in str(session.explain("p", 4))
    for m in (1, 40):
        x = random_x((m, 520), dtype)
        assert_close(on_host(session.linear("p", on_device(cp, x))), exact(Q, x), dtype)
        x = random_x((m, 192), dtype)
        assert_close(on_host(session.linear("experts", on_device(cp, x), expert=1)), exact(EXPERTS, x, 1), dtype)


@pytest.mark.parametrize("m", [1, 16, 17, 257, 4096])
def test_explain_names_kernel_reason_and_rejected(session, m):
    text = str(session.explain("p", m))
    assert f"y[{m}, 200]" in text
    assert "stage 1: " in text
    assert "why: " in text
    assert "cuBLAS" not in text


def test_a_closed_session_says_so(cp, session):
    x = cp.zeros((1, 520), cp.float16)
    session.linear("p", x)
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.linear("p", x)
