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
from .wgmma_plan import SHARED, Wgmma

Spec = Mapping[str, Any]

# us of a step of 64 k of a tile, for q4_0, other lean kinds, the rest; H200, 2026-11-30, q4_0, mxfp4 and q4_k, q6_k.
STEP_COST = {
    Wgmma(256, 16, 1): (0.37, 0.37, 0.6),
    Wgmma(512, 16, 1): (0.71, 0.71, 1.2),
    Wgmma(256, 32, 1): (0.41, 0.41, 0.62),
    Wgmma(256, 64, 1): (0.51, 0.51, 0.71),
    Wgmma(256, 128, 1): (0.71, 0.76, 0.93),
    Wgmma(128, 256, 1, cluster=2): (0.72, 0.72, 0.8),
}
TILES = tuple(STEP_COST)

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


def refuse_tile(spec: Spec, device: Device, w: Wgmma) -> str | None:
    """None if the tile's stages fit into shared memory and its cluster into the strips, else why not."""
    if reason := wgmma.refuse_cluster(w, spec["n_padded"], device):
        return reason
    needs = shared(spec["kind"], w)
    return f"needs {needs} bytes of shared memory, a block has {SHARED}" if needs > SHARED else None


def _multiplies_exactly(spec: Spec) -> bool:
    """Whether codes times their scales are numbers of 16 bits: e2m1."""
    return KINDS[spec["kind"]].scales[0][0] in ("e8m0", "e4m3")


def _lean(spec: Spec, x_dtype: str) -> bool:
    """Whether two multiplications make weights of a pair of codes: exact ones, or one scale of the type of x."""
    kind = KINDS[spec["kind"]]
    return _multiplies_exactly(spec) or (x_dtype == "f16" and len(kind.scales) == 1 and "iq4" not in kind.elements)


def fewest(spec: Spec, x_dtype: str) -> int:
    """Rows from which x as it is takes no longer than x in int8, whose tiles have 16, 32, 64 tokens and up.

    Int8 multiplies e2m1 by table, and sums of 16 k twice as often as those of 32.
    """
    if _multiplies_exactly(spec):
        return 9
    return 17 if _lean(spec, x_dtype) or KINDS[spec["kind"]].scales[0][1] == 16 else 33


def estimate(spec: Spec, m: int, device: Device, x_dtype: str, w: Wgmma) -> float:
    """us on an H200, roughly."""
    count = wgmma.tiles(w, spec["n_padded"], m)
    step = STEP_COST[replace(w, cut=False)][2 if not _lean(spec, x_dtype) else 0 if spec["kind"] == "q4_0" else 1]
    return wgmma.estimate(w, count, step, spec["k_padded"], device)


def choose(
    spec: Spec, m: int, device: Device, x_dtype: str, batch_invariant: bool
) -> tuple[Wgmma, tuple[tuple[str, str], ...]]:
    """The tile of the least estimated time, and why not each other one."""
    times: dict[Wgmma, float] = {}
    refused: dict[str, str] = {}
    for w in (replace(w, cut=cut) for w in TILES for cut in (False, True)):
        if why := refuse_tile(spec, device, w):
            refused[str(w)] = why
        elif batch_invariant and w.cut:
            refused[str(w)] = "adds in an order that depends on m"
        else:
            times[w] = estimate(spec, m, device, x_dtype, w)
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
    device = Device(90, sms=2, shared=0, nvrtc=wgmma.NVRTC)
    for kind, x_dtype, w, scales in product(KINDS, X_DTYPES, TILES, ({}, {"global": "f32"})):
        spec = {"kind": kind, "n_padded": w.features * w.cluster, **scales}
        wanted = not elements or set(elements) & set(KINDS[kind].elements)
        if wanted and refuse(spec, device, x_dtype) is None and refuse_tile(spec, device, w) is None:
            yield "mmq_wgmma", variant(spec, x_dtype, w), "sm_90a"


def covering() -> Iterator[tuple[str, tuple[int, ...]]]:
    """What CI compiles: of every kind three or four, which take turns among types of x, tiles and factors."""
    seen: dict[int, int] = {}
    for kernel, made, target in variants():
        if target == "sm_90a":
            turn = seen[made[0]] = seen.get(made[0], -1) + 1
            if turn % 7 == made[0] % 7:
                yield kernel, made


def variant(spec: Spec, x_dtype: str, w: Wgmma) -> tuple[int, ...]:
    """The kernel's ``Variant``."""
    types = list(KINDS).index(spec["kind"]), list(SCALE_DTYPES).index(x_dtype)
    return *types, int("global" in spec), w.features, w.tokens, w.cluster, *_stages(spec["kind"], w)


def shared(kind: str, w: Wgmma, stages: tuple[int, int] | None = None) -> int:
    """sizeof(Shared) of the kernel, bytes."""
    x, weights = stages or _stages(kind, w)
    return wgmma.shared(w, x, weights * w.features // ROWS * KINDS[kind].strip, 2 * x + 2 * weights + 2)


def _stages(kind: str, w: Wgmma) -> tuple[int, int]:
    """Stages of x and of weights: more where tokens are few and time is memory's."""
    if w.tokens > 32:
        return (8, 2) if w.tokens == 64 else (4, 2)
    every = ((8, 4), (4, 4), (8, 2), (4, 2))
    return next((pair for pair in every if shared(kind, w, pair) <= SHARED), every[-1])


assert all(w.features % BLOCK == 0 for w in TILES)
