"""NVFP4 checkpoints, multiplier and divisor: values against the OCP tables, bytes given back, one-line refusals."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from stored import check_source, check_zoo, checkpoint
from warptile.formats import fp8, mxfp4, nvfp4
from warptile.formats.canonical import dequantize, per_shard
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.formats.options import Options

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MODELOPT = (".weight", ".weight_scale_2", ".input_scale")
LLM_COMPRESSOR = (".weight_packed", ".weight_global_scale", ".input_global_scale")
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}


def ue4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def arrays(
    form: tuple[str, str, str], *shape: int, whole: np.ndarray | None = None, module: str = "a", bias: bool = True
) -> dict[str, np.ndarray]:
    """``shape`` is that of the weights, [(E,) n, k]; every nibble and every legal scale byte occurs."""
    rng = np.random.default_rng(2)
    packed, name, side = form
    scales = rng.integers(0, 127, (*shape[:-1], -(-shape[-1] // 16)), dtype=np.uint8)
    scales.reshape(-1)[:2] = 0, 126
    if whole is None:
        whole = np.float32(2832.1) if form is LLM_COMPRESSOR else np.float32(3.7e-4)
    given = {
        packed: rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8),
        ".weight_scale": scales.view(E4M3),
        name: np.asarray(whole, np.float32),
        side: np.float32(0.25).reshape(()),
    }
    if bias:
        given[".bias"] = rng.standard_normal(shape[:-1]).astype(BF16)
    return {module + suffix: array for suffix, array in given.items()}


def check_values(
    dense: np.ndarray, given: dict[str, np.ndarray], form: tuple[str, str, str], factor: np.ndarray
) -> None:
    """``factor`` is the global of each row, [rows] float64."""
    k = dense.shape[-1]
    dense = dense.reshape(-1, k)
    data = given["a" + form[0]].reshape(-1, k // 2)
    scales = given["a.weight_scale"].view(np.uint8).reshape(len(data), -1)
    for n in range(0, len(data), 3):
        for at in range(k):
            nibble = int(data[n, at // 2]) >> 4 * (at % 2) & 15
            value = (-1 if nibble & 8 else 1) * E2M1[nibble & 7] * ue4m3(int(scales[n, at // 16]))
            assert dense[n, at] == value * factor[n]


@pytest.mark.parametrize("shape", [(40, 96), (33, 72), (3, 20, 64)])
@pytest.mark.parametrize("form", [MODELOPT, LLM_COMPRESSOR])
def test_a_weight_is_nibble_times_scale_times_global(
    form: tuple[str, str, str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    given = arrays(form, *shape)
    opened = checkpoint(tmp_path, {**given, "a.k_scale": np.float32(1)})
    members = ("a" + form[0], "a.weight_scale", "a" + form[1], "a.bias", "a" + form[2])
    assert nvfp4.modules(opened) == {"a": members}
    assert fp8.modules(opened) == mxfp4.modules(opened) == nvfp4.orphans(opened) == fp8.orphans(opened) == {}
    q = check_source(nvfp4, opened, "a")
    stored = given["a" + form[1]].astype(np.float64)
    factor = np.float64(np.float32(1 / stored)) if form is LLM_COMPRESSOR else stored
    check_values(dequantize(q, np.float64), given, form, np.full(int(np.prod(shape[:-1])), factor))


def test_divisors_are_given_back_bit_for_bit_though_reciprocals_coincide(tmp_path: Path) -> None:
    reciprocals = set()
    for bits in range(0x45770000, 0x45770010):
        divisor = np.array([bits], np.uint32).view(np.float32)
        given = arrays(LLM_COMPRESSOR, 4, 32, whole=divisor)
        q = check_source(nvfp4, checkpoint(tmp_path, given), "a")
        assert q.scales[1].data.reshape(-1)[0] == np.float32(1 / np.float64(divisor[0]))
        reciprocals.add(q.scales[1].data.tobytes())
    assert len(reciprocals) < 16, "the reciprocal does not determine the divisor"


@pytest.mark.parametrize("form", [MODELOPT, LLM_COMPRESSOR])
@pytest.mark.parametrize(
    ("module", "shape", "stored", "rows"),
    [
        ("a.gate_up_proj", (60, 64), [1.0, 3.0], [30, 30]),
        ("a.qkv_proj", (100, 64), [1.0, 3.0, 5.0], [60, 20, 20]),
        ("a.up_proj", (3, 20, 64), [1.0, 3.0, 5.0], [20, 20, 20]),
        ("a.gate_up_proj", (2, 20, 64), [[1.0, 3.0], [5.0, 7.0]], [10, 10, 10, 10]),
        ("a.up_proj", (3, 20, 64), 3.0, [60]),
    ],
)
def test_every_shard_and_expert_keeps_its_global(
    form: tuple[str, str, str],
    module: str,
    shape: tuple[int, ...],
    stored: list[float],
    rows: list[int],
    tmp_path: Path,
) -> None:
    given = arrays(form, *shape, whole=np.array(stored, np.float32), module=module)
    q = check_source(nvfp4, checkpoint(tmp_path, given, None, None, None, **HEADS), module)
    values = np.array(stored, np.float32).reshape(-1).astype(np.float64)
    values = (1 / values).astype(np.float32).astype(np.float64) if form is LLM_COMPRESSOR else values
    renamed = {"a" + name.removeprefix(module): array for name, array in given.items()}
    check_values(dequantize(q, np.float64), renamed, form, np.repeat(values, rows))
    if q.scales[1].shards:
        assert per_shard(q.scales[1]).size == values.size


@pytest.mark.parametrize(("form", "said"), [(MODELOPT, "divide"), (LLM_COMPRESSOR, "multiply")])
def test_the_switch_is_believed_before_the_name(form: tuple[str, str, str], said: str, tmp_path: Path) -> None:
    given = arrays(form, 8, 32, whole=np.float32(4))
    q = check_source(nvfp4, checkpoint(tmp_path, given, None, Options(scale_convention=said)), "a")
    assert q.scales[1].data.reshape(()) == (0.25 if said == "divide" else 4)


def test_a_zero_block_scale_is_legal(tmp_path: Path) -> None:
    given = arrays(MODELOPT, 4, 32)
    given["a.weight_scale"] = np.zeros((4, 2), np.uint8).view(E4M3)
    assert not dequantize(check_source(nvfp4, checkpoint(tmp_path, given), "a")).any()


@pytest.mark.parametrize("form", [MODELOPT, LLM_COMPRESSOR])
def test_parts_alone_are_orphans(form: tuple[str, str, str], tmp_path: Path) -> None:
    whole = arrays(form, 8, 64)
    missing = {
        "a" + form[1]: ("a" + form[0], "its global scale, weight_scale_2 or weight_global_scale"),
        "a" + form[0]: ("a.weight_scale", "weight or weight_packed (U8)"),
        "a.weight_scale": ("a" + form[1], "weight or weight_packed (U8), and weight_scale"),
    }
    for lost, (orphan, need) in missing.items():
        opened = checkpoint(tmp_path, {name: array for name, array in whole.items() if name != lost})
        assert nvfp4.modules(opened) == {}
        assert nvfp4.orphans(opened)[orphan] == need


def changed(form: tuple[str, str, str], **parts: np.ndarray) -> dict[str, np.ndarray]:
    return arrays(form, 8, 64) | {f"a.{suffix}": array for suffix, array in parts.items()}


def byte(value: int, *at: int) -> np.ndarray:
    scales = np.full((8, 4), 0x30, np.uint8)
    scales[at] = value
    return scales.view(E4M3)


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def negative(value: str) -> str:
    return (
        rf"block scales are NaN or negative; found 1 of 32, the first at \[5, 2\], is {value}; need bytes 0x00 to 0x7E"
    )


GLOBAL = r"a global scale is zero, negative, infinite or NaN; found 1 of 1, the first at \[0\]"
BAD = {
    "NaN block scale": (changed(MODELOPT, weight_scale=byte(0x7F, 5, 2)), {}, CorruptError, negative("nan")),
    "below zero, a block scale": (
        changed(LLM_COMPRESSOR, weight_scale=byte(0xB0, 5, 2)), {}, CorruptError, negative("-0.5")),
    "minus zero block scale": (changed(MODELOPT, weight_scale=byte(0x80, 5, 2)), {}, CorruptError, negative("-0")),
    "negative NaN block scale": (changed(MODELOPT, weight_scale=byte(0xFF, 5, 2)), {}, CorruptError, negative("nan")),
    **{
        f"global {value} {form[1]}": (changed(form, **{form[1][1:]: one(value)}), {}, CorruptError, GLOBAL)
        for form in (MODELOPT, LLM_COMPRESSOR)
        for value in (0.0, -0.0, -1.0, np.inf, np.nan)
    },
    "divisor without reciprocal": (
        changed(LLM_COMPRESSOR, weight_global_scale=one(1e-45)), {}, CorruptError, r"no float32 reciprocal"),
    "divisor whose reciprocal loses bits": (
        changed(LLM_COMPRESSOR, weight_global_scale=one(3e38)), {}, CorruptError, r"no float32 reciprocal"),
    "both conventions": (
        changed(MODELOPT, weight_global_scale=one(4)), {}, UnsupportedError,
        r"two readings of one module; found \.weight_scale_2 and \.weight_global_scale"),
    "both packed names": (
        changed(MODELOPT, weight_packed=np.zeros((8, 32), np.uint8)), {}, UnsupportedError,
        r"found a\.weight and a\.weight_packed"),
    "scales of another grid": (
        changed(MODELOPT, weight_scale=byte(0x30)[:, :3]), {}, CorruptError,
        r"found \[8, 3\]; need \[8, 4\] for 8 x 64 weights in groups of 16"),
    "scales padded for a library": (
        changed(MODELOPT, weight_scale=np.zeros((128, 4), np.uint8).view(E4M3)), {}, CorruptError,
        r"found \[128, 4\]; need \[8, 4\]"),
    "scales of another type": (
        changed(MODELOPT, weight_scale=np.full((8, 4), 0x30, np.uint8)), {}, UnsupportedError,
        r"unexpected dtype; found U8; need F8_E4M3"),
    "globals of another type": (
        changed(MODELOPT, weight_scale_2=np.ones(1, BF16)), {}, UnsupportedError, r"found BF16; need F32"),
    "a global below zero": (
        changed(MODELOPT, weight_scale_2=np.array([-1.5], np.float32)), {}, CorruptError,
        r"found 1 of 1, the first at \[0\], is -1.5; need finite numbers above 0; get the file again"),
    "a global without a dimension": (
        changed(MODELOPT, weight_scale_2=np.array(np.inf, np.float32)), {}, CorruptError,
        r"found 1 of 1, the first at \[\], is inf; need"),
    "a divisor too small": (
        changed(LLM_COMPRESSOR, weight_global_scale=np.array([1e-40], np.float32)), {}, CorruptError,
        r"a divisor has no float32 reciprocal; found 1 of 1, the first at \[0\], is 9.99995e-41; need"),
    "too many globals": (
        changed(MODELOPT, weight_scale_2=np.ones(2, np.float32)), {}, CorruptError,
        r"wrong number of global scales; found 2; need 1"),
    "odd k": (
        changed(LLM_COMPRESSOR, weight_shape=np.array([8, 63])), {}, CorruptError,
        r"odd number of input channels cannot be packed two a byte; found \[8, 63\]"),
    "no matrix": (
        changed(MODELOPT, weight=np.zeros(32, np.uint8)), {}, CorruptError, r"not a matrix; found \[32\]"),
    "bias": (changed(MODELOPT, bias=np.zeros(9, BF16)), {}, CorruptError, r"found \[9\]; need \[8\]"),
    "swizzled by its label": (
        changed(MODELOPT), {"quantization": {"scale_layout": "swizzled_128x4"}}, UnsupportedError,
        r"found quantization\.scale_layout = 'swizzled_128x4' in the quantization config"),
    "prepacked by its label": (
        changed(MODELOPT), {"weights_prepacked": True}, UnsupportedError, r"weights_prepacked = True"),
    "experts along the inputs": (
        {"a": np.zeros((2, 32, 48), np.uint8), "a_weight_scale": np.ones((2, 4, 48), E4M3)}, {}, UnsupportedError,
        r"ModelOpt's export of stacked experts, \[2, 32, 48\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    given, config, error, words = BAD[name]
    opened = checkpoint(tmp_path, given, config)
    assert list(nvfp4.modules(opened)) == ["a"]
    with pytest.raises(error, match=words) as refused:
        nvfp4.read(opened, "a")
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    if "block scale" not in name:  # known before any code is read
        with pytest.raises(error):
            nvfp4.describe(opened, "a")


@pytest.mark.parametrize("value", ["false", "", "none"])
def test_a_label_that_denies_reordering_is_no_reason(value: str, tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, changed(MODELOPT), {"swizzled": False}, None, {"shuffled": value} if value else None)
    check_source(nvfp4, opened, "a")


def test_metadata_that_says_reordered_is_a_reason(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, changed(MODELOPT), {}, None, {"weights": "preshuffled"})
    with pytest.raises(UnsupportedError, match="weights = 'preshuffled' in the metadata"):
        nvfp4.describe(opened, "a")


@pytest.mark.parametrize(
    ("name", "modules"), [("ct_nvfp4", 14), ("mo_nvfp4", 14), ("mo_nvfp4_bias", 14), ("mo_nvfp4_moe", 32)]
)
def test_zoo_decodes_to_1e_7_of_the_largest_weight_and_comes_back_byte_for_byte(name: str, modules: int) -> None:
    """Its two scales can be multiplied in either order, with a rounding between."""
    check_zoo(nvfp4, name, modules, tolerance=1e-7)
