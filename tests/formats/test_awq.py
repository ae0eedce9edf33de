"""AWQ gemm checkpoints: weights against bytes written from the description, real files, refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, Stored, floats, gptq_case, ints, write_file
from stored import check_source, check_zoo, zoo
from warptile.formats import awq, gptq
from warptile.formats.canonical import dequantize
from warptile.formats.container import Checkpoint, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.formats.options import Options

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble p of a word is this column of eight


def packed(rows: list[list[int]], words: str = "I32") -> Stored:
    return ints(
        [[sum(row[8 * w + NIBBLES[p]] << 4 * p for p in range(8)) for w in range(len(row) // 8)] for row in rows], words
    )


def awq_case(
    group: int = 32,
    n: int = 64,
    k: int = 96,
    *,
    zero: int | None = None,
    scale: str = "F16",
    bias: str | None = None,
    words: str = "I32",
    qzeros: bool = True,
    module: str = "layer",
    seed: int = 0,
) -> Case:
    """``zero``: one zero point everywhere; random ones without it. Scales of both signs."""
    rng = random.Random(seed)
    width = k if group == -1 else group
    groups = -(-k // width)
    codes = [[rng.randrange(16) for _ in range(n)] for _ in range(k)]
    zeros = [[rng.randrange(16) if zero is None else zero for _ in range(n)] for _ in range(groups)]
    scales = [[rng.choice((-1, 1)) * rng.randrange(1, 128) / 2**9 for _ in range(n)] for _ in range(groups)]
    dense = np.empty((n, k))
    for channel in range(k):
        g = channel // width
        for row in range(n):
            dense[row, channel] = scales[g][row] * (codes[channel][row] - zeros[g][row])
    tensors = {"qweight": packed(codes, words)}
    if qzeros:
        tensors["qzeros"] = packed(zeros, words)
    tensors["scales"] = floats([s for row in scales for s in row], (groups, n), scale)
    if bias is not None:
        tensors["bias"] = floats([rng.randrange(-64, 64) / 64 for _ in range(n)], (n,), bias)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero != 8, "version": "gemm"}
    return Case({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, config, dense)


@pytest.mark.parametrize(
    ("word", "columns"),
    [(0x75316420, range(8)), (0x76543210, (0, 4, 1, 5, 2, 6, 3, 7)), (0x0000000F, (15, 0, 0, 0, 0, 0, 0, 0))],
)
def test_the_columns_of_a_word(word: int, columns: Any, tmp_path: Path) -> None:
    tensors = {
        "p.qweight": ints([[word]] * 16),
        "p.qzeros": ints([[0]]),
        "p.scales": floats([1.0] * 8, (1, 8), "F16"),
    }
    q = awq.read(open_checkpoint(write_file(tmp_path / "a.safetensors", tensors)), "p")
    assert q.codes[:, 0].tolist() == list(columns)


@pytest.mark.parametrize("scale", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("zero", [None, 7, 8])
@pytest.mark.parametrize("group", [16, 32, 96, -1])
def test_weights_and_bytes(group: int, zero: int | None, scale: str, tmp_path: Path) -> None:
    case = awq_case(group, zero=zero, scale=scale, bias=scale)
    given = open_checkpoint(case.save(tmp_path))
    q = check_source(awq, given, "layer")
    assert np.array_equal(dequantize(q, np.float64), case.dense)
    assert q.element.name == ("u4b8" if zero == 8 else "u4")
    assert q.outline().group == (-1 if group in (-1, 96) else group)
    assert not given.notes


@pytest.mark.parametrize(("k", "group"), [(100, 32), (112, 64), (40, 128)])
def test_a_short_last_group_is_what_the_shapes_say(k: int, group: int, tmp_path: Path) -> None:
    case = awq_case(group, k=k)
    q = check_source(awq, open_checkpoint(case.save(tmp_path)), "layer")
    assert np.array_equal(dequantize(q, np.float64), case.dense)


def test_unsigned_words_come_back_unsigned(tmp_path: Path) -> None:
    check_source(awq, open_checkpoint(awq_case(words="U32").save(tmp_path)), "layer")


def test_symmetric_files_need_no_zero_points(tmp_path: Path) -> None:
    case = awq_case(zero=8, qzeros=False)
    q = check_source(awq, open_checkpoint(case.save(tmp_path)), "layer")
    assert (q.element.name, q.zero) == ("u4b8", None)


def test_older_names_of_the_label(tmp_path: Path) -> None:
    case = awq_case()
    label = {"quant_method": None, "bits": None, "group_size": None, "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    given = open_checkpoint(case.save(tmp_path, **label))
    assert np.array_equal(dequantize(awq.read(given, "layer"), np.float64), case.dense)
    assert not given.notes


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "version": None},
        {"quant_method": "awq", "version": None, "format": "gemm", "checkpoint_format": "gemm"},
        {"quant_method": "awq", "version": "exllama", "backend": "autoawq"},
    ],
)
def test_labels_of_other_writers(config: dict[str, Any], tmp_path: Path) -> None:
    case = awq_case()
    given = open_checkpoint(case.save(tmp_path, **config))
    assert np.array_equal(dequantize(awq.read(given, "layer"), np.float64), case.dense)


def test_a_lone_file_is_told_by_its_shapes_and_what_was_assumed_is_recorded(tmp_path: Path) -> None:
    case = awq_case()
    given = open_checkpoint(case.save_lone(tmp_path))
    q = check_source(awq, given, "layer")
    assert np.array_equal(dequantize(q, np.float64), case.dense)
    assumed = [
        "assumed AWQ of version gemm from the shapes: there is no label",
        "assumed group size 32 from the shapes",
    ]
    assert [text for module, text in given.notes if module] == assumed
    assert q.source["assumed"] == assumed


def test_a_lone_file_of_one_group(tmp_path: Path) -> None:
    case = awq_case(-1)
    given = open_checkpoint(case.save_lone(tmp_path))
    q = check_source(awq, given, "layer")
    assert np.array_equal(dequantize(q, np.float64), case.dense)
    assert ("layer", "assumed group size -1 from the shapes") in given.notes


def test_the_switch_for_groups_wins_over_the_label(tmp_path: Path) -> None:
    case = awq_case(64, k=112)
    given = open_checkpoint(case.save(tmp_path, group_size=32), Options(group_size=64))
    assert np.array_equal(dequantize(awq.read(given, "layer"), np.float64), case.dense)


def test_a_module_that_the_label_excludes_is_read_by_its_tensors(tmp_path: Path) -> None:
    given = open_checkpoint(awq_case().save(tmp_path, modules_to_not_convert=["lay"]))
    assert list(awq.modules(given)) == ["layer"]
    awq.describe(given, "layer")
    assert "modules_to_not_convert lists 'lay'" in given.notes[0][1]


def test_plain_linears_are_left_alone(tmp_path: Path) -> None:
    case = awq_case()
    tensors = {**case.tensors, "head.weight": floats([1.0] * 64, (8, 8), "F16")}
    given = open_checkpoint(Case(tensors, case.config, case.dense).save(tmp_path, modules_to_not_convert=["head"]))
    assert awq.modules(given) == {"layer": ("layer.qweight", "layer.qzeros", "layer.scales")}


def test_files_packed_along_k_are_the_other_readers(tmp_path: Path) -> None:
    lone = open_checkpoint(gptq_case().save_lone(tmp_path))
    assert awq.modules(lone) == {}
    assert list(gptq.modules(lone)) == ["layer"]
    (tmp_path / "ours").mkdir()
    ours = open_checkpoint(awq_case().save_lone(tmp_path / "ours"))
    assert gptq.modules(ours) == {}


@pytest.mark.parametrize("name", ["ar_awq_w4g64_asym", "gq_awq_gemm_w4g128"])
def test_real_checkpoints(name: str) -> None:
    check_zoo(awq, name, 14)


@pytest.mark.parametrize("name", ["ar_gptq_w4g32_asym", "gq_gptqv2_w4g32_asym", "ct_w4a16_g32_asym", "mo_nvfp4"])
def test_real_checkpoints_of_others_are_not_claimed(name: str) -> None:
    assert awq.modules(open_checkpoint(zoo(name))) == {}


def test_real_modelopt_awq_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="W4A16_AWQ"):
        awq.modules(open_checkpoint(zoo("mo_int4_awq")))


def test_two_output_rows_in_a_byte_are_refused_by_name(tmp_path: Path) -> None:
    tensors = {"p.weight": ("U8", (4, 128), bytes(512)), "p.weight_scale": floats([1.0] * 8, (8, 1), "F32")}
    with pytest.raises(UnsupportedError, match=r"p\.weight: ModelOpt's W4A16_AWQ"):
        awq.modules(open_checkpoint(write_file(tmp_path / "a.safetensors", tensors)))


def replaced(case: Case, suffix: str, tensor: Stored | None) -> Case:
    tensors = {k: v for k, v in case.tensors.items() if k != f"layer.{suffix}"}
    return Case(tensors | ({f"layer.{suffix}": tensor} if tensor else {}), case.config, case.dense)


def poisoned(value: float) -> Case:
    values = [1.0] * 192
    values[130] = value
    return replaced(awq_case(), "scales", floats(values, (3, 64), "F16"))


OTHERS = {
    "gemv": ("I32", (64, 12), bytes(64 * 48)),
    "gemv_fast": ("I16", (16, 96), bytes(16 * 192)),
}


def another(kind: str) -> Case:
    """Shapes of AutoAWQ's other versions."""
    case = awq_case()
    scales = {"gemv": floats([1.0] * 64 * 8, (64, 8), "F16"), "gemv_fast": case.tensors["layer.scales"]}[kind]
    return replaced(replaced(case, "qweight", OTHERS[kind]), "scales", scales)


def gptq_less() -> Case:
    """A configuration as early writers of another format left it, without any name."""
    return Case(awq_case().tensors, {"bits": 4, "group_size": 32, "desc_act": False}, np.zeros(0))


BAD: list[tuple[str, Callable[[], Case], dict[str, Any], type[Exception], str]] = [
    ("gptq label", awq_case, {"quant_method": "gptq"}, UnsupportedError, "AWQ, packed along n, under the label 'gptq'"),
    ("unnamed label", gptq_less, {}, UnsupportedError, "under the label 'unnamed'"),
    ("another label", awq_case, {"quant_method": "fp8"}, UnsupportedError, "under the label 'fp8'"),
    ("gptq tensors", gptq_case, {"quant_method": "awq"}, UnsupportedError, "packed along k, which AWQ never has"),
    ("gemv label", awq_case, {"version": "gemv"}, UnsupportedError, "version 'gemv'; need gemm"),
    ("gemv_fast label", awq_case, {"version": "gemv_fast"}, UnsupportedError, "version 'gemv_fast'; need gemm"),
    ("llm-awq label", awq_case, {"backend": "llm-awq"}, UnsupportedError, "backend 'llm-awq'; need gemm"),
    ("gemv tensors", lambda: another("gemv"), {"version": "gemv"}, UnsupportedError, "AWQ stored as gemv,"),
    ("gemv_fast tensors", lambda: another("gemv_fast"), {}, UnsupportedError, "AWQ stored as gemv_fast,"),
    ("llm-awq tensors", lambda: replaced(another("gemv_fast"), "scaled_zeros", floats([0.0] * 192, (3, 64), "F16")), {},
     UnsupportedError, "AWQ stored as llm-awq"),
    ("8 bit tensors", lambda: replaced(awq_case(), "qweight", ("I32", (96, 16), bytes(96 * 64))), {}, UnsupportedError,
     "AWQ stored as 8 bit"),
    ("8 bit label", awq_case, {"bits": 8}, UnsupportedError, "bits 8; need 4"),
    ("no scales", lambda: replaced(awq_case(), "scales", None), {}, CorruptError, "layer.scales: module 'layer' is in"),
    ("no zeros", lambda: replaced(awq_case(), "qzeros", None), {}, CorruptError, "layer.qzeros: module 'layer' is in"),
    ("zeros meant", awq_case, {"zero_point": False}, UnsupportedError, "zero_point false, but a zero point of"),
    ("zero shape", lambda: replaced(awq_case(), "qzeros", ("I32", (2, 8), bytes(64))), {}, CorruptError,
     "layer.qzeros: shapes disagree; found [2, 8]; need [3, 8]"),
    ("scale columns", lambda: replaced(awq_case(), "scales", floats([1.0] * 168, (3, 56), "F16")), {}, CorruptError,
     "layer.scales: shapes disagree; found [3, 56]; need [3, 64]"),
    ("bias shape", lambda: replaced(awq_case(), "bias", floats([1.0] * 8, (8,), "F16")), {}, CorruptError,
     "layer.bias: shapes disagree; found [8]; need [64]"),
    ("empty", lambda: replaced(awq_case(), "qweight", ("I32", (0, 8), b"")), {}, CorruptError, "shapes disagree"),
    ("dtype", lambda: replaced(awq_case(), "qweight", ("F32", (96, 8), bytes(96 * 32))), {}, UnsupportedError,
     "layer.qweight: unexpected dtype; found F32"),
    ("wrong group", awq_case, {"group_size": 64}, UnsupportedError, "3 groups over 96 channels; need group size 64"),
    ("group -1", awq_case, {"group_size": -1}, UnsupportedError, "need group size -1 as the label says"),
    ("nan", lambda: poisoned(math.nan), {}, CorruptError, "the first at [2, 2]"),
    ("inf", lambda: poisoned(-math.inf), {}, CorruptError, "scales are NaN or infinite; found 1 of 192"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "config", "error", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_one_clear_line(
    make: Callable[[], Case], config: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    given = open_checkpoint(make().save(tmp_path, **config))
    with pytest.raises(error) as caught:
        read_all(given)
    text = str(caught.value)
    assert says in text
    assert "\n" not in text


@pytest.mark.parametrize("junk", [0, -1, 3.5, True, "x", [1], {"a": 1}, [None], 2**70, math.nan], ids=repr)
def test_configurations_of_any_kind_are_read_or_refused(junk: Any, tmp_path: Path) -> None:
    case = awq_case()
    for key in (*case.config, "w_bit", "q_group_size", "modules_to_not_convert", "backend", "format", "method"):
        given = open_checkpoint(case.save(tmp_path, **{key: junk}))
        try:
            q = awq.read(given, "layer") if awq.modules(given) else None
        except UnsupportedError:
            continue
        assert q is None or np.array_equal(dequantize(q, np.float64), case.dense)


def read_all(given: Checkpoint) -> None:
    for module in awq.modules(given):
        awq.read(given, module)


def test_zero_points_without_codes_are_orphans(tmp_path: Path) -> None:
    given = open_checkpoint(replaced(awq_case(), "qweight", None).save(tmp_path))
    assert awq.modules(given) == {}
    assert awq.orphans(given) == {"layer.qzeros": "layer.qweight"}
