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

COMPILER = shutil.which("g++")
HOST = Path(__file__).parent / "kernels" / "host"
REPLACED = ("mma.cuh", "imma.cuh")
"""The headers whose place host/ takes."""


def sources(here: Path) -> Path:
    """The kernels' sources beside the headers that take the place of mma.cuh and imma.cuh."""
    for name, text in GENERATED.items():
        (here / name).write_text(text())
    for name in REPLACED:
        (here / name).write_text((HOST / name).read_text())
    for file in files("warptile.kernels").iterdir():
        if file.name.endswith((".cu", ".cuh")) and file.name not in REPLACED:
            (here / file.name).write_text(file.read_text("utf-8").replace("extern __shared__", "extern"))
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
    path.with_suffix(".cpp").write_text(
        f"#define __CUDA_ARCH__ {stage.target[3:].rstrip('a')}0\n"
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


def run(stage: Stage, memory: Mapping[str, np.ndarray], scalars: Mapping[str, int], folder: Path, **at: int) -> None:
    """One launch. ``memory`` holds every tensor, as ``aligned`` gives it; ``at`` is its first byte of one."""
    kernel, types = library(stage, folder)
    words = np.zeros(len(stage.args), np.int64)
    for i, (arg, kind) in enumerate(zip(stage.args, types, strict=True)):
        name, offset = (arg.name, arg.offset) if isinstance(arg, At) else (arg, 0)
        if "*" not in kind:
            words[i] = name if isinstance(name, int) else scalars[name]
        elif name in memory:
            words[i] = memory[name].ctypes.data + at.get(name, 0) + offset
    ends = np.array([[t.ctypes.data, t.ctypes.data + t.nbytes] for t in memory.values()], np.int64)
    addresses = words.ctypes.data + 8 * np.arange(len(words))
    given, within = (ctypes.c_void_p(a.ctypes.data) for a in (addresses, ends))
    kernel.run(given, within, len(ends), *stage.grid[:2], stage.block)
