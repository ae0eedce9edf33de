"""Which tile of marlin_wgmma multiplies on Hopper: a function of (module, m, device) and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from . import marlin_scales as scales
from . import wgmma_plan as wgmma
from .factors import bias_type
from .launch import Device, Plan, Stage
from .marlin_launch import variant_of
from .wgmma_plan import STEP, Wgmma

Spec = Mapping[str, Any]

# us of a step of 64 k of a tile; H200, 2026-11-30, u4b8 in groups of 128, f16.
STEP_COST = {
    Wgmma(256, 16, 1, sums=True): 0.272,
    Wgmma(256, 16, 2): 0.283,
    Wgmma(128, 32, 2): 0.165,
    Wgmma(128, 32, 2, sums=True): 0.18,
    Wgmma(256, 32, 1, sums=True): 0.3,
    Wgmma(256, 32, 2): 0.311,
    Wgmma(128, 64, 2): 0.235,
    Wgmma(128, 64, 2, sums=True): 0.25,
    Wgmma(256, 64, 1, sums=True): 0.4,
    Wgmma(256, 64, 1): 0.42,
    Wgmma(256, 128, 1): 0.665,
    Wgmma(128, 128, 1, cluster=2): 0.385,
    Wgmma(128, 128, 1, cluster=2, sums=True): 0.39,
    Wgmma(128, 256, 1, cluster=2): 0.655,
    Wgmma(128, 64, 1, deep=2): 0.235,
    Wgmma(128, 64, 1, deep=3): 0.235,
    Wgmma(128, 128, 1, deep=2): 0.385,
}
TILES = tuple(STEP_COST)

RUN = 128
"""k of two steps, which are one run where k and groups are multiples of it."""


def must_scale_sums(spec: Spec, x_dtype: str) -> bool:
    """Whether scales would multiply 16-bit weights with more than one rounding, so that only sums can have them."""
    return bool(ELEMENTS[spec["element"]].is_float and scales.mixed(spec, x_dtype))


def may_scale_sums(spec: Spec, x_dtype: str) -> bool:
    """Whether scales may act on fp32 sums of a run. Integers in groups of 64 have more scales than that is worth, but
    for those of another type, which take several instructions where they multiply weights."""
    if _scale_rows(spec) != 1 or scales.exact(spec, x_dtype):
        return False
    return spec["group"] % RUN == 0 or scales.mixed(spec, x_dtype)


def refuse(spec: Spec, device: Device, x_dtype: str) -> str | None:
    """None if marlin_wgmma runs this module on this device, else why not."""
    if reason := wgmma.refuse(device):
        return reason
    if spec["group"] not in (-1, 16, 32) and spec["group"] % STEP:
        return f"takes groups of 16, 32 and multiples of {STEP}, not {spec['group']}"
    if spec["group"] in (16, 32) and must_scale_sums(spec, x_dtype):
        return f"scales sums of {STEP} k, and {spec['scale']} scales of every {spec['group']} would round in {x_dtype}"
    return None


def refuse_tile(spec: Spec, device: Device, x_dtype: str, w: Wgmma) -> str | None:
    """None if the tile multiplies scales where this module may have them and its ring of stages fits into shared
    memory, else why not."""
    if w.sums and not may_scale_sums(spec, x_dtype):
        return "scales sums of a run of k, within which this module has other scales, or exact products with weights"
    if not w.sums and must_scale_sums(spec, x_dtype):
        return f"{spec['scale']} scales multiply fp32 sums, of which this tile has one set"
    if reason := wgmma.refuse_cluster(w, spec["n_padded"], device):
        return reason
    if _stages(spec, w, device.shared) is None:
        return f"two stages need {shared(spec, w, 2)} bytes of shared memory, a block has {device.shared}"
    return None


def one_order(spec: Spec, x_dtype: str, w: Wgmma) -> bool:
    """Whether a row's sums have the same bits in every tile for which this is true."""
    return not w.cut and w.ways == 1 and w.deep == 1 and w.sums == must_scale_sums(spec, x_dtype)


def estimate(spec: Spec, m: int, device: Device, w: Wgmma) -> float:
    """us on an H200, roughly."""
    step = STEP_COST[replace(w, cut=False)]
    return wgmma.estimate(w, wgmma.tiles(w, spec["n_padded"], m), step, spec["k"], device)


def launch(spec: Spec, m: int, device: Device, x_dtype: str, gather: Stage | None, w: Wgmma) -> Plan:
    """The product with one tile; ``gather`` goes before it where x cannot be copied as it lies."""
    x, k = ("gathered", "k_padded") if gather else ("x", "k")
    count, runs = wgmma.tiles(w, spec["n_padded"], m), -(-spec[k] // (_run(spec, w) * STEP))
    blocks, split = wgmma.share(w, count, runs, device)
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
        box=(w.tokens // w.cluster, STEP),
        cluster=w.blocks,
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
    for w, k in product(TILES, (RUN, RUN // 2)):
        if spec["group"] > k:  # k is padded to groups
            continue
        shaped = {**spec, "n_padded": w.features * w.cluster, "k_padded": k}
        stages = _stages(spec, w, device.shared)
        if stages is not None and refuse_tile(shaped, device, x_dtype, w) is None:
            yield variant(shaped, x_dtype, w, stages)


def variant(spec: Spec, x_dtype: str, w: Wgmma, stages: int) -> tuple[int, ...]:
    """The kernel's ``Variant``."""
    shape = w.features, w.tokens, w.ways, w.cluster, w.deep, stages
    return variant_of(spec, x_dtype, _scale_rows(spec), _run(spec, w), int(w.sums), *shape)


def shared(spec: Spec, w: Wgmma, stages: int) -> int:
    """sizeof(Shared) of the kernel, bytes."""
    bits = ELEMENTS[spec["element"]].bits
    scale = 0 if scales.block(spec) else SCALE_DTYPES[spec["scale"]].itemsize
    rows = _scale_rows(spec) * w.features * (8 * scale + (bits if spec["zero"] else 0)) // 8 or 16
    return wgmma.shared(w, stages, stages * (STEP * w.features * bits // 8 + rows), 2 * stages + 4)


def _scale_rows(spec: Spec) -> int:
    """Rows of scales in 64 k; 0 for one scale for all of k, which multiplies finished sums (zero points need a row)."""
    if spec["group"] == -1 and spec["zero"] is None:
        return 0
    return STEP // spec["group"] if spec["group"] in (16, 32) else 1


def _run(spec: Spec, w: Wgmma) -> int:
    """Steps of a run, the unit of cuts and, where there are, of scaled sums."""
    groups = (spec["group"],) if w.sums else ()
    return 2 if all(extent % RUN == 0 for extent in (spec["k_padded"], *groups)) else 1


def _stages(spec: Spec, w: Wgmma, most: int) -> int | None:
    """The most stages that fit, a power of two."""
    least = 4 if w.deep > 1 else 2  # whose place parts of sums take
    return next((stages for stages in (8, 4, 2) if stages >= least and shared(spec, w, stages) <= most), None)
