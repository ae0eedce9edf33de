"""The GPTQ reader against checkpoints written bit by bit, and its writer against the bytes it read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, Stored, floats, gptq_case, gptq_marlin_case, ints, stream, write_file
from hypothesis import given, settings
from hypothesis import strategies as st
from warptile.formats import gptq, gptq_config
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.formats.container import Checkpoint, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.formats.options import Options
from warptile.kernels import marlin


def check(checkpoint: Checkpoint, case: Case, module: str = "layer") -> QuantTensor:
    """Every promise at once: claims all tensors, describes what it reads, exact weights, JSON source, same bytes."""
    assert gptq.modules(checkpoint) == {module: tuple(sorted(case.tensors, key=list(case.tensors).index))}
    q = gptq.read(checkpoint, module)
    assert gptq.describe(checkpoint, module) == q.outline()
    np.testing.assert_array_equal(dequantize(q, np.float64), case.dense)
    assert json.loads(json.dumps(q.source))["format"] == "gptq"
    written = gptq.write(module, q)
    assert list(written) == list(case.tensors)
    for name, (_, shape, data) in case.tensors.items():
        assert written[name].shape == shape
        assert written[name].dtype == checkpoint.tensors[name].array().dtype
        assert written[name].tobytes() == data, name
    return q


def notes(checkpoint: Checkpoint) -> str:
    return "; ".join(text for _, text in checkpoint.notes)


# --- bytes written by hand ---


def test_four_bit_bytes(tmp_path: Path) -> None:
    """Codes 0..7 and 15..8 down two columns; stored zeros 7 mean 8."""
    tensors = {
        "p.qweight": ints([[0x76543210, 0x89ABCDEF, 0, 0, 0, 0, 0, 0]]),
        "p.qzeros": ints([[0x77777777]]),
        "p.scales": floats([0.5, -2, 1, 1, 1, 1, 1, 1], (1, 8), "F16"),
    }
    q = gptq.read(open_checkpoint(Case(tensors, {"bits": 4, "group_size": -1}, np.empty(0)).save(tmp_path)), "p")
    w = dequantize(q)
    assert q.element.name == "u4b8"
    np.testing.assert_array_equal(w[0], [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5])
    np.testing.assert_array_equal(w[1], [-14, -12, -10, -8, -6, -4, -2, 0])
    np.testing.assert_array_equal(w[2], [-8] * 8)


def test_three_bit_bytes_straddle_words(tmp_path: Path) -> None:
    """0..7 four times is the bytes 88 C6 FA four times: values 10 and 21 lie across two words."""
    words = struct.unpack("<3I", bytes.fromhex("88C6FA" * 4))
    tensors = {
        "p.qweight": ints([[word] * 32 for word in words]),
        "p.qzeros": ints([struct.unpack("<3I", bytes.fromhex("DBB66D" * 4))]),
        "p.scales": floats([1] * 32, (1, 32), "F16"),
    }
    q = gptq.read(open_checkpoint(Case(tensors, {"bits": 3, "group_size": 32}, np.empty(0)).save(tmp_path)), "p")
    assert q.element.name == "u3b4"
    np.testing.assert_array_equal(dequantize(q), np.tile(np.arange(-4, 4), (32, 4)))


# --- every kind, against the bit-by-bit oracle ---

KINDS = {
    "2 bit": {"bits": 2},
    "3 bit": {"bits": 3},
    "8 bit": {"bits": 8, "n": 32, "k": 64},
    "one group": {"group": -1},
    "group of 16": {"group": 16},
    "group of 48": {"group": 48, "k": 96},
    "short last group": {"group": 32, "k": 104},
    "short last group, act-order": {"group": 32, "k": 104, "g_idx": "act"},
    "group larger than k": {"group": 128, "k": 64},
    "act-order": {"g_idx": "act"},
    "act-order, 3 bit, zeros": {"g_idx": "act", "bits": 3, "sym": False},
    "act-order with one group": {"g_idx": "act", "group": -1},
    "no g_idx": {"g_idx": "absent"},
    "g_idx all zero": {"g_idx": "zeros"},
    "no qzeros": {"qzeros": False},
    "no qzeros, no g_idx": {"qzeros": False, "g_idx": "absent"},
    "no qzeros, odd n": {"qzeros": False, "n": 5},
    "zeros of a partial word": {"n": 12, "sym": False},
    "zeros of a partial word, 3 bit": {"n": 9, "sym": False, "bits": 3},
    "uint32": {"words": "U32", "sym": False},
    "bfloat16 scales": {"scale": "BF16"},
    "float32 scales": {"scale": "F32"},
    "bias": {"bias": "F16"},
    "bfloat16 bias": {"bias": "BF16", "sym": False},
    "zeros, gptq": {"sym": False},
    "zeros, gptq_v2": {"sym": False, "convention": "gptq_v2"},
    "symmetric gptq_v2": {"convention": "gptq_v2"},
    "2 bit zeros": {"bits": 2, "sym": False},
    "8 bit zeros": {"bits": 8, "sym": False, "n": 32, "k": 64},
    "8 bit zeros, gptq_v2": {"bits": 8, "sym": False, "convention": "gptq_v2", "n": 32, "k": 64},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_reads_exactly_and_writes_the_same_bytes(kind: dict[str, Any], tmp_path: Path) -> None:
    case = gptq_case(**kind)
    checkpoint = open_checkpoint(case.save(tmp_path))
    q = check(checkpoint, case)
    assert not checkpoint.notes
    assert not q.residue
    assert (q.perm is None) == (kind.get("g_idx") != "act" or kind.get("group") == -1)
    assert (q.zero is None) == kind.get("sym", True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_combination_round_trips(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = data.draw
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    group = draw(st.sampled_from([-1, 16, 24, 32, 64]))
    case = gptq_case(
        bits=bits,
        sym=draw(st.booleans()),
        group=group,
        n=draw(st.integers(1, 20)),
        k=32 * draw(st.integers(1, 4)),
        g_idx=draw(st.sampled_from(["groups", "act", "zeros", "absent"])),
        convention=draw(st.sampled_from(["gptq", "gptq_v2"])),
        scale=draw(st.sampled_from(["F16", "BF16", "F32"])),
        bias=draw(st.sampled_from([None, "F16", "BF16", "F32"])),
        words=draw(st.sampled_from(["I32", "U32"])),
        seed=draw(st.integers(0, 2**16)),
    )
    folder = tmp_path_factory.mktemp("case")
    # Few columns may hold equal zeros by chance, which is another reading: say which convention it is.
    checkpoint = open_checkpoint(case.save(folder), Options(checkpoint_format=case.config["checkpoint_format"]))
    check(checkpoint, case)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"sym": False, "g_idx": "act", "k": 104},
        {"bits": 8, "n": 40, "sym": False},
        {"group": -1, "g_idx": "absent"},
    ],
)
def test_bytes_survive_a_layout(kind: dict[str, Any], tmp_path: Path) -> None:
    """A layout gives back the tensor alone; source and residue travel as JSON and as they are."""
    case = gptq_case(bias="F16", **kind)
    q = gptq.read(open_checkpoint(case.save(tmp_path)), "layer")
    again = marlin.unpack(*marlin.pack(q))
    written = gptq.write("layer", replace(again, source=json.loads(json.dumps(q.source)), residue=q.residue))
    assert {name: data.tobytes() for name, data in written.items()} == {
        name: data for name, (_, _, data) in case.tensors.items()
    }


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("g_idx", ["groups", "act"])
def test_compiled_loops_read_what_numpy_reads(bits: int, g_idx: str, tmp_path: Path, compiled: None) -> None:
    case = gptq_case(bits=bits, n=8, k=160, g_idx=g_idx)
    check(open_checkpoint(case.save(tmp_path)), case)


def test_codes_are_a_view_along_k(tmp_path: Path) -> None:
    q = gptq.read(open_checkpoint(gptq_case().save(tmp_path)), "layer")
    assert q.codes.T.flags.c_contiguous


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.down_proj", ""])
def test_any_module_name(name: str, tmp_path: Path) -> None:
    case = gptq_case(module=name)
    tensors = {key.lstrip("."): tensor for key, tensor in case.tensors.items()}
    check(open_checkpoint(Case(tensors, case.config, case.dense).save(tmp_path)), Case(tensors, {}, case.dense), name)


def test_int64_g_idx_keeps_its_type(tmp_path: Path) -> None:
    case = gptq_case(g_idx="act")
    _, (k,), data = case.tensors["layer.g_idx"]
    case.tensors["layer.g_idx"] = ("I64", (k,), struct.pack(f"<{k}q", *struct.unpack(f"<{k}i", data)))
    check(open_checkpoint(case.save(tmp_path)), case)


def test_static_groups_are_decided_by_g_idx(tmp_path: Path) -> None:
    """desc_act with static_groups keeps channels in place: the label alone would sort them."""
    case = gptq_case()
    q = check(open_checkpoint(case.save(tmp_path, desc_act=True, static_groups=True)), case)
    assert q.perm is None


def test_act_order_is_a_stable_sort_of_groups(tmp_path: Path) -> None:
    case = gptq_case(k=64, group=32, n=8)
    case.tensors["layer.g_idx"] = ("I32", (64,), struct.pack("<64i", *[1, 0] * 32))
    q = gptq.read(open_checkpoint(case.save(tmp_path)), "layer")
    np.testing.assert_array_equal(q.perm, [*range(1, 64, 2), *range(0, 64, 2)])


# --- Marlin tiles ---


@pytest.mark.parametrize("group", [128, -1])
@pytest.mark.parametrize("bias", [None, "F16"])
def test_marlin_checkpoints(group: int, bias: str | None, tmp_path: Path) -> None:
    case = gptq_marlin_case(group, bias=bias)
    q = check(open_checkpoint(case.save(tmp_path)), case)
    assert q.outline().group == group
    assert q.element.name == "u4b8"


def test_marlin_group_of_all_k_has_one_row_of_scales(tmp_path: Path) -> None:
    """With g = k the scales are in the single-group order although the label says 128."""
    case = gptq_marlin_case(128, k=128)
    check(open_checkpoint(case.save(tmp_path)), case)


def test_lone_marlin_checkpoint(tmp_path: Path) -> None:
    case = gptq_marlin_case(128)
    checkpoint = open_checkpoint(case.save_lone(tmp_path))
    q = check(checkpoint, case)
    assert "Marlin" in notes(checkpoint)
    assert q.source["assumed"]


def test_old_marlin_label(tmp_path: Path) -> None:
    case = gptq_marlin_case(128)
    check(open_checkpoint(case.save(tmp_path, checkpoint_format=None, is_marlin_format=True)), case)
    drop(case, "B")
    checkpoint = open_checkpoint(case.save(tmp_path, checkpoint_format=None, is_marlin_format=True))
    assert gptq.modules(checkpoint) == {"layer": ("layer.s",)}


# --- zero points ---


def test_first_lane_of_zero_needs_the_wrap_named(tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15 by every writer; AutoGPTQ's users got worse output for years."""
    case = gptq_case(sym=False, n=8, zeros=[0, 8, 8, 8, 8, 8, 8, 8])
    folder = case.save(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"15 means 0 or 16; found 4 of them, the first at \[0, 0\].*--zero-wrap"
    ):
        gptq.describe(open_checkpoint(folder), "layer")
    check(open_checkpoint(folder, Options(zero_wrap="lane")), case)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("wrap", ["lane", "word", "none"])
def test_zero_wraps(bits: int, wrap: str, tmp_path: Path) -> None:
    top = 2**bits
    zeros = [1, top, 2, 1, top, 1, top - 1, top] * 4 if wrap == "none" else [0, 1, 2, 0, 0, 1, top - 1, 0] * 4
    case = gptq_case(bits=bits, sym=False, n=32, k=64, zeros=zeros, wrap=wrap)
    q = check(open_checkpoint(case.save(tmp_path), Options(zero_wrap=wrap)), case)
    assert q.outline().zero_max == max(zeros)


@pytest.mark.parametrize(("bits", "n"), [(3, 9), (4, 12), (8, 3)])
def test_word_wrap_follows_the_writer_into_unused_lanes(bits: int, n: int, tmp_path: Path) -> None:
    case = gptq_case(bits=bits, sym=False, n=n, k=64, zeros=[0, 1, 2] * (n // 3), wrap="word")
    assert not check(open_checkpoint(case.save(tmp_path), Options(zero_wrap="word")), case).residue


@pytest.mark.parametrize("wrap", ["lane", "word", "none"])
def test_destroyed_words_come_back(wrap: str, tmp_path: Path) -> None:
    """AutoGPTQ's own packing of a zero 0 leaves a word of ones, which no reading explains; its bytes survive."""
    case = gptq_case(sym=False, n=16, k=64)
    case.tensors["layer.qzeros"] = ints([[0xFFFFFFFF, 0x12345678], [0x0000000F, 0xF0000000]])
    q = gptq.read(open_checkpoint(case.save(tmp_path), Options(zero_wrap=wrap)), "layer")
    assert gptq.write("layer", q)["layer.qzeros"].tobytes() == case.tensors["layer.qzeros"][2]
    assert q.zero is not None
    assert q.zero[0, 0] == {"lane": 0, "word": 0, "none": 16}[wrap]


def test_gptqmodel_is_named_as_a_hint(tmp_path: Path) -> None:
    case = gptq_case(sym=False, zeros=[0] * 32 + [5] * 32)
    folder = case.save(tmp_path, meta={"quantizer": ["gptqmodel:7.7.0"]})
    with pytest.raises(UnsupportedError, match=r"gptqmodel:7\.7\.0, suggests word"):
        gptq.read(open_checkpoint(folder), "layer")


def test_both_conventions_give_the_same_weights(tmp_path: Path) -> None:
    zeros = [(3 * i) % 15 + 1 for i in range(64)]
    read = []
    for convention in ("gptq", "gptq_v2"):
        (tmp_path / convention).mkdir()
        case = gptq_case(sym=False, zeros=zeros, convention=convention)
        read.append(dequantize(check(open_checkpoint(case.save(tmp_path / convention)), case)))
    np.testing.assert_array_equal(read[0], read[1])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("stored", "labelled"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2")])
def test_symmetric_zeros_under_the_other_label_are_read_with_a_warning(
    bits: int, stored: str, labelled: str, tmp_path: Path
) -> None:
    case = gptq_case(bits=bits, convention=stored, n=32, k=64)
    checkpoint = open_checkpoint(case.save(tmp_path, checkpoint_format=labelled))
    check(checkpoint, case)
    assert f"labelled {labelled}, but" in notes(checkpoint)


def test_asymmetric_zeros_of_one_value_under_v1_are_ambiguous(tmp_path: Path) -> None:
    """0x88888888 labelled gptq and asymmetric: 9, or a mislabelled 8."""
    folder = gptq_case(sym=False, zeros=[9] * 64).save(tmp_path)
    with pytest.raises(UnsupportedError, match=r"every stored zero is 8: 9 .* or 8 .*--checkpoint-format"):
        gptq.describe(open_checkpoint(folder), "layer")
    assert gptq.describe(open_checkpoint(folder, Options(checkpoint_format="gptq")), "layer").zero_max == 9
    assert gptq.describe(open_checkpoint(folder, Options(checkpoint_format="gptq_v2")), "layer").zero_max is None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("convention", ["gptq", "gptq_v2"])
def test_asymmetric_zeros_in_the_middle_become_symmetric(bits: int, convention: str, tmp_path: Path) -> None:
    case = gptq_case(bits=bits, sym=False, n=32, k=64, zeros=[2 ** (bits - 1)] * 32, convention=convention)
    q = check(open_checkpoint(case.save(tmp_path)), case)
    assert q.zero is None
    assert q.element.bias == 2 ** (bits - 1)
    assert q.source["sym"] is False


def test_odd_zeros_of_a_symmetric_file_are_kept(tmp_path: Path) -> None:
    case = gptq_case(n=16, k=64)
    case.tensors["layer.qzeros"] = ints([[0x77777777, 0x77777776], [0x77777777, 0x77777777]])
    checkpoint = open_checkpoint(case.save(tmp_path))
    q = check(checkpoint, case)
    assert list(q.residue) == ["qzeros"]
    assert "ignored" in notes(checkpoint)


def test_unused_lanes_with_bits_are_kept(tmp_path: Path) -> None:
    case = gptq_case(n=12, k=32)
    case.tensors["layer.qzeros"] = ints([[0x77777777, 0x77777777]])
    assert list(check(open_checkpoint(case.save(tmp_path)), case).residue) == ["qzeros"]


# --- labels ---


@pytest.mark.parametrize(
    ("packing", "convention"),
    [("auto_round:auto_gptq", "gptq"), ("auto_round:gptqmodel", "gptq_v2"), ("auto_round", "gptq_v2")],
)
@pytest.mark.parametrize("sym", [True, False])
def test_auto_round_packings(packing: str, convention: str, sym: bool, tmp_path: Path) -> None:
    case = gptq_case(sym=sym, convention=convention, g_idx="absent")
    label = {"quant_method": "auto-round", "packing_format": packing, "checkpoint_format": None}
    check(open_checkpoint(case.save(tmp_path, **label)), case)


def test_auto_round_without_a_packing_is_not_guessed(tmp_path: Path) -> None:
    folder = gptq_case(sym=False).save(tmp_path, quant_method="auto-round", checkpoint_format=None)
    with pytest.raises(UnsupportedError, match="does not say how zero points are stored"):
        gptq.read(open_checkpoint(folder), "layer")


@pytest.mark.parametrize(
    "label",
    [
        {"quant_method": "awq"},
        {"quant_method": None, "bits": None, "checkpoint_format": None, "w_bit": 4, "q_group_size": 32},
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
    ],
)
def test_other_formats_by_label_are_not_claimed(label: dict[str, Any], tmp_path: Path) -> None:
    assert gptq.modules(open_checkpoint(gptq_case().save(tmp_path, **label))) == {}


def awq_shaped(module: str = "layer") -> dict[str, Stored]:
    return {
        f"{module}.qweight": ints([[0] * 8] * 64),
        f"{module}.qzeros": ints([[0x88888888] * 8] * 2),
        f"{module}.scales": floats([1] * 128, (2, 64), "F16"),
    }


def test_awq_shapes_without_a_label_are_not_claimed(tmp_path: Path) -> None:
    """Same names, other order of bits: fed to the wrong unpacker they give noise."""
    tensors = awq_shaped() | gptq_case(g_idx="absent", module="ours").tensors
    assert list(gptq.modules(open_checkpoint(write_file(tmp_path / "w.safetensors", tensors)))) == ["ours"]


def test_sym_defaults_to_what_the_zeros_say(tmp_path: Path) -> None:
    for name, case in {"s": gptq_case(), "a": gptq_case(sym=False)}.items():
        (tmp_path / name).mkdir()
        checkpoint = open_checkpoint(case.save(tmp_path / name, sym=None))
        check(checkpoint, case)
        assert ("asymmetric" in notes(checkpoint)) == (name == "a")


def test_plain_quantize_config_of_autogptq(tmp_path: Path) -> None:
    """No quant_method, no checkpoint_format, no meta: GPTQ, zeros minus one."""
    case = gptq_case(sym=False)
    checkpoint = open_checkpoint(case.save(tmp_path, quant_method=None, checkpoint_format=None))
    check(checkpoint, case)
    assert not checkpoint.notes


# --- dynamic rules ---


@pytest.mark.parametrize(
    ("rules", "bits"),
    [
        ({"+:.*down.*": {"bits": 8, "group_size": 16}}, 8),
        ({r".*layers\.0\..*": {"bits": 8, "group_size": 16}, ".*": {"bits": 2}}, 8),
        ({"down": {"bits": 2}, "model": {"bits": 8, "group_size": 16}}, 8),
        ({r"+:model\.layers\.[0-3]\.(?:mlp|attn)\..*_proj$": {"bits": 8, "group_size": 16}}, 8),
        ({"-:.*up_proj": {}, "+:.*": {"group_size": 16}}, 4),
    ],
)
def test_rules_apply_in_order_from_the_names_beginning(rules: dict[str, Any], bits: int, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    case = gptq_case(bits=bits, group=16, n=32, k=64, module=name)
    checkpoint = open_checkpoint(case.save(tmp_path, bits=4, group_size=32, dynamic=rules))
    check(checkpoint, case, name)
    assert not checkpoint.notes


def test_rule_overrides_symmetry(tmp_path: Path) -> None:
    case = gptq_case(sym=False)
    check(open_checkpoint(case.save(tmp_path, sym=True, dynamic={"layer": {"sym": False}})), case)


def test_rule_counts_beside_a_switch_for_the_whole_file(tmp_path: Path) -> None:
    """--bits 4 for the file does not undo the 8-bit lm_head that has its own rule."""
    case = gptq_case(bits=8, n=32, k=64, module="lm_head")
    folder = case.save(tmp_path, bits=4, dynamic={"lm_head": {"bits": 8}})
    check(open_checkpoint(folder, Options(bits=4)), case, "lm_head")


def test_quantised_module_under_a_negative_rule_is_read_and_said(tmp_path: Path) -> None:
    case = gptq_case()
    checkpoint = open_checkpoint(case.save(tmp_path, dynamic={"-:lay": {}}))
    check(checkpoint, case)
    assert "'-:lay' says not quantised" in notes(checkpoint)


def test_unquantised_by_extra_config_is_said(tmp_path: Path) -> None:
    case = gptq_case()
    checkpoint = open_checkpoint(case.save(tmp_path, extra_config={"layer": {"bits": 16, "data_type": "float"}}))
    check(checkpoint, case)
    assert "'layer' says not quantised" in notes(checkpoint)


@pytest.mark.parametrize("key", ["layer", "^lay.r$", "ye"])
def test_extra_config_of_auto_round(key: str, tmp_path: Path) -> None:
    case = gptq_case(bits=8, n=32, k=64)
    folder = case.save(tmp_path, bits=4, quant_method="auto-round", extra_config={"ye": {"bits": 2}, key: {"bits": 8}})
    if key == "ye":
        with pytest.raises(UnsupportedError, match="contradicts"):
            gptq.read(open_checkpoint(folder), "layer")
    else:
        check(open_checkpoint(folder), case)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)*b", "(?:a?){40}b", ".*a.*a.*a.*a.*a.*a.*b", "(a|a)" * 60 + "b", "a?" * 60 + "b", "[", "x" * 600],
)
def test_rules_that_could_run_for_ever_are_refused_at_once(pattern: str, tmp_path: Path) -> None:
    name = "a" * 60
    folder = gptq_case(module=name).save(tmp_path, dynamic={pattern: {"bits": 8}})
    with pytest.raises(UnsupportedError, match="in reasonable time"):
        gptq.describe(open_checkpoint(folder), name)


@pytest.mark.parametrize(
    "pattern",
    [
        r"-:.*layers\.1\..*up_proj.*",
        r"-:.*model\.layers\.0\.mlp\.gate.*",
        r"+:.*\.(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
        r".*layers\.(1[0-9]|2[0-3])\..*mlp\.(gate|up)_proj.*",
        r"model\.layers\.\d+\.self_attn\.[qkv]_proj",
        r".*mlp\.(?!.*shared).*experts.*",
    ],
)
def test_usual_rules_are_evaluated(pattern: str) -> None:
    config = {"dynamic": {pattern: {"bits": 8}}}
    name = "model.language_model.layers.61.mlp.shared_experts.down_proj"
    said = gptq_config.label({"bits": 4, **config}, Options(), name, "config.json")
    negative = pattern.startswith("-:")
    matches = re.match(pattern.removeprefix("-:").removeprefix("+:"), name) is not None
    assert said.bits == ((8,) if matches and not negative else (4,))
    assert bool(said.remarks) == (matches and negative)


# --- files without a configuration ---


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("evidence", ["both", "g_idx", "qzeros"])
def test_lone_files_are_read_from_their_shapes(bits: int, evidence: str, tmp_path: Path) -> None:
    case = gptq_case(
        bits=bits, n=32, k=96, qzeros=evidence != "g_idx", g_idx="absent" if evidence == "qzeros" else "groups"
    )
    checkpoint = open_checkpoint(case.save_lone(tmp_path))
    q = check(checkpoint, case)
    assert f"assumed {bits}-bit codes" in notes(checkpoint)
    assert "assumed group size 32" in notes(checkpoint)
    assert "assumed symmetric" in notes(checkpoint)
    assert q.source["assumed"] == [text for _, text in checkpoint.notes]


@pytest.mark.parametrize("convention", ["gptq", "gptq_v2"])
def test_a_lone_asymmetric_file_is_read_as_the_flag_says_and_not_without_it(tmp_path: Path, convention: str) -> None:
    case = gptq_case(sym=False, convention=convention)
    path = case.save_lone(tmp_path)
    checkpoint = open_checkpoint(path)
    (name,) = gptq.modules(checkpoint)
    with pytest.raises(UnsupportedError, match=r"nothing says how zero points are stored.*--checkpoint-format"):
        gptq.read(checkpoint, name)
    check(open_checkpoint(path, Options(checkpoint_format=convention)), case)


def test_lone_symmetric_file_shows_its_convention(tmp_path: Path) -> None:
    case = gptq_case(convention="gptq_v2")
    check(open_checkpoint(case.save_lone(tmp_path)), case)


def test_lone_file_takes_the_switches(tmp_path: Path) -> None:
    case = gptq_case(sym=False, convention="gptq_v2", g_idx="absent", group=32, k=104)
    options = Options(bits=4, group_size=32, checkpoint_format="gptq_v2")
    check(open_checkpoint(case.save_lone(tmp_path), options), case)


def test_lone_zeros_that_fill_their_words_tell_the_bits(tmp_path: Path) -> None:
    """16 columns of 4 bits fill two words; 3 bits would need two as well and leave half of one unused."""
    case = gptq_case(n=16, k=96, g_idx="absent")
    check(open_checkpoint(case.save_lone(tmp_path)), case)


def test_lone_group_switch_tells_the_bits(tmp_path: Path) -> None:
    case = gptq_case(qzeros=False, g_idx="absent")
    checkpoint = open_checkpoint(case.save_lone(tmp_path), Options(group_size=32))
    check(checkpoint, case)
    assert "assumed 4-bit codes" in notes(checkpoint)


def test_lone_short_last_group_of_a_usual_size(tmp_path: Path) -> None:
    case = gptq_case(group=128, k=704, n=8, g_idx="absent")
    checkpoint = open_checkpoint(case.save_lone(tmp_path), Options(bits=4))
    check(checkpoint, case)
    assert "assumed group size 128" in notes(checkpoint)


def test_lone_file_of_one_group(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gptq_case(group=-1, k=96).save_lone(tmp_path))
    assert gptq.describe(checkpoint, "layer").group == -1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (gptq_case(qzeros=False, g_idx="absent"), r"do not tell the bits.*2 or 4 or 8 .*--bits"),
        (gptq_case(k=648, group=324, g_idx="absent", n=32), r"do not tell the group size.*324 or 512.*--group-size"),
        (
            gptq_case(k=104, group=40, g_idx="absent", n=32),
            r"do not tell the group size.*3 groups over 104.*--group-size",
        ),
    ],
    ids=["bits", "group", "short group"],
)
def test_ambiguous_lone_files_name_the_switch(case: Case, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=words):
        gptq.describe(open_checkpoint(case.save_lone(tmp_path)), "layer")


# --- bad input ---


def drop(case: Case, *suffixes: str) -> None:
    for suffix in suffixes:
        del case.tensors[f"layer.{suffix}"]


def put_g_idx(case: Case, values: dict[int, int]) -> None:
    dtype, shape, data = case.tensors["layer.g_idx"]
    numbers = list(struct.unpack(f"<{shape[0]}i", data))
    for at, value in values.items():
        numbers[at] = value
    case.tensors["layer.g_idx"] = (dtype, shape, struct.pack(f"<{shape[0]}i", *numbers))


def put_scale(case: Case, value: float) -> None:
    dtype, shape, data = case.tensors["layer.scales"]
    at = 2 * (shape[1] * 2 + 3)
    case.tensors["layer.scales"] = (dtype, shape, data[:at] + struct.pack("<e", value) + data[at + 2 :])


def reshape(case: Case, suffix: str, shape: tuple[int, ...], dtype: str = "I32") -> None:
    size = {"I32": 4, "F16": 2, "I16": 2, "F32": 4}[dtype]
    case.tensors[f"layer.{suffix}"] = (dtype, shape, bytes(size * int(np.prod(shape))))


DECIDE = Options()


@dataclass(frozen=True)
class Bad:
    error: type[WarptileError]
    words: str
    spoil: Callable[[Case], object] = lambda case: None
    label: dict[str, Any] = field(default_factory=dict)
    options: Options = DECIDE
    case: dict[str, Any] = field(default_factory=dict)


BAD = {
    "g_idx far out": Bad(CorruptError, r"g_idx: .*1000000 at \[5\]", spoil=lambda c: put_g_idx(c, {5: 10**6})),
    "g_idx negative": Bad(CorruptError, r"g_idx: .*-1 at \[5\]; need 0 to 3", spoil=lambda c: put_g_idx(c, {5: -1})),
    "unequal groups": Bad(UnsupportedError, "unequal numbers", spoil=lambda c: put_g_idx(c, {0: 1})),
    "no qweight": Bad(CorruptError, r"layer\.qweight: module 'layer' is", spoil=lambda c: drop(c, "qweight")),
    "only scales": Bad(
        CorruptError, r"layer\.qweight: module 'layer' is", spoil=lambda c: drop(c, "qweight", "qzeros", "g_idx")
    ),
    "no scales": Bad(CorruptError, r"layer\.scales: module 'layer' is", spoil=lambda c: drop(c, "scales")),
    "asymmetric without qzeros": Bad(
        CorruptError, "qzeros are missing", spoil=lambda c: drop(c, "qzeros"), case={"sym": False}
    ),
    "NaN scale": Bad(
        CorruptError, r"scales: .*1 of 256, the first at \[2, 3\]", spoil=lambda c: put_scale(c, float("nan"))
    ),
    "infinite scale": Bad(
        CorruptError, r"scales: .*the first at \[2, 3\]", spoil=lambda c: put_scale(c, float("-inf"))
    ),
    "scales of other columns": Bad(
        CorruptError, r"found \[16, 64\]; need 60 columns", spoil=lambda c: reshape(c, "scales", (4, 60), "F16")
    ),
    "qzeros of other rows": Bad(
        CorruptError, r"qzeros: shapes disagree; found \[3, 8\]", spoil=lambda c: reshape(c, "qzeros", (3, 8))
    ),
    "qzeros of other columns": Bad(
        CorruptError,
        r"layer\.qzeros: shapes disagree; found \[4, 9\]; need \[4, 8\], as qweight \[16, 64\] of 4-bit codes has; get",
        spoil=lambda c: reshape(c, "qzeros", (4, 9)),
    ),
    "g_idx of another length": Bad(
        CorruptError,
        r"layer\.g_idx: shapes disagree; found \[120\]; need \[128\], as qweight \[16, 64\] of 4-bit codes has; get",
        spoil=lambda c: reshape(c, "g_idx", (120,)),
    ),
    "g_idx and qzeros of other lengths": Bad(
        CorruptError,
        r"layer\.qweight: shapes disagree; found qweight \[16, 64\], g_idx \[120\], qzeros \[4, 9\]",
        spoil=lambda c: (reshape(c, "g_idx", (120,)), reshape(c, "qzeros", (4, 9))),
    ),
    "g_idx of twice the length": Bad(
        CorruptError,
        r"layer\.g_idx: shapes disagree; found \[256\]; need \[128\], as qweight \[16, 64\] of 4-bit codes has; "
        "get the checkpoint again; --bits 2 if g_idx is right",
        spoil=lambda c: (reshape(c, "g_idx", (256,)), drop(c, "qzeros")),
    ),
    "g_idx of half the length, with a switch": Bad(
        CorruptError,
        r"layer\.g_idx: shapes disagree; found \[64\]; need \[128\]",
        spoil=lambda c: (reshape(c, "g_idx", (64,)), drop(c, "qzeros")),
        options=Options(bits=4),
    ),
    "bits contradict without qzeros": Bad(
        UnsupportedError, "need bits 2 as the label", spoil=lambda c: drop(c, "qzeros"), label={"bits": 2}
    ),
    "k not whole words": Bad(CorruptError, "do not fill whole words", spoil=lambda c: reshape(c, "g_idx", (126,))),
    "bias of another length": Bad(
        CorruptError, r"bias: shapes disagree", spoil=lambda c: reshape(c, "bias", (63,), "F16"), case={"bias": "F16"}
    ),
    "qweight of three dimensions": Bad(CorruptError, "2 dimensions", spoil=lambda c: reshape(c, "qweight", (2, 8, 64))),
    "no rows": Bad(CorruptError, "none empty", spoil=lambda c: reshape(c, "qweight", (0, 64))),
    "float qweight": Bad(
        UnsupportedError,
        "unexpected dtype; found F16; need I32 or U32",
        spoil=lambda c: reshape(c, "qweight", (16, 64), "F16"),
    ),
    "integer scales": Bad(
        UnsupportedError, "unexpected dtype; found I32", spoil=lambda c: reshape(c, "scales", (4, 64))
    ),
    "16-bit words": Bad(
        UnsupportedError,
        "pack_dtype 'int16'",
        spoil=lambda c: reshape(c, "qweight", (32, 64), "I16"),
        label={"pack_dtype": "int16"},
    ),
    "group contradicts": Bad(
        UnsupportedError,
        "2 groups over 128 channels; need group size 128 .*--group-size 64",
        label={"group_size": 128},
        case={"group": 64},
    ),
    "group switch contradicts": Bad(
        UnsupportedError, "need group size 16", options=Options(group_size=16), case={"group": 64}
    ),
    "-1 contradicts": Bad(UnsupportedError, "need group size -1", label={"group_size": -1}),
    "bits contradict": Bad(UnsupportedError, "4-bit codes; need bits 8 as the label says.*--bits 4", label={"bits": 8}),
    "bits switch contradicts": Bad(
        UnsupportedError, "4-bit codes; need bits 8 as --bits says", options=Options(bits=8)
    ),
    "5 bits": Bad(UnsupportedError, "5-bit GPTQ is stored in planes", label={"bits": 5}),
    "16 bits": Bad(UnsupportedError, "16 bits are unknown", label={"bits": 16}),
    "bits in words": Bad(UnsupportedError, "bits is not a number", label={"bits": "four"}),
    "group of nothing": Bad(UnsupportedError, "no such group size", label={"group_size": 0}),
    "odd sym": Bad(UnsupportedError, "sym is not true or false", label={"sym": "yes"}),
    "planar 3 bit": Bad(
        UnsupportedError,
        "'gptq_p'; need gptq or gptq_v2 or marlin; save it again in one of these",
        label={"checkpoint_format": "gptq_p"},
        case={"bits": 3},
    ),
    "planar 3 bit, with a switch": Bad(
        UnsupportedError,
        "'gptq_p'",
        label={"checkpoint_format": None, "format": "gptq_p"},
        options=Options(checkpoint_format="gptq"),
        case={"bits": 3},
    ),
    "unknown variant": Bad(UnsupportedError, "'gptq_v9'", label={"checkpoint_format": "gptq_v9"}),
    "labels disagree": Bad(UnsupportedError, "two labels disagree", label={"format": "gptq_v2"}),
    "unknown packing": Bad(
        UnsupportedError, "packing_format 'x'", label={"packing_format": "x", "checkpoint_format": None}
    ),
    "another method": Bad(UnsupportedError, "quant_method 'squeeze'", label={"quant_method": "squeeze"}),
    "rules in a list": Bad(UnsupportedError, "dynamic is not a table", label={"dynamic": ["-:.*"]}),
    "plain under marlin": Bad(UnsupportedError, "stored as plain GPTQ", label={"checkpoint_format": "marlin"}),
    "repacked for Marlin": Bad(UnsupportedError, "already repacked", spoil=lambda c: reshape(c, "qweight", (8, 128))),
    "AWQ order": Bad(UnsupportedError, "labelled GPTQ, but it is AWQ", spoil=lambda c: c.tensors.update(awq_shaped())),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_line(bad: Bad, tmp_path: Path) -> None:
    case = gptq_case(**bad.case)
    bad.spoil(case)
    checkpoint = open_checkpoint(case.save(tmp_path, **bad.label), bad.options)
    assert list(gptq.modules(checkpoint)) == ["layer"]
    with pytest.raises(bad.error, match=bad.words) as caught:
        gptq.read(checkpoint, "layer")
    assert type(caught.value) is bad.error
    assert "\n" not in str(caught.value)


MARLIN_BAD = {
    "no tiles": Bad(CorruptError, r"layer\.B: module 'layer' is incomplete", lambda c: drop(c, "B")),
    "no scales": Bad(CorruptError, r"layer\.s: module 'layer' is incomplete", lambda c: drop(c, "s")),
    "columns": Bad(CorruptError, "shapes disagree", lambda c: reshape(c, "s", (2, 64), "F16")),
    "no whole tiles": Bad(
        CorruptError,
        "n divisible by 64",
        lambda c: (reshape(c, "B", (16, 192)), reshape(c, "s", (2, 96), "F16")),
    ),
    "asymmetric": Bad(UnsupportedError, "symmetric 4-bit", label={"sym": False}),
    "8 bits": Bad(UnsupportedError, "symmetric 4-bit", label={"bits": 8}),
    "group of 64": Bad(
        UnsupportedError, "need 128 or -1", lambda c: reshape(c, "s", (4, 128), "F16"), {"group_size": 64}
    ),
}


@pytest.mark.parametrize("bad", MARLIN_BAD.values(), ids=MARLIN_BAD)
def test_bad_marlin_checkpoints(bad: Bad, tmp_path: Path) -> None:
    case = gptq_marlin_case()
    bad.spoil(case)
    checkpoint = open_checkpoint(case.save(tmp_path, **bad.label))
    assert list(gptq.modules(checkpoint)) == ["layer"]
    with pytest.raises(bad.error, match=bad.words):
        gptq.read(checkpoint, "layer")


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_lone_planar_widths_are_named(bits: int, tmp_path: Path) -> None:
    tensors = {
        "layer.qweight": ints([[0] * 32] * bits),
        "layer.g_idx": ("I32", (32,), bytes(128)),
        "layer.qzeros": ints([stream([1] * 32, bits)]),
        "layer.scales": floats([1] * 32, (1, 32), "F16"),
    }
    with pytest.raises(UnsupportedError, match=f"{bits}-bit GPTQ is stored in planes"):
        gptq.describe(open_checkpoint(write_file(tmp_path / "w.safetensors", tensors)), "layer")


def test_group_switch_settles_a_lying_label(tmp_path: Path) -> None:
    case = gptq_case(group=64)
    check(open_checkpoint(case.save(tmp_path, group_size=128), Options(group_size=64)), case)


def test_bits_switch_settles_a_lying_label(tmp_path: Path) -> None:
    case = gptq_case()
    check(open_checkpoint(case.save(tmp_path, bits=8), Options(bits=4)), case)


def test_group_across_a_tensor_parallel_cut(tmp_path: Path) -> None:
    """k = 192 in groups of 128: the last group is short, nothing is padded or refused here."""
    case = gptq_case(group=128, k=192, n=8)
    q = check(open_checkpoint(case.save(tmp_path)), case)
    assert q.scales[0].data.shape == (8, 2)
