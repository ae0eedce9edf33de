"""Plans carried out on the host, stage by stage."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from host_kernels import aligned, run
from warptile.kernels import marlin
from warptile.kernels.launch import Device, Plan
from warptile.kernels.quantize import padded

DEVICE = Device(arch=90, sms=6, shared=232448)
TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def carried_out(
    made: Plan,
    tensors: dict[str, np.ndarray],
    spec: dict[str, Any],
    x: np.ndarray,
    folder: Path,
    expert: int = 0,
    residual: np.ndarray | None = None,
    rounding: str = "once",
    layout: ModuleType = marlin,
    seed: int = 0,
    ldy: int = 0,
    shift: int = 0,
) -> np.ndarray:
    """y of a plan, whatever was in its memory before. Rows of y are ``ldy`` apart, where that is given, and begin
    ``shift`` elements behind a multiple of 256 bytes; nothing between or around them is written."""
    (m, k), n = x.shape, spec["n"]
    flat, wanted, ldy = layout.expected({**spec, "experts": None}), layout.expected(spec), ldy or n
    memory = {suffix: aligned(tensor) for suffix, tensor in tensors.items()}
    room = np.full((m + 2) * ldy + shift, np.nan, x.dtype)
    memory |= {"x": aligned(x), "y": aligned(room)}
    memory |= {} if residual is None else {"residual": aligned(residual)}
    sizes = {name: getattr(made, name) for name in ("factors", "scratch", "gathered", "quantized")}
    memory |= {name: aligned(np.full(size, 0xFF, np.uint8)) for name, size in sizes.items()}
    memory |= {"counters": aligned(np.zeros(made.counters, np.uint32))}
    scalars = {**spec, "m": m, "ldx": k, "ldy": ldy, "ld_gathered": spec["k_padded"], "ld_quantized": padded(k)}
    scalars |= {"ld_residual": n, "each": int(rounding == "each")}
    stacked = {s: s in wanted and wanted[s][1] != flat[s][1] for s in tensors}
    at = {suffix: expert * (memory[suffix].nbytes // 3) for suffix in tensors if stacked[suffix]}
    for stage in made.stages:
        run(stage, memory, scalars, folder, seed, **at, y=(ldy + shift) * x.itemsize)
    assert not memory["counters"].any()
    written = memory["y"].view(x.dtype)
    y = written[ldy + shift :][: m * ldy].reshape(m, ldy)[:, :n].copy()
    written[ldy + shift :][: m * ldy].reshape(m, ldy)[:, :n] = np.nan
    assert written.tobytes() == room.tobytes(), "a write beside y"
    return y
