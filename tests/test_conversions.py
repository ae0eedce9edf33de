"""Any legal model of several linears through files: converted, grouped or not, in shards, verified, and back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoders import DECODERS
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import Stored, model, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import MODULES
from tiny import Tiny
from warptile.convert import convert, plan, unpack, verify
from warptile.formats import sources
from warptile.formats.artifact import open_artifact
from warptile.formats.canonical import dequantize
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, VerifyError
from warptile.kernels import layouts

QUICK = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SAFETENSORS = tuple(name for name in MODULES if name not in ("gguf", "matmulnbits"))
CODES = ("qweight", ".B", "weight_packed", "_blocks", "weight.blocks", ".weight")
FAMILIES = (
    ("l.0.q_proj", "l.0.k_proj", "l.0.v_proj"),
    ("l.0.gate_proj", "l.0.up_proj", "l.0.down_proj"),
    ("l.experts.0.up_proj", "l.experts.1.up_proj", "l.experts.2.up_proj"),
    *(tuple(f"l.experts.{e}.{w}_proj" for e in range(count) for w in ("gate", "up")) for count in (1, 2)),
    ("a",),
)


def module_of(tiny: Tiny) -> str:
    (module,) = sources()[tiny.source].modules(tiny.checkpoint())
    return module


def siblings(tiny: Tiny, names: tuple[str, ...]) -> dict[str, Tiny]:
    """The module under several names, each with its codes in another order."""
    module, found = module_of(tiny), {}
    for i, name in enumerate(names):
        tensors = {}
        for old, (dtype, shape, data) in tiny.tensors.items():
            turned = bytes(np.roll(np.frombuffer(data, np.uint8), 4 * i)) if old.endswith(CODES) else data
            tensors[name + old.removeprefix(module)] = dtype, shape, turned
        found[name] = replace(tiny, tensors=tensors)
    return found


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.mark.parametrize("source", SAFETENSORS)
@QUICK
@given(data=st.data())
def test_a_model_converts_verifies_and_comes_back(source: str, data: st.DataObject) -> None:
    tiny = data.draw(MODULES[source])
    wordwise = source == "compressed_tensors" and tiny.quantization["version"].startswith("0.12")
    fused = module_of(tiny).endswith(("qkv_proj", "gate_up_proj"))
    names = (module_of(tiny),) if wordwise or fused else data.draw(st.sampled_from(FAMILIES))
    linears = siblings(tiny, names)
    plain = {"norm.weight": ("F32", (3,), b"\0\1\2\3" * 3), "empty": ("F16", (0, 2), b""), "one": ("U8", (), b"x")}
    whole = replace(tiny, tensors={n: t for each in linears.values() for n, t in each.tensors.items()} | plain)
    layout = data.draw(st.sampled_from(list(layouts())))
    flags = {flag: data.draw(st.booleans()) for flag in ("fuse", "stack_experts", "widen")}
    limit = data.draw(st.sampled_from([1, 2000, 10**9]))
    given = {key: value for key, value in vars(tiny.options).items() if value}
    with folder() as at:
        src = whole.save(at / "src")
        (src / "tokenizer.json").write_text("{}")
        planned = plan.make(open_checkpoint(src, tiny.options), None, layout, **flags)
        if not planned.converted:
            with pytest.raises(UnsupportedError, match="modules cannot become"):
                convert(src, at / "dst", to=layout, **flags, **given)
            return
        result = convert(src, at / "dst", to=layout, max_shard_size=limit, workers=1, **flags, **given)
        verify(result.dst, workers=1)
        verify(result.dst, src, workers=1)
        artifact = open_artifact(result.dst, layouts())
        assert set(artifact.parts) <= set(linears)
        for name in artifact.parts:
            wanted = DECODERS[source](alone(linears[name], module_of(tiny)))
            np.testing.assert_array_equal(dequantize(artifact.quant(name), np.float64), wanted)
        unpack(result.dst, at / "back")
        before, after = open_checkpoint(src), open_checkpoint(at / "back")
        assert [(t.name, t.dtype, t.shape, t.raw().tobytes()) for t in after.tensors.values()] == [
            (t.name, t.dtype, t.shape, t.raw().tobytes()) for t in before.tensors.values()
        ]
        assert json.loads((at / "back" / "config.json").read_text()) == json.loads((src / "config.json").read_text())


def alone(linear: Tiny, module: str) -> Tiny:
    """Under the name that decoders know."""
    ((name, _),) = sources()[linear.source].modules(linear.checkpoint()).items()
    return replace(linear, tensors={module + n.removeprefix(name): t for n, t in linear.tensors.items()})


@QUICK
@given(
    tiny=MODULES["gguf"], layout=st.sampled_from(list(layouts())), fuse=st.booleans(), limit=st.sampled_from([1, 10**9])
)
def test_a_gguf_file_comes_back_to_the_byte(tiny: Tiny, layout: str, fuse: bool, limit: int) -> None:
    (weight,) = tiny.quantization["types"]
    kind = GGMLQuantizationType[tiny.quantization["types"][weight]]
    _, (*lead, n, row), data = tiny.tensors[weight]
    size, nbytes = GGML_QUANT_SIZES[kind]
    ne = (row // nbytes * size, n, *reversed(lead))
    names = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight")
    tensors = [Stored(name, "F32", ne, data, id=int(kind)) for name in names]
    tensors.append(Stored("output_norm.weight", "F32", (5,), bytes(20)))
    with folder() as at:
        src = write(at / "m.gguf", tensors, model("qwen3", head_count=4))
        planned = plan.make(open_checkpoint(src), None, layout, fuse=fuse)
        if not planned.converted:
            return
        convert(src, at / "dst", to=layout, fuse=fuse, max_shard_size=limit, workers=1)
        verify(at / "dst", src, workers=1)
        artifact = open_artifact(at / "dst", layouts())
        wanted = DECODERS["gguf"](tiny)
        for name in artifact.parts:
            np.testing.assert_array_equal(dequantize(artifact.quant(name)).astype(np.float64), wanted)
        unpack(at / "dst", at / "back.gguf")
        assert (at / "back.gguf").read_bytes() == src.read_bytes()


@QUICK
@given(tiny=MODULES["matmulnbits"], layout=st.sampled_from(list(layouts())), widen=st.booleans())
def test_an_onnx_model_and_its_initializers_come_back(tiny: Tiny, layout: str, widen: bool) -> None:
    onnx = pytest.importorskip("onnx")
    (node,) = tiny.quantization["nodes"]
    proto = onnx.helper.make_node(node["op"], node["inputs"], ["y"], domain=node["domain"], **node["attributes"])
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])
    kinds = {"U8": 2, "I32": 6, "F16": 10, "BF16": 16, "F32": 1}
    initializers = [
        onnx.helper.make_tensor(name, kinds[dtype], shape, data, raw=True)
        for name, (dtype, shape, data) in tiny.tensors.items()
    ]
    graph = onnx.helper.make_graph([proto], "g", [value], [value], initializers)
    sets = [onnx.helper.make_opsetid(domain, version) for domain, version in tiny.quantization["opsets"].items()]
    with folder() as at:
        onnx.save(onnx.helper.make_model(graph, opset_imports=sets, ir_version=10), at / "m.onnx")
        checkpoint = open_checkpoint(at / "m.onnx")
        if not plan.make(checkpoint, None, layout, widen=widen).converted:
            return
        convert(at / "m.onnx", at / "dst.safetensors", to=layout, widen=widen, workers=1)
        verify(at / "dst.safetensors", at / "m.onnx", workers=1)
        artifact = open_artifact(at / "dst.safetensors", layouts())
        (name,) = artifact.parts
        np.testing.assert_array_equal(dequantize(artifact.quant(name), np.float64), DECODERS["matmulnbits"](tiny))
        unpack(at / "dst.safetensors", at / "back.safetensors")
        back = open_checkpoint(at / "back.safetensors").tensors
        assert {n: (t.dtype, t.shape, t.raw().tobytes()) for n, t in back.items()} == tiny.tensors
        unpack(at / "dst.safetensors", at / "back.onnx")
        assert (at / "back.onnx").read_bytes() == (at / "m.onnx").read_bytes()


@pytest.mark.parametrize("source", SAFETENSORS)
@QUICK
@given(data=st.data())
def test_no_byte_of_an_artifact_changes_unnoticed(source: str, data: st.DataObject) -> None:
    """Codes, scales, padding, what passed through: verify against the source finds each."""
    tiny = data.draw(MODULES[source])
    layout = data.draw(st.sampled_from(list(layouts())))
    given = {key: value for key, value in vars(tiny.options).items() if value}
    with folder() as at:
        src = replace(tiny, tensors=tiny.tensors | {"norm.weight": ("F32", (3,), b"\0\1\2\3" * 3)}).save(at / "src")
        if not plan.make(open_checkpoint(src, tiny.options), None, layout, widen=True).converted:
            return
        convert(src, at / "a.safetensors", to=layout, widen=True, workers=1, **given)
        raw = (at / "a.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for place in data.draw(st.lists(st.integers(start, len(raw) - 1), min_size=1, max_size=8)):
            changed = bytes([raw[place] ^ data.draw(st.integers(1, 255))])
            (at / "a.safetensors").write_bytes(raw[:place] + changed + raw[place + 1 :])
            with pytest.raises((VerifyError, CorruptError)):
                verify(at / "a.safetensors", src, workers=1)
