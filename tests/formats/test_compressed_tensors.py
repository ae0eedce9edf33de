"""Integer compressed-tensors checkpoints: weights against bytes written from the description, real files, refusals."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, Stored, floats, ints, stream
from stored import assert_bytes, check_source, check_zoo, zoo
from warptile.formats import compressed_tensors, targets
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.formats.container import Checkpoint, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.formats.options import Options
from warptile.kernels import marlin


def wordwise(codes: Sequence[int], bits: int) -> list[int]:
    """32 // bits codes a word, as version 0.12 packs."""
    per = 32 // bits
    return [sum(c << bits * i for i, c in enumerate(codes[at : at + per])) for at in range(0, len(codes), per)]


def transposed(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def ct_case(
    bits: int = 4,
    group: int | str = 32,
    n: int = 64,
    k: int = 96,
    *,
    sym: bool = True,
    packed: bool = True,
    pack: Callable[[Sequence[int], int], list[int]] = stream,
    zeros: bool | None = None,
    act: str | None = None,
    scale: str = "BF16",
    scale_shape: tuple[int, ...] | None = None,
    shape: str = "I64",
    bias: str | None = None,
    module: str = "layer",
    seed: int = 0,
) -> Case:
    """``group``: channels, "channel" or "tensor"; ``zeros``: store zero points, as an asymmetric file does;
    ``act``: order, unset (all -1) or absent."""
    rng = random.Random(seed)
    width = group if isinstance(group, int) else k
    groups, half = -(-k // width), 2 ** (bits - 1)
    order = list(range(k))
    if act == "order":
        rng.shuffle(order)
    group_of = [0] * k
    for position, channel in enumerate(order):
        group_of[channel] = position // width
    value = [[rng.randrange(-half, half) for _ in range(k)] for _ in range(n)]
    zero = [[0 if sym else rng.randrange(-half, half) for _ in range(groups)] for _ in range(n)]
    scales = [[rng.choice((-1, 1)) * rng.randrange(1, 128) / 2**9 for _ in range(groups)] for _ in range(n)]
    if group == "tensor":
        scales, zero = [scales[0]] * n, [zero[0]] * n
    dense = np.empty((n, k))
    for row in range(n):
        for channel in range(k):
            g = group_of[channel]
            dense[row, channel] = scales[row][g] * (value[row][channel] - zero[row][g])

    tensors: dict[str, Stored] = {}
    one = group == "tensor"
    grid = scale_shape or ((1,) if one else (n, groups))
    flat = [s for row in scales[: 1 if one else n] for s in row]
    if packed:
        tensors["weight_packed"] = ints([pack([v + half for v in row], bits) for row in value])
        tensors["weight_shape"] = (shape, (2,), struct.pack("<2q" if shape == "I64" else "<2i", n, k))
    else:
        tensors["weight"] = ("I8", (n, k), struct.pack(f"{n * k}b", *(v for row in value for v in row)))
    tensors["weight_scale"] = floats(flat, grid, scale)
    if zeros if zeros is not None else not sym:
        if packed:
            columns = [pack([z + half for z in column], bits) for column in transposed(zero)]
            tensors["weight_zero_point"] = ints(transposed(columns))
        else:
            stored = [z for row in zero[: 1 if one else n] for z in row]
            tensors["weight_zero_point"] = ("I8", grid, struct.pack(f"{len(stored)}b", *stored))
    if act is not None:
        g_idx = group_of if act == "order" else [-1] * k
        tensors["weight_g_idx"] = ("I32", (k,), struct.pack(f"<{k}i", *g_idx))
    if bias is not None:
        tensors["bias"] = floats([rng.randrange(-64, 64) / 64 for _ in range(n)], (n,), bias)
    strategy = group if isinstance(group, str) else "group"
    weights = {
        **{"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy},
        **{"group_size": group if strategy == "group" else None, "actorder": "group" if act else None},
    }
    config = {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized" if packed else "int-quantized"},
        **{"config_groups": {"my_scheme": {"targets": ["Linear"], "weights": weights}}, "ignore": ["head"]},
        "version": "0.19.0",
    }
    tensors["head"] = floats([1.0], (1,), "F32")
    named = {(f"{s}.weight" if s == "head" else f"{module}.{s}"): t for s, t in tensors.items()}
    return Case(named, config, dense)


def check(given: Checkpoint, dense: np.ndarray) -> QuantTensor:
    """As ``check_source``, for what Marlin tiles do not hold as well."""
    q = compressed_tensors.read(given, "layer")
    assert compressed_tensors.describe(given, "layer") == q.outline()
    assert_bytes(compressed_tensors.write("layer", q), given, compressed_tensors.modules(given)["layer"])
    assert np.array_equal(dequantize(q, np.float64), dense)
    return q


PACKINGS = [
    *({"bits": b, "group": g, "sym": s} for b in (4, 8) for g in (16, 32, 96, "channel") for s in (True, False)),
    *({"bits": b, "act": act, "sym": s} for b in (4, 8) for act in ("order", "unset") for s in (True, False)),
    {"bits": 4, "group": 64, "k": 96},
    {"bits": 4, "sym": True, "zeros": True},
    {"bits": 8, "bias": "BF16", "scale": "F16", "shape": "I32"},
    {"bits": 4, "bias": "F32", "scale": "F32", "scale_shape": (64, 3)},
    {"bits": 8, "group": "channel", "scale_shape": (64,)},
    {"bits": 4, "k": 100, "group": "channel"},
    {"bits": 4, "k": 99, "group": 33, "sym": False, "n": 61},
    {"bits": 8, "k": 101, "group": "channel", "n": 63, "sym": False},
    *({"bits": 8, "packed": False, "group": g, "sym": s} for g in (32, "channel") for s in (True, False)),
    {"bits": 4, "packed": False, "group": "channel"},
    {"bits": 4, "packed": False, "group": 32, "sym": False, "act": "order"},
    {"bits": 8, "packed": False, "group": "channel", "zeros": True, "scale_shape": (64,)},
]


def named(facts: dict[str, Any]) -> str:
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in facts.items())


@pytest.mark.parametrize("facts", PACKINGS, ids=named)
def test_weights_and_bytes(facts: dict[str, Any], tmp_path: Path) -> None:
    case = ct_case(**facts)
    given = open_checkpoint(case.save(tmp_path))
    q = check(given, case.dense)
    if marlin.accepts(q.outline()) is None:
        check_source(compressed_tensors, given, "layer")
    packed, bits = facts.get("packed", True), facts["bits"]
    names = {True: f"u{bits}b{2 ** (bits - 1)}", False: f"u{bits}"} if packed else {True: "s8", False: "u8"}
    assert q.element.name == names[facts.get("sym", True)]
    assert (q.perm is not None) == (facts.get("act") == "order")
    assert not given.notes


OTHER_WIDTHS = [
    *({"bits": b, "sym": s, "pack": p} for b in (2, 3) for s in (True, False) for p in (stream, wordwise)),
    *(
        {"bits": b, "sym": s, "pack": p, "k": 160}
        for b, s in ((5, True), (5, False), (6, True))
        for p in (stream, wordwise)
    ),
    {"bits": 3, "k": 10, "n": 8, "group": "channel"},
]


@pytest.mark.parametrize("facts", OTHER_WIDTHS, ids=named)
def test_widths_that_do_not_divide_a_word_are_told_by_their_shapes(facts: dict[str, Any], tmp_path: Path) -> None:
    case = ct_case(**facts)
    given = open_checkpoint(case.save(tmp_path, version="0.13.0"))
    check(given, case.dense)


@pytest.mark.parametrize(
    ("version", "pack"), [("0.12.2", wordwise), ("0.9", wordwise), ("0.19.0", stream), ("1.0", stream)]
)
def test_the_version_tells_what_the_shapes_do_not(version: str, pack: Any, tmp_path: Path) -> None:
    case = ct_case(3, "channel", n=8, k=20, pack=pack)
    check(open_checkpoint(case.save(tmp_path, version=version)), case.dense)


def test_blocks_and_whole_tensors(tmp_path: Path) -> None:
    case = ct_case(8, "tensor", packed=False)
    q = check(open_checkpoint(case.save(tmp_path)), case.dense)
    assert q.scales[0].block == (64, 96)
    (tmp_path / "blocks").mkdir()
    grid = floats([1.0, 2.0, 4.0, 8.0], (2, 2), "F32")
    blocks = replaced(ct_case(8, "channel", packed=False), "weight_scale", grid)
    given = open_checkpoint(relabelled(blocks, strategy="block", block_structure=[32, 64]).save(tmp_path / "blocks"))
    q = compressed_tensors.read(given, "layer")
    assert q.scales[0].block == (32, 64)
    assert_bytes(compressed_tensors.write("layer", q), given, compressed_tensors.modules(given)["layer"])


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_zero_point"])
def test_bits_after_the_last_code_come_back(suffix: str, tmp_path: Path) -> None:
    case = ct_case(4, "channel", n=61, k=99, sym=False)
    dtype, shape, data = case.tensors[f"layer.{suffix}"]
    words = np.frombuffer(data, np.uint32).reshape(shape).copy()
    last = words[:, -1] if suffix == "weight_packed" else words[-1]
    last |= np.uint32(0xABC00000)
    given = open_checkpoint(replaced(case, suffix, (dtype, shape, words.tobytes())).save(tmp_path))
    q = check(given, case.dense)
    assert list(q.residue) == [suffix]
    check_source(compressed_tensors, given, "layer")


def test_int8_codes_of_four_bits_are_not_biased(tmp_path: Path) -> None:
    case = ct_case(4, "channel", packed=False)
    q = compressed_tensors.read(open_checkpoint(case.save(tmp_path)), "layer")
    values = q.element.values()[q.codes]
    assert (values.min(), values.max()) == (-8, 7)


def test_float_weights_under_an_integer_label_are_not_ours(tmp_path: Path) -> None:
    case = ct_case(8, "channel", packed=False)
    tensors = {**case.tensors, "layer.weight": ("F8_E4M3", *case.tensors["layer.weight"][1:])}
    assert compressed_tensors.modules(open_checkpoint(Case(tensors, case.config, case.dense).save(tmp_path))) == {}


def test_scaled_inputs_and_other_labels_are_not_ours(tmp_path: Path) -> None:
    case = ct_case(8, "channel", packed=False)
    given = open_checkpoint(case.save(tmp_path, quant_method="modelopt"))
    assert compressed_tensors.modules(given) == {}
    smooth = replaced(case, "pre_quant_scale", floats([1.0] * 96, (96,), "F32"))
    (tmp_path / "smooth").mkdir()
    assert compressed_tensors.modules(open_checkpoint(smooth.save(tmp_path / "smooth", quant_method=None))) == {}


def test_activation_scales_are_not_members(tmp_path: Path) -> None:
    case = replaced(ct_case(8, "channel", packed=False), "input_scale", floats([1.0], (1,), "F32"))
    given = open_checkpoint(case.save(tmp_path))
    assert compressed_tensors.modules(given)["layer"] == ("layer.weight", "layer.weight_scale")
    check(given, case.dense)


@pytest.mark.parametrize("facts", [{"bits": 4}, {"bits": 4, "act": "order"}, {"bits": 8, "packed": False}], ids=named)
def test_a_lone_file_is_told_by_its_tensors(facts: dict[str, Any], tmp_path: Path) -> None:
    case = ct_case(**facts)
    given = open_checkpoint(case.save_lone(tmp_path))
    q = check(given, case.dense)
    assert "assumed compressed-tensors from the tensors: there is no label" in q.source["assumed"]
    assert [text for module, text in given.notes if module] == q.source["assumed"]


def test_the_switches_win_over_the_label(tmp_path: Path) -> None:
    case = ct_case(4, 64, k=96)
    given = open_checkpoint(relabelled(case, num_bits=8, group_size=32).save(tmp_path), Options(bits=4, group_size=64))
    check(given, case.dense)


REAL = [
    *(("ct_gptq_w4_actgroup", 14), ("ct_w4a16_g32_asym", 14)),
    *(("ct_mixed", 6), ("ct_w4a16_bias", 14), ("ct_w4a16_g128_sym", 12)),
]


@pytest.mark.parametrize(("name", "modules"), REAL)
def test_real_checkpoints(name: str, modules: int) -> None:
    check_zoo(compressed_tensors, name, modules)


def test_real_act_order() -> None:
    given = open_checkpoint(zoo("ct_gptq_w4_actgroup"))
    assert all(compressed_tensors.describe(given, module).perm for module in compressed_tensors.modules(given))
    assert not given.notes


@pytest.mark.parametrize("name", ["ct_nvfp4", "ct_mxfp4", "ct_fp8_block_odd", "ar_gptq_w4g32_asym", "mo_fp8"])
def test_real_checkpoints_of_others_are_not_claimed(name: str) -> None:
    assert compressed_tensors.modules(open_checkpoint(zoo(name))) == {}


def replaced(case: Case, suffix: str, tensor: Stored | None) -> Case:
    tensors = {name: t for name, t in case.tensors.items() if name != f"layer.{suffix}"}
    return Case(tensors | ({f"layer.{suffix}": tensor} if tensor else {}), case.config, case.dense)


def relabelled(case: Case, **weights: Any) -> Case:
    said = case.config["config_groups"]["my_scheme"]["weights"]
    group = {"targets": ["Linear"], "weights": {**said, **weights}}
    return Case(case.tensors, {**case.config, "config_groups": {"my_scheme": group}}, case.dense)


def targeted(*patterns: str, ignore: Sequence[str] = ()) -> Case:
    case = ct_case()
    group = {**case.config["config_groups"]["my_scheme"], "targets": list(patterns)}
    return Case(case.tensors, {**case.config, "config_groups": {"a": group}, "ignore": list(ignore)}, case.dense)


@pytest.mark.parametrize(
    ("case", "notes"),
    [
        (targeted("Linear", "re:.*experts.*"), ["targets that match no module: re:.*experts.*"]),
        (targeted("layer", ignore=["lm_head", "re:.*gate$"]), ["ignore that match no module: lm_head, re:.*gate$"]),
        (targeted("re:lay", "LlamaAttention", ignore=["Embedding"]), []),
        (
            targeted("Linear", ignore=["re:.*yer"]),
            [
                "ignored by 're:.*yer', its tensors say it is quantised: read as they are",
                "assumed group size 32 from the shapes",
            ],
        ),
    ],
    ids=["target", "ignored", "classes", "ignored but quantised"],
)
def test_patterns_that_mean_nothing_are_reported(case: Case, notes: list[str], tmp_path: Path) -> None:
    given = open_checkpoint(case.save(tmp_path))
    check(given, case.dense)
    assert [text for _, text in given.notes] == notes


GROUPS = {
    "g0": {"targets": ["Linear"], "weights": {"num_bits": 1}},
    "g1": {"targets": ["re:.*attn.*", "re:.*mlp.*"], "weights": {"num_bits": 2}},
    "g2": {"targets": ["text.mlp.up"], "weights": {"num_bits": 3}},
    "W4A16": ["re:.*preset"],
}


@pytest.mark.parametrize(
    ("module", "group"),
    [("text.mlp.up", "g2"), ("model.mlp.down", "g1"), ("model.attn", "g1"), ("other", "g0"), ("a.preset", "W4A16")],
)
def test_a_name_wins_over_a_pattern_and_that_over_a_class(module: str, group: str) -> None:
    scheme = targets.scheme_of(module, targets.schemes({"config_groups": GROUPS}, "config.json"), "config.json")
    assert scheme is not None
    assert scheme.group == group


@pytest.mark.parametrize(
    ("name", "pattern", "means"),
    [
        ("model.layers.0.mlp", "re:.*mlp", True),
        ("model.layers.0.mlp", "re:mlp", False),
        ("model.layers.0.mlp.up", "re:.*mlp", True),
        ("model.layers.0.mlp", "mlp", False),
        ("model.layers.0.mlp", "model.layers.0.mlp", True),
        ("model.layers.0.mlp", "Linear", True),
        ("model.layers.0.mlp", "Conv2d", False),
    ],
)
def test_what_a_pattern_means(name: str, pattern: str, means: bool) -> None:
    assert targets.matches(name, pattern, "config.json") is means


def test_without_any_scheme_a_module_has_none() -> None:
    assert targets.scheme_of("layer", targets.schemes({}, "config.json"), "config.json") is None


def test_groups_with_their_own_formats(tmp_path: Path) -> None:
    """One file of packed, int8 and other readers' modules, each with its scheme."""
    parts = [ct_case(4, 32, module="a.mlp"), ct_case(8, "channel", packed=False, module="a.attn", seed=1)]
    schemes = {
        "g0": {"format": "pack-quantized", "targets": ["re:.*mlp"], **scheme(parts[0])},
        "g1": {"format": "int-quantized", "targets": ["re:.*attn"], **scheme(parts[1])},
        "g2": {"format": "float-quantized", "targets": ["re:.*router"], "weights": {"num_bits": 8, "type": "float"}},
    }
    tensors = {**parts[0].tensors, **parts[1].tensors, "a.router.weight": ("F8_E4M3", (4, 4), bytes(16))}
    config = {**parts[0].config, "format": "mixed-precision", "config_groups": schemes}
    given = open_checkpoint(Case(tensors, config, np.zeros(0)).save(tmp_path))
    assert sorted(compressed_tensors.modules(given)) == ["a.attn", "a.mlp"]
    for module, case in zip(("a.mlp", "a.attn"), parts, strict=True):
        q = check_source(compressed_tensors, given, module)
        assert np.array_equal(dequantize(q, np.float64), case.dense)
    assert not given.notes


def scheme(case: Case) -> dict[str, Any]:
    return {"weights": case.config["config_groups"]["my_scheme"]["weights"]}


def poisoned(value: float) -> Case:
    values = [1.0] * 192
    values[130] = value
    return replaced(ct_case(), "weight_scale", floats(values, (64, 3), "F32"))


def g_idx(*values: int) -> Case:
    return replaced(ct_case(), "weight_g_idx", ("I32", (len(values),), struct.pack(f"<{len(values)}i", *values)))


def told(case: Case, *extents: int) -> Case:
    return replaced(case, "weight_shape", ("I64", (len(extents),), struct.pack(f"<{len(extents)}q", *extents)))


def shape(*extents: int) -> Case:
    return told(ct_case(), *extents)


def spare_tops() -> Case:
    case = ct_case(3, "channel", pack=wordwise)
    dtype, extents, data = case.tensors["layer.weight_packed"]
    return replaced(case, "weight_packed", (dtype, extents, b"\xff\xff\xff\xff" + data[4:]))


def spare_zero_tops() -> Case:
    case = ct_case(3, sym=False, pack=wordwise)
    dtype, extents, data = case.tensors["layer.weight_zero_point"]
    return replaced(case, "weight_zero_point", (dtype, extents, data[:3] + b"\xff" + data[4:]))


CONTRADICTS = "the label contradicts the"
BAD: list[tuple[str, Callable[[], Case], dict[str, Any], type[Exception], str]] = [
    ("unknown format", ct_case, {"format": "zip-quantized"}, UnsupportedError, "unknown compressor format; found 'zip"),
    ("sparse", ct_case, {"sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedError, "'sparse-24-bitmask'"),
    ("marlin-24", ct_case, {"format": "marlin-24"}, UnsupportedError, "unknown compressor format; found 'marlin-24'"),
    ("group format", lambda: Case(ct_case().tensors, {**ct_case().config, "config_groups": {"g": {"format": "new"}}},
     np.zeros(0)), {}, UnsupportedError, "unknown compressor format; found 'new'"),
    ("another label", ct_case, {"quant_method": "gptq"}, UnsupportedError, f"{CONTRADICTS} tensors"),
    ("targets mean nothing", lambda: targeted("re:.*experts", "mlp"), {}, UnsupportedError,
     "the targets match no module, yet there are quantised ones; found mlp, re:.*experts"),
    ("endless pattern", lambda: targeted("re:(a+)+$"), {}, UnsupportedError, "matched in reasonable time"),
    ("groups", ct_case, {"config_groups": {"g": 3}}, UnsupportedError, "g is not a table; found 3"),
    ("shape rows", lambda: shape(63, 96), {}, CorruptError,
     "layer.weight_shape: shapes disagree; found 63 x 96; need 64 rows, as layer.weight_packed [64, 12] has"),
    ("shape columns", lambda: shape(64, 2000), {}, CorruptError,
     "layer.weight_shape: shapes disagree; found 64 x 2000; need 64 x 89 to 96, as 12 words a row of "
     "layer.weight_packed hold with 4 bits as the label says; get the checkpoint again"),
    ("twice the columns", lambda: shape(64, 192), {}, CorruptError,
     "layer.weight_shape: shapes disagree; found 64 x 192; need 64 x 89 to 96, as 12 words a row"),
    ("half the columns", lambda: shape(64, 48), {}, CorruptError,
     "layer.weight_shape: shapes disagree; found 64 x 48; need 64 x 89 to 96"),
    ("half the columns of channels", lambda: told(ct_case(group="channel"), 64, 48), {}, CorruptError,
     "found 64 x 48; need 64 x 89 to 96, as 12 words a row of layer.weight_packed hold with 4 bits as the label says; "
     "get the checkpoint again, or say --bits 7 or 8 if the label is wrong"),
    ("twice the columns beside g_idx", lambda: told(ct_case(act="order"), 64, 192), {}, CorruptError,
     "layer.weight_shape: shapes disagree; found 64 x 192; need 64 x 96, as 12 words"),
    ("twice the columns beside zero points", lambda: told(ct_case(group="channel", sym=False), 64, 192), {},
     CorruptError, "layer.weight_shape: shapes disagree; found 64 x 192; need 64 x 89 to 96"),
    ("columns below zero", lambda: shape(64, -96), {}, CorruptError, "layer.weight_shape: shapes disagree"),
    ("no label and no width", lambda: shape(64, 2000), {"config_groups": {}}, CorruptError,
     "layer.weight_shape: shapes disagree; found 64 x 2000; need 64 x k with k codes of 2 to 8 bits, as 12 words"),
    ("bits of channels", lambda: relabelled(ct_case(group="channel", sym=False), num_bits=8), {}, UnsupportedError,
     "layer.weight_packed: the label contradicts the shapes; found 12 words for 96 codes, so 4 bits"),
    ("no such bits", lambda: relabelled(ct_case(), num_bits=16), {}, UnsupportedError,
     "need 16 bits as the label says; --bits 4 believes the tensors"),
    ("shape extents", lambda: shape(64, 96, 1), {}, CorruptError, "layer.weight_shape: shapes disagree; found [3]"),
    ("bits", lambda: relabelled(ct_case(), num_bits=8), {}, UnsupportedError,
     "found 12 words for 96 codes, so 4 bits; need 8 bits as the label says; --bits 4 believes the tensors"),
    ("group", lambda: relabelled(ct_case(), group_size=64), {}, UnsupportedError, "need group size 64 as the label"),
    ("channel", lambda: relabelled(ct_case(), strategy="channel"), {}, UnsupportedError, "need group size -1"),
    ("odd group", lambda: relabelled(ct_case(), group_size=0), {}, UnsupportedError, "no such group size; found 0"),
    ("float label", lambda: relabelled(ct_case(), type="float"), {}, UnsupportedError, "integer codes, type 'float'"),
    ("bits are text", lambda: relabelled(ct_case(), num_bits="4"), {}, UnsupportedError, "num_bits is not a number"),
    ("block", lambda: relabelled(ct_case(), block_structure=[0]), {}, UnsupportedError, "block_structure is no pair"),
    ("asymmetric without zeros", lambda: relabelled(ct_case(), symmetric=False), {}, CorruptError,
     "asymmetric, but its zero points are missing"),
    ("symmetric with zeros", lambda: relabelled(ct_case(sym=False), symmetric=True), {}, UnsupportedError,
     "symmetric, but a zero point of "),
    ("zero shape", lambda: replaced(ct_case(sym=False), "weight_zero_point", ints([[0] * 3] * 7)), {}, CorruptError,
     "layer.weight_zero_point: shapes disagree; found [7, 3]; need [8, 3]"),
    ("zero dtype", lambda: replaced(ct_case(sym=False), "weight_zero_point", ("I8", (64, 3), bytes(192))), {},
     UnsupportedError, "layer.weight_zero_point: unexpected dtype; found I8; need I32 or U32"),
    ("scale shape", lambda: replaced(ct_case(), "weight_scale", floats([1.0] * 189, (63, 3), "F32")), {}, CorruptError,
     "layer.weight_scale: shapes disagree; found [63, 3]"),
    ("bias shape", lambda: replaced(ct_case(), "bias", floats([1.0] * 8, (8,), "F16")), {}, CorruptError,
     "layer.bias: shapes disagree; found [8]; need [64]"),
    ("no scale", lambda: replaced(ct_case(), "weight_scale", None), {}, CorruptError, "layer.weight_scale: module 'la"),
    ("no shape", lambda: replaced(ct_case(), "weight_shape", None), {}, CorruptError, "layer.weight_shape: module 'la"),
    ("int8 without scale", lambda: replaced(ct_case(8, packed=False), "weight_scale", None), {}, CorruptError,
     "layer.weight_scale: module 'layer' is incomplete"),
    ("g_idx above", lambda: g_idx(*[3] * 96), {}, CorruptError, "weight_g_idx: a channel's group is out of range"),
    ("g_idx below", lambda: g_idx(*[0] * 95, -1), {}, CorruptError, "found -1 at [95]; need 0 to 2"),
    ("g_idx short", lambda: g_idx(*[0] * 95), {}, CorruptError, "layer.weight_g_idx: shapes disagree; found [95]"),
    ("g_idx uneven", lambda: g_idx(*[0] * 40, *[1] * 24, *[2] * 32), {}, UnsupportedError, "unequal numbers of"),
    ("seven bits", lambda: ct_case(7, pack=stream), {}, UnsupportedError, "symmetric codes of 7 bits are not ours"),
    ("two packings", lambda: ct_case(3, "channel", n=8, k=20), {"version": "0.15.0"}, UnsupportedError,
     "3-bit codes can be one dense stream or 10 codes a word, and the shapes do not tell; found version '0.15.0'"),
    ("spare tops", spare_tops, {}, CorruptError, "bits above the codes of a word are set"),
    ("spare zero tops", spare_zero_tops, {}, CorruptError,
     "layer.weight_zero_point: bits above the codes of a word are set"),
    ("experts", lambda: replaced(ct_case(), "weight_packed", ("I32", (2, 32, 12), bytes(3072))), {}, UnsupportedError,
     "stacked experts must be stored one by one"),
    ("nan", lambda: poisoned(math.nan), {}, CorruptError, "the first at [43, 1]"),
    ("inf", lambda: poisoned(math.inf), {}, CorruptError, "scales are NaN or infinite; found 1 of 192"),
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


@pytest.mark.parametrize(
    ("case", "bits", "error", "says"),
    [
        (
            ct_case(),
            2,
            UnsupportedError,
            "layer.weight_packed: --bits contradicts the shapes; found 12 words for 96",
        ),
        (ct_case(group="channel"), 8, UnsupportedError, "need 8 bits as --bits says; --bits 4 believes the tensors"),
        (
            shape(64, 192),
            4,
            CorruptError,
            "found 64 x 192; need 64 x 89 to 96, as 12 words a row of layer.weight_packed",
        ),
        (shape(64, 2000), 4, CorruptError, "hold with 4 bits as --bits says; get the checkpoint again"),
    ],
)
def test_a_width_that_is_asked_for_or_the_shape_is_blamed(
    case: Case, bits: int, error: type[Exception], says: str, tmp_path: Path
) -> None:
    given = open_checkpoint(case.save(tmp_path), Options(bits=bits))
    with pytest.raises(error) as caught:
        read_all(given)
    assert says in str(caught.value)


JUNK: list[Any] = [0, -1, 3.5, True, "x", [1], {"a": 1}, [None], 2**70, ["re:("], math.nan]


def configurations(config: Any, junk: Any) -> Iterator[Any]:
    """Copies of a configuration with one value in it replaced."""
    for key in config if isinstance(config, dict) else range(len(config)) if isinstance(config, list) else ():
        for value in (junk, *configurations(config[key], junk)):
            changed = config.copy()
            changed[key] = value
            yield changed


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_configurations_of_any_kind_are_read_or_refused(junk: Any, tmp_path: Path) -> None:
    case = ct_case(sym=False)
    for config in configurations({**case.config, "sparsity_config": {"format": "dense"}}, junk):
        given = open_checkpoint(Case(case.tensors, config, case.dense).save(tmp_path))
        try:
            q = compressed_tensors.read(given, "layer") if compressed_tensors.modules(given) else None
        except UnsupportedError:
            continue
        assert q is None or np.array_equal(dequantize(q, np.float64), case.dense)


def read_all(given: Checkpoint) -> None:
    for module in compressed_tensors.modules(given):
        compressed_tensors.read(given, module)


@pytest.mark.parametrize("suffix", ["weight_shape", "weight_zero_point", "weight_g_idx"])
def test_members_without_codes_are_orphans(suffix: str, tmp_path: Path) -> None:
    case = ct_case(sym=False, act="order")
    given = open_checkpoint(replaced(case, "weight_packed", None).save(tmp_path))
    assert compressed_tensors.modules(given) == {}
    assert compressed_tensors.orphans(given)[f"layer.{suffix}"] == "layer.weight_packed or layer.weight"


def test_shapes_that_fit_two_widths_need_the_switch(tmp_path: Path) -> None:
    case = ct_case(4, "channel", n=8, k=8)
    with pytest.raises(UnsupportedError, match="say --bits"):
        read_all(open_checkpoint(case.save_lone(tmp_path)))
    given = open_checkpoint(case.save_lone(tmp_path), Options(bits=4))
    assert np.array_equal(dequantize(compressed_tensors.read(given, "layer"), np.float64), case.dense)
