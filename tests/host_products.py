"""Plans of Marlin tiles carried out on the host, stage by stage."""

from __future__ import annotations

from pathlib import Path
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
) -> np.ndarray:
    """y of a plan, whatever was in its memory before."""
    (m, k), flat, wanted = x.shape, marlin.expected({**spec, "experts": None}), marlin.expected(spec)
    memory = {suffix: aligned(tensor) for suffix, tensor in tensors.items()}
    memory |= {"x": aligned(x), "y": aligned(np.full((m, spec["n"]), np.nan, x.dtype))}
    memory |= {} if residual is None else {"residual": aligned(residual)}
    sizes = {name: getattr(made, name) for name in ("factors", "scratch", "gathered", "quantized")}
    memory |= {name: aligned(np.full(size, 0xFF, np.uint8)) for name, size in sizes.items()}
    memory |= {"counters": aligned(np.zeros(made.counters, np.uint32))}
    scalars = {**spec, "m": m, "ldx": k, "ldy": spec["n"], "ld_gathered": spec["k_padded"], "ld_quantized": padded(k)}
    scalars |= {"ld_residual": spec["n"], "each": int(rounding == "each")}
    stacked = {s: s in wanted and wanted[s][1] != flat[s][1] for s in tensors}
    at = {suffix: expert * (memory[suffix].nbytes // 3) for suffix in tensors if stacked[suffix]}
    for stage in made.stages:
        run(stage, memory, scalars, folder, **at)
    assert not memory["counters"].any()
    return memory["y"].view(x.dtype).reshape(m, spec["n"])
