"""Which tiles of marlin_tiled multiply with a Marlin module: their shapes, what they take, whom they serve.

A tile is refused where its ring does not fit into shared memory, or where its loop would spill: compilers were asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formats.canonical import ELEMENTS
from . import marlin_scales as scales
from .launch import STATIC, Device, Part, Plan, Stage
from .marlin_launch import args_of, run_of, variant_of

Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Tiled:
    """A block's shape in marlin_tiled: ``wn`` x ``wm`` warps of 16 ``columns`` features x 8 ``blocks`` tokens, the
    other warps along k; ``cut`` cuts the tiles of the last wave along k so that every SM has its share."""

    blocks: int
    columns: int
    wn: int
    wm: int
    cut: bool = False

    @property
    def wk(self) -> int:
        return 8 // (self.wn * self.wm)

    @property
    def features(self) -> int:
        return 16 * self.columns * self.wn

    @property
    def tokens(self) -> int:
        return 8 * self.blocks * self.wm

    @property
    def shared(self) -> int:
        stage = self.tokens * 128 * self.wk
        return max(stage * (3 if stage > 16384 else 4), self.tokens * (self.features + 8) * 2)

    def __str__(self) -> str:
        ways = f", k in {self.wk} ways" if self.wk > 1 else ""
        return f"tile {self.features} x {self.tokens}{ways}{', last wave cut' if self.cut else ''}"


# (blocks, columns, wn): us of a step of 64 k a warp, measured on an H200 with 4-bit codes. Only ratios matter.
STEP_COST = {
    (2, 4, 1): 0.84,
    (2, 4, 2): 0.78,
    (4, 4, 1): 1.25,
    (4, 4, 2): 1.10,
    (4, 2, 8): 0.95,
    (4, 4, 4): 1.05,
    (8, 2, 8): 0.98,
    (8, 4, 2): 1.58,
    (8, 4, 4): 1.50,
    (16, 2, 4): 1.53,
    (16, 2, 8): 1.43,
}
START, CUT = 5.0, 8.0
"""us of a launch and its first loads, and of adding the parts of cut tiles."""

TILES = tuple(Tiled(blocks, columns, wn, 1) for blocks, columns, wn in STEP_COST)


def _resident(spec: Spec, x_dtype: str, t: Tiled, whole: bool) -> int:
    """Blocks on one SM."""
    lean = ELEMENTS[spec["element"]].bits == 4 and run_of(spec, 4) != 1 and not scales.mixed(spec, x_dtype, whole)
    return 2 if t.blocks * t.columns <= 8 and lean else 1


def refuse_tile(spec: Spec, device: Device, x_dtype: str, t: Tiled, whole: bool = False) -> str | None:
    """None if the tile runs this module on this device, else why not."""
    if t.shared + STATIC > device.shared:
        return f"needs {t.shared + STATIC} bytes of shared memory, a block has {device.shared}"
    mixed, run = scales.mixed(spec, x_dtype, whole), run_of(spec, 4)
    sums, eights = t.blocks * t.columns, ELEMENTS[spec["element"]].bits == 8
    if sums > 16 and mixed:
        of = "whole" if whole else x_dtype
        return f"{spec['scale']} scales multiply {of} sums in fp32, which leaves too few registers"
    if sums > 16 and run == 1 and spec["zero"] and eights:
        return "zero points of every 16 k and 8-bit codes take too many registers"
    if sums > 16 and run and spec["zero"] and eights and x_dtype == "bf16" and t.columns == 4:
        return "zero points of 8 bits in bf16 take too many registers"
    if sums > 16 and run == 1 and t.wk > 2 and not scales.exact(spec, x_dtype):
        return "scales of every 16 k and k in more than two ways take too many registers"
    if sums > 8 and mixed and run == 1:
        if not scales.bytes_each(spec):
            return f"{spec['scale']} scales of every 16 k and fp32 sums they multiply take too many registers"
        if x_dtype == "f32" and (t.columns == 4 or spec["scale"] == "e8m0"):
            return f"{spec['scale']} scales of every 16 k and sums of pairs of rows take too many registers"
    if sums > 8 and mixed and 0 < run <= 2 and eights and t.columns == 4:
        return "8-bit codes and fp32 sums that scales of every 16 or 32 k multiply take too many registers"
    if device.arch < 80 and mixed and 0 < run <= 2:
        zeros = spec["zero"] and eights and spec["scale"] == "f32"
        if sums > 8 or (zeros and run == 1 and t.columns == 4):
            return "fp32 sums of every 16 or 32 k and two instructions for one take too many registers"
    return None


def _work(spec: Spec, m: int, t: Tiled) -> tuple[int, int, int]:
    """(tiles along m, tiles along n, steps of k) of a product."""
    return -(-m // t.tokens), -(-spec["n_padded"] // t.features), -(-spec["k_padded"] // (64 * t.wk))


def estimate(spec: Spec, m: int, device: Device, t: Tiled) -> float:
    """us on an H200, roughly."""
    rows, columns, steps = _work(spec, m, t)
    tiles = rows * columns
    waves = tiles / device.sms if t.cut else -(-tiles // device.sms)
    return START + waves * steps * STEP_COST[t.blocks, t.columns, t.wn] + (CUT if t.cut else 0)


def variant(spec: Spec, x_dtype: str, t: Tiled, whole: bool) -> tuple[int, ...]:
    return variant_of(spec, x_dtype, run_of(spec, 4), t.blocks, t.columns, t.wn, t.wm, int(whole))


def launch(
    spec: Spec, rows: int, device: Device, x_dtype: str, before: Stage | None, t: Tiled, whole: bool = False
) -> Plan:
    down, across, steps = _work(spec, rows, t)
    blocks = device.sms * _resident(spec, x_dtype, t, whole)
    waves, rest = divmod(down * across, blocks)
    streams = min(blocks, rest * steps) if t.cut and rest * steps * blocks < 2**32 else rest
    stage = Stage(
        kernel="marlin_tiled",
        variant=variant(spec, x_dtype, t, whole),
        target=f"sm_{device.arch}",
        grid=(blocks if waves else streams, 1, 1),
        block=256,
        shared=t.shared,
        args=(*args_of(Part(spec, 0, spec["n"]), rows, before is not None, whole), down, steps, waves, streams),
        overlap=device.overlaps,
    )
    cut = streams > rest
    return Plan(
        (before, stage) if before else (stage,),
        f"{t}: {down} x {across} tiles on {device.sms} SMs take the least time by estimate",
        scratch=8 * streams * t.features * t.tokens if cut else 0,
        counters=rest if cut else 0,
    )
