"""Kernels compiled for the host and run thread by thread: host/ takes the place of the device's."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np
from warptile.kernels.launch import At, Stage
from warptile.runtime.build import GENERATED
from warptile.runtime.launch import MAP_BYTES, MAP_ITEM, MAPS

COMPILER = shutil.which("g++")
HOST = Path(__file__).parent / "kernels" / "host"
REPLACED = ("mma.cuh", "imma.cuh", "hopper.cuh")
"""The headers whose place host/ takes."""
THREADS = "threads.cuh"
"""What they run on."""
DYNAMIC = "extern __shared__ __align__(1024) u8 dynamic[]"
"""Where blocks of a cluster run together, each has shared memory of its own; blocks that run alone have it in turn."""
MAP = np.dtype([("from", "u8"), *((name, "i8") for name in ("rows", "columns", "stride", "box_rows", "box_columns"))])
"""hopper.cuh's TensorMap."""


def sources(here: Path) -> Path:
    """The kernels' sources beside the headers that take the place of the device's."""
    for name, text in GENERATED.items():
        (here / name).write_text(text())
    for name in (*REPLACED, THREADS):
        (here / name).write_text((HOST / name).read_text())
    for file in files("warptile.kernels").iterdir():
        if file.name.endswith((".cu", ".cuh")) and file.name not in REPLACED:
            text = file.read_text("utf-8").replace(DYNAMIC, "u8* dynamic = shared_of_block()")
            (here / file.name).write_text(text.replace("extern __shared__", "extern"))
    return here


def library(stage: Stage, folder: Path) -> tuple[ctypes.CDLL, list[str]]:
    """A stage's kernel, and the types of its parameters."""
    text = (folder / f"{stage.kernel}.cu").read_text()
    (found,) = re.findall(rf"__global__[^;]*?\b{stage.kernel}\(([^)]*)\)\s*{{", text)
    types = [re.sub(r"__restrict__|\w+$", "", p.strip()) for p in found.split(",")]
    path = folder / f"{stage.kernel}_{'_'.join(map(str, stage.variant))}_{stage.target}.so"
    if path.exists():
        return ctypes.CDLL(str(path)), types
    values = ", ".join(f"*static_cast<{t}*>(arguments[{i}])" for i, t in enumerate(types))
    variant = ", ".join(map(str, stage.variant))
    shape = ", ".join(f"shape[{i}]" for i in range(6))
    path.with_suffix(".cpp").write_text(
        f"#define __CUDA_ARCH__ {stage.target[3:].rstrip('a')}0\n"
        f'#include "mma.cuh"\n#include "{stage.kernel}.cu"\nstatic void** arguments;\n'
        'extern "C" void run(void** given, const u8** tensors, int count, const int* shape) {\n'
        "  arguments = given, readable.clear();\n"
        "  for (int i = 0; i < count; i++) readable.push_back({tensors[2 * i], tensors[2 * i + 1]});\n"
        f"  launch([] {{ {stage.kernel}<Variant{{{variant}}}>({values}); }}, {shape});\n}}\n"
    )
    options = (
        "-std=c++20",
        "-O1",
        "-w",
        "-Wno-psabi",
        "-U_FORTIFY_SOURCE",
        "-fno-strict-aliasing",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
    )
    assert COMPILER
    subprocess.run([COMPILER, *options, "-o", path, path.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(path)), types


def aligned(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, from a multiple of 256 on."""
    room = np.zeros(array.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return room[start : start + array.nbytes]


def _map(stage: Stage, name: str, memory: Mapping[str, np.ndarray], scalars: Mapping[str, int], at: int) -> np.ndarray:
    """A tensor map as runtime/launch.py has it made, in hopper.cuh's form."""
    of, stride = ("gathered", "ld_gathered") if name == "gathered_map" else ("x", "ldx")
    assert stage.box
    extents = scalars["m"], scalars[MAPS[name]], MAP_ITEM * scalars[stride]
    made = np.zeros(MAP_BYTES, np.uint8)
    made[: MAP.itemsize].view(MAP)[0] = memory[of].ctypes.data + at, *extents, *stage.box
    return aligned(made)


def run(
    stage: Stage,
    memory: Mapping[str, np.ndarray],
    scalars: Mapping[str, int],
    folder: Path,
    seed: int = 0,
    **at: int,
) -> None:
    """One launch. ``memory`` holds every tensor, as ``aligned`` gives it; ``at`` is its first byte of one. ``seed`` is
    another order of threads, copies and blocks."""
    kernel, types = library(stage, folder)
    words = np.zeros(len(stage.args), np.int64)
    addresses = words.ctypes.data + 8 * np.arange(len(words))
    maps = []
    for i, (arg, kind) in enumerate(zip(stage.args, types, strict=True)):
        name, offset = (arg.name, arg.offset) if isinstance(arg, At) else (arg, 0)
        if name in MAPS:
            maps.append(_map(stage, str(name), memory, scalars, at.get("x", 0)))
            addresses[i] = maps[-1].ctypes.data
        elif "*" not in kind:
            words[i] = name if isinstance(name, int) else scalars[name]
        elif name in memory:
            words[i] = memory[name].ctypes.data + at.get(name, 0) + offset
    ends = np.array([[t.ctypes.data, t.ctypes.data + t.nbytes] for t in memory.values()], np.int64)
    shape = np.array([*stage.grid[:2], stage.block, stage.cluster, stage.shared, seed], np.int32)
    given, within, shaped = (ctypes.c_void_p(a.ctypes.data) for a in (addresses, ends, shape))
    kernel.run(given, within, len(ends), shaped)
