"""The kernels on strips, their own source compiled for the host: index maths, decoding, factors and sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_kernels import COMPILER, aligned, run, sources
from strip_linears import assert_is_in_8_bits, random_rows, random_strips
from warptile.formats.canonical import QuantTensor
from warptile.kernels import mmq
from warptile.kernels.launch import Device
from warptile.kernels.mmq_plan import Decode, plan

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

DEVICE = Device(arch=90, sms=3, shared=232448)
TYPES = {"float16": "f16", "bfloat16": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


def multiplied(q: QuantTensor, x: np.ndarray, variant: Decode | None, folder: Path, expert: int) -> np.ndarray:
    tensors, spec = mmq.pack(q)
    (m, k), flat, wanted = x.shape, mmq.expected({**spec, "experts": None}), mmq.expected(spec)
    numerics = "e4m3" if spec["kind"] == "fp8" else "int8"
    made = plan(spec, m, DEVICE, TYPES[x.dtype.name], variant=variant, numerics=numerics)
    memory = {suffix: aligned(tensor) for suffix, tensor in tensors.items()}
    memory |= {"x": aligned(x), "y": aligned(np.full((m, spec["n"]), 0x7E00, np.uint16))}
    memory |= {
        name: aligned(np.full(getattr(made, name), 0xFF, np.uint8)) for name in ("quantized", "factors", "scratch")
    }
    memory |= {"counters": aligned(np.zeros(made.counters, np.uint32))}
    stacked = {s: wanted[s][1] != flat[s][1] for s in tensors}
    at = {suffix: expert * (memory[suffix].nbytes // 3) for suffix in tensors if stacked[suffix]}
    for stage in made.stages:
        run(stage, memory, {**spec, "m": m, "ldx": k, "ldy": spec["n"]}, folder, **at)
    assert not memory["counters"].any()
    return memory["y"].view(x.dtype).reshape(m, spec["n"])


@pytest.mark.parametrize("kind", [*mmq.KINDS])
def test_decode_multiplies_every_kind(kind: str, folder: Path) -> None:
    q, x = random_strips(kind, 40, 800, bias="f32"), random_rows(5, 800, "float16")
    for variant in (None, Decode(warps=2, splits=2, columns=2, chunk=1)):
        assert_is_in_8_bits(multiplied(q, x, variant, folder, 0), q, x)


NVFP4 = {"shards": (40, 100), "whole": True}


@pytest.mark.parametrize(
    ("kind", "m", "dtype", "more"),
    [
        ("nvfp4", 8, "bfloat16", NVFP4),
        ("q4_k", 1, "float16", {"experts": 3, "bias": "f16"}),
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
