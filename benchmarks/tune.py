"""Times every tile that a plan may choose, for the tables of kernels/marlin_tiled_plan.py and marlin_hopper_plan.py.

    python benchmarks/tune.py --shape 28672x8192 --m 16,32,64 --element u4b8 --dtype float16

For each m all candidates, fastest first, the plan's own choice marked, with the us of a step of 64 k that the time
amounts to; then the step costs as table rows, each the median over every m measured. Times as in timing.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matmul import DTYPES, as_device, random_linear, write_copies
from shapes import Shape
from timing import graph_time, torch_graph_time
from warptile.formats.errors import UnsupportedError
from warptile.kernels import marlin, marlin_plan
from warptile.kernels import marlin_decode_plan as few
from warptile.kernels import marlin_hopper_plan as hopper
from warptile.kernels import marlin_tiled_plan as tiled
from warptile.kernels import wgmma_plan as wgmma
from warptile.kernels.launch import Device, Plan
from warptile.kernels.wgmma_plan import Wgmma
from warptile.runtime import Session, arrays

ACTIVATIONS = {"float16": "f16", "bfloat16": "bf16"}
CALLS = 20


def candidates(spec: dict[str, Any], m: int, device: Device, x_dtype: str) -> Iterator[tuple[Any, Plan]]:
    """Every variant that runs, and the plan it makes."""
    columns = spec["n_padded"] // 64
    tiles: list[Any] = []
    if few.DECODE_TOKENS < m <= 8 * few.row_tiles(spec, x_dtype, device.arch)[-1]:
        shapes = product((8, 12) if m <= 16 else (8,), (1, 2), (1, 2))
        tiles = [few.Decode(w, s, -(-columns // a), a) for w, s, a in shapes]
    elif m <= few.DECODE_TOKENS:
        tiles = [few.Decode(w, s, c) for w, s in product((4, 8, 16), (1, 2, 3)) for c in (columns, columns // 2)]
    if hopper.refuse(spec, device, x_dtype) is None:
        tiles += [w for w in hopper.TILES if hopper.refuse_tile(spec, device, x_dtype, w) is None]
    tiles += [t for t in tiled.TILES if tiled.refuse_tile(spec, device, x_dtype, t) is None]
    for tile in tiles:
        whole = isinstance(tile, few.Decode) or (isinstance(tile, Wgmma) and tile.deep > 1)
        cuts = [] if whole else [replace(tile, cut=True)]
        for variant in (tile, *cuts):
            try:
                yield variant, marlin_plan.plan(spec, m, device, x_dtype, variant=variant)
            except UnsupportedError:
                continue


def step_cost(spec: dict[str, Any], m: int, device: Device, variant: Any, us: float) -> float | None:
    """us of a step of 64 k of a wgmma tile, from the time of a product without cut tiles."""
    if not isinstance(variant, Wgmma) or variant.cut:
        return None
    waves = -(-wgmma.tiles(variant, spec["n_padded"], m) // variant.workers(device))
    return (us - wgmma.START) / (waves * -(-spec["k"] // wgmma.STEP // variant.deep))


def measure(session: Session, names: list[str], m: int, dtype: str) -> Iterator[tuple[float, Any, float | None]]:
    """(us, variant, us of a step), fastest first."""
    backend: Any = session._backend
    module = session.module(names[0])
    spec = backend.catalog.artifact.modules[names[0]]
    kind_x = as_device(np.random.default_rng(m).standard_normal((m, module.k)).astype(DTYPES[dtype]))
    kind_y = as_device(np.zeros((m, module.n), DTYPES[dtype]))
    kind = arrays.kind_of(kind_x)
    x, y = kind.operand(kind_x), kind.operand(kind_y)
    assert x.row_stride is not None
    assert y.row_stride is not None
    operands = {"x": x.pointer, "y": y.pointer, "ldx": x.row_stride, "ldy": y.row_stride}
    clock = torch_graph_time if dtype == "bfloat16" else graph_time
    rows = []
    for variant, plan in candidates(spec, m, backend.ready.facts, ACTIVATIONS[dtype]):
        bound = [backend.ready.bind(session.module(name), m, plan) for name in names]

        def call(i: int, bound: list[Any] = bound) -> None:
            stream = kind.stream(backend.index)
            lane = backend._lanes.of(stream)
            with lane.lock:
                bound[i % len(bound)].launch(stream, operands, 0, lane)

        us = clock(call, max(CALLS, len(names)))
        rows.append((us, variant, step_cost(spec, m, backend.ready.facts, variant, us)))
    return iter(sorted(rows, key=lambda row: row[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--element", default="u4b8", choices=["u4b8", "u4", "u8b128", "u8", "e4m3", "e2m1"])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--dtype", default="float16", choices=list(ACTIVATIONS))
    parser.add_argument("--scale")
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=[16, 32, 64, 128, 256])
    parser.add_argument("--shape", action="append", type=lambda s: Shape(*map(int, s.split("x"))), help="NxK")
    parser.add_argument("--show", type=int, default=6, help="candidates of each m")
    args = parser.parse_args()
    costs: dict[Wgmma, list[float]] = defaultdict(list)
    for shape in args.shape or [Shape(28672, 8192)]:
        q = random_linear(shape, args.element, args.group, args.scale or ACTIVATIONS[args.dtype])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "copies.safetensors"
            names, _ = write_copies(path, *marlin.pack(q))
            with Session(path) as session:
                backend: Any = session._backend
                for m in args.m:
                    rows = list(measure(session, names, m, args.dtype))
                    spec = backend.catalog.artifact.modules[names[0]]
                    chosen = marlin_plan.plan(spec, m, backend.ready.facts, ACTIVATIONS[args.dtype]).why
                    print(f"{shape.n} x {shape.k}, m = {m}, {args.element} g{args.group} {args.dtype}")
                    for us, variant, step in rows[: args.show]:
                        mark = "*" if chosen.startswith(f"{variant}:") else " "
                        print(f" {mark} {us:8.2f}  {'' if step is None else f'{step:.3f}':>6}  {variant}", flush=True)
                    for _, variant, step in rows:
                        if step is not None:
                            costs[variant].append(step)
    for tile, steps in costs.items():
        print(f"    {tile}: {median(steps):.3g},")


if __name__ == "__main__":
    main()
