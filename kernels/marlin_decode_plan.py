"""How marlin_decode divides a product of up to 8 rows, of one matrix or of two, and when another kernel is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formats.canonical import ELEMENTS
from . import marlin_hopper_plan as hopper
from . import marlin_scales as scales
from .factors import bias_type
from .launch import Device, Part, Plan, Stage
from .marlin_launch import args_of, run_of, tensors_of, variant_of

Spec = Mapping[str, Any]

DECODE_TOKENS = 8

CHUNK = 8
"""Numbers of x in one copy of 16 bytes: rows of another length are gathered."""

LARGE = 1 << 27
"""Weights from which on wgmma reads groups of 16 faster than decode: 44 us for 53 at 28672 x 8192, as fast at 14336 x
4096 (H200)."""


@dataclass(frozen=True)
class Decode:
    """How marlin_decode divides the work: ``columns`` x ``splits`` blocks of ``warps`` warps, which also split k."""

    warps: int
    splits: int
    columns: int

    def __str__(self) -> str:
        return f"decode, {self.columns} x {self.splits} blocks of {self.warps} warps"


def decode_run(spec: Spec) -> int:
    return run_of(spec, 32 // ELEMENTS[spec["element"]].bits)


def parts_of_pair(spec: Spec, arch: int) -> tuple[int, ...]:
    """How many parts of k a warp of a pair may take: on sm_75 zero points of 4-bit codes leave registers for one."""
    return (1,) if arch < 80 and spec["zero"] and ELEMENTS[spec["element"]].bits == 4 else (1, 2)


def refuse_decode(
    spec: Spec, rows: int, device: Device, x_dtype: str, batch_invariant: bool = False, whole: bool = False
) -> str | None:
    """None if marlin_decode multiplies so many rows, else why another kernel does."""
    if batch_invariant:
        return "its sums depend on m"
    if rows > DECODE_TOKENS:
        return f"serves up to {DECODE_TOKENS} rows, this has {rows}"
    integers = ELEMENTS[spec["element"]].bits == 4 and not ELEMENTS[spec["element"]].is_float
    large = spec["n_padded"] * spec["k_padded"] >= LARGE
    wgmma = x_dtype != "f32" and not whole and hopper.refuse(spec, device, x_dtype) is None
    if spec["group"] == 16 and integers and large and wgmma:
        return "slower than wgmma where large matrices have a scale for every 16 k"
    return None


def choose_decode(spec: Spec, device: Device) -> Decode:
    """About 16 warps for each SM, but 4 to 16 in a block and two loop bodies of k for each."""
    tiles = spec["n_padded"] // 64
    bodies = max(1, spec["k_padded"] // (16 * 32 // ELEMENTS[spec["element"]].bits))
    wide = spec["scale"] == "f32" and not scales.block(spec)
    many_scales = wide and 0 < decode_run(spec) < 32 // ELEMENTS[spec["element"]].bits
    most = 8 if many_scales else 16
    warps = 4
    while warps < most and 2 * warps * tiles <= 18 * device.sms and 2 * warps <= bodies:
        warps *= 2
    splits = max(1, min(device.sms // tiles, bodies // (2 * warps)))
    if spec["element"] == "e2m1" and splits == 1 and 4 * warps <= bodies:
        # Decoding takes about as long as reading: the SM with the most tiles decides, and half tiles share out evenly.
        # H200, 2026-11-29, 28672 x 8192, m = 1: e8m0 47.7 us, uncut over 51.5; e4m3 and a global 50.9, uncut over 54.5.
        busiest = [-(-tiles * cuts // device.sms) / cuts for cuts in (1, 2)]
        splits = 2 if busiest[1] < 0.95 * busiest[0] else 1
    blocks = 2 * device.sms
    if device.overlaps and (warps, splits) == (4, 1) and 5 * blocks < 3 * tiles <= 6 * blocks and decode_run(spec) == 8:
        # Two blocks of 8 warps on each SM, most with two tiles, not three or four of 4 warps. H200, 28672 x 8192,
        # m = 1 / 8: 32.3 / 34.2 us for 33.0 / 34.4; groups of 32 take 37.3 for 36.3.
        return Decode(8, 1, blocks)
    waves = -(-tiles // (4 * device.sms))
    return Decode(warps, splits, -(-tiles // waves))


def decode(
    part: Part,
    rows: int,
    device: Device,
    x_dtype: str,
    before: Stage | None,
    d: Decode,
    up: Part | None = None,
    whole: bool = False,
) -> Plan:
    """The launches of marlin_decode; with ``up`` of a pair, whose first matrix is ``part``."""
    spec, tiles = part.spec, -(-part.n // 64) if up else part.spec["n_padded"] // 64
    second = (*tensors_of(up or part, "up."), bias_type((up or part).spec))
    # A pair has eight warps or more, and k in as many parts as one matrix has.
    warps, matrices = (max(8, d.warps), 2) if up else (d.warps, 1)
    buffers = 1 if d.columns >= tiles else 2
    stage = Stage(
        kernel="marlin_decode",
        variant=variant_of(spec, x_dtype, decode_run(spec), 2 * d.warps // warps if up else 0, int(whole)),
        target=f"sm_{device.arch}",
        grid=(d.columns, d.splits, 1),
        block=32 * warps,
        shared=buffers * matrices * d.warps * rows * 68 * 4,
        args=(*args_of(part, rows, before is not None, whole), *second),
        overlap=device.overlaps,
    )
    cut = d.splits > 1
    return Plan(
        (before, stage) if before else (stage,),
        f"{d}: at m <= {DECODE_TOKENS} the time is that of reading the weights once",
        scratch=4 * d.splits * matrices * rows * tiles * 64 if cut else 0,
        counters=tiles if cut else 0,
        rejected=(("tiled", f"its smallest tile has 16 tokens, this has {rows}"),),
    )
