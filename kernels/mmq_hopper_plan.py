"""Which tile of mmq_wgmma multiplies with strips on Hopper and x as it is: a function of (module, m, device) alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..formats.canonical import SCALE_DTYPES
from . import gather
from . import wgmma_plan as wgmma
from .factors import bias_type, refuse_parts, starts
from .launch import Device, Plan, Stage, fastest
from .mmq_strips import BLOCK, DEPTH, KINDS, ROWS
from .wgmma_plan import Wgmma

Spec = Mapping[str, Any]

FEATURES, WEIGHT_STAGES = 256, 2

# tokens: us of a step of 64 k of a tile; H200, 2026-11-29, q4_k, bf16.
STEP_COST = {64: 0.75, 128: 1.13}
TILES = tuple(Wgmma(FEATURES, tokens, 1) for tokens in STEP_COST)

X_DTYPES = ("f16", "bf16")


def refuse(spec: Spec, device: Device, x_dtype: str) -> str | None:
    """None if mmq_wgmma runs this module on this device, else why not."""
    if reason := wgmma.refuse(device):
        return reason
    if x_dtype not in X_DTYPES:
        return f"{' or '.join(X_DTYPES)} activations, not {x_dtype}"
    scales = KINDS[spec["kind"]].scales
    if not scales:
        return f"scales inside strips, which {spec['kind']} has beside them"
    if x_dtype == "f16" and scales[0][0] == "e8m0":
        return "bf16 activations: weights with scales up to 2^127 are out of f16's range"
    return refuse_parts(spec)


def choose(spec: Spec, m: int, device: Device, batch_invariant: bool) -> tuple[Wgmma, tuple[tuple[str, str], ...]]:
    """The tile of the least estimated time, and why not each other one."""
    every = [replace(w, cut=cut) for w in TILES for cut in (False, True)]
    refused = {str(w): "adds in an order that depends on m" for w in every if batch_invariant and w.cut}
    times = {
        w: wgmma.estimate(w, wgmma.tiles(w, spec["n_padded"], m), STEP_COST[w.tokens], spec["k_padded"], device)
        for w in every
        if str(w) not in refused
    }
    return fastest(times, refused)


def launch(spec: Spec, m: int, device: Device, x_dtype: str, w: Wgmma) -> Plan:
    """The product with one tile: x in the order of fragments, then the tiles."""
    count, steps = wgmma.tiles(w, spec["n_padded"], m), spec["k_padded"] // DEPTH
    blocks, split = wgmma.share(w, count, steps, device)
    pointers = ("strips", "global_scale", "bias", "gathered_map", "y", "residual", "scratch", "counters")
    extents = ("m", "n", "k_padded", "n_padded", "ldy", "ld_residual", "each")
    stage = Stage(
        kernel="mmq_wgmma",
        variant=variant(spec, x_dtype, w),
        target="sm_90a",
        grid=(blocks, 1, 1),
        block=w.threads,
        shared=shared(spec["kind"], w),
        args=(*pointers, *extents, bias_type(spec), *starts(spec), split),
        box=(w.tokens // w.cluster, wgmma.STEP),
        cluster=w.cluster,
        overlap=device.overlaps,
    )
    scratch, counters = wgmma.memory(w, blocks, split)
    return Plan(
        (gather.stage(gather.FRAGMENTS, m, spec["k_padded"], device), stage),
        f"{w}: {count} tiles on {device.sms} SMs take the least time by estimate",
        scratch=scratch,
        gathered=2 * m * spec["k_padded"],
        counters=counters,
    )


def variants(elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``launch`` can ask for, for building ahead."""
    yield "gather", (gather.FRAGMENTS,), "sm_90"
    device = Device(90, sms=1, shared=0, nvrtc=wgmma.NVRTC)
    for kind, x_dtype, w, scales in product(KINDS, X_DTYPES, TILES, ({}, {"global": "f32"})):
        spec = {"kind": kind, **scales}
        if (not elements or set(elements) & set(KINDS[kind].elements)) and refuse(spec, device, x_dtype) is None:
            yield "mmq_wgmma", variant(spec, x_dtype, w), "sm_90a"


def covering() -> Iterator[tuple[str, tuple[int, ...]]]:
    """What CI compiles: every kind, each tile and type of x with half of them, some with a factor."""
    seen: dict[int, int] = {}
    for kernel, made, target in variants():
        if target == "sm_90a":
            turn = seen[made[0]] = seen.get(made[0], -1) + 1
            if turn == made[0] % 4:
                yield kernel, made


def variant(spec: Spec, x_dtype: str, w: Wgmma) -> tuple[int, ...]:
    """The kernel's ``Variant``."""
    types = list(KINDS).index(spec["kind"]), list(SCALE_DTYPES).index(x_dtype)
    return *types, int("global" in spec), w.tokens, _stages(w)


def shared(kind: str, w: Wgmma) -> int:
    """sizeof(Shared) of the kernel, bytes."""
    weights = WEIGHT_STAGES * w.features // ROWS * KINDS[kind].strip
    return wgmma.shared(w, _stages(w), weights, 2 * _stages(w) + 2 * WEIGHT_STAGES + 2)


def _stages(w: Wgmma) -> int:
    """Stages of x."""
    return 4 if w.tokens > 64 else 8


assert BLOCK * 2 == FEATURES
