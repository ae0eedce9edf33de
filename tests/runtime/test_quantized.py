"""x in 8 bits, shared by products: what the handle promises, which numerics a layout does, and the memory behind it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from linears import Case, InMemory, random_quant, random_x
from warptile.formats.canonical import dequantize
from warptile.formats.errors import UnsupportedError
from warptile.kernels import mmq
from warptile.kernels.quantize import KINDS, nbytes, quantize
from warptile.kernels.quantize import dequantize as values
from warptile.runtime import Session

QUANTS = {"q": random_quant(Case(n=72, k=200)), "k": random_quant(Case(n=40, k=200, bias="f16", seed=2))}
WIDE = {**QUANTS, "wide": random_quant(Case(n=40, k=256))}
PLAIN = {"lm_head.weight": random_x((24, 200), "float16")}
X = random_x((2, 3, 200), "float16")


@pytest.fixture
def session():
    with Session(InMemory(WIDE, PLAIN, mmq), device="cpu") as s:
        yield s


def rounded(x, numerics):
    """x as products of those numerics see it."""
    return values(*quantize(x.reshape(-1, x.shape[-1]), numerics), numerics, x.shape[-1]).reshape(x.shape)


def exact(q, x):
    return (np.float64(x) @ dequantize(q, np.float64).T + (0 if q.bias is None else np.float64(q.bias))).astype("f2")


def test_one_handle_serves_every_product_that_reads_the_same_x(session):
    x = X.copy()
    with session.quantize(x) as handle:
        x[...] = 0  # the handle holds the values of the call
        for name, q in QUANTS.items():
            np.testing.assert_array_equal(session.linear(name, handle), exact(q, rounded(X, "int8")))
            np.testing.assert_array_equal(session.linear(name, X, numerics="int8"), exact(q, rounded(X, "int8")))
    assert (handle.shape, handle.dtype, handle.numerics) == (X.shape, "f16", "int8")


@pytest.mark.parametrize("numerics", KINDS)
def test_no_rows_are_rounded_like_any_other(session, numerics):
    codes, factors = quantize(X[0][:0], numerics)
    assert (len(codes), len(factors), values(codes, factors, numerics, 200).shape) == (0, 0, (0, 200))
    assert session.quantize(X[:0], numerics).shape == (0, 3, 200)
    if numerics == "int8":
        assert session.linear("q", X[:0], numerics=numerics).shape == (0, 3, 72)
        assert session.linear("q", session.quantize(X[:0])).shape == (0, 3, 72)


def test_prepare_takes_one_name_and_by_default_all_that_do_the_numerics(session):
    session.prepare(4, names="q", numerics="int8")
    session.prepare(4, numerics="int8")  # lm_head does not
    session.load("q")
    with pytest.raises(UnsupportedError, match="do not multiply with e4m3"):
        session.prepare(4, numerics="e4m3")


def test_exact_numerics_do_not_round_x(session):
    np.testing.assert_array_equal(session.linear("q", X, numerics="exact"), exact(QUANTS["q"], X))


def test_a_handle_is_refused_where_it_does_not_belong(session):
    handle = session.quantize(X)
    with Session(InMemory(WIDE, {}, mmq), device="cpu") as other, pytest.raises(ValueError, match="another session"):
        other.linear("q", handle)
    with pytest.raises(ValueError, match=r"wide: x was quantized with shape \[2, 3, 200\]; need \[.., 256\]"):
        session.linear("wide", handle)
    with pytest.raises(ValueError, match="quantized to int8, numerics is exact"):
        session.linear("q", handle, numerics="exact")
    with pytest.raises(ValueError, match="out has shape"):
        session.linear("q", handle, out=np.empty((5, 72), np.float16))
    with pytest.raises(UnsupportedError, match="q: mmq modules do not multiply with e4m3 activations"):
        session.linear("q", session.quantize(X, "e4m3"))
    handle.close()
    handle.close()
    with pytest.raises(RuntimeError, match="q: the quantized x was closed"):
        session.linear("q", handle)


@pytest.mark.parametrize("call", ["linear", "explain", "prepare"])
@pytest.mark.parametrize(
    ("layout", "name", "numerics", "words"),
    [
        (
            None,
            "q",
            "int8",
            "marlin modules do not multiply with int8 activations; found numerics int8; need exact or int8_row",
        ),
        (mmq, "q", "e4m3", "modules do not multiply with e4m3 activations; found numerics e4m3; need int8 or exact"),
        (mmq, "lm_head", "int8", "lm_head: weights that passed through conversion do not multiply with int8"),
    ],
)
def test_numerics_that_a_layout_does_not_do_are_refused_by_name(call, layout, name, numerics, words):
    with Session(InMemory(QUANTS, PLAIN, *filter(None, [layout])), device="cpu") as s:
        arguments = {"linear": (name, X), "explain": (name, 4), "prepare": (4,)}[call]
        more = {"names": [name]} if call == "prepare" else {}
        with pytest.raises(UnsupportedError) as caught:
            getattr(s, call)(*arguments, numerics=numerics, **more)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda s: s.linear("q", X, numerics="int4"),
            ValueError,
            "numerics is 'int4'; need exact, int8, e4m3, int8_row or None",
        ),
        (lambda s: s.quantize(X, "exact"), ValueError, "numerics is 'exact'; need int8 or e4m3 or int8_row"),
        (lambda s: s.quantize(X.tolist()), TypeError, "x is list"),
        (lambda s: s.quantize(X.astype(np.float64)), TypeError, "x is float64"),
        (lambda s: s.quantize(np.float16(1)[None][0]), TypeError, "x is"),
    ],
)
def test_bad_questions_are_refused(session, call, error, words):
    with pytest.raises(error, match=words):
        call(session)


def test_explain_says_that_x_is_rounded(session):
    assert "x in 8 bits (int8)" in str(session.explain("q", 4, numerics="int8"))
    assert "8 bits" not in str(session.explain("q", 4))


# ---- on a CUDA device ----


@pytest.fixture
def cp():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture
def gpu():
    with Session(InMemory(WIDE, PLAIN, mmq)) as s:
        yield s


def contents(cp, handle):
    """``quantized`` and ``factors`` as they lie in a handle's memory."""
    raw = cp.ndarray((handle.memory.nbytes,), cp.uint8, cp.cuda.MemoryPointer(handle.memory.memory, 0)).get()
    codes, factors = nbytes(handle.numerics, 6, 200)
    return raw[:codes], raw[codes : codes + factors]


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", KINDS)
@pytest.mark.parametrize("view", [np.s_[...], np.s_[::-1], np.s_[:, ::-1]], ids=["rows", "reversed", "no matrix"])
def test_a_handle_holds_what_the_reference_gives(cp, gpu, numerics, view):
    want = [a.view(np.uint8).reshape(-1) for a in quantize(X[view].reshape(6, 200), numerics)]
    for x in (X[view], cp.asarray(X)[view]):
        for got, bits in zip(contents(cp, gpu.quantize(x, numerics)), want, strict=True):
            np.testing.assert_array_equal(got, bits)


@pytest.mark.gpu
def test_memory_of_handles_is_scratch_and_serves_the_next_one(cp, gpu):
    x = cp.asarray(X)
    first = gpu.quantize(x)
    held, pointer = gpu.scratch_bytes, first.memory.memory.ptr
    assert held > 0
    gpu.release()
    assert gpu.scratch_bytes == held
    second = gpu.quantize(x)
    assert gpu.scratch_bytes == 2 * held
    first.close()
    del second
    gc.collect()
    with gpu.quantize(x) as third:
        assert gpu.scratch_bytes == 2 * held
        assert third.memory.memory.ptr == pointer
    gpu.release()
    assert gpu.scratch_bytes == 0


@pytest.mark.gpu
def test_a_handle_belongs_to_its_stream_and_its_capture(cp, gpu):
    x = cp.asarray(X)
    handle = gpu.quantize(x)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, pytest.raises(ValueError, match="another stream or graph capture"):
        gpu.linear("q", handle)
    gpu.prepare(6, "float16")
    with stream:
        eager = gpu.quantize(x)
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        try:
            inside = gpu.quantize(x)
            with pytest.raises(ValueError, match="another stream or graph capture"):
                gpu.linear("q", eager)
        finally:
            graph = stream.end_capture()
        with pytest.raises(ValueError, match="another stream or graph capture"):
            gpu.linear("q", inside)
    x *= 2
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(contents(cp, inside)[0], contents(cp, gpu.quantize(x))[0])


@pytest.mark.gpu
def test_a_cold_call_inside_a_capture_names_prepare(cp, gpu):
    x, stream = cp.asarray(X), cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        try:
            with pytest.raises(RuntimeError, match=r"session\.prepare\(6\)"):
                gpu.quantize(x)
        finally:
            stream.end_capture()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "numerics"), [(1, None), (6, None), (40, "int8")])
def test_prepare_makes_the_product_of_a_handle_ready_for_a_capture(cp, gpu, m, numerics):
    gpu.prepare(m, "float16", numerics=numerics)
    x, y, stream = (
        cp.asarray(random_x((m, 200), "float16")),
        cp.empty((m, 72), cp.float16),
        cp.cuda.Stream(non_blocking=True),
    )
    with stream:
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        gpu.linear("q", gpu.quantize(x), out=y)
        stream.end_capture().launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(y.get(), gpu.linear("q", x, numerics="int8").get())


@pytest.mark.gpu
def test_a_cold_product_inside_a_capture_names_its_numerics(cp, gpu):
    x, stream = cp.asarray(random_x((40, 200), "float16")), cp.cuda.Stream(non_blocking=True)
    gpu.prepare(40, "float16")
    with stream:
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
        try:
            with pytest.raises(RuntimeError, match=r"session\.prepare\(40, numerics='int8'\)"):
                gpu.linear("q", x, numerics="int8")
        finally:
            stream.end_capture()


@pytest.mark.gpu
def test_a_handle_outlives_neither_its_session_nor_its_memory(cp):
    with Session(InMemory(WIDE, PLAIN, mmq)) as s:
        handle = s.quantize(cp.asarray(X))
    assert handle.memory.memory is None
    with pytest.raises(RuntimeError, match="closed"):
        s.linear("q", handle)
