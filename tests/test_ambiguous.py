"""What can be read in two ways, or in none, is refused by name; of label and switch, the wrong one is told."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Stored, gptq_case
from tiny import TINY, Tiny, f16, f32, i64, in_memory, junk
from warptile.convert import convert, plan, unpack, verify
from warptile.convert.cli import main
from warptile.formats import checks, matmulnbits, nvfp4, sources
from warptile.formats.container import Checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, UsageError
from warptile.formats.options import Options

Line = tuple[int, str]


def told(capsys: pytest.CaptureFixture[str], *args: object) -> Line:
    """(exit code, the line on stderr without its ``error: ``)."""
    code = main([str(a) for a in args])
    return code, capsys.readouterr().err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("flags", "code", "starts"),
    [
        (["--bits", "5"], 2, "layer: --bits 5: 5-bit GPTQ is stored in planes; need 2, 3, 4 or 8"),
        (["--bits", "16"], 2, "layer: --bits 16: 16 bits are unknown to GPTQ; need 2, 3, 4 or 8"),
        (["--bits", "0"], 2, "--bits 0: no such width; need 1 or more"),
        (["--group-size", "0"], 2, "--group-size 0: no such size; need -1 or a positive number"),
        (["--group-size", "-2"], 2, "--group-size -2: no such size; need -1 or a positive number"),
        (["--bits", "8"], 3, "layer.qweight: --bits contradicts the shapes; found tensors of 4-bit codes; need bits 8"),
        (["--group-size", "16"], 3, "layer.qweight: --group-size contradicts the tensors; found 4 groups"),
        (["--checkpoint-format", "marlin"], 3, "layer.qweight: --checkpoint-format marlin, but stored as plain GPTQ"),
    ],
)
def test_a_wrong_switch_is_told_and_not_the_label(capsys, tmp_path, flags, code, starts) -> None:
    src = gptq_case().save(tmp_path)
    found, line = told(capsys, "gptq-to-marlin", src, *flags, "--dry-run")
    assert (found, starts in line) == (code, True), line
    assert "label" not in line
    assert "config.json" not in line


@pytest.mark.parametrize("command", [["auto", "--to", "marlin", "--dry-run"], ["inspect"]])
def test_a_switch_that_no_reader_heeds_is_refused(capsys, tmp_path, command) -> None:
    src = TINY["awq"].save(tmp_path)
    found, line = told(capsys, *command, src, "--bits", "5", "--zero-wrap", "lane", "--group-size", "32")
    starts = "--bits, --zero-wrap means nothing to the modules in it; found modules of awq; leave it out"
    assert (found, starts in line) == (2, True), line
    assert told(capsys, *command, src, "--group-size", "32") == (0, "")


@pytest.mark.parametrize("flags", [[], ["--bits", "4"], ["--group-size", "32"], ["--checkpoint-format", "gptq"]])
def test_a_right_switch_changes_nothing(capsys, tmp_path, flags) -> None:
    assert main(["gptq-to-marlin", str(gptq_case().save(tmp_path)), *flags, "--dry-run"]) == 0


@pytest.mark.parametrize("label", [{"bits": 5}, {"group_size": 0}, {"bits": 8}, {"group_size": 16}])
def test_a_wrong_label_is_told_as_one(capsys, tmp_path, label) -> None:
    src = gptq_case().save(tmp_path, **label)
    code, line = told(capsys, "gptq-to-marlin", src, "--dry-run")
    assert (code, "config.json" in line or "as the label says" in line) == (3, True), line


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("compressed_tensors", Options(bits=8), "--bits contradicts the shapes.*need 8 bits as --bits says"),
        ("compressed_tensors", Options(group_size=16), "--group-size contradicts .*group size 16 as --group-size says"),
        ("awq", Options(group_size=16), "--group-size contradicts .*need group size 16 as --group-size says"),
    ],
)
def test_other_readers_tell_the_switch_too(name: str, options: Options, says: str) -> None:
    checkpoint = replace(TINY[name], options=options).checkpoint()
    reader = sources()[name]
    with pytest.raises(UnsupportedError, match=says):
        reader.describe(checkpoint, next(iter(reader.modules(checkpoint))))


def test_a_rule_beside_a_switch_is_told_as_the_labels(tmp_path: Path) -> None:
    case = gptq_case()
    src = case.save(tmp_path, dynamic={"layer": {"group_size": 64}})
    with pytest.raises(UnsupportedError, match="need group size 16 as --group-size says or 64 as the label says"):
        convert(src, to="marlin", group_size=16, dry_run=True)


@pytest.mark.parametrize(("switch", "value"), [("bits", 4), ("group_size", 32)])
def test_an_artifact_that_tells_of_impossible_switches_is_damaged(tmp_path: Path, switch: str, value: int) -> None:
    src, dst = gptq_case().save_lone(tmp_path), tmp_path / "a.safetensors"
    convert(src, dst, to="marlin", **{switch: value})
    raw = dst.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    assert json.loads(header["__metadata__"]["source_options"]) == {switch: value}
    header["__metadata__"]["source_options"] = json.dumps({switch: 0})
    text = json.dumps(header).encode()
    dst.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    with pytest.raises(CorruptError, match="source_options in its metadata is damaged"):
        verify(dst, src)


def with_bias(tiny: Tiny, value: float) -> Tiny:
    """Its module with a bias of f32 ones, but for the last; the one it has gives way."""
    checkpoint, reader = tiny.checkpoint(), sources()[tiny.source]
    (module,) = reader.modules(checkpoint)
    outline = reader.describe(checkpoint, module)
    count = (outline.experts or 1) * outline.n
    data = struct.pack(f"<{count}f", *[1.0] * (count - 1), value)
    shape = (outline.n,) if outline.experts is None else (outline.experts, outline.n)
    joint = "_" if "e.gate_up_proj" in module else "."
    name = next((n for n in tiny.tensors if n.endswith("bias")), f"{module}{joint}bias")
    return replace(tiny, tensors={**tiny.tensors, name: ("F32", shape, data)})


BIASED = [name for name in TINY if name not in ("fp8 nan", "fp8 experts apart")]


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_a_bias_is_of_numbers(name: str, value: float) -> None:
    checkpoint = with_bias(TINY[name], value).checkpoint()
    reader = sources()[TINY[name].source]
    (module,) = reader.modules(checkpoint)
    if np.isfinite(value):
        assert reader.read(checkpoint, module).bias.reshape(-1)[-1] == np.float32(value)
        return
    with pytest.raises(CorruptError, match="values of a bias are NaN or infinite; found 1 of"):
        reader.read(checkpoint, module)


# Codes beside which a plain weight would be a second one.
CODED = [
    name
    for name, tiny in TINY.items()
    if tiny.source in ("gptq", "awq") or any(n.endswith(("weight_packed", "_blocks")) for n in tiny.tensors)
]


@pytest.mark.parametrize("name", CODED)
def test_a_plain_weight_beside_codes_is_refused_by_name(name: str) -> None:
    tiny = TINY[name]
    first = next(iter(tiny.tensors))
    plain = first.removesuffix("_blocks") if first.endswith("_blocks") else f"{first.rpartition('.')[0]}.weight"
    checkpoint = replace(tiny, tensors={**tiny.tensors, plain: f16(1, 4, 8)}).checkpoint()
    with pytest.raises(UnsupportedError, match="two weights for one module") as error:
        plan.make(checkpoint, None, "marlin")
    assert error.value.tensor == plain
    assert plan.claims(tiny.checkpoint(), None)


BLOCKS = junk(1, "U8", 2, 8, 2, 16), junk(2, "U8", 2, 8, 2, below=255)
NIBBLES = junk(3, "U8", 8, 32), junk(4, "F8_E8M0", 8, 2, below=255)
E4M3 = junk(5, "F8_E4M3", 16, 64, below=127), f32(0.5)
NAMELESS: dict[str, dict[str, Stored]] = {
    "mxfp4 .weight_blocks": {".weight_blocks": BLOCKS[0], ".weight_scales": BLOCKS[1]},
    "mxfp4 ._blocks": {"._blocks": BLOCKS[0], "._scales": BLOCKS[1]},
    "mxfp4 a.._blocks": {"a.._blocks": BLOCKS[0], "a.._scales": BLOCKS[1]},
    "mxfp4 .weight_packed": {".weight_packed": NIBBLES[0], ".weight_scale": NIBBLES[1]},
    "nvfp4 .weight": {".weight": junk(6, "U8", 8, 32), ".weight_scale": junk(7, "F8_E4M3", 8, 4, below=127),
                      ".weight_scale_2": f32(0.01)},
    "fp8 .weight": {".weight": E4M3[0], ".weight_scale": E4M3[1]},
    "fp8 ..weight": {"..weight": E4M3[0], "..weight_scale": E4M3[1]},
    "compressed_tensors ..weight_packed": {
        "..weight_packed": junk(8, "I32", 16, 8), "..weight_scale": f16(9, 16, 2), "..weight_shape": i64(16, 64)},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMELESS)
def test_a_module_whose_name_is_only_dots_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="a module needs a name"):
        plan.claims(in_memory(NAMELESS[name], {}, {}), None)
    named = {
        f"x{tensor}": stored
        for tensor, stored in NAMELESS[name].items()
        if ".." not in f"x{tensor}" and "._" not in tensor
    }
    assert not named or plan.claims(in_memory(named, {}, {}), None)


def onnx_nodes(count: int) -> Checkpoint:
    """A model of that many small MatMulNBits."""
    tiny = TINY["matmulnbits"]
    (node,) = tiny.quantization["nodes"]
    tensors, nodes = {}, []
    for i in range(count):
        names = [f"layer{i}.{name}" for name in tiny.tensors]
        tensors |= dict(zip(names, tiny.tensors.values(), strict=True))
        nodes.append({**node, "inputs": ["x", *names]})
    return in_memory(tensors, {**tiny.quantization, "nodes": nodes}, {})


def test_matching_nodes_is_linear_in_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    inputs = matmulnbits._inputs
    for count in (50, 200):

        def counted(node: Any, count: int = count) -> dict[str, str]:
            calls[count] += 1
            return inputs(node)

        monkeypatch.setattr(matmulnbits, "_inputs", counted)
        checkpoint = onnx_nodes(count)
        for module in matmulnbits.modules(checkpoint):
            matmulnbits.describe(checkpoint, module)
            matmulnbits.read(checkpoint, module)
    assert 0 < calls[200] <= 4 * calls[50]


def test_labels_are_searched_once_and_not_for_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, tensors = TINY["nvfp4"], {}
    for i in range(40):
        tensors |= {f"layer{i}.{name}": stored for name, stored in tiny.tensors.items()}
    checkpoint = in_memory(tensors, {**tiny.quantization, "ignore": [f"layer{i}.x" for i in range(100)]}, {})
    visited: Counter[str] = Counter()
    leaves = checks._leaves

    def counted(labels: Any, path: str = "") -> Any:
        visited["leaves"] += 1
        return leaves(labels, path)

    monkeypatch.setattr(checks, "_leaves", counted)
    for module in nvfp4.modules(checkpoint):
        nvfp4.describe(checkpoint, module)
    assert 0 < visited["leaves"] < 300


def test_modules_of_an_onnx_model_keep_their_names_in_every_shard(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    attributes = {"N": 16, "K": 64, "block_size": 32, "bits": 4}
    nodes, initializers = [], []
    for i, b in enumerate(("fc_Q4", "fc_Q8")):  # both would be called fc
        inputs = ["x", b, f"{b}.scales"]
        nodes.append(onnx.helper.make_node("MatMulNBits", inputs, [f"{b}y"], domain="com.microsoft", **attributes))
        codes = np.arange(i, i + 512, dtype=np.uint16).astype(np.uint8).reshape(16, 2, 16)
        scales = np.full((16, 2), 0.5 + i, np.float32)
        initializers += [onnx.numpy_helper.from_array(codes, b), onnx.numpy_helper.from_array(scales, f"{b}.scales")]
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])
    graph = onnx.helper.make_graph(nodes, "g", [value], [value], initializers)
    sets = [onnx.helper.make_opsetid(domain, 1 if domain else 17) for domain in ("", "com.microsoft")]
    onnx.save(onnx.helper.make_model(graph, opset_imports=sets, ir_version=10), tmp_path / "m.onnx")
    result = convert(tmp_path / "m.onnx", tmp_path / "out", to="marlin", max_shard_size=1)
    assert len(result.files) == 2
    assert [m.name for m in result.plan.modules] == ["fc", "fc_Q8"]
    assert not [text for _, text in result.notes if "no initializer" in text]
    verify(tmp_path / "out", tmp_path / "m.onnx")
    unpack(tmp_path / "out", tmp_path / "back")


def test_a_switch_that_no_checkpoint_could_have_is_a_usage_error() -> None:
    for options in ({"bits": 0}, {"bits": -4}, {"group_size": 0}, {"group_size": -2}):
        with pytest.raises(UsageError, match="no such"):
            Options(**options)


@pytest.mark.parametrize("base", ["gptq sym", "compressed_tensors", "awq", "nvfp4", "mxfp4"])
def test_a_name_of_many_dots_costs_no_more_than_others(tmp_path: Path, base: str) -> None:
    """Of a tensor that passes through, and of three modules that become one."""
    deep, tiny = ".".join("a" * 12_000), TINY[base]
    module = next(iter(tiny.tensors)).rpartition(".")[0]
    names = {name: deep + name.removeprefix(module).replace(".", ".b.q_proj.", 1) for name in tiny.tensors}
    tensors = {new.replace("q_proj", f"{w}_proj"): tiny.tensors[old] for old, new in names.items() for w in "qkv"}
    start = time.process_time()
    tracemalloc.start()
    plan.make(in_memory(tensors | {f"{deep}.norm": f32(1.0)}, tiny.quantization, {}), None, "marlin", fuse=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert time.process_time() - start < 2
