"""Which tile of marlin_wgmma multiplies on Hopper: a function of (module, m, device) and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from . import marlin_scales as scales
from . import wgmma_plan as wgmma
from .factors import bias_type
from .launch import Device, Plan, Stage
from .marlin_launch import variant_of
from .wgmma_plan import STEP, Wgmma

Spec = Mapping[str, Any]

# (features, tokens, ways): us of a step of 64 k of a tile; H200, 2026-11-29, u4b8 in groups of 128, f16.
STEP_COST = {
    (256, 16, 2): 0.32,
    (128, 32, 2): 0.205,
    (256, 32, 1): 0.38,
    (256, 32, 2): 0.37,
    (512, 32, 1): 0.67,
    (128, 64, 2): 0.26,
    (256, 64, 1): 0.45,
    (256, 128, 1): 0.64,
}
TILES = tuple(Wgmma(*shape) for shape in STEP_COST)


SUM_TOKENS = 64
"""Most tokens of a tile whose sums of 64 k have scales: a second set of sums takes as many registers again."""


def scales_sums(spec: Spec, x_dtype: str) -> bool:
    """Whether scales act on fp32 sums of 64 k, as they would multiply 16-bit weights with more than one rounding."""
    return bool(ELEMENTS[spec["element"]].is_float and scales.mixed(spec, x_dtype))


def refuse(spec: Spec, device: Device, x_dtype: str) -> str | None:
    """None if marlin_wgmma runs this module on this device, else why not."""
    if reason := wgmma.refuse(device):
        return reason
    if spec["group"] not in (-1, 16, 32) and spec["group"] % STEP:
        return f"takes groups of 16, 32 and multiples of {STEP}, not {spec['group']}"
    if spec["group"] in (16, 32) and scales_sums(spec, x_dtype):
        return f"scales sums of {STEP} k, and {spec['scale']} scales of every {spec['group']} would round in {x_dtype}"
    return None


def refuse_tile(spec: Spec, device: Device, x_dtype: str, w: Wgmma) -> str | None:
    """None if the tile's ring of stages fits into shared memory and its sums into registers, else why not."""
    if w.tokens > SUM_TOKENS and scales_sums(spec, x_dtype):
        return f"{spec['scale']} scales multiply fp32 sums, for which registers reach up to {SUM_TOKENS} tokens"
    if _stages(spec, w, device.shared) is None:
        return f"two stages need {shared(spec, w, 2)} bytes of shared memory, a block has {device.shared}"
    return None


def estimate(spec: Spec, m: int, device: Device, w: Wgmma) -> float:
    """us on an H200, roughly."""
    step = STEP_COST[w.features, w.tokens, w.ways]
    return wgmma.estimate(w, wgmma.tiles(w, spec["n_padded"], m), step, spec["k"], device)


def launch(spec: Spec, m: int, device: Device, x_dtype: str, gather: Stage | None, w: Wgmma) -> Plan:
    """The product with one tile; ``gather`` goes before it where x cannot be copied as it lies."""
    x, k = ("gathered", "k_padded") if gather else ("x", "k")
    count, steps = wgmma.tiles(w, spec["n_padded"], m), -(-spec[k] // STEP)
    blocks, split = wgmma.share(w, count, steps, device)
    stages = _stages(spec, w, device.shared)
    assert stages is not None
    weights = ("qweight", "scales", "qzeros", scales.factors(spec), "bias")
    operands = (*weights, f"{x}_map", "y", "residual", "scratch", "counters")
    extents = ("m", "n", k, "n_padded", "group", "ldy", "ld_residual", "each")
    stage = Stage(
        kernel="marlin_wgmma",
        variant=variant(spec, x_dtype, w, stages),
        target="sm_90a",
        grid=(blocks, 1, 1),
        block=w.threads,
        shared=shared(spec, w, stages),
        args=(*operands, *extents, bias_type(spec), *scales.args(spec), split),
        box=(w.tokens, STEP),
        overlap=device.overlaps,
    )
    scratch, counters = wgmma.memory(w, blocks, split)
    return Plan(
        (gather, stage) if gather else (stage,),
        f"{w}: {count} tiles on {device.sms} SMs take the least time by estimate",
        scratch=scratch,
        gathered=2 * m * spec["k_padded"] if gather else 0,
        counters=counters,
    )


def variants(spec: Spec, x_dtype: str, device: Device) -> Iterator[tuple[int, ...]]:
    """Template arguments of every tile that runs a module on a device."""
    for w in TILES:
        stages = _stages(spec, w, device.shared)
        if stages is not None and refuse_tile(spec, device, x_dtype, w) is None:
            yield variant(spec, x_dtype, w, stages)


def variant(spec: Spec, x_dtype: str, w: Wgmma, stages: int) -> tuple[int, ...]:
    """The kernel's ``Variant``."""
    return variant_of(spec, x_dtype, _scale_rows(spec), w.features, w.tokens, w.ways, stages)


def shared(spec: Spec, w: Wgmma, stages: int) -> int:
    """sizeof(Shared) of the kernel, bytes."""
    bits = ELEMENTS[spec["element"]].bits
    scale = 0 if scales.block(spec) else SCALE_DTYPES[spec["scale"]].itemsize
    rows = _scale_rows(spec) * w.features * (8 * scale + (bits if spec["zero"] else 0)) // 8 or 16
    return wgmma.shared(w, stages, stages * (STEP * w.features * bits // 8 + rows), 2 * stages + 4)


def _scale_rows(spec: Spec) -> int:
    """Rows of scales in 64 k; 0 for a float's one scale for all of k, which multiplies the finished sum."""
    if spec["group"] == -1 and ELEMENTS[spec["element"]].is_float:
        return 0
    return STEP // spec["group"] if spec["group"] in (16, 32) else 1


def _stages(spec: Spec, w: Wgmma, most: int) -> int | None:
    """The most stages that fit, a power of two."""
    return next((stages for stages in (8, 4, 2) if shared(spec, w, stages) <= most), None)
