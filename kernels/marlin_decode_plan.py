"""How marlin_decode divides a product of up to 8 rows, of one matrix or of two, or on Hopper of up to 32 rows of one,
and when another kernel is better."""

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
"""Most rows where x is float32, whole numbers, or multiplied with a pair of matrices, and elsewhere than on Hopper."""

RED = 68
"""Floats of a row of sums in shared memory, as in the kernel."""

CHUNK = 8
"""Numbers of x in one copy of 16 bytes: rows of another length are gathered."""

LARGE = 1 << 27
"""Weights from which on wgmma is faster for more than 8 rows, and in groups of 16 for any (H200: 44 us for 53 at 28672
x 8192, as fast at 14336 x 4096)."""


@dataclass(frozen=True)
class Decode:
    """How marlin_decode divides the work: ``columns`` x ``splits`` blocks of ``warps`` warps, which also split k; a
    block takes ``abreast`` tiles at once."""

    warps: int
    splits: int
    columns: int
    abreast: int = 1

    def __str__(self) -> str:
        wide = f", {self.abreast} tiles abreast" if self.abreast > 1 else ""
        return f"decode, {self.columns} x {self.splits} blocks of {self.warps} warps{wide}"


def decode_run(spec: Spec) -> int:
    return run_of(spec, 32 // ELEMENTS[spec["element"]].bits)


def bodies_of(spec: Spec) -> int:
    """Loop bodies in all of k."""
    return max(1, int(spec["k_padded"]) // (16 * 32 // ELEMENTS[spec["element"]].bits))


def parts_of_pair(spec: Spec, arch: int) -> tuple[int, ...]:
    """How many parts of k a warp of a pair may take: one with zero points where a loop body has two scales for 4-bit
    codes or four for 8-bit ones, and on sm_75 with all 4-bit codes, as two spill."""
    bits, run = ELEMENTS[spec["element"]].bits, decode_run(spec)
    short = run == 4 if bits == 4 else run == 1
    return (1,) if spec["zero"] and (short or (arch < 80 and bits == 4)) else (1, 2)


def long_runs(spec: Spec) -> bool:
    """Whether a loop body has one scale for a column, or none: others take more registers."""
    return decode_run(spec) in (0, 32 // ELEMENTS[spec["element"]].bits)


def row_tiles(spec: Spec, x_dtype: str, arch: int) -> tuple[int, ...]:
    """Into how many tiles of 8 rows x may be cut."""
    if arch != 90 or x_dtype == "f32":
        return (1,)
    return (1, 2, 4) if long_runs(spec) or (scales.exact(spec, x_dtype) and decode_run(spec) > 1) else (1, 2)


def refuse_decode(
    spec: Spec,
    rows: int,
    device: Device,
    x_dtype: str,
    batch_invariant: bool = False,
    whole: bool = False,
    pair: bool = False,
) -> str | None:
    """None if marlin_decode multiplies so many rows, else why another kernel does."""
    if batch_invariant:
        return "its sums depend on m"
    most = DECODE_TOKENS if whole or pair else 8 * row_tiles(spec, x_dtype, device.arch)[-1]
    if rows > most:
        return f"serves up to {most} rows, this has {rows}"
    if rows > DECODE_TOKENS and (reason := refuse_many(spec, rows, device)) is not None:
        return reason
    integers = ELEMENTS[spec["element"]].bits == 4 and not ELEMENTS[spec["element"]].is_float
    large = spec["n_padded"] * spec["k_padded"] >= LARGE
    wgmma = x_dtype != "f32" and not whole and hopper.refuse(spec, device, x_dtype) is None
    if spec["group"] == 16 and integers and large and wgmma:
        return "slower than wgmma where large matrices have a scale for every 16 k"
    return None


def refuse_many(spec: Spec, rows: int, device: Device) -> str | None:
    """None if more than 8 rows take less time than with wgmma. H200, 2026-11-30, u4b8 in groups of 128, us for wgmma's:
    28672 x 8192, 16 rows: 39.7 for 38.5; 14336 x 4096, 16 / 32 rows: 13.5 for 17.3 / 17.8 for 17.4; 5120 x 5120,
    32 rows: 13.1 for 12.1; in groups of 16, 16 rows: 14336 x 4096 18.9 for 17.4, 4096 x 4096 7.2 for 9.3."""
    tiles = spec["n_padded"] // 64
    if spec["group"] == 16 and not ELEMENTS[spec["element"]].is_float and tiles > device.sms:
        return f"slower for {rows} rows of integers with a scale for every 16 k"
    if spec["n_padded"] * spec["k_padded"] >= LARGE:
        return f"slower for {rows} rows of a large matrix"
    # With 32 rows mma.sync at its own rate takes as long as reading, so the SM with the most work decides: a cluster of
    # two blocks for each tile finds SMs for all, or a block for each is a fair share (80 tiles of 132 SMs are not).
    if rows > 16 and (tiles > device.sms or device.sms < 2 * tiles < 1.4 * device.sms):
        return f"slower for {rows} rows where SMs have different shares of the work"
    return None


def choose_many(spec: Spec, rows: int, device: Device) -> Decode:
    """For more than 8 rows: a block on each SM, of as many warps as have registers for their sums. H200, 2026-11-30,
    16 rows, us: 12 warps for 8 at 8192 x 8192 13.7 for 14.2; two tiles abreast for one at 14336 x 4096 13.6 for 14.8;
    clusters of two for one block at 4096 x 4096 6.9 for 7.7 (32 rows 8.5 for 10.6), of four 13.6: they take turns."""
    tiles = spec["n_padded"] // 64
    bodies = bodies_of(spec)
    splits = 2 if 2 * tiles <= device.sms and bodies >= 8 else 1
    warps = 12 if splits == 1 and rows <= 16 and bodies >= 12 and long_runs(spec) else 8 if bodies >= 8 else 4
    if tiles <= device.sms:
        return Decode(warps, splits, tiles)
    groups = -(-tiles // 2)
    waves = -(-groups // device.sms)
    return Decode(warps, 1, -(-groups // waves), 2)


def choose_decode(spec: Spec, device: Device) -> Decode:
    """About 16 warps for each SM, but 4 to 16 in a block and two loop bodies of k for each."""
    tiles = spec["n_padded"] // 64
    bodies = bodies_of(spec)
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


def tiles_of(rows: int) -> int:
    """Tiles of 8 rows that marlin_decode multiplies at once."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def shared_of(spec: Spec, rows: int, d: Decode, sets: int, buffers: int) -> int:
    """Bytes of sums, in whose place x lies up to 8 rows; of more, x of two loop bodies of each part of k is beside."""
    sums = 4 * RED * buffers * sets * d.warps * rows
    if rows <= DECODE_TOKENS:
        return sums
    depth = 4 if decode_run(spec) == 1 else 32 // ELEMENTS[spec["element"]].bits
    return sums + 2 * (d.warps // d.abreast) * rows * (32 * depth + 16)


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
    many = rows > DECODE_TOKENS
    groups = -(-tiles // d.abreast)
    stage = Stage(
        kernel="marlin_decode",
        variant=variant_of(
            spec, x_dtype, decode_run(spec), 2 * d.warps // warps if up else 0, tiles_of(rows), int(whole)
        ),
        target=f"sm_{device.arch}",
        grid=(d.columns * d.splits, 1, 1) if many else (d.columns, d.splits, 1),
        block=32 * warps,
        shared=shared_of(spec, rows, d, matrices, 1 if d.columns >= groups else 2),
        args=(*args_of(part, rows, before is not None, whole), *second, d.abreast - 1, d.splits - 1),
        cluster=d.splits if many else 1,
        overlap=device.overlaps,
    )
    cut = d.splits > 1 and not many
    slower = hopper.refuse(spec, device, x_dtype) or "slower for few rows of a matrix of this size"
    against = ("wgmma", slower) if many else ("tiled", f"its smallest tile has 16 tokens, this has {rows}")
    time = "faster for few rows of a matrix of this size" if many else "the time is that of reading the weights once"
    return Plan(
        (before, stage) if before else (stage,),
        f"{d}: at m <= {8 * tiles_of(rows)} {time}",
        scratch=4 * d.splits * matrices * rows * tiles * 64 if cut else 0,
        counters=tiles if cut else 0,
        rejected=(against,),
    )
