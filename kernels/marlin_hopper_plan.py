"""Which tile of marlin_wgmma multiplies on Hopper: a function of (module, m, device) and nothing else.

A tile is ``features`` x ``tokens``; ``ways`` groups of warps share its features and take every ways-th 64 k. Tiles go
round a grid of one block for each SM; with ``cut`` those of the last wave are cut along k, so that every SM has its
share, and the warps that finish last add the parts in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from . import marlin_scales as scales
from .launch import Device, Plan, Stage

Spec = Mapping[str, Any]

NVRTC = (13, 3)
"""Compilers before this one may overwrite the A registers of a wgmma that still runs."""

STEP = 64  # k of a stage of the kernel's ring
WARP_FEATURES = 32


@dataclass(frozen=True)
class Wgmma:
    """A block's shape in marlin_wgmma."""

    features: int
    tokens: int
    ways: int
    cut: bool = False

    def __str__(self) -> str:
        ways = f", k in {self.ways} ways" if self.ways > 1 else ""
        return f"wgmma {self.features} x {self.tokens}{ways}{', last wave cut' if self.cut else ''}"


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
START = 6.0
"""us of a launch, its first loads and its last stores."""
CUT, SUMS = 2.0, 2800
"""us of adding the parts of cut tiles, and a tile's sums that lengthen it by another us."""

TILES = tuple(Wgmma(*shape) for shape in STEP_COST)


SUM_TOKENS = 64
"""Most tokens of a tile whose sums of 64 k have scales: a second set of sums takes as many registers again."""


def scales_sums(spec: Spec, x_dtype: str) -> bool:
    """Whether scales act on fp32 sums of 64 k, as they would multiply 16-bit weights with more than one rounding."""
    return bool(ELEMENTS[spec["element"]].is_float and scales.mixed(spec, x_dtype))


def refuse(spec: Spec, device: Device, x_dtype: str) -> str | None:
    """None if marlin_wgmma runs this module on this device, else why not."""
    if device.arch != 90:
        return f"needs sm_90, this is sm_{device.arch}"
    if device.nvrtc < NVRTC:
        return f"needs NVRTC {NVRTC[0]}.{NVRTC[1]} or newer, this is {device.nvrtc[0]}.{device.nvrtc[1]}"
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
    tiles, steps = _tiles(spec, m, w), -(-spec["k"] // STEP)
    waves = tiles / device.sms if w.cut else -(-tiles // device.sms)
    add = CUT + w.features * w.tokens / SUMS if w.cut else 0
    return float(START + waves * steps * STEP_COST[w.features, w.tokens, w.ways] + add)


def launch(spec: Spec, m: int, device: Device, x_dtype: str, gather: Stage | None, w: Wgmma) -> Plan:
    """The product with one tile; ``gather`` goes before it where x cannot be copied as it lies."""
    x, k = ("gathered", "k_padded") if gather else ("x", "k")
    tiles, steps = _tiles(spec, m, w), -(-spec[k] // STEP)
    split = tiles % device.sms if w.cut else 0
    blocks = min(device.sms, tiles * steps if split else tiles)
    if split * steps < blocks or split * steps * blocks >= 2**32:  # a share for each block, divided in 32 bits
        split, blocks = 0, min(device.sms, tiles)
    stages = _stages(spec, w, device.shared)
    assert stages is not None
    bias_type = list(SCALE_DTYPES).index(spec["bias"]) if spec["bias"] else 0
    operands = (
        "qweight",
        "scales",
        "qzeros",
        scales.factors(spec),
        "bias",
        f"{x}_map",
        "y",
        "residual",
        "scratch",
        "counters",
    )
    extents = ("m", "n", k, "n_padded", "group", "ldy", "ld_residual", "each")
    stage = Stage(
        kernel="marlin_wgmma",
        variant=variant(spec, x_dtype, w, stages),
        target="sm_90a",
        grid=(blocks, 1, 1),
        block=w.features * w.ways + 128,
        shared=shared(spec, w, stages),
        args=(*operands, *extents, bias_type, *scales.args(spec), split),
        box=(w.tokens, STEP),
        overlap=device.overlaps,
    )
    return Plan(
        (gather, stage) if gather else (stage,),
        f"{w}: {tiles} tiles on {device.sms} SMs take the least time by estimate",
        scratch=8 * blocks * w.features * w.tokens if split else 0,
        gathered=2 * m * spec["k_padded"] if gather else 0,
        counters=split * w.features // WARP_FEATURES,
    )


def variants(spec: Spec, x_dtype: str, most: int) -> Iterator[tuple[int, ...]]:
    """Template arguments of every tile for a module and ``most`` bytes of shared memory."""
    for w in TILES:
        stages = _stages(spec, w, most)
        if stages is not None and (w.tokens <= SUM_TOKENS or not scales_sums(spec, x_dtype)):
            yield variant(spec, x_dtype, w, stages)


def variant(spec: Spec, x_dtype: str, w: Wgmma, stages: int) -> tuple[int, ...]:
    """The kernel's ``Variant``."""
    names, dtypes = list(ELEMENTS), list(SCALE_DTYPES)
    types = names.index(spec["element"]), dtypes.index(x_dtype), dtypes.index(spec["scale"])
    kind = int(spec["zero"] is not None), _scale_rows(spec), int(scales.block(spec)), int(scales.factor(spec))
    return *types, *kind, w.features, w.tokens, w.ways, stages


def shared(spec: Spec, w: Wgmma, stages: int) -> int:
    """sizeof(Shared) of the kernel, bytes."""
    bits = ELEMENTS[spec["element"]].bits
    scale = 0 if scales.block(spec) else SCALE_DTYPES[spec["scale"]].itemsize
    rows = _scale_rows(spec) * w.features * (8 * scale + (bits if spec["zero"] else 0)) // 8 or 16
    stage = w.tokens * STEP * 2 + STEP * w.features * bits // 8 + rows
    out = w.features // WARP_FEATURES * min(w.tokens, 32) * WARP_FEATURES * 2
    sums = 4 * w.tokens * w.features if w.ways > 1 else 16
    return -(-(stages * (stage + 16) + out + sums + 16) // 1024) * 1024


def _tiles(spec: Spec, m: int, w: Wgmma) -> int:
    tiles: int = -(-m // w.tokens) * -(-spec["n_padded"] // w.features)
    return tiles


def _scale_rows(spec: Spec) -> int:
    """Rows of scales in 64 k; 0 for a float's one scale for all of k, which multiplies the finished sum."""
    if spec["group"] == -1 and ELEMENTS[spec["element"]].is_float:
        return 0
    return STEP // spec["group"] if spec["group"] in (16, 32) else 1


def _stages(spec: Spec, w: Wgmma, most: int) -> int | None:
    """The most stages that fit, a power of two."""
    return next((stages for stages in (8, 4, 2) if shared(spec, w, stages) <= most), None)
