"""The mma.sync kernels' own source, compiled for the host and run thread by thread: index maths, decoding and scales.

What it cannot show is what the hardware does: occupancy, races between warps, subnormal numbers of its units.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_kernels import COMPILER, aligned, run, sources
from linears import ACTIVATION, Case, random_quant, random_x
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.kernels import marlin
from warptile.kernels.launch import Device
from warptile.kernels.marlin_plan import Decode, Tiled, plan

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

DEVICE = Device(arch=90, sms=6, shared=232448)
TYPES = {"float16": "f16", "bfloat16": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


def product(q: QuantTensor, x: np.ndarray, variant: Decode | Tiled | None, folder: Path, expert: int) -> np.ndarray:
    tensors, spec = marlin.pack(q)
    (m, k), flat, wanted = x.shape, marlin.expected({**spec, "experts": None}), marlin.expected(spec)
    made = plan(spec, m, DEVICE, TYPES[x.dtype.name], k % 8 == 0, variant)
    memory = {suffix: aligned(tensor) for suffix, tensor in tensors.items()}
    memory |= {"x": aligned(x), "y": aligned(np.full((m, spec["n"]), 0x7E00, np.uint16))}
    memory |= {"scratch": aligned(np.full(made.scratch, 0xFF, np.uint8))}
    memory |= {"gathered": aligned(np.full(made.gathered, 0xFF, np.uint8))}
    memory |= {"counters": aligned(np.zeros(made.counters, np.uint32))}
    scalars = {**spec, "m": m, "ldx": k, "ldy": spec["n"], "ld_gathered": spec["k_padded"]}
    stacked = {s: wanted[s][1] != flat[s][1] for s in tensors}
    at = {suffix: expert * (memory[suffix].nbytes // 3) for suffix in tensors if stacked[suffix]}
    for stage in made.stages:
        run(stage, memory, scalars, folder, **at)
    assert not memory["counters"].any()
    return memory["y"].view(x.dtype).reshape(m, spec["n"])


NVFP4 = Case("e2m1", scale="e4m3", group=16, whole=True, shards=(100, 60, 40), low=1, high=60, n=200, k=300)
FP8 = Case("e4m3", scale="f32", group=128, rows=128, n=200, k=300)
MXFP4 = Case("e2m1", scale="e8m0", low=0, high=4, n=72, k=200, experts=3)


@pytest.mark.parametrize(
    ("case", "m", "dtype", "variant"),
    [
        (Case("u4", zero=True, group=48, order=True, bias="f32"), 3, "float16", None),
        (replace(FP8, bias="bf16"), 5, "bfloat16", None),
        (replace(FP8, group=-1, rows=0, scale="bf16"), 17, "float16", Tiled(4, 4, 2, 1, cut=True)),
        (NVFP4, 8, "float16", Decode(4, 2, 3)),
        (NVFP4, 40, "bfloat16", Tiled(2, 4, 1, 1, cut=True)),
        (replace(MXFP4, low=115, high=123), 20, "float16", Tiled(8, 2, 8, 1)),
        (MXFP4, 2, "bfloat16", None),
    ],
    ids=str,
)
def test_kernels_multiply_and_one_hot_rows_return_the_weights(
    case: Case, m: int, dtype: str, variant: Decode | Tiled | None, folder: Path
) -> None:
    q, to, expert = random_quant(case), ACTIVATION[dtype], 2 if case.experts else 0
    w = dequantize(q, np.float64).reshape(-1, case.n, case.k)[expert]
    bias = 0 if q.bias is None else np.float64(q.bias)
    if not (case.scale == "e8m0" and case.low == 0):  # sums of those would be subnormal
        x = random_x((m, case.k), dtype)
        want = np.float64(x) @ w.T + bias
        error = np.linalg.norm(np.float64(product(q, x, variant, folder, expert)) - want) / np.linalg.norm(want)
        assert error < {"float16": 1e-3, "bfloat16": 3e-3}[dtype]
    rows = np.random.default_rng(1).permutation(case.k)[:m]
    got = np.float32(product(replace(q, bias=None), np.eye(case.k, dtype=to)[rows], variant, folder, expert))
    once, twice = (np.float32(w.T[rows].astype(first).astype(to)) for first in (np.float64, np.float32))
    np.testing.assert_array_equal(got, np.where(got == twice, twice, once))
