"""The kernels on strips, their own source compiled for the host: index maths, decoding, factors and sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_kernels import COMPILER, aligned, run, sources
from strip_linears import assert_is_in_8_bits, random_rows, random_strips
from warptile.formats.canonical import QuantTensor
from warptile.kernels import mmq
from warptile.kernels.epilogue import ROUNDINGS, finish
from warptile.kernels.launch import Device
from warptile.kernels.mmq_decode_plan import Decode
from warptile.kernels.mmq_plan import plan
from warptile.kernels.mmq_strips import KINDS
from warptile.kernels.mmq_tiled_plan import Tiled

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

DEVICE = Device(arch=90, sms=3, shared=232448)
TURING = replace(DEVICE, arch=75, shared=65536)
TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


def multiplied(
    q: QuantTensor,
    x: np.ndarray,
    variant: Decode | Tiled | None,
    folder: Path,
    expert: int,
    residual: np.ndarray | None = None,
    each: int = 0,
    device: Device = DEVICE,
    quantized: bool = False,
) -> np.ndarray:
    tensors, spec = mmq.pack(q)
    (m, k), flat, wanted = x.shape, mmq.expected({**spec, "experts": None}), mmq.expected(spec)
    numerics = "e4m3" if spec["kind"] == "fp8" else "int8"
    made = plan(spec, m, device, TYPES[x.dtype.name], variant=variant, numerics=numerics, quantized=quantized)
    memory = {suffix: aligned(tensor) for suffix, tensor in tensors.items()}
    memory |= {"x": aligned(x), "y": aligned(np.full((m, spec["n"]), np.nan, x.dtype))}
    memory |= {
        name: aligned(np.full(getattr(made, name), 0xFF, np.uint8)) for name in ("quantized", "factors", "scratch")
    }
    memory |= {} if residual is None else {"residual": aligned(residual)}
    memory |= {"counters": aligned(np.zeros(made.counters, np.uint32))}
    stacked = {s: wanted[s][1] != flat[s][1] for s in tensors}
    at = {suffix: expert * (memory[suffix].nbytes // 3) for suffix in tensors if stacked[suffix]}
    for stage in made.stages:
        run(
            stage,
            memory,
            {**spec, "m": m, "ldx": k, "ldy": spec["n"], "ld_residual": spec["n"], "each": each},
            folder,
            **at,
        )
    assert not memory["counters"].any()
    return memory["y"].view(x.dtype).reshape(m, spec["n"])


@pytest.mark.parametrize("kind", [*mmq.KINDS])
def test_decode_multiplies_every_kind(kind: str, folder: Path) -> None:
    q, x = random_strips(kind, 40, 800, bias="f32"), random_rows(5, 800, "float16")
    for variant in (None, Decode(warps=2, splits=2, columns=2, chunk=1)):
        assert_is_in_8_bits(multiplied(q, x, variant, folder, 0), q, x)


ROUNDED = [
    (kind, ("float16", "bfloat16", "float32")[i % 3], 1 + i % 4, DEVICE)
    for i, kind in enumerate(("q8_0", "q4_1", "q4_k", "q6_k", "mxfp4", "fp8"))
]


@pytest.mark.parametrize(("kind", "dtype", "m", "device"), [*ROUNDED, ("q4_k", "float16", 3, TURING)], ids=str)
def test_rows_rounded_where_they_are_read_make_the_same_bits(
    kind: str, dtype: str, m: int, device: Device, folder: Path
) -> None:
    q, x = random_strips(kind, 60, 799), random_rows(m, 799, dtype)
    x[-1, 5] = np.inf
    for variant in (Decode(warps=4, splits=1, columns=2, chunk=2), Decode(warps=2, splits=2, columns=1, chunk=4)):
        here, before = (multiplied(q, x, variant, folder, 0, device=device, quantized=given) for given in (False, True))
        np.testing.assert_array_equal(here.view(np.uint8), before.view(np.uint8))
        assert np.isfinite(np.float32(here[:-1])).all()
        assert np.isnan(np.float32(here[-1])).all()


NVFP4 = {"shards": (40, 100), "whole": True}


@pytest.mark.parametrize(
    ("kind", "m", "dtype", "more"),
    [
        ("nvfp4", 8, "bfloat16", NVFP4),
        ("q4_k", 1, "float32", {"experts": 3, "bias": "f16"}),
        ("fp8", 2, "bfloat16", {"block": (1, 2000), "scale": "bf16"}),
        ("fp8", 3, "float16", {"shards": (60, 50, 30)}),
        ("fp8", 7, "float16", {"experts": 3, "block": (48, 256), "scale": "e8m0", "whole": True}),
    ],
    ids=str,
)
def test_decode_finds_scales_wherever_they_lie(
    kind: str, m: int, dtype: str, more: dict[str, Any], folder: Path
) -> None:
    q, x = random_strips(kind, 140, 2000, **more), random_rows(m, 2000, dtype)
    expert = 2 if "experts" in more else None
    assert_is_in_8_bits(multiplied(q, x, None, folder, expert or 0), q, x, expert)


@pytest.mark.parametrize(
    ("kind", "m", "dtype", "tile", "more"),
    [
        ("q4_0", 20, "float16", Tiled(2, 1, 3, 2, cut=True), {"bias": "f32"}),
        ("q4_1", 40, "float32", Tiled(4, 2, 2, 1), {"bias": "f32"}),
        ("q5_k", 17, "float16", Tiled(4, 1, 2, 2), {"experts": 3}),
        ("q6_k", 70, "float16", Tiled(8, 2, 2, 1, cut=True), {}),
        ("nvfp4", 33, "bfloat16", Tiled(2, 1, 4, 2), {"shards": (60, 80), "whole": True}),
        ("mxfp4", 9, "float16", Tiled(2, 1, 2, 2, cut=True), {"bias": "bf16"}),
        ("fp8", 34, "bfloat16", Tiled(4, 2, 3, 1, cut=True), {"block": (48, 256), "scale": "e8m0"}),
        ("fp8", 12, "float16", Tiled(2, 1, 2, 2), {"block": (1, 1100), "scale": "bf16"}),
    ],
    ids=str,
)
def test_tiles_multiply(kind: str, m: int, dtype: str, tile: Tiled, more: dict[str, Any], folder: Path) -> None:
    q, x = random_strips(kind, 140, 1100, **more), random_rows(m, 1100, dtype)
    expert = 2 if "experts" in more else None
    assert_is_in_8_bits(multiplied(q, x, tile, folder, expert or 0), q, x, expert)


def test_residuals_are_added_and_each_step_may_round(folder: Path) -> None:
    """By the epilogue's own reference, from the sums that float32 products give."""
    q, x = random_strips("q4_k", 140, 600, bias="f16"), random_rows(20, 600, "float16")
    residual = random_rows(20, 140, "float16", seed=5)
    for m, variant in ((3, None), (20, Tiled(2, 1, 2, 2))):
        sums = multiplied(replace(q, bias=None), np.float32(x[:m]), variant, folder, 0)
        for each, rounding in enumerate(ROUNDINGS):
            want = finish(sums, x.dtype, q.bias, residual[:m], rounding)
            got = multiplied(q, x[:m], variant, folder, 0, residual[:m], each)
            np.testing.assert_array_equal(got, want)


def test_rows_have_the_same_bits_in_every_whole_tile(folder: Path) -> None:
    q, x = random_strips("q4_k", 140, 600), random_rows(20, 600, "float16")
    wide = multiplied(q, x, Tiled(4, 2, 2, 1), folder, 0)
    np.testing.assert_array_equal(multiplied(q, x[:3], Tiled(2, 1, 2, 2), folder, 0), wide[:3])


@pytest.mark.parametrize("kind", ["q8_0", "q6_k", "nvfp4", "q4_1", "q5_k"])
def test_instructions_of_sm_75_make_the_products_of_newer_ones(kind: str, folder: Path) -> None:
    """Integer sums and what is made of them to the bit; minima take another road there, whose last bits differ."""
    q, x = random_strips(kind, 100, 800, bias="f32"), random_rows(20, 800, "float32")
    for m, variant in ((5, Decode(warps=2, splits=2, columns=2, chunk=1)), (20, Tiled(2, 1, 1, 2))):
        old, new = (multiplied(q, x[:m], variant, folder, 0, device=device) for device in (TURING, DEVICE))
        assert_is_in_8_bits(old, q, x[:m])
        if KINDS[kind].minima:
            np.testing.assert_allclose(old, new, rtol=0, atol=2e-6 * np.abs(new).max())
        else:
            np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("kind", "m", "dtype", "more"),
    [
        ("q4_0", 1, "float16", {}),
        ("q4_k", 3, "bfloat16", {"experts": 3, "bias": "f16"}),
        ("q8_0", 40, "bfloat16", {}),
        ("nvfp4", 70, "float16", {"shards": (60, 80), "whole": True}),
    ],
    ids=str,
)
def test_plans_for_sm_75_multiply(kind: str, m: int, dtype: str, more: dict[str, Any], folder: Path) -> None:
    q, x = random_strips(kind, 140, 1100, **more), random_rows(m, 1100, dtype)
    expert = 2 if "experts" in more else None
    assert_is_in_8_bits(multiplied(q, x, None, folder, expert or 0, device=TURING), q, x, expert)


def test_sums_of_x_of_any_size_meet_minima_on_sm_75(folder: Path) -> None:
    """f16 holds them only after their own power of two; a token that is no number spoils no other."""
    q, x = random_strips("q4_k", 40, 600), random_rows(6, 600, "float32")
    x *= np.array([[1e30], [1e-30], [0], [1], [1e-3], [np.nan]], np.float32)
    old, new = (multiplied(q, x, None, folder, 0, device=device) for device in (TURING, DEVICE))
    assert np.isnan(old[5]).all()
    assert (old[2] == 0).all()
    for row in (0, 1, 3, 4):
        np.testing.assert_allclose(old[row], new[row], rtol=0, atol=2e-6 * np.abs(new[row]).max())
