"""How mmq_decode divides the work of a few rows among blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass

from .launch import STATIC, Device, Plan, Stage
from .mmq_launch import DECODE_TOKENS, RESERVED, Spec, args_of, extent_of, variant_of

WARPS = 16
"""Warps of 128 registers that an SM holds."""
TOKENS = 2816
"""Bytes of shared memory that a warp needs for x of a step."""

ROUNDED = 4
"""Rows of x times steps of 256 k that a warp rounds in less time than a launch before this one takes. H200, 2026-11-30,
q4_0, 28672 x 8192 (two steps a warp), m = 1 / 2 / 4 / 8: 34.6 / 35.6 / 38.0 / 42.9 us for 37.7 / 38.4 / 38.6 / 38.9."""


@dataclass(frozen=True)
class Decode:
    """How mmq_decode divides the work: ``columns`` x ``splits`` blocks of ``warps`` warps, which also split k; a block
    adds the sums of its warps every ``chunk`` rows of strips."""

    warps: int
    splits: int
    columns: int
    chunk: int

    @property
    def shared(self) -> int:
        return self.warps * (512 * self.chunk + TOKENS)

    def __str__(self) -> str:
        return f"decode, {self.columns} x {self.splits} blocks of {self.warps} warps"


def choose_decode(spec: Spec, device: Device) -> Decode:
    """The division in which the busiest SM has the fewest strips; adding splits costs as long as 30 of them."""
    rows, steps = extent_of(spec)
    held = min(WARPS, (device.shared - STATIC) // (TOKENS + 512))
    best: tuple[float, Decode] | None = None
    for splits in range(1, min(steps, 8) + 1):
        per = -(-steps // splits)
        warps = min(-(-per // -(-per // held)), steps // splits)
        fitting = (device.shared + RESERVED) // (warps * (TOKENS + 512) + STATIC + RESERVED)
        resident = min(WARPS // warps, fitting)
        columns = min(rows, max(1, device.sms * resident // splits))
        room = (device.shared + RESERVED) // resident - RESERVED - STATIC
        most = -(-rows // columns)
        chunk = min(most, (room // warps - TOKENS) // 512)
        busiest = -(-columns * splits // device.sms) * most * -(-per // warps) * warps
        # Fewer warps have fewer strips in flight.
        time = busiest * max(1.0, 12 / (warps * resident)) + (30 if splits > 1 else 0)
        if best is None or time < best[0]:
            best = time, Decode(warps, splits, columns, chunk)
    assert best is not None
    return best[1]


def rounds(spec: Spec, m: int, d: Decode) -> bool:
    """Whether warps round the x they need themselves."""
    rows, steps = extent_of(spec)
    chunks = -(-rows // (d.columns * d.chunk))
    return m * -(-steps // (d.warps * d.splits)) * chunks <= ROUNDED


def decode(spec: Spec, device: Device, x_dtype: str, d: Decode, rounding: bool) -> Plan:
    """The launch of mmq_decode, which rounds x first or finds it in 8 bits."""
    rows, _ = extent_of(spec)
    stage = Stage(
        kernel="mmq_decode",
        variant=variant_of(spec, x_dtype, int(rounding)),
        target=f"sm_{device.arch}",
        grid=(d.columns, d.splits, 1),
        block=32 * d.warps,
        shared=d.shared,
        args=(*args_of(spec), rows, d.chunk, "x", "k", "ldx"),
        overlap=device.overlaps,
    )
    cut, how = d.splits > 1, f"{d}, x rounded where it is read" if rounding else str(d)
    return Plan(
        (stage,),
        f"{how}: at m <= {DECODE_TOKENS} the time is that of reading the weights once",
        scratch=512 * d.splits * rows if cut else 0,
        counters=d.columns if cut else 0,
    )
