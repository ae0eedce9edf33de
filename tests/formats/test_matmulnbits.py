"""MatMulNBits in ONNX models: weights against loops over the description, the runtime itself, real files, refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored import ROOT, assert_bytes, check_source
from warptile.convert import convert, unpack, verify
from warptile.formats import matmulnbits, sources
from warptile.formats.canonical import dequantize
from warptile.formats.container import Checkpoint, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.runtime import Session

onnx = pytest.importorskip("onnx")

FLOATS = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Node:
    """A MatMulNBits node, its initializers by role and its exact weights."""

    arrays: dict[str, np.ndarray]
    attributes: dict[str, int]
    dense: np.ndarray
    name: str = "fc"
    domain: str = "com.microsoft"
    names: dict[str, str] = field(default_factory=dict)

    def full(self, role: str) -> str:
        return self.names.get(role, f"{self.name}.weight_Q4" if role == "B" else f"{self.name}.weight_{role}")

    def proto(self) -> Any:
        inputs = ["x", *(self.full(r) if r in self.arrays else "" for r in ROLES)]
        while not inputs[-1]:
            inputs.pop()
        return onnx.helper.make_node("MatMulNBits", inputs, [f"{self.name}_y"], domain=self.domain, **self.attributes)

    def initializers(self) -> list[Any]:
        return [onnx.numpy_helper.from_array(array, self.full(role)) for role, array in self.arrays.items()]

    def with_(self, **arrays: np.ndarray | None) -> Node:
        merged = {role: array for role, array in {**self.arrays, **arrays}.items() if array is not None}
        return Node(merged, self.attributes, self.dense, self.name, self.domain)

    def said(self, **attributes: int | None) -> Node:
        merged = {key: value for key, value in {**self.attributes, **attributes}.items() if value is not None}
        return Node(self.arrays, merged, self.dense, self.name, self.domain)


ROLES = ("B", "scales", "zero_points", "g_idx", "bias")


def row_bytes(codes: Sequence[int], bits: int) -> list[int]:
    number = sum(code << bits * i for i, code in enumerate(codes))
    return list(number.to_bytes(-(-len(codes) * bits // 8), "little"))


def node(
    bits: int = 4,
    block: int = 32,
    n: int = 48,
    k: int = 96,
    *,
    zeros: bool | int = False,
    act: str | None = None,
    scale: str = "F32",
    flat: bool = False,
    bias: bool = False,
    junk: bool = False,
    name: str = "fc",
    seed: int = 0,
) -> Node:
    """``zeros``: random ones, or one number; ``act``: groups, order, padded; ``junk``: set what lies past the end."""
    rng = random.Random(seed)
    blocks = -(-k // block)
    order = list(range(k))
    if act in ("order", "padded"):
        rng.shuffle(order)
    group_of = [0] * k
    for position, channel in enumerate(order):
        group_of[channel] = position // block
    past = [rng.randrange(2**bits) if junk else 0 for _ in range(blocks * block - k)]
    codes = [[rng.randrange(2**bits) for _ in range(k)] for _ in range(n)]
    fixed = 2 ** (bits - 1) if zeros is False else zeros
    zero = [[rng.randrange(2**bits) if zeros is True else fixed for _ in range(blocks)] for _ in range(n)]
    scales = [[rng.choice((-1, 1)) * rng.randrange(1, 128) / 2**9 for _ in range(blocks)] for _ in range(n)]
    dense = np.empty((n, k))
    for row in range(n):
        for channel in range(k):
            g = group_of[channel]
            dense[row, channel] = scales[row][g] * (codes[row][channel] - zero[row][g])
    b = np.array([row_bytes(row + past, bits) for row in codes], np.uint8)
    arrays = {"B": b.reshape(n, blocks, -1), "scales": np.array(scales, FLOATS[scale])}
    if zeros is not False:
        lanes = -(-blocks * bits // 8) * 8 // bits
        spare = [2**bits - 1 if junk else 0] * (lanes - blocks)
        arrays["zero_points"] = np.array([row_bytes(row + spare, bits) for row in zero], np.uint8)
    if flat:
        arrays |= {role: a.reshape(-1) for role, a in arrays.items() if role in ("scales", "zero_points")}
    if act is not None:
        tail = [0 if junk else blocks - 1] * (blocks * block - k if act == "padded" else 0)
        arrays["g_idx"] = np.array(group_of + tail, np.int32)
    if bias:
        arrays["bias"] = np.array([rng.randrange(-64, 64) / 64 for _ in range(n)], FLOATS[scale])
    return Node(arrays, {"K": k, "N": n, "bits": bits, "block_size": block}, dense, name)


def model(
    *nodes: Node, extra: Sequence[Any] = (), opsets: Sequence[str] = ("", "com.microsoft"), more: Any = ()
) -> Any:
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [*(one.proto() for one in nodes), *more],
        "graph",
        [tensor("x", onnx.TensorProto.FLOAT, [None, None])],
        [tensor(f"{one.name}_y", onnx.TensorProto.FLOAT, [None, None]) for one in nodes],
        [*(proto for one in nodes for proto in one.initializers()), *extra],
    )
    sets = [onnx.helper.make_opsetid(domain, 1 if domain else 17) for domain in opsets]
    return onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)


def opened(folder: Path, proto: Any, **external: Any) -> Checkpoint:
    path = folder / "model.onnx"
    onnx.save(proto, path, **external)
    return open_checkpoint(path)


FACTS = [
    *({"bits": b, "block": s, "k": 256} for b in (4, 8) for s in (16, 32, 64, 128, 256)),
    *({"bits": b, "zeros": z, "flat": f} for b in (2, 4, 8) for z in (True, False) for f in (True, False)),
    *({"bits": b, "zeros": 2 ** (b - 1)} for b in (2, 4, 8)),
    *({"scale": s, "bias": True, "zeros": True} for s in FLOATS),
    *({"bits": b, "act": a} for b in (4, 8) for a in ("groups", "order", "padded")),
    *({"k": k, "zeros": True, "junk": j, "bits": b} for k in (80, 100) for j in (True, False) for b in (4, 8)),
    *({"k": 80, "act": "padded", "junk": j, "zeros": True} for j in (True, False)),
    {"bits": 2, "k": 100, "junk": True, "zeros": True},
    {"block": 256, "k": 48, "zeros": True},
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_weights_and_bytes(facts: dict[str, Any], tmp_path: Path) -> None:
    one = node(**facts)
    given = opened(tmp_path, model(one))
    q = matmulnbits.read(given, "fc.weight")
    assert matmulnbits.describe(given, "fc.weight") == q.outline()
    assert_bytes(matmulnbits.write("fc.weight", q), given, matmulnbits.modules(given)["fc.weight"])
    assert np.array_equal(dequantize(q, np.float64), one.dense)
    if facts.get("bits") != 2:
        check_source(matmulnbits, given, "fc.weight")
    asymmetric = facts.get("zeros") is True
    assert (q.zero is not None) == asymmetric
    assert bool(q.residue) == facts.get("junk", False)
    assert bool(given.notes) == (asymmetric and facts.get("act") in ("order", "padded"))


@pytest.mark.parametrize(
    "facts",
    [
        *({"bits": b, "zeros": z, "k": k} for b in (2, 4, 8) for z in (True, False) for k in (96, 80)),
        *({"act": "order", "flat": f} for f in (True, False)),
        {"block": 16, "flat": True, "zeros": True},
    ],
    ids=str,
)
def test_the_runtime_computes_with_the_same_weights(facts: dict[str, Any]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    one = node(**facts)
    quiet = runtime.SessionOptions()
    quiet.log_severity_level = 4
    session = runtime.InferenceSession(model(one).SerializeToString(), quiet)
    (product,) = session.run(None, {"x": np.eye(one.dense.shape[1], dtype=np.float32)})
    assert np.abs(product.T - one.dense).max() <= 1e-6 * np.abs(one.dense).max()


@pytest.mark.parametrize("name", ["ort_b32_asym", "ort_b128_sym"])
def test_real_models(name: str) -> None:
    folder = ROOT / "tests" / "data" / name
    given = open_checkpoint(folder / "model.onnx")
    expected = np.load(folder / "expected.npz")
    assert list(matmulnbits.modules(given)) == ["fc1.weight", "fc2.weight"]
    for module in matmulnbits.modules(given):
        q = check_source(matmulnbits, given, module)
        assert np.array_equal(dequantize(q), expected[module.removesuffix(".weight")])
    assert not given.notes
    assert [name for name, reader in sources().items() if reader.modules(given)] == ["matmulnbits"]


def test_a_real_model_converts_and_comes_back(tmp_path: Path) -> None:
    source = ROOT / "tests" / "data" / "ort_b32_asym" / "model.onnx"
    artifact, back = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    convert(source, artifact, to="marlin")
    assert verify(artifact, source).modules == 2
    unpack(artifact, back)
    was, now = open_checkpoint(source).tensors, open_checkpoint(back).tensors
    assert now.keys() == was.keys()
    for name, tensor in was.items():
        assert (now[name].dtype, now[name].shape) == (tensor.dtype, tensor.shape)
        assert now[name].raw().tobytes() == tensor.raw().tobytes()


@pytest.mark.parametrize("one_file", [True, False])
def test_external_data_is_read_where_it_lies(one_file: bool, tmp_path: Path) -> None:
    one = node(zeros=True)
    (tmp_path / "weights").mkdir()
    given = opened(
        tmp_path,
        model(one),
        save_as_external_data=True,
        all_tensors_to_one_file=one_file,
        location="weights/model.data" if one_file else None,
        size_threshold=0,
    )
    assert {tensor.file.name for tensor in given.tensors.values()}.isdisjoint({"model.onnx"})
    q = check_source(matmulnbits, given, "fc.weight")
    assert np.array_equal(dequantize(q, np.float64), one.dense)


def test_names(tmp_path: Path) -> None:
    first, second, third = (node(name=name, seed=i) for i, name in enumerate(("a", "b", "c")))
    second = Node(second.arrays, second.attributes, second.dense, "b", names={"B": "q_proj.MatMul.qweight"})
    third = Node(third.arrays, third.attributes, third.dense, "c", names={"B": "onnx::MatMul_7_Q4"})
    given = opened(tmp_path, model(first, second, third))
    assert list(matmulnbits.modules(given)) == ["a.weight", "q_proj.MatMul", "onnx::MatMul_7"]
    for module, one in zip(matmulnbits.modules(given), (first, second, third), strict=True):
        assert np.array_equal(dequantize(matmulnbits.read(given, module), np.float64), one.dense)


@pytest.mark.parametrize("k", [96, 512])
def test_names_of_other_formats_do_not_make_it_theirs(k: int, tmp_path: Path) -> None:
    """With 512 channels in blocks of 32 the last extents are those of codes packed along k."""
    names = {"B": "p.qweight", "scales": "p.scales", "zero_points": "p.qzeros"}
    one = node(k=k, n=16, zeros=True)
    given = opened(tmp_path, model(Node(one.arrays, one.attributes, one.dense, names=names)))
    assert [name for name, reader in sources().items() if reader.modules(given)] == ["matmulnbits"]
    assert np.array_equal(dequantize(check_source(matmulnbits, given, "p"), np.float64), one.dense)


def test_a_session_answers_to_the_weights_name_and_to_the_layers(tmp_path: Path) -> None:
    artifact = tmp_path / "a.safetensors"
    convert(ROOT / "tests" / "data" / "ort_b32_asym" / "model.onnx", artifact, to="marlin")
    expected = np.load(ROOT / "tests" / "data" / "ort_b32_asym" / "expected.npz")
    with Session(artifact, device="cpu") as session:
        for name in ("fc1", "fc1.weight"):
            assert np.array_equal(session.dequantize(name), expected["fc1"])
        assert session.tensor("fc1.bias").shape == (704,)
        with pytest.raises(KeyError, match="fc1"):
            session.dequantize("fc1.weights")


def test_what_a_node_says_is_kept(tmp_path: Path) -> None:
    given = opened(tmp_path, model(node().said(accuracy_level=4, weight_prepacked=0)))
    source = matmulnbits.read(given, "fc.weight").source
    assert source["attributes"]["accuracy_level"] == 4
    assert source["names"] == {"B": "fc.weight_Q4", "scales": "fc.weight_scales"}


def test_bits_are_four_when_nothing_is_said(tmp_path: Path) -> None:
    one = node()
    given = opened(tmp_path, model(one.said(bits=None)))
    assert np.array_equal(dequantize(check_source(matmulnbits, given, "fc.weight"), np.float64), one.dense)


def test_a_bias_that_an_add_applies_is_no_member(tmp_path: Path) -> None:
    bias = onnx.numpy_helper.from_array(np.ones(48, np.float32), "fc.bias")
    add = onnx.helper.make_node("Add", ["fc_y", "fc.bias"], ["y"])
    given = opened(tmp_path, model(node(), extra=[bias], more=[add]))
    assert matmulnbits.modules(given)["fc.weight"] == ("fc.weight_Q4", "fc.weight_scales")
    assert given.tensors["fc.bias"].shape == (48,)


def test_two_nodes_may_use_one_weight(tmp_path: Path) -> None:
    one = node()
    twin = Node({}, one.attributes, one.dense, "twin").proto()
    twin.input[:] = ["x2", *one.proto().input[1:]]
    given = opened(tmp_path, model(one, more=[twin]))
    assert list(matmulnbits.modules(given)) == ["fc.weight"]


def test_a_weight_computed_at_run_time_stays(tmp_path: Path) -> None:
    computed = node(name="other").with_(B=None)
    proto = computed.proto()
    proto.input[1] = "somewhere"
    given = opened(tmp_path, model(node(), more=[proto], extra=computed.initializers()))
    assert list(matmulnbits.modules(given)) == ["fc.weight"]
    assert ("", "somewhere is no initializer: its MatMulNBits stays as it is") in given.notes


def sharing() -> Any:
    first, second = node(name="a"), node(name="b", seed=1)
    proto = second.proto()
    proto.input[2] = first.full("scales")
    return model(first, more=[proto], extra=second.initializers())


def twice() -> Any:
    one = node()
    proto = one.said(N=24).proto()
    return model(one, more=[proto])


def without(role: str) -> Any:
    return model(node().with_(**{role: None}))


def computed_scales() -> Any:
    proto = node().proto()
    proto.input[2] = "somewhere"
    return model(more=[proto], extra=node().initializers())


def poisoned(value: float) -> Any:
    one = node()
    scales = one.arrays["scales"].copy()
    scales[43, 1] = value
    return model(one.with_(scales=scales))


def elsewhere() -> Any:
    one = node()
    return model(Node(one.arrays, one.attributes, one.dense, domain="com.example"))


def g_idx(*values: int) -> Any:
    return model(node().with_(g_idx=np.array(values, np.int32)))


BAD: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("no opset", lambda: model(node(), opsets=[""]), UnsupportedError,
     "fc.weight_Q4: the model uses MatMulNBits without the operator set that has it; found operator sets ''"),
    ("domain", elsewhere, UnsupportedError, "found 'com.example'; need domain com.microsoft"),
    *((f"no {key}", lambda key=key: model(node().said(**{key: None})), CorruptError,
       f"fc.weight_Q4: MatMulNBits needs a positive {key}; found none") for key in ("K", "N", "block_size")),
    *((f"{key} {value}", lambda key=key, value=value: model(node().said(**{key: value})), CorruptError,
       f"MatMulNBits needs a positive {key}; found {value}")
      for key in ("K", "N", "block_size", "bits") for value in (0, -4)),
    ("bits", lambda: model(node().said(bits=3)), UnsupportedError, "unknown bits; found 3; need 2, 4 or 8"),
    ("block", lambda: model(node().said(block_size=48)), CorruptError, "no such block_size; found 48"),
    ("small block", lambda: model(node().said(block_size=8)), CorruptError, "no such block_size; found 8"),
    ("prepacked", lambda: model(node().said(weight_prepacked=1)), UnsupportedError, "weight_prepacked 1; need 0"),
    ("K", lambda: model(node().said(K=160)), CorruptError, "shapes disagree; found [48, 3, 16]; need [48, 5, 16]"),
    ("blocks first", lambda: model(node().with_(B=node().arrays["B"].swapaxes(0, 1).copy())), CorruptError,
     "fc.weight_Q4: shapes disagree; found [3, 48, 16]; need [48, 3, 16]"),
    ("scales", lambda: model(node().with_(scales=np.ones((48, 4), np.float32))), CorruptError,
     "fc.weight_scales: shapes disagree; found [48, 4]; need [48, 3] or [144]"),
    ("zeros", lambda: model(node().with_(zero_points=np.ones((48, 3), np.uint8))), CorruptError,
     "fc.weight_zero_points: shapes disagree; found [48, 3]; need [48, 2] or [96]"),
    ("float zeros", lambda: model(node().with_(zero_points=np.ones((48, 3), np.float32))), UnsupportedError,
     "fc.weight_zero_points: unexpected dtype; found F32; need U8"),
    ("bias", lambda: model(node().with_(bias=np.ones(47, np.float32))), CorruptError,
     "fc.weight_bias: shapes disagree; found [47]; need [48]"),
    ("no scales", lambda: without("scales"), CorruptError, "module 'fc.weight' is incomplete; need scales"),
    ("computed scales", computed_scales, UnsupportedError, "somewhere: scales is computed at run time"),
    ("shared", sharing, UnsupportedError, "a.weight_scales: two modules share an initializer; found a.w"),
    ("two readings", twice, UnsupportedError, "fc.weight_Q4: two nodes read it in two ways"),
    ("g_idx above", lambda: g_idx(*[0] * 95, 3), CorruptError, "found 3 at [95]; need 0 to 2"),
    ("g_idx below", lambda: g_idx(-1, *[0] * 95), CorruptError, "fc.weight_g_idx: a channel's group is out of range"),
    ("g_idx short", lambda: g_idx(*[0] * 95), CorruptError, "fc.weight_g_idx: shapes disagree; found [95]; need [96]"),
    ("g_idx uneven", lambda: g_idx(*[0] * 40, *[1] * 24, *[2] * 32), UnsupportedError, "unequal numbers of channels"),
    ("g_idx of other sizes", lambda: model(node(block=64).with_(g_idx=np.repeat(np.int32([0, 1]), (50, 46)))),
     UnsupportedError, "fc.weight_g_idx: groups are not blocks; found 50; need 64"),
    ("2 bits in order", lambda: model(node(bits=2, act="order")), UnsupportedError, "2-bit codes with g_idx"),
    ("nan", lambda: poisoned(math.nan), CorruptError, "fc.weight_scales: scales are NaN or infinite; found 1 of 144"),
    ("inf", lambda: poisoned(math.inf), CorruptError, "the first at [43, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_one_clear_line(
    make: Callable[[], Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        read_all(opened(tmp_path, make()))
    text = str(caught.value)
    assert says in text
    assert "\n" not in text


def read_all(given: Checkpoint) -> None:
    for module in matmulnbits.modules(given):
        matmulnbits.read(given, module)


def test_a_model_without_the_operator_has_no_modules(tmp_path: Path) -> None:
    plain = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    given = opened(tmp_path, model(more=[plain], extra=[weight]))
    assert matmulnbits.modules(given) == {}
    with pytest.raises(UnsupportedError, match="no matmulnbits modules in it"):
        convert(tmp_path / "model.onnx", tmp_path / "a.safetensors", to="marlin", source="matmulnbits")
