"""The session on the NumPy backend: exact products, names, the caller's arrays, and refusals before any work."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from linears import ACTIVATION, Case, InMemory, random_quant, random_x
from warptile.formats.canonical import dequantize
from warptile.runtime import Session

CASES = [
    Case("u4b8"),
    Case("u4", zero=True, scale="bf16", group=48, order=True, bias="f16"),
    Case("u8b128", scale="f32", group=-1, bias="f32", n=65, k=129),
    Case("u8", zero=True, group=16, order=True, bias="bf16"),
]
Q = random_quant(Case(bias="f16"))
EXPERTS = random_quant(Case("u4", zero=True, bias="f32", n=40, k=64, experts=3, seed=2))
PLAIN = {
    "lm_head.weight": random_x((24, 40), "bfloat16"),
    "lm_head.bias": random_x((24,), "float16"),
    "norm.weight": random_x((40,), "float16"),
    "table": random_x((2, 3, 4), "bfloat16"),
}


@pytest.fixture
def session():
    with Session(InMemory({"mlp.down": Q, "mlp.experts": EXPERTS}, PLAIN), device="cpu") as s:
        yield s


def exact(q, x, expert=None):
    """The product in float64, rounded once."""
    w, bias = dequantize(q, np.float64), q.bias
    if expert is not None:
        w, bias = w[expert], bias[expert]
    return (np.float64(x) @ w.T + (0 if bias is None else np.float64(bias))).astype(x.dtype)


@pytest.mark.parametrize("dtype", [*ACTIVATION, "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_is_the_float64_product_rounded_once(case, dtype):
    q, x = random_quant(case), random_x((5, case.k), dtype)
    with Session(InMemory({"p": q}, {}), device="cpu") as s:
        y = s.linear("p", x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, exact(q, x))


@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_hot_rows_return_the_decoded_weights(case, dtype):
    q = random_quant(Case(**{**vars(case), "bias": None}))
    with Session(InMemory({"p": q}, {}), device="cpu") as s:
        y = s.linear("p", np.eye(case.k, dtype=ACTIVATION[dtype]))
        decoded = s.dequantize("p")
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, dequantize(q))
    np.testing.assert_array_equal(y, dequantize(q, np.float64).T.astype(y.dtype))


def test_a_residual_is_added_before_the_rounding_or_each_step_is_rounded(session):
    x, residual = random_x((3, 200), "float16"), random_x((3, 72), "float16", seed=9)
    w, bias = dequantize(Q, np.float64), np.float64(Q.bias)
    product = np.float64(x) @ w.T
    once = (product + bias + np.float64(residual)).astype(np.float16)
    each = ((product.astype(np.float16) + Q.bias) + residual).astype(np.float16)
    np.testing.assert_array_equal(session.linear("mlp.down", x, residual=residual), once)
    np.testing.assert_array_equal(session.linear("mlp.down", x, residual=residual, rounding="each"), each)
    assert (once != each).any()
    out = residual.copy()
    assert session.linear("mlp.down", x, out=out, residual=out) is out
    np.testing.assert_array_equal(out, once)


@pytest.mark.parametrize("shape", [(200,), (1, 200), (2, 3, 200), (0, 200), (4, 0, 200)])
def test_any_leading_shape(session, shape):
    x = random_x(shape, "float16")
    y = session.linear("mlp.down", x)
    assert y.shape == (*shape[:-1], 72)
    np.testing.assert_array_equal(y, exact(Q, x))


X = random_x((4, 6, 400), "float16")


@pytest.mark.parametrize(
    "x",
    [
        X[0, :, 1:201],
        X[:, 0, 7:207],
        X[::-1, :, 100:300],
        X[..., ::2],
        X[:, 1:5, 3:203],
        X[1].T[:200].T,
        X[0, :1, 5:205],
    ],
    ids=["offset", "row stride", "reversed", "every other column", "hole in the middle", "transposed twice", "one row"],
)
def test_strided_x_is_read_as_numpy_reads_it(session, x):
    np.testing.assert_array_equal(session.linear("mlp.down", x), exact(Q, np.ascontiguousarray(x)))


def test_out_takes_the_result_and_nothing_beside_it(session):
    x, buffer = random_x((3, 200), "float16"), np.full((5, 100), 7, np.float16)
    out = buffer[1:4, 10:82]
    assert session.linear("mlp.down", x, out=out) is out
    np.testing.assert_array_equal(out, exact(Q, x))
    out[...] = 7
    assert (buffer == 7).all()


def test_x_and_out_may_be_column_slices_of_one_buffer(session):
    x, buffer = random_x((3, 200), "float16"), np.zeros((3, 300), np.float16)
    buffer[:, :200] = x
    session.linear("mlp.down", buffer[:, :200], out=buffer[:, 200:272])
    np.testing.assert_array_equal(buffer[:, 200:272], exact(Q, x))


def test_results_are_not_overwritten_by_later_calls(session):
    x = random_x((3, 200), "float16")
    first = session.linear("mlp.down", x)
    session.linear("mlp.down", -x)
    np.testing.assert_array_equal(first, exact(Q, x))


@pytest.mark.parametrize("expert", range(3))
def test_an_expert_is_picked_from_a_stack(session, expert):
    x = random_x((4, 64), "bfloat16")
    np.testing.assert_array_equal(session.linear("mlp.experts", x, expert=expert), exact(EXPERTS, x, expert))


def test_a_passed_through_linear_multiplies_too(session):
    x = random_x((4, 40), "float16")
    want = np.float64(x) @ np.float64(PLAIN["lm_head.weight"]).T + np.float64(PLAIN["lm_head.bias"])
    np.testing.assert_array_equal(session.linear("lm_head", x), want.astype(np.float16))
    np.testing.assert_array_equal(session.dequantize("lm_head"), np.float32(PLAIN["lm_head.weight"]))


class Exporter:
    """An array of a library we do not know: DLPack and the array API's namespace, nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return type("Namespace", (), {"from_dlpack": staticmethod(lambda other: Exporter(np.from_dlpack(other)))})


def test_any_dlpack_array_comes_back_as_its_own_kind(session):
    x = random_x((4, 200), "float16")
    y = session.linear("mlp.down", Exporter(x))
    assert isinstance(y, Exporter)
    np.testing.assert_array_equal(y.array, exact(Q, x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_tensors_come_back_as_torch(session, dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = random_x((4, 200), dtype)
    y = session.linear("mlp.down", torch.from_numpy(np.float32(x)).to(getattr(torch, dtype)))
    assert y.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(y.float().numpy(), np.float32(exact(Q, x)))
    with pytest.raises(TypeError, match="requires grad"):
        session.linear("mlp.down", torch.zeros(1, 200, dtype=torch.float16, requires_grad=True))


def test_names_are_taken_with_and_without_weight(session):
    assert session.names() == ["mlp.down", "mlp.experts", "lm_head"]
    assert session.module("mlp.down.weight") == session.module("mlp.down")
    module = session.module("mlp.experts")
    assert (module.n, module.k, module.experts, module.element, module.group) == (40, 64, 3, "u4", 32)
    assert session.module("lm_head").layout is None


def test_pass_through_tensors_come_as_stored(session):
    for name in ("norm.weight", "table", "lm_head.weight"):
        array = session.tensor(name)
        assert array.dtype == PLAIN[name].dtype
        np.testing.assert_array_equal(array, PLAIN[name])


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        ("linear", "mlp.dwn", ["mlp.dwn", "mlp.down"]),
        ("dequantize", "lm_heads", ["lm_heads", "lm_head"]),
        ("module", "norm", ["norm"]),
        ("tensor", "norm.weights", ["norm.weight"]),
        ("tensor", "mlp.down.qweight", ["mlp.down.qweight"]),
    ],
)
def test_an_unknown_name_is_a_key_error_with_close_matches(session, call, name, words):
    arguments = (name, random_x((1, 200), "float16")) if call == "linear" else (name,)
    with pytest.raises(KeyError) as caught:
        getattr(session, call)(*arguments)
    assert all(word in str(caught.value) for word in words)


GOOD = random_x((2, 200), "float16")
SHARED = np.zeros((2, 80), np.float16)
READ_ONLY = np.zeros((2, 72), np.float16)
READ_ONLY.setflags(write=False)
RECORDS = np.zeros((2, 200), [("a", "f2"), ("b", "i1")])["a"]


@pytest.mark.parametrize(
    ("x", "more", "error", "words"),
    [
        (GOOD[:, :199], {}, ValueError, "[2, 199]; need [.., 200]"),
        (np.ones((), np.float16), {}, ValueError, "need [.., 200]"),
        (GOOD.astype(np.float64), {}, TypeError, "x is float64; need float16, bfloat16 or float32"),
        (GOOD.astype(">f2"), {}, TypeError, "x is >f2"),
        (GOOD.view(np.int16), {}, TypeError, "x is int16"),
        (GOOD.tolist(), {}, TypeError, "x is list"),
        (RECORDS, {}, ValueError, "not whole float16 elements"),
        (GOOD, {"out": np.zeros((2, 71), np.float16)}, ValueError, "out has shape [2, 71]; need [2, 72]"),
        (GOOD, {"out": np.zeros((2, 72), ml_dtypes.bfloat16)}, TypeError, "out is bf16, x is f16"),
        (GOOD, {"out": np.zeros((2, 144), np.float16)[:, ::2]}, ValueError, "contiguous rows"),
        (GOOD, {"out": GOOD[:, :72]}, ValueError, "overlaps"),
        (GOOD, {"out": READ_ONLY}, ValueError, "read-only"),
        (GOOD, {"out": Exporter(np.zeros((2, 72), np.float16))}, TypeError, "need the same kind"),
        (GOOD, {"expert": 0}, ValueError, "no experts"),
        (GOOD, {"residual": np.zeros((2, 71), np.float16)}, ValueError, "residual has shape [2, 71]; need [2, 72]"),
        (GOOD, {"residual": np.zeros((2, 72), np.float32)}, TypeError, "residual is f32, x is f16; need the same"),
        (GOOD, {"residual": Exporter(np.zeros((2, 72), np.float16))}, TypeError, "residual is dlpack, x is numpy"),
        (GOOD, {"residual": SHARED[:, 1:73], "out": SHARED[:, :72]}, ValueError, "out overlaps residual"),
        (GOOD, {"rounding": "twice"}, ValueError, "rounding is 'twice'; need once or each"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(session, monkeypatch, x, more, error, words):
    monkeypatch.setattr(InMemory, "quant", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(error) as caught:
        session.linear("mlp.down", x, **more)
    assert words in str(caught.value)


@pytest.mark.parametrize(("expert", "words"), [(None, "which"), (3, "need 0..2"), (-1, "need 0..2")])
def test_a_stack_needs_one_of_its_experts(session, expert, words):
    with pytest.raises(ValueError, match=words):
        session.linear("mlp.experts", random_x((1, 64), "float16"), expert=expert)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.explain("mlp.down", -1), ValueError),
        (lambda s: s.explain("mlp.down", 1, "float64"), TypeError),
        (lambda s: s.prepare([1, 2**31]), ValueError),
        (lambda s: s.prepare(1, "int8"), TypeError),
        (lambda s: s.prepare(1, names=["nobody"]), KeyError),
        (lambda s: s.prepare("1"), TypeError),
        (lambda s: s.explain("mlp.down", 1.5), TypeError),
        (lambda s: s.explain("mlp.down", None), TypeError),
        (lambda s: s.linear(3, GOOD), TypeError),
        (lambda s: s.linear("mlp.experts", GOOD, expert=True), TypeError),
        (lambda s: s.linear("mlp.experts", GOOD, expert="0"), TypeError),
        (lambda s: s.linear("mlp.experts", GOOD, expert=1.0), TypeError),
        (lambda _: Session(None), TypeError),
        (lambda _: Session(InMemory({}, {}), device=0), TypeError),
    ],
)
def test_bad_questions_are_refused(session, call, error):
    with pytest.raises(error):
        call(session)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_a_device_that_has_no_such_name_is_refused(device):
    with pytest.raises(ValueError, match="need cuda:<i> or cpu"):
        Session(InMemory({}, {}), device=device)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="no device cuda:999"):
        Session(InMemory({}, {}), device="cuda:999")


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.linear("mlp.down", GOOD),
        lambda s: s.dequantize("mlp.down"),
        lambda s: s.tensor("table"),
        lambda s: s.names(),
        lambda s: s.module("mlp.down"),
        lambda s: s.explain("mlp.down", 1),
        lambda s: s.prepare(1),
        lambda s: s.load(),
        lambda s: s.release(),
        lambda s: s.scratch_bytes,
        lambda s: s.weight_bytes,
        lambda s: s.device,
    ],
)
def test_a_closed_session_says_so(use):
    with Session(InMemory({"mlp.down": Q}, PLAIN), device="cpu") as s:
        use(s)
    s.close()
    with pytest.raises(RuntimeError, match="closed"):
        use(s)


def test_explain_says_that_this_is_the_reference(session):
    text = str(session.explain("mlp.down", 16))
    assert text.startswith("mlp.down: y[16, 72] = x[16, 200] @ W.T on cpu\n")
    assert "reference backend" in text


def test_the_reference_backend_is_announced_once(capfd, monkeypatch):
    from warptile.runtime import reference

    reference.announce.cache_clear()
    for _ in range(2):
        Session(InMemory({}, {}), device="cpu").close()
    assert capfd.readouterr().err.count("reference backend") == 1


def test_the_runtime_imports_without_cuda_packages():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules.update({'cupy': None, 'cuda': None, 'torch': None}); import warptile.runtime as r; "
        "print(r.Session.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Session\n"
