"""The mma.sync kernels' own source, compiled for the host and run thread by thread: index maths, decoding and scales.

What it cannot show is what the hardware does: occupancy, races between warps, subnormal numbers of its units.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from linears import ACTIVATION, Case, random_quant, random_x
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.kernels import marlin
from warptile.kernels.launch import Device, Stage
from warptile.kernels.marlin_plan import Decode, Tiled, plan
from warptile.runtime.build import elements_header

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

HOST = Path(__file__).parent / "host"
DEVICE = Device(arch=90, sms=6, shared=232448)
TYPES = {"float16": "f16", "bfloat16": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' sources beside the header that takes mma.cuh's place."""
    here = tmp_path_factory.mktemp("host")
    (here / "elements.h").write_text(elements_header())
    (here / "mma.cuh").write_text((HOST / "mma.cuh").read_text())
    for name in ("decode.cuh", "output.cuh", "gather.cu", "marlin_decode.cu", "marlin_tiled.cu"):
        text = files("warptile.kernels").joinpath(name).read_text("utf-8")
        (here / name).write_text(text.replace("extern __shared__", "extern"))
    return here


def library(stage: Stage, folder: Path) -> tuple[ctypes.CDLL, list[str]]:
    """A stage's kernel, and the types of its parameters."""
    text = (folder / f"{stage.kernel}.cu").read_text()
    (found,) = re.findall(rf"__global__[^;]*?\b{stage.kernel}\(([^)]*)\)\s*{{", text)
    types = [re.sub(r"__restrict__|\w+$", "", p.strip()) for p in found.split(",")]
    path = folder / f"{stage.kernel}_{'_'.join(map(str, stage.variant))}.so"
    if path.exists():
        return ctypes.CDLL(str(path)), types
    values = ", ".join(f"*static_cast<{t}*>(arguments[{i}])" for i, t in enumerate(types))
    variant = ", ".join(map(str, stage.variant))
    path.with_suffix(".cpp").write_text(
        f'#include "mma.cuh"\n#include "{stage.kernel}.cu"\nstatic void** arguments;\n'
        f'extern "C" void run(void** given, const u8** tensors, int count, int columns, int rows, int threads) {{\n'
        "  arguments = given, readable.clear();\n"
        "  for (int i = 0; i < count; i++) readable.push_back({tensors[2 * i], tensors[2 * i + 1]});\n"
        f"  launch([] {{ {stage.kernel}<Variant{{{variant}}}>({values}); }}, columns, rows, threads);\n}}\n"
    )
    options = ("-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC")
    assert COMPILER
    subprocess.run([COMPILER, *options, "-o", path, path.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(path)), types


def aligned(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, from a multiple of 256 on."""
    room = np.zeros(array.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return room[start : start + array.nbytes]


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
    for stage in made.stages:
        kernel, types = library(stage, folder)
        words = np.zeros(len(stage.args), np.int64)
        for i, (arg, kind) in enumerate(zip(stage.args, types, strict=True)):
            if "*" not in kind:
                words[i] = arg if isinstance(arg, int) else scalars[arg]
            elif arg in memory:
                stacked = arg in wanted and wanted[arg][1] != flat[arg][1]
                words[i] = memory[arg].ctypes.data + (expert * (memory[arg].nbytes // 3) if stacked else 0)
        ends = np.array([[t.ctypes.data, t.ctypes.data + t.nbytes] for t in memory.values()], np.int64)
        addresses = words.ctypes.data + 8 * np.arange(len(words))
        given, within = (ctypes.c_void_p(a.ctypes.data) for a in (addresses, ends))
        kernel.run(given, within, len(ends), *stage.grid[:2], stage.block)
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
