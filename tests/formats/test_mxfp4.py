"""MXFP4 checkpoints in all their names: values against the OCP tables, bytes given back, refusals in one line."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from stored import check_source, check_zoo, checkpoint
from warptile.formats import mxfp4
from warptile.formats.canonical import dequantize
from warptile.formats.errors import CorruptError, UnsupportedError, UsageError
from warptile.formats.options import Options

BF16, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling 1.0, table 5

# (packed, scale, bias, blocked)
FORMS = {
    "experts.gate_up_proj": ("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales", "experts.gate_up_proj_bias"),
    "experts.down_proj": ("experts.down_proj_blocks", "experts.down_proj_scales", "experts.down_proj_bias"),
    "block.3.mlp.mlp1": ("block.3.mlp.mlp1_weight.blocks", "block.3.mlp.mlp1_weight.scales", "block.3.mlp.mlp1_bias"),
    "block.3.mlp.mlp2": ("block.3.mlp.mlp2_weight.blocks", "block.3.mlp.mlp2_weight.scales", "block.3.mlp.mlp2_bias"),
    "up": ("up.weight_packed", "up.weight_scale", "up.bias"),
    "gate": ("gate.weight", "gate.weight_scale", "gate.bias"),
}


def arrays(module: str, *shape: int, scale_dtype: type = np.uint8, seed: int = 0) -> dict[str, np.ndarray]:
    """``shape`` is that of the weights, [(E,) n, k]; every nibble and scales 0 and 254 occur."""
    rng = np.random.default_rng(seed)
    packed, scale, bias = FORMS[module]
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scales = rng.integers(100, 140, (*shape[:-1], -(-shape[-1] // 32)), dtype=np.uint8)
    scales.reshape(-1)[:2] = 0, 254
    if module not in ("up", "gate"):
        codes = codes.reshape(*shape[:-1], shape[-1] // 32, 16)
    return {packed: codes, scale: scales.view(scale_dtype), bias: rng.standard_normal(shape[:-1]).astype(BF16)}


@pytest.mark.parametrize("scale_dtype", [np.uint8, E8M0])
@pytest.mark.parametrize(
    ("module", "shape"), [(m, (48, 96) if m in ("up", "gate") else (3, 40, 96)) for m in FORMS] + [("up", (2, 8, 80))]
)
def test_a_weight_is_its_nibble_times_a_power_of_two(
    module: str, shape: tuple[int, ...], scale_dtype: type, tmp_path: Path
) -> None:
    given = arrays(module, *shape, scale_dtype=scale_dtype)
    opened = checkpoint(tmp_path, given)
    assert mxfp4.modules(opened) == {module: FORMS[module]}
    assert mxfp4.orphans(opened) == {}
    q = check_source(mxfp4, opened, module)
    assert q.experts == (shape[0] if len(shape) == 3 else None)
    dense = dequantize(q, np.float64).reshape(-1, shape[-1])
    data = given[FORMS[module][0]].reshape(-1, shape[-1] // 2)
    scales = given[FORMS[module][1]].view(np.uint8).reshape(len(data), -1)
    for n in range(0, len(data), 3):
        for k in range(shape[-1]):
            nibble = int(data[n, k // 2]) >> 4 * (k % 2) & 15
            value = (-1 if nibble & 8 else 1) * E2M1[nibble & 7] * 2.0 ** (int(scales[n, k // 32]) - 127)
            assert dense[n, k] == value
            assert np.signbit(dense[n, k]) == (nibble >= 8), "minus zero stays minus zero"


@pytest.mark.parametrize("module", FORMS)
def test_interleaved_rows_are_recorded_where_gpt_oss_has_them(module: str, tmp_path: Path) -> None:
    shape = (8, 64) if module in ("up", "gate") else (2, 8, 64)
    source = mxfp4.describe(checkpoint(tmp_path, arrays(module, *shape)), module).source
    assert ("rows" in source) == (module in ("experts.gate_up_proj", "block.3.mlp.mlp1"))


def test_scale_bytes_are_viewed_and_never_cast(tmp_path: Path) -> None:
    given = arrays("up", 1, 160)
    given["up.weight_scale"] = np.array([[120, 125, 127, 130, 140]], np.uint8).view(E8M0)
    given["up.weight_packed"][...] = 0x22
    q = check_source(mxfp4, checkpoint(tmp_path, given), "up")
    assert list(dequantize(q, np.float64)[0, ::32]) == [2.0**-7, 2.0**-2, 1.0, 8.0, 8192.0]


def nan_at(module: str, *places: int) -> dict[str, np.ndarray]:
    given = arrays(module, *((4, 72) if module == "up" else (2, 4, 96)))
    scales = given[FORMS[module][1]]
    scales.reshape(-1)[list(places)] = 255
    return given


@pytest.mark.parametrize("module", ["up", "experts.down_proj"])
def test_nan_scales_are_read_as_zero_when_asked_and_given_back(module: str, tmp_path: Path) -> None:
    given = checkpoint(tmp_path, nan_at(module, 5, 11), None, Options(nan="zero"))
    q = check_source(mxfp4, given, module)
    assert given.notes == [(module, "the weights under 2 NaN scales are read as zeros")]
    dense = dequantize(q, np.float64).reshape(-1, q.k)
    assert np.isfinite(dense).all()
    for place in (5, 11):
        n, group = divmod(place, 3)
        assert not dense[n, 32 * group : 32 * group + 32].any()
    assert np.count_nonzero(dense) > dense.size // 2


def without(given: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in given.items() if key != name}


@pytest.mark.parametrize("module", FORMS)
@pytest.mark.parametrize("part", [0, 1])
def test_one_half_alone_is_an_orphan(module: str, part: int, tmp_path: Path) -> None:
    names = FORMS[module]
    shape = (8, 64) if module in ("up", "gate") else (2, 8, 64)
    opened = checkpoint(tmp_path, without(arrays(module, *shape), names[1 - part]))
    assert mxfp4.modules(opened) == {}
    plain = module == "gate" or (module, part) == ("up", 1)  # such names occur for themselves in other formats
    assert mxfp4.orphans(opened) == ({} if plain else {names[part]: names[1 - part]})


EXPERTS = "experts.down_proj"
BAD = {
    "NaN scale": (
        EXPERTS, nan_at(EXPERTS, 7, 20), {}, CorruptError,
        r"scales of 255 are NaN; found 2 of 24, the first at \[0, 2, 1\]; need 0 to 254; --nan zero",
    ),
    "scales of another grid": (
        "up", arrays("up", 8, 64) | {"up.weight_scale": np.full((8, 3), 120, np.uint8)}, {}, CorruptError,
        r"shapes disagree; found \[8, 3\]; need \[8, 2\] for 8 x 64 weights in groups of 32",
    ),
    "blocks of another width": (
        EXPERTS, arrays(EXPERTS, 2, 8, 64) | {f"{EXPERTS}_blocks": np.zeros((2, 8, 4, 8), np.uint8)}, {},
        CorruptError, r"blocks are 16 bytes of 32 codes; found \[2, 8, 4, 8\]",
    ),
    "scales of another type": (
        EXPERTS, arrays(EXPERTS, 2, 8, 64) | {f"{EXPERTS}_scales": np.ones((2, 8, 2), np.float32)}, {},
        UnsupportedError, r"unexpected dtype; found F32; need U8 or F8_E8M0",
    ),
    "no rows": (
        "up", {"up.weight_packed": np.zeros((0, 32), np.uint8), "up.weight_scale": np.zeros((0, 2), np.uint8)}, {},
        CorruptError, r"not a matrix; found \[0, 32\]",
    ),
    "bias": (
        "up", arrays("up", 8, 64) | {"up.bias": np.zeros(9, BF16)}, {}, CorruptError, r"found \[9\]; need \[8\]",
    ),
    "odd k": (
        "up", arrays("up", 8, 64) | {"up.weight_shape": np.array([8, 63])}, {}, CorruptError,
        r"odd number of input channels cannot be packed two a byte; found \[8, 63\]",
    ),
    "another shape": (
        "up", arrays("up", 8, 64) | {"up.weight_shape": np.array([8, 128])}, {}, CorruptError, r"found \[8, 128\]",
    ),
    "packed along the outputs": (
        "experts.gate_up_proj",
        {"experts.gate_up_proj": np.zeros((2, 64, 64), np.uint8),
         "experts.gate_up_proj_weight_scale": np.full((2, 64, 4), 120, np.uint8)},
        {}, UnsupportedError, r"ModelOpt's export of stacked experts, \[2, 64, 64\]; need _blocks and _scales",
    ),
    "swizzled by its label": (
        "up", arrays("up", 8, 64), {"scale_layout": "swizzled"}, UnsupportedError,
        r"reordered for a GPU library; found scale_layout = 'swizzled' in the quantization config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    module, given, config, error, words = BAD[name]
    opened = checkpoint(tmp_path, given, config)
    assert list(mxfp4.modules(opened)) == [module]
    with pytest.raises(error, match=words) as refused:
        mxfp4.read(opened, module)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_unknown_switch_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown --nan 'skip'; need zero"):
        mxfp4.describe(checkpoint(tmp_path, arrays("up", 8, 64), None, Options(nan="skip")), "up")


def test_codes_with_a_global_or_another_scale_belong_to_others(tmp_path: Path) -> None:
    given = {
        **arrays("up", 8, 64),
        "up.weight_global_scale": np.ones(1, np.float32),
        "int.weight": np.zeros((8, 32), np.uint8),
        "int.weight_scale": np.ones((16, 1), np.float32),
    }
    opened = checkpoint(tmp_path, given)
    assert mxfp4.modules(opened) == mxfp4.orphans(opened) == {}


@pytest.mark.parametrize(("name", "modules"), [("mo_oai_mxfp4_gptoss", 4), ("ct_mxfp4", 14)])
def test_zoo_decodes_exactly_and_comes_back_byte_for_byte(name: str, modules: int) -> None:
    check_zoo(mxfp4, name, modules)
