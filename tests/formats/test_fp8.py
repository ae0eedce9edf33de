"""FP8 checkpoints: every shape of scale against loops, the bytes given back, and refusals that say what to do."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from stored import check_source, check_zoo, checkpoint, zoo
from warptile.formats import fp8
from warptile.formats.canonical import dequantize
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.formats.options import Options

E4M3, BF16, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INVERSE = {**BLOCKS, "weight_scale_semantics": "inverse"}
N, K = 200, 300
W, S = "a.weight", "a.weight_scale_inv"


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0x80), codes).view(E4M3)


def factors(*shape: int, dtype: type = np.float32, seed: int = 1) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(1e-5, 2e-3, shape)
    return (2.0 ** np.round(np.log2(values)) if dtype is E8M0 else values).astype(dtype)


def e4m3(code: int) -> float:
    """OCP 8-bit floating point, table 1: 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


# name -> (scale's suffix and array, config, rows and columns under one scale)
SCALES = {
    "block f32": (".weight_scale_inv", factors(2, 3), BLOCKS, (128, 128)),
    "block bf16": (".weight_scale", factors(2, 3, dtype=BF16), {}, (128, 128)),
    "block f16": (".weight_scale", (factors(2, 3) * 64).astype(np.float16), {}, (128, 128)),
    "block e8m0": (".scale", factors(2, 3, dtype=E8M0), {**BLOCKS, "scale_fmt": "ue8m0"}, (128, 128)),
    "block e8m0 as bytes": (
        ".weight_scale_inv", factors(2, 3, dtype=E8M0).view(np.uint8), {**BLOCKS, "scale_fmt": "ue8m0"}, (128, 128),
    ),
    "block 64 x 96": (".weight_scale_inv", factors(4, 4), {"weight_block_size": [64, 96]}, (64, 96)),
    "block 4-D": (".weight_scale", factors(2, 1, 3, 1), {"quant_method": "modelopt"}, (128, 128)),
    "block by its group": (
        ".weight_scale", factors(2, 5), {"config_groups": {"any": {"weights": {"block_structure": [100, 64]}}}},
        (100, 64),
    ),
    "group": (
        ".weight_scale", factors(N, 3),
        {"config_groups": {"my_scheme": {"weights": {
            "type": "float", "num_bits": 8, "strategy": "group", "group_size": 112}}}},
        (1, 112),
    ),
    "row [N, 1]": (".weight_scale", factors(N, 1, dtype=BF16), {}, (1, K)),
    "row under an int label": (
        ".weight_scale", factors(N, 1, dtype=BF16),
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}, (1, K),
    ),
    "row [N]": (".weight_scale", factors(N), {}, (1, K)),
    "tensor []": (".weight_scale", factors(), {}, (N, K)),
    "tensor [1]": (".weight_scale", factors(1, dtype=BF16), {}, (N, K)),
    "tensor inv": (".weight_scale_inv", factors(dtype=BF16), {"weight_block_size": None}, (N, K)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_a_weight_is_its_code_times_the_scale_over_it(name: str, tmp_path: Path) -> None:
    suffix, scale, config, (bn, bk) = SCALES[name]
    w = weight(N, K)
    bias, side = factors(N, dtype=BF16), factors()
    arrays = {"a.weight": w, f"a{suffix}": scale, "a.bias": bias, "a.input_scale": side, "b.k_scale": side}
    given = checkpoint(tmp_path, arrays, config)
    assert fp8.modules(given) == {"a": ("a.weight", f"a{suffix}", "a.bias", "a.input_scale")}
    q = check_source(fp8, given, "a")
    assert q.bias is not None
    grid = scale.view(E8M0) if scale.dtype == np.uint8 else scale
    grid = grid.astype(np.float64).reshape(-(-N // bn), -(-K // bk))
    dense, codes = dequantize(q, np.float64), w.view(np.uint8)
    for n in range(0, N, 7):
        for k in range(0, K, 11):
            assert dense[n, k] == e4m3(int(codes[n, k])) * grid[n // bn, k // bk]


def test_block_axes_are_not_swapped(tmp_path: Path) -> None:
    """576 x 320 in blocks of 128: five rows of three, each block with a scale of its own."""
    scale = (np.arange(15, dtype=np.float32).reshape(5, 3) + 1) / 16
    ones = np.full((576, 320), 0x38, np.uint8).view(E4M3)
    q = check_source(fp8, checkpoint(tmp_path, {"a.weight": ones, "a.weight_scale_inv": scale}, BLOCKS), "a")
    np.testing.assert_array_equal(dequantize(q), np.repeat(np.repeat(scale, 128, 0)[:576], 128, 1)[:, :320])


@pytest.mark.parametrize(("n", "k", "grid"), [(300, 64, (3, 1)), (100, 300, (1, 3)), (64, 64, (1, 1))])
def test_a_grid_one_block_wide_may_be_squeezed(n: int, k: int, grid: tuple[int, int], tmp_path: Path) -> None:
    scale = factors(*(size for size in grid if size > 1))
    q = check_source(fp8, checkpoint(tmp_path, {"a.weight": weight(n, k), "a.weight_scale_inv": scale}, BLOCKS), "a")
    assert q.scales[0].data.shape == grid


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, E8M0])
def test_divisors_decode_as_the_division_does(dtype: type, tmp_path: Path) -> None:
    """float32(code / stored), which float32(code * float32(1 / stored)) is not."""
    values = np.random.default_rng(3).uniform(2.5, 3000, (N, K))
    scale = (2.0 ** np.round(np.log2(values)) if dtype is E8M0 else values).astype(dtype)
    w = weight(N, K)
    given = checkpoint(tmp_path, {"a.weight": w, "a.weight_scale_inv": scale}, {**INVERSE, "weight_block_size": [1, 1]})
    assert fp8.describe(given, "a").source["divide"]
    q = fp8.read(given, "a")
    divided = w.astype(np.float32) / scale.astype(np.float32)
    np.testing.assert_array_equal(dequantize(q).view(np.uint32), divided.view(np.uint32))
    if dtype is np.float32:
        multiplied = w.astype(np.float32) * (np.float32(1) / scale)
        assert (multiplied != divided).mean() > 0.1, "the reason for float64 reciprocals"
    assert fp8.write("a", q)["a.weight_scale_inv"].tobytes() == scale.tobytes()


@pytest.mark.parametrize("said", ["multiply", "divide"])
def test_the_switch_is_believed_before_the_label(said: str, tmp_path: Path) -> None:
    scale = np.full((2, 3), 0.25, np.float32)
    label = BLOCKS if said == "divide" else INVERSE
    given = checkpoint(
        tmp_path, {"a.weight": weight(N, K), "a.weight_scale_inv": scale}, label, Options(scale_convention=said)
    )
    q = check_source(fp8, given, "a")
    factor = 0.25 if said == "multiply" else 4.0
    np.testing.assert_array_equal(dequantize(q), weight(N, K).astype(np.float32) * np.float32(factor))


HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60}


@pytest.mark.parametrize(
    ("module", "rows", "shape"),
    [("m.qkv_proj", (60, 20, 20), (3,)), ("m.qkv_proj", (60, 20, 20), (3, 1)), ("m.gate_up_proj", (50, 50), (2,))],
)
def test_a_fused_weight_keeps_one_scale_a_shard(
    module: str, rows: tuple[int, ...], shape: tuple[int, ...], tmp_path: Path
) -> None:
    scale = factors(*shape)
    given = checkpoint(tmp_path, {f"{module}.weight": weight(100, 96), f"{module}.weight_scale": scale}, {}, **HEADS)
    q = check_source(fp8, given, module)
    assert q.outline().shards == rows
    each = np.repeat(scale.reshape(-1).astype(np.float64), rows)[:, None]
    np.testing.assert_array_equal(dequantize(q, np.float64), weight(100, 96).astype(np.float64) * each)


@pytest.mark.parametrize(
    ("names", "scale"),
    [
        (("e.gate_up_proj", "e.gate_up_proj_scale_inv", "e.gate_up_proj_bias"), factors(3, 2, 3)),
        (("e.up.weight", "e.up.weight_scale", "e.up.bias"), factors(3, 2, 3)),
        (("e.up.weight", "e.up.weight_scale", "e.up.bias"), factors(3)),
        (("e.up.weight", "e.up.weight_scale", "e.up.bias"), factors(3, N, 1)),
    ],
)
def test_stacked_experts_are_an_axis(names: tuple[str, str, str], scale: np.ndarray, tmp_path: Path) -> None:
    w, bias = weight(3, N, K), factors(3, N)
    given = checkpoint(tmp_path, dict(zip(names, (w, scale, bias), strict=True)))
    ((module, members),) = fp8.modules(given).items()
    assert members == names
    q = check_source(fp8, given, module)
    assert q.experts == 3
    one = scale.reshape(3, -1).astype(np.float64)[:, -1]
    assert dequantize(q, np.float64)[1, N - 1, K - 1] == float(w[1, N - 1, K - 1]) * one[1]


@pytest.mark.parametrize("rows", [64, 128, 200])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_experts_that_are_apart_and_share_a_scale_tensor_are_one_stack(rows: int, dtype: type, tmp_path: Path) -> None:
    """transformers: blocks run over the rows of gate, then up, also across their seam."""
    block, experts, k = "model.layers.0.mlp.experts", 3, 300
    each = {f"{block}.{e}.{name}": weight(rows, k, seed=10 * e + i)
            for e in (2, 0, 1) for i, name in enumerate(("up_proj", "down_proj", "gate_proj"))}  # fmt: skip
    scales = {
        f"{block}.gate_up_proj_scale_inv": factors(experts, -(-2 * rows // 128), 3, dtype=dtype),
        f"{block}.down_proj_scale_inv": factors(experts, -(-rows // 128), 3, dtype=dtype, seed=2),
    }
    given = checkpoint(tmp_path, {f"{name}.weight": w for name, w in each.items()} | scales, BLOCKS)
    assert list(fp8.modules(given)) == [f"{block}.gate_up_proj", f"{block}.down_proj"]
    assert fp8.orphans(given) == {}
    for name, members in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        q = check_source(fp8, given, f"{block}.{name}")
        assert (q.experts, q.n, q.k) == (experts, rows * len(members), k)
        dense, grid = dequantize(q, np.float64), scales[f"{block}.{name}_scale_inv"].astype(np.float64)
        for e in range(experts):
            codes = np.concatenate([each[f"{block}.{e}.{member}"] for member in members]).astype(np.float64)
            by_row = np.repeat(np.repeat(grid[e], 128, 0)[: len(codes)], 128, 1)[:, :k]
            np.testing.assert_array_equal(dense[e], codes * by_row)


def test_nan_codes_of_experts_that_are_apart_come_back(tmp_path: Path) -> None:
    arrays = {"experts.0.down_proj.weight": weight(N, K), "experts.1.down_proj.weight": with_nan(),
              "experts.down_proj_scale_inv": factors(2, 2, 3)}  # fmt: skip
    with pytest.raises(CorruptError, match=r"experts\.1\.down_proj\.weight: codes 0x7F.*the first at \[3, 17\]"):
        fp8.read(checkpoint(tmp_path, arrays, BLOCKS), "experts.down_proj")
    given = checkpoint(tmp_path, arrays, BLOCKS, Options(nan="zero"))
    q = check_source(fp8, given, "experts.down_proj")
    assert dequantize(q)[1, 3, 17] == dequantize(q)[1, 150, 2] == 0


def test_experts_with_scales_of_their_own_are_modules_whatever_lies_beside_them(tmp_path: Path) -> None:
    arrays = {"experts.0.down_proj.weight": weight(N, K), "experts.0.down_proj.weight_scale_inv": factors(2, 3),
              "experts.down_proj_scale_inv": factors(1, 2, 3)}  # fmt: skip
    assert list(fp8.modules(checkpoint(tmp_path, arrays, BLOCKS))) == ["experts.0.down_proj"]


def test_a_wide_weight_beside_a_scale_is_no_module(tmp_path: Path) -> None:
    """transformers leaves odd shapes in bf16 and saves scales that nobody has set."""
    wide, garbage = factors(N, K, dtype=BF16), np.full((2, 3), np.nan, np.float32)
    given = checkpoint(tmp_path, {"a.weight": wide, "a.weight_scale_inv": garbage}, BLOCKS)
    assert fp8.modules(given) == {}
    assert fp8.orphans(given) == {}
    assert given.notes == [("a", "the weight is BF16: it and its unused scale pass through")]


def test_a_weight_without_scale_is_an_orphan(tmp_path: Path) -> None:
    given = checkpoint(tmp_path, {"a.weight": weight(N, K), "b": weight(2, 4, 4), "c.bias": factors(4)})
    assert fp8.modules(given) == {}
    assert fp8.orphans(given) == dict.fromkeys(("a.weight", "b"), "its scale (weight_scale_inv, weight_scale, scale)")


def test_zero_points_that_are_zero_are_kept(tmp_path: Path) -> None:
    zero = np.zeros((N, 1), E4M3)
    given = checkpoint(tmp_path, {W: weight(N, K), "a.weight_scale": factors(N, 1), "a.weight_zero_point": zero})
    assert check_source(fp8, given, "a").residue["weight_zero_point"].shape == (N, 1)
    assert fp8.orphans(given) == {}


@pytest.mark.parametrize(("label", "notes"), [({}, 1), (BLOCKS, 0)])
def test_an_assumed_block_size_is_said_once(label: dict[str, object], notes: int, tmp_path: Path) -> None:
    arrays = {f"{m}.{part}": a for m in "ab" for part, a in (("weight", weight(N, K)), ("weight_scale", factors(2, 3)))}
    given = checkpoint(tmp_path, arrays, label)
    for module in fp8.modules(given):
        fp8.describe(given, module)
    assert [module for module, text in given.notes if "128 x 128 are assumed" in text] == [""] * notes


def with_nan() -> np.ndarray:
    codes = weight(N, K).view(np.uint8).copy()
    codes[3, 17], codes[150, 2], codes[150, 3] = 0x7F, 0xFF, 0x7F
    return codes.view(E4M3)


def test_nan_codes_are_read_as_zero_when_asked_and_given_back(tmp_path: Path) -> None:
    given = checkpoint(tmp_path, {W: with_nan(), S: factors(2, 3)}, BLOCKS, Options(nan="zero"))
    q = check_source(fp8, given, "a")
    assert given.notes == [("a", "3 NaN codes are read as zero")]
    dense = dequantize(q)
    assert np.isfinite(dense).all()
    assert dense[3, 17] == dense[150, 2] == dense[150, 3] == 0


def nth(values: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    out = values.copy()
    out[at] = value
    return out


BAD = {
    "NaN code": ({W: with_nan(), S: factors(2, 3)}, BLOCKS, CorruptError,
                 r"a\.weight: codes 0x7F or 0xFF are NaN; found 3 of 60000, the first at \[3, 17\].*--nan zero"),
    "NaN scale": ({W: weight(N, K), S: nth(factors(2, 3), (1, 2), np.nan)}, BLOCKS, CorruptError,
                  r"scale_inv: scales are NaN or infinite; found 1 of 6, the first at \[1, 2\]"),
    "infinite scale": ({W: weight(N, K), S: nth(factors(2, 3), (0, 1), np.inf)}, BLOCKS, CorruptError,
                       r"found 1 of 6, the first at \[0, 1\]"),
    "e8m0 NaN": ({W: weight(N, K), S: nth(np.full((2, 3), 110, np.uint8), (1, 0), 255).view(E8M0)}, BLOCKS,
                 CorruptError, r"found 1 of 6, the first at \[1, 0\]"),
    "transposed grid": ({W: weight(N, K), S: factors(3, 2)}, BLOCKS, CorruptError,
                        r"shapes disagree; found \[3, 2\]; need \[2, 3\] in blocks of 128 x 128 for 200 x 300"),
    "wrong grid, no label": ({W: weight(N, K), S: factors(3, 3)}, {}, CorruptError, r"or one scale a row or tensor"),
    "row scales under a block label": ({W: weight(N, K), S: factors(N, 1)}, BLOCKS, CorruptError, r"need \[2, 3\]"),
    "grid of other experts": ({W: weight(2, N, K), S: factors(3, 2, 3)}, BLOCKS, CorruptError, r"need \[2, 2, 3\]"),
    "two readings": ({W: weight(2, 256), S: factors(2)}, {}, UnsupportedError,
                     r"can be read in two ways; found \[2\]; need weight_block_size"),
    "two scales": ({W: weight(N, K), S: factors(2, 3), "a.weight_scale": factors(2, 3)}, BLOCKS, UnsupportedError,
                   r"one scale is needed; found a\.weight_scale_inv, a\.weight_scale"),
    "zero divisor": ({W: weight(N, K), S: nth(factors(2, 3) + 700, (0, 2), 0)}, INVERSE, CorruptError,
                     r"a divisor is zero; found 1 of 6, the first at \[0, 2\]"),
    "divisors without a label": ({W: weight(N, K), S: factors(2, 3) + 700}, BLOCKS, UnsupportedError,
                                 r"do not look like multipliers; found 700 to 700\.002.*--scale-convention"),
    "multipliers called divisors": ({W: weight(N, K), S: factors(2, 3)}, INVERSE, UnsupportedError,
                                    r"do not look like divisors, as the label says.*--scale-convention"),
    "unknown semantics": ({W: weight(N, K), S: factors(2, 3)}, {"weight_scale_semantics": "log"}, UnsupportedError,
                          r"unknown direction.*'log'"),
    "fnuz": ({W: weight(N, K).view(ml_dtypes.float8_e4m3fnuz), S: factors(2, 3)}, BLOCKS, UnsupportedError,
             r"F8_E4M3FNUZ has the bytes of F8_E4M3 and other values; need F8_E4M3"),
    "fnuz without scale": ({W: weight(N, K).view(ml_dtypes.float8_e4m3fnuz)}, {}, UnsupportedError, r"F8_E4M3FNUZ"),
    "fnuz by its label": ({W: weight(N, K), S: factors(2, 3)}, {**BLOCKS, "fmt": "float8_e4m3fnuz"}, UnsupportedError,
                          r"the label contradicts the tensor; found fmt 'float8_e4m3fnuz'"),
    "e5m2": ({W: weight(N, K).view(ml_dtypes.float8_e5m2), S: factors(2, 3)}, BLOCKS, UnsupportedError, r"F8_E5M2"),
    "scale of unknown bytes": ({W: weight(N, K), S: np.full((2, 3), 110, np.uint8)}, BLOCKS, UnsupportedError,
                               r"unexpected dtype; found U8; need F16 or BF16 or F32 or F8_E8M0"),
    "bias": ({W: weight(N, K), S: factors(2, 3), "a.bias": factors(N + 1)}, BLOCKS, CorruptError,
             r"a\.bias: shapes disagree; found \[201\]; need \[200\]"),
    "block size": ({W: weight(N, K), S: factors(2, 3)}, {"weight_block_size": [128]}, CorruptError,
                   r"a block size is no pair of sizes; found \[\[128\]\]; need 1 to 2147483647"),
    "zero points": ({W: weight(N, K), S: factors(2, 3), "a.weight_zero_point": np.ones(1, E4M3)}, BLOCKS, CorruptError,
                    r"zero points beside FP8 codes; found 1 of 1"),
    "no matrix": ({W: weight(N), S: factors()}, {}, CorruptError, r"a\.weight: not a matrix; found \[200\]"),
    "no rows": ({W: weight(0, K), S: factors()}, {}, CorruptError, r"a\.weight: not a matrix; found \[0, 300\]"),
    "an expert's half is missing": (
        {"a.mlp.experts.0.up_proj.weight": weight(128, 128), "a.mlp.experts.gate_up_proj_scale_inv": factors(1, 2, 1)},
        BLOCKS, CorruptError, r"found 1 weights, no a\.mlp\.experts\.0\.gate_proj\.weight; need those of 1 experts"),
    "an expert is missing": (
        {"experts.0.down_proj.weight": weight(128, 128), "experts.2.down_proj.weight": weight(128, 128),
         "experts.down_proj_scale_inv": factors(2, 1, 1)},
        BLOCKS, CorruptError, r"experts\.down_proj_scale_inv: .*found 2 weights, no experts\.1\.down_proj\.weight"),
    "more experts than scales": (
        {"experts.0.down_proj.weight": weight(128, 128), "experts.1.down_proj.weight": weight(128, 128),
         "experts.down_proj_scale_inv": factors(1, 1, 1)},
        BLOCKS, CorruptError, r"found 2 weights; need those of 1 experts"),
    "scales of a billion experts": (
        {"experts.0.down_proj.weight": weight(128, 128), "experts.down_proj_scale_inv": factors(10**9, 0)},
        BLOCKS, CorruptError, r"found 1 weights; need those of 1000000000 experts"),
    "experts of two shapes": (
        {"experts.0.down_proj.weight": weight(128, 128), "experts.1.down_proj.weight": weight(256, 128),
         "experts.down_proj_scale_inv": factors(2, 1, 1)},
        BLOCKS, CorruptError, r"one stack differ; found F8_E4M3 \[256, 128\]; need a matrix F8_E4M3 \[128, 128\]"),
    "experts of two types": (
        {"experts.0.down_proj.weight": weight(128, 128),
         "experts.1.down_proj.weight": weight(128, 128).view(ml_dtypes.float8_e5m2),
         "experts.down_proj_scale_inv": factors(2, 1, 1)},
        BLOCKS, UnsupportedError, r"experts of one stack differ; found F8_E5M2"),
    "an expert with a bias": (
        {"experts.0.down_proj.weight": weight(128, 128), "experts.0.down_proj.bias": factors(128),
         "experts.down_proj_scale_inv": factors(1, 1, 1)},
        BLOCKS, UnsupportedError, r"experts\.0\.down_proj\.bias: experts that have a bias and one scale for all"),
    "a grid of other rows": (
        {"experts.0.down_proj.weight": weight(128, 128), "experts.down_proj_scale_inv": factors(1, 2, 1)},
        BLOCKS, CorruptError, r"shapes disagree; found \[1, 2, 1\]; need \[1, 1, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    arrays, config, error, words = BAD[name]
    given = checkpoint(tmp_path, arrays, config)
    ((module, _),) = fp8.modules(given).items()
    with pytest.raises(error, match=words) as refused:
        fp8.read(given, module)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    if "code" not in name:  # known before any code is read
        with pytest.raises(WarptileError):
            fp8.describe(given, module)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gq_fp8_block", 14),
        ("ct_fp8_block_odd", 14),
        ("ct_mixed", 8),
        ("hf_fp8_block", 8),
        ("hf_fp8_ue8m0_768", 14),
        ("mo_fp8", 14),
    ],
)
def test_zoo_decodes_exactly_and_comes_back_byte_for_byte(name: str, modules: int) -> None:
    check_zoo(fp8, name, modules)


def test_divisors_of_a_lone_file_are_noticed(tmp_path: Path) -> None:
    """Without its config GPTQModel's file looks like DeepSeek's; its scales of 500 to 3000 do not."""
    lone = tmp_path / "lone.safetensors"
    lone.symlink_to(zoo("gq_fp8_block") / "model.safetensors")
    given = open_checkpoint(lone)
    with pytest.raises(UnsupportedError, match="do not look like multipliers"):
        fp8.describe(given, "model.layers.0.self_attn.k_proj")


def test_e8m0_is_viewed_and_never_cast(tmp_path: Path) -> None:
    """Codes 120, 125, 127 are 2^-7, 2^-2, 1; code 0 is 2^-127."""
    scale = np.array([[120, 125], [127, 0]], np.uint8).view(E8M0)
    ones = np.full((256, 256), 0x38, np.uint8).view(E4M3)
    q = check_source(fp8, checkpoint(tmp_path, {"a.weight": ones, "a.scale": scale}, BLOCKS), "a")
    want = [2.0**-7, 2.0**-2, 1.0, 2.0**-127]
    assert list(dequantize(q, np.float64)[::128, ::128].reshape(-1)) == want
    assert struct.pack("4B", *scale.view(np.uint8).reshape(-1)) == fp8.write("a", q)["a.scale"].tobytes()
