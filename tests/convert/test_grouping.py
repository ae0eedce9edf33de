"""``--fuse`` and ``--stack-experts``: one module of many, the source's bytes back, and reasons for the rest."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import cases
import ml_dtypes
import numpy as np
import pytest
from cases import Case, gptq_case
from stored import ROOT, checkpoint, zoo
from typer.testing import CliRunner
from warptile.convert import convert, inspect, manifest, report, unpack, verify
from warptile.convert import modules as module_plans
from warptile.convert.cli import app
from warptile.formats import stream
from warptile.formats.artifact import open_artifact
from warptile.formats.canonical import dequantize
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.kernels import layouts
from warptile.runtime import Session

BOTH = {"fuse": True, "stack_experts": True}
ATTN, MLP, MOE = "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.0.mlp.experts"
DATA = sorted(folder.name for folder in (ROOT / "tests" / "data").iterdir() if folder.is_dir())
ZOO = ["mo_nvfp4_moe", "mo_nvfp4", "mo_fp8", "ct_mxfp4", "gq_gptq_w4g64_act", "gg_q8_0"]


def model(folder: Path) -> Path:
    """What to convert of a folder: the file that is the model, or the folder."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".gguf", ".onnx"))
    return files[0] if files else folder


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("name", sorted({*DATA, *ZOO}))
def test_checkpoints_of_other_tools_are_grouped_without_a_bit_lost(name, layout, tmp_path):
    folder = zoo(name)
    src = model(folder)
    try:
        result = convert(src, tmp_path / "artifact", to=layout, widen=True, **BOTH)
    except UnsupportedError as refused:
        if "modules cannot become" not in str(refused):
            raise
        pytest.skip(str(refused))
    verify(result.dst)
    verify(result.dst, src)
    artifact, known = open_artifact(result.dst, layouts()), np.load(folder / "expected.npz")
    for part in artifact.parts.values():
        weights = dequantize(artifact.quant(part.name))
        whole = dequantize(artifact.quant(part.module))
        np.testing.assert_array_equal(
            (whole if part.expert is None else whole[part.expert])[..., part.rows, :], weights
        )
        if part.name in known:
            most = 1e-7 if "nvfp4" in name else 0
            assert np.abs(weights - known[part.name]).max() <= most * np.abs(known[part.name]).max()
    unpack(result.dst, tmp_path / "back")
    before, after = open_checkpoint(src).tensors, open_checkpoint(tmp_path / "back").tensors
    assert list(after) == list(before)
    assert all(after[t].raw().tobytes() == before[t].raw().tobytes() for t in before)
    for file in folder.iterdir() if src == folder else ():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("fuse", [False, True])
def test_experts_of_a_real_checkpoint_are_one_module(fuse, tmp_path):
    result = convert(zoo("ar_gptq_w4g64_moe"), tmp_path / "a", to="marlin", stack_experts=True, fuse=fuse)
    grouped = {m.name: m for m in result.plan.converted if m.grouped and "experts" in m.name}
    layer = {name.removeprefix(f"{MOE}.") for name in grouped if name.startswith(MOE)}
    assert layer == ({"gate_up_proj", "down_proj"} if fuse else {"gate_proj", "up_proj", "down_proj"})
    spec = open_artifact(result.dst, layouts()).modules[f"{MOE}.down_proj"]
    assert spec["experts"] == 4
    assert [part["expert"] for part in spec["parts"]] == [0, 1, 2, 3]


Modules = dict[str, Case]


def save(folder: Path, modules: Modules, others: dict[str, cases.Stored] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {name: stored for case in modules.values() for name, stored in case.tensors.items()}
    cases.write_file(folder / "model.safetensors", tensors | (others or {}))
    config = next(iter(modules.values())).config
    del config["sym"]  # one label for asymmetric ones too
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def linears(prefix: str, names: Sequence[str], seeds: int = 0, **parts: object) -> Modules:
    return {
        f"{prefix}.{name}": gptq_case(module=f"{prefix}.{name}", seed=seeds + i, **parts)  # type: ignore[arg-type]
        for i, name in enumerate(names)
    }


def check(src: Path, dst: Path, modules: Modules, tmp_path: Path, **given: bool) -> dict[str, list[str]]:
    """{module: its parts} of an artifact whose linears decode to what was written and come back."""
    result = convert(src, dst, to="marlin", **given)
    verify(dst, src)
    artifact = open_artifact(dst, layouts())
    for name, case in modules.items():
        np.testing.assert_array_equal(dequantize(artifact.quant(name), np.float64), case.dense)
    back = unpack(dst, tmp_path / "back").dst
    assert (back / "model.safetensors").read_bytes()[8:].count(b"qweight")
    before, after = open_checkpoint(src).tensors, open_checkpoint(back).tensors
    assert {n: t.raw().tobytes() for n, t in after.items()} == {n: t.raw().tobytes() for n, t in before.items()}
    counts = result.plan.counts
    assert counts["input"] == len(before)
    return {m.name: [linear.name for linear in m.linears] for m in result.plan.converted}


@pytest.mark.parametrize("zeros", ["all symmetric", "one asymmetric", "all asymmetric"])
@pytest.mark.parametrize("fuse", [False, True])
def test_of_a_stack_all_get_zero_points_if_one_has_and_bytes_come_back(zeros, fuse, tmp_path):
    modules: Modules = {}
    for expert in range(3):
        sym = {"all symmetric": True, "one asymmetric": expert != 1, "all asymmetric": False}[zeros]
        modules |= linears(f"{MOE}.{expert}", ("gate_proj", "up_proj"), 10 * expert, sym=sym, n=64, k=96)
    src = save(tmp_path / "model", modules)
    found = check(src, tmp_path / "out", modules, tmp_path, stack_experts=True, fuse=fuse)
    names = ["gate_up_proj"] if fuse else ["gate_proj", "up_proj"]
    assert list(found) == [f"{MOE}.{name}" for name in names]
    specs = open_artifact(tmp_path / "out", layouts()).modules
    for name in names:
        spec = specs[f"{MOE}.{name}"]
        assert (spec["zero"] is None) == (zeros == "all symmetric")
        symmetric = [part.get("symmetric") for part in spec["parts"]]
        assert symmetric.count("u4b8") == (2 * len(spec["parts"]) // 3 if zeros == "one asymmetric" else 0)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_widths_that_are_widened_are_grouped_too(bits, tmp_path):
    modules: Modules = {}
    for expert in range(2):
        modules |= linears(f"{MOE}.{expert}", ("w1", "w3"), expert, bits=bits, sym=expert == 0, n=32, k=64)
    src = save(tmp_path / "model", modules)
    assert list(check(src, tmp_path / "out", modules, tmp_path, widen=True, **BOTH)) == [f"{MOE}.w13"]


def test_act_order_that_all_share_is_fused(tmp_path):
    modules = linears(ATTN, ("q_proj", "k_proj", "v_proj"), g_idx="act", bias="F16")
    shared = modules[f"{ATTN}.q_proj"].tensors[f"{ATTN}.q_proj.g_idx"]
    others = linears(ATTN, ("k_proj", "v_proj"), g_idx="act", bias="F16")  # seeds 0 and 1: another order in v_proj
    assert others[f"{ATTN}.k_proj"].tensors[f"{ATTN}.k_proj.g_idx"] == shared
    apart = save(tmp_path / "apart", modules)
    result = convert(apart, tmp_path / "a", to="marlin", fuse=True)
    assert [a.reason.split(":")[0] for a in result.plan.apart] == ["act-order differs"]
    assert len(result.plan.converted) == 3
    same = {
        f"{ATTN}.{name}": gptq_case(module=f"{ATTN}.{name}", g_idx="act") for name in ("q_proj", "k_proj", "v_proj")
    }
    assert list(check(save(tmp_path / "same", same), tmp_path / "b", same, tmp_path, fuse=True)) == [f"{ATTN}.qkv_proj"]


PLAIN = cases.floats([0.5] * 64, (8, 8), "F16")
APART: dict[str, tuple[Callable[[], tuple[Modules, dict[str, cases.Stored]]], str, str]] = {
    "another shape": (
        lambda: (linears(MLP, ("gate_proj",)) | linears(MLP, ("up_proj",), k=64), {}),
        f"{MLP}.gate_up_proj",
        "inputs differ: gate_proj 128, up_proj 64",
    ),
    "zero points in one": (
        lambda: (linears(MLP, ("gate_proj",)) | linears(MLP, ("up_proj",), sym=False), {}),
        f"{MLP}.gate_up_proj",
        "zero points are not in all: gate_proj none, up_proj some",
    ),
    "bias in one": (
        lambda: (linears(MLP, ("gate_proj",), bias="F16") | linears(MLP, ("up_proj",)), {}),
        f"{MLP}.gate_up_proj",
        "biases differ: gate_proj f16, up_proj none",
    ),
    "a member that is not quantised": (
        lambda: (linears(ATTN, ("q_proj", "k_proj")), {f"{ATTN}.v_proj.weight": PLAIN}),
        f"{ATTN}.qkv_proj",
        "v_proj is no quantised linear",
    ),
    "a member that is refused": (
        lambda: (linears(MLP, ("gate_proj", "up_proj")), {f"{MLP}.up_proj.perm": PLAIN}),
        f"{MLP}.gate_up_proj",
        "up_proj is not converted",
    ),
    "the name is taken": (
        lambda: (linears(MLP, ("gate_proj", "up_proj")), {f"{MLP}.gate_up_proj.weight": PLAIN}),
        f"{MLP}.gate_up_proj",
        f"there is a {MLP}.gate_up_proj already",
    ),
    "experts of two shapes": (
        lambda: (linears(f"{MOE}.0", ("w2",)) | linears(f"{MOE}.1", ("w2",), n=32), {}),
        f"{MOE}.w2",
        "outputs differ: expert 0 64, expert 1 32",
    ),
    "experts in two orders": (
        lambda: (linears(f"{MOE}.0", ("w2",), g_idx="act") | linears(f"{MOE}.1", ("w2",), 1, g_idx="act"), {}),
        f"{MOE}.w2",
        "act-order differs: expert 0 order",
    ),
    "an expert that is not quantised": (
        lambda: (linears(f"{MOE}.0", ("w2",)), {f"{MOE}.1.w2.weight": PLAIN}),
        f"{MOE}.w2",
        "expert 1 is no quantised linear, or not as the others",
    ),
    "one pair of a stack": (
        lambda: (
            linears(f"{MOE}.0", ("w1", "w3"))
            | linears(f"{MOE}.1", ("w1",))
            | linears(f"{MOE}.1", ("w3",), scale="F32"),
            {},
        ),
        f"{MOE}.w13",
        f"{MOE}.1.w13: scales differ: w1 f16 per 32, w3 f32 per 32",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart_is_converted_and_listed_with_its_reason(name, tmp_path):
    build, group, reason = APART[name]
    modules, others = build()
    result = convert(save(tmp_path / "model", modules, others), tmp_path / "out", to="marlin", **BOTH)
    found = {a.name: a for a in result.plan.apart}
    assert found[group].reason.startswith(reason)
    kept = {linear.name for m in result.plan.modules for linear in m.linears}
    assert kept == modules.keys()
    assert group not in {m.name for m in result.plan.converted}
    text, data = report.text(result), report.data(result)
    assert f"stored apart: {reason}" in text
    assert {"module": group, "parts": list(found[group].parts), "reason": found[group].reason} in data["apart"]
    verify(tmp_path / "out", tmp_path / "model")


@pytest.mark.parametrize("numbers", [(1,), (0, 2), (0, 1, 3, 4)])
def test_a_gap_in_the_numbers_of_experts_is_refused(numbers, tmp_path):
    modules: Modules = {}
    for number in numbers:
        modules |= linears(f"{MOE}.{number}", ("up_proj",))
    src = save(tmp_path / "model", modules)
    missing = next(i for i in range(9) if i not in numbers)
    with pytest.raises(CorruptError, match=rf"experts\.{missing}\.up_proj: an expert is missing.*--stack-experts"):
        convert(src, tmp_path / "out", to="marlin", stack_experts=True)
    assert not (tmp_path / "out").exists()
    assert len(convert(src, tmp_path / "out", to="marlin").plan.converted) == len(numbers)


def test_a_layout_that_refuses_the_whole_leaves_the_parts(tmp_path, monkeypatch):
    modules = linears(MLP, ("gate_proj", "up_proj"))
    marlin = layouts()["marlin"]
    accepts = marlin.accepts
    monkeypatch.setattr(marlin, "accepts", lambda q: "too tall" if q.n > 64 else accepts(q))
    result = convert(save(tmp_path / "model", modules), tmp_path / "out", to="marlin", fuse=True)
    assert [(a.name, a.reason) for a in result.plan.apart] == [(f"{MLP}.gate_up_proj", "as one: too tall")]
    assert len(result.plan.converted) == 2


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("flags", [{}, BOTH], ids=["no flags", "both flags"])
def test_experts_that_share_a_scale_tensor_make_the_round_trip(flags, layout, tmp_path):
    """FP8 as transformers saves it: weights of every expert, one scale tensor for all of them."""
    rng, arrays = np.random.default_rng(0), {}
    for e in range(3):
        for name in ("gate_proj", "up_proj"):
            codes = rng.integers(0, 0x7F, (128, 256), dtype=np.uint8)
            arrays[f"{MOE}.{e}.{name}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
    arrays[f"{MOE}.gate_up_proj_scale_inv"] = rng.uniform(1e-4, 1e-3, (3, 2, 2)).astype(np.float32)
    (tmp_path / "model").mkdir()
    source = checkpoint(tmp_path / "model", arrays, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    dst = convert(source.path, tmp_path / "out", to=layout, **flags).dst
    verify(dst, source.path)
    back = open_checkpoint(unpack(dst, tmp_path / "back").dst).tensors
    assert {n: t.raw().tobytes() for n, t in back.items()} == {n: t.raw().tobytes() for n, t in source.tensors.items()}
    with Session(dst, device="cpu") as session:
        w, x = session.dequantize(f"{MOE}.gate_up_proj"), np.eye(256, dtype=np.float16)[:4]
        assert w.shape == (3, 256, 256)
        y = session.linear(f"{MOE}.gate_up_proj", x, expert=2, numerics="exact")
        np.testing.assert_array_equal(y, w[2].T[:4].astype(np.float16))


@pytest.mark.parametrize("name", ["mo_nvfp4", "gq_fp8_block", "gg_q8_0", "ct_mxfp4"])
def test_bits_that_move_straight_from_several_parts_are_those_of_their_codes(name, compiled, tmp_path):
    src = model(zoo(name))
    dst = convert(src, tmp_path / "out", to="mmq", fuse=True).dst
    assert any("parts" in spec for spec in open_artifact(dst, layouts()).modules.values())
    verify(dst, src)


@pytest.fixture
def moe(tmp_path: Path) -> tuple[Path, Modules]:
    modules = linears(ATTN, ("q_proj", "k_proj", "v_proj"))
    for expert in range(3):
        modules |= linears(f"{MOE}.{expert}", ("gate_proj", "up_proj"), 10 * expert, sym=expert != 1, bias="F16")
    return save(tmp_path / "model", modules, {"norm.weight": PLAIN}), modules


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_bytes_depend_on_nothing_but_source_and_flags(moe, size, tmp_path):
    src, modules = moe
    found = check(src, tmp_path / "a", modules, tmp_path, **BOTH)
    assert list(found) == [f"{ATTN}.qkv_proj", f"{MOE}.gate_up_proj"]
    for workers, name in ((1, "b"), (3, "c")):
        convert(src, tmp_path / name, to="marlin", workers=workers, max_shard_size=size, **BOTH)
        verify(tmp_path / name, src)
    for file in (tmp_path / "b").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()


@pytest.mark.parametrize("flags", [BOTH, {"stack_experts": True}], ids=["the same flags", "other flags"])
def test_a_run_that_was_interrupted_goes_on_only_with_the_same_flags(moe, flags, tmp_path, monkeypatch):
    src, _ = moe
    cut = {"to": "marlin", "max_shard_size": "10KB"}
    want = convert(src, tmp_path / "want", **cut, **flags).dst
    publish, done = manifest.publish, []

    def stop(*given):
        publish(*given)
        done.append(given[1].name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(src, tmp_path / "out", **cut, **BOTH)
    (first,) = (tmp_path / "out.partial").glob(f"out/{done[0]}")
    kept = first.stat().st_mtime_ns
    dst = convert(src, tmp_path / "out", **cut, **flags).dst
    assert ((dst / done[0]).exists() and (dst / done[0]).stat().st_mtime_ns == kept) == (flags == BOTH)
    assert {f.name: f.read_bytes() for f in dst.iterdir()} == {f.name: f.read_bytes() for f in want.iterdir()}


def test_a_stack_takes_the_memory_of_one_expert_and_the_next(tmp_path, monkeypatch):
    for module in (stream, module_plans):
        monkeypatch.setattr(module, "STEP", 1 << 17)

    def peak(experts: int) -> tuple[int, int, int]:
        """(reached, foretold, bytes of one expert as stored)"""
        arrays, rng, folder = {}, np.random.default_rng(0), tmp_path / str(experts)
        for name in (f"{MOE}.{e}.{half}" for e in range(experts) for half in ("gate_proj", "up_proj")):
            arrays[f"{name}.weight"] = rng.integers(0, 256, (512, 1024), dtype=np.uint8)
            arrays[f"{name}.weight_scale"] = np.ones((512, 128), ml_dtypes.float8_e4m3fn)
            arrays[f"{name}.weight_scale_2"] = np.float32([0.5])
        folder.mkdir()
        source = checkpoint(folder, arrays, {"quant_method": "modelopt"})
        del arrays
        tracemalloc.start()
        result = convert(source.path, to="marlin", workers=2, **BOTH)
        reached = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return reached, result.plan.peak, result.plan.nbytes // experts

    _, (few, _, each), (many, foretold, _) = peak(1), peak(2), peak(12)  # the first also loads what is loaded once
    assert many < few + 2 * each  # threads do not always meet; the others would be ten
    assert many < foretold + 1_000_000


def test_plan_inspect_and_report_show_what_is_held(moe, tmp_path):
    src, _ = moe
    dry = convert(src, to="marlin", dry_run=True, **BOTH)
    text = report.text(dry)
    assert "3: q_proj, k_proj, v_proj" in text
    assert "6: 0.gate_proj .. 2.up_proj" in text
    planned = report.data(dry)["modules"]
    assert planned[f"{ATTN}.qkv_proj"]["parts"] == [f"{ATTN}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    assert planned[f"{MOE}.gate_up_proj"]["experts"] == 3
    wet = convert(src, tmp_path / "out", to="marlin", **BOTH)
    assert wet.plan.nbytes == dry.plan.nbytes
    assert "2 marlin modules of 9 linears" in report.text(wet)
    contents = inspect(tmp_path / "out")
    held = {linear.name: linear.parts for linear in contents.linears}
    assert held[f"{MOE}.gate_up_proj"] == tuple(f"{MOE}.{e}.{n}" for e in range(3) for n in ("gate_proj", "up_proj"))
    assert "6: 0.gate_proj .. 2.up_proj" in report.text(contents)
    assert report.data(contents)["modules"][f"{ATTN}.qkv_proj"]["parts"][0] == f"{ATTN}.q_proj"


def test_the_command_line_has_both_flags(moe, tmp_path):
    src, _ = moe
    arguments = ["gptq-to-marlin", str(src), str(tmp_path / "out"), "--fuse", "--stack-experts", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["modules"]) == [f"{ATTN}.qkv_proj", f"{MOE}.gate_up_proj"]


def damaged(spec: dict, part: int, **changes: object) -> dict:
    parts = [dict(p) for p in spec["parts"]]
    parts[part] |= changes
    return {**spec, "parts": [{k: v for k, v in p.items() if v is not None} for p in parts]}


DAMAGE: dict[str, tuple[Callable[[dict], dict], str]] = {
    "an expert in two places": (lambda s: damaged(s, 4, expert=0), "every expert of the stack, in order"),
    "an expert of three": (lambda s: damaged(s, 2, expert=0), "128 rows, cut alike in every expert"),
    "no expert": (lambda s: damaged(s, 0, expert=None), "every expert of the stack, in order"),
    "an expert too many": (lambda s: damaged(s, 5, expert=3), "every expert of the stack, in order"),
    "interleaved": (lambda s: damaged(damaged(s, 1, expert=1), 2, expert=0), "every expert of the stack, in order"),
    "rows": (lambda s: damaged(s, 3, n=63), "128 rows, cut alike in every expert"),
    "rows of all": (lambda s: {**s, "parts": [p | {"n": 32} for p in s["parts"]]}, "128 rows, cut alike"),
    "symmetric of another": (lambda s: damaged(s, 0, symmetric="u8b128"), "a symmetric element that is u4"),
    "source too": (lambda s: {**s, "source": {"format": "gptq"}}, "it, or parts"),
    "no parts": (lambda s: {**s, "parts": []}, "a list of name, n, source"),
    "a key": (lambda s: damaged(s, 0, key=1), "a list of name, n, source"),
    "no format": (lambda s: damaged(s, 0, source={}), "a list of name, n, source"),
    "narrow": (lambda s: damaged(s, 4, source={"format": "gptq", "narrow": "u8"}), "an element narrower than u4b8"),
    "a name twice": (lambda s: damaged(s, 1, name=s["parts"][0]["name"]), "a linear is in two modules"),
    "a module's name": (lambda s: damaged(s, 1, name=f"{ATTN}.qkv_proj"), "a linear is in two modules"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_parts_that_do_not_make_up_their_module_are_refused(moe, name, tmp_path):
    change, words = DAMAGE[name]
    src, _ = moe
    dst = convert(src, tmp_path / "out.safetensors", to="marlin", **BOTH).dst
    raw = dst.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    said = json.loads(header["__metadata__"]["warptile"])
    said["modules"][f"{MOE}.gate_up_proj"] = change(said["modules"][f"{MOE}.gate_up_proj"])
    header["__metadata__"]["warptile"] = json.dumps(said)
    text = json.dumps(header).encode()
    dst.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(CorruptError, match=words):
        open_artifact(dst, layouts())


def test_zero_points_of_a_symmetric_part_that_are_others_are_found(moe, tmp_path):
    src, _ = moe
    dst = convert(src, tmp_path / "out", to="marlin", **BOTH).dst
    tensor = open_checkpoint(dst).tensors[f"{MOE}.gate_up_proj.qzeros"]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset)
        byte = file.read(1)[0]
        file.seek(tensor.offset)
        file.write(bytes([byte ^ 1]))
    for action in (lambda: verify(dst, src), lambda: unpack(dst, tmp_path / "back")):
        with pytest.raises(WarptileError, match=r"experts\.0\..*zero points of a symmetric part are others"):
            action()


@pytest.mark.parametrize("given", [{"stack_experts": True}, BOTH], ids=["stacked", "fused too"])
def test_a_stack_of_one_expert(given, tmp_path):
    modules = linears(f"{MOE}.0", ("gate_proj", "up_proj"), n=64, k=96)
    src = save(tmp_path / "model", modules)
    found = check(src, tmp_path / "a", modules, tmp_path, **given)
    assert [len(names) for names in found.values()] == ([2] if "fuse" in given else [1, 1])
