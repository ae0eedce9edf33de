"""Real checkpoints: the weights their own tools decode, and the bytes those tools wrote.

The folders in tests/data and examples are always there; the whole zoo is taken from $WARPTILE_ZOO, or from
shared/zoo beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from warptile.formats import gptq
from warptile.formats.canonical import dequantize
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import UnsupportedError
from warptile.formats.options import Options

ROOT = Path(__file__).resolve().parents[2]
ZOO = Path(os.environ.get("WARPTILE_ZOO", ROOT.parent / "shared" / "zoo"))

# name -> modules, elements that occur
HERE = {
    "tests/data/ar_ar_w4g128_sym": (14, {"u4b8"}),
    "tests/data/ar_gptq_w3g32_asym": (14, {"u3"}),
    "tests/data/gq_gptq_dynamic": (13, {"u4b8", "u8b128"}),
    "examples/llama-tiny-gptq-w4g64": (14, {"u4b8"}),
}
THERE = {
    "ar_gptq_w4g128_sym": (14, {"u4b8"}),
    "ar_gptq_w4g32_asym": (14, {"u4"}),
    "ar_gptq_w4g64_moe": (32, {"u4b8"}),
    "ar_gptq_w8g64_sym": (14, {"u8b128"}),
    "gq_gptq_lmhead": (15, {"u4b8", "u8b128"}),
    "gq_gptq_w4g64_act": (14, {"u4b8"}),
    "gq_gptqv2_w4g32_asym": (14, {"u4"}),
}
CHECKPOINTS = [(ROOT / name, *facts) for name, facts in HERE.items()] + [
    (ZOO / name, *facts) for name, facts in THERE.items()
]


def present(folder: Path) -> Path:
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is not in {folder.parent.name}; WARPTILE_ZOO names the folder that has it")
    return folder


@pytest.fixture(params=CHECKPOINTS, ids=lambda entry: entry[0].name)
def zoo(request: pytest.FixtureRequest) -> tuple[Path, int, set[str]]:
    folder, count, elements = request.param
    return present(folder), count, elements


def test_every_module_decodes_as_its_tool_does_and_writes_its_bytes(zoo: tuple[Path, int, set[str]]) -> None:
    folder, count, elements = zoo
    checkpoint = open_checkpoint(folder)
    expected = np.load(folder / "expected.npz")
    modules = gptq.modules(checkpoint)
    assert len(modules) == count
    assert set(expected.files) <= set(modules)
    seen = set()
    for module, names in modules.items():
        q = gptq.read(checkpoint, module)
        seen.add(q.element.name)
        assert gptq.describe(checkpoint, module) == q.outline()
        assert not q.residue
        if module in expected:
            np.testing.assert_array_equal(dequantize(q), expected[module], strict=True)
        written = gptq.write(module, q)
        assert sorted(written) == sorted(names)
        for name, data in written.items():
            stored = checkpoint.tensors[name].array()
            assert (data.dtype, data.shape) == (stored.dtype, stored.shape)
            assert data.tobytes() == stored.tobytes(), name
    assert seen == elements
    assert not checkpoint.notes


def test_every_tensor_is_a_members_or_a_plain_weight(zoo: tuple[Path, int, set[str]]) -> None:
    checkpoint = open_checkpoint(zoo[0])
    consumed = [name for names in gptq.modules(checkpoint).values() for name in names]
    assert len(consumed) == len(set(consumed))
    assert all(name.endswith(".weight") for name in set(checkpoint.tensors) - set(consumed))


def test_labels_are_not_needed(zoo: tuple[Path, int, set[str]], tmp_path: Path) -> None:
    """The file alone gives the same weights, but for conventions that only a label tells."""
    folder = zoo[0]
    lone = tmp_path / "weights.safetensors"
    lone.symlink_to(folder / "model.safetensors")
    convention = "gptq_v2" if "gptqv2" in folder.name else "gptq" if "asym" in folder.name else None
    checkpoint = open_checkpoint(lone, Options(checkpoint_format=convention))
    expected = np.load(folder / "expected.npz")
    if convention:
        with pytest.raises(UnsupportedError, match="nothing says how zero points are stored"):
            gptq.read(open_checkpoint(lone), expected.files[0])
    for module in expected.files:
        np.testing.assert_array_equal(dequantize(gptq.read(checkpoint, module)), expected[module])
    assert checkpoint.notes


def test_negative_scales_survive() -> None:
    """auto-round writes about half of all symmetric scales negative."""
    checkpoint = open_checkpoint(ROOT / "tests/data/ar_ar_w4g128_sym")
    scales = [gptq.read(checkpoint, module).scales[0].data for module in gptq.modules(checkpoint)]
    assert 0.4 < np.mean(np.concatenate([s.ravel() for s in scales]) < 0) < 0.6


def test_short_last_group_without_g_idx() -> None:
    outline = gptq.describe(open_checkpoint(ROOT / "tests/data/ar_ar_w4g128_sym"), "model.layers.0.mlp.down_proj")
    assert (outline.k, outline.group) == (704, 128)


def test_act_order_is_seen_in_the_real_file() -> None:
    checkpoint = open_checkpoint(ROOT / "examples/llama-tiny-gptq-w4g64")
    assert all(gptq.describe(checkpoint, module).perm for module in gptq.modules(checkpoint))


def test_planar_three_bit_is_refused_by_name() -> None:
    checkpoint = open_checkpoint(present(ZOO / "gq_gptqp_w3g32"))
    with pytest.raises(UnsupportedError, match="'gptq_p'"):
        gptq.describe(checkpoint, next(iter(gptq.modules(checkpoint))))


@pytest.mark.parametrize(
    "name",
    ["ar_awq_w4g64_asym", "gq_awq_gemm_w4g128", "ct_gptq_w4_actgroup", "gq_fp8_block", "mo_int4_awq", "ct_nvfp4"],
)
def test_other_formats_are_not_claimed(name: str) -> None:
    assert gptq.modules(open_checkpoint(present(ZOO / name))) == {}


@pytest.mark.parametrize("name", ["ar_awq_w4g64_asym", "gq_awq_gemm_w4g128"])
def test_awq_without_its_label_is_not_claimed(name: str, tmp_path: Path) -> None:
    lone = tmp_path / "weights.safetensors"
    lone.symlink_to(present(ZOO / name) / "model.safetensors")
    assert gptq.modules(open_checkpoint(lone)) == {}
