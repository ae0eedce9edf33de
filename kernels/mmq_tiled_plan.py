"""Which tile of mmq_tiled multiplies with strips: their shapes, what they take, whom they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .launch import STATIC, Device, Plan, Stage, fastest
from .mmq_launch import DECODE_TOKENS, RESERVED, Spec, args_of, variant_of
from .mmq_strips import DEPTH, FIFTH, KINDS

FEATURES = 128


@dataclass(frozen=True)
class Tiled:
    """A block's shape in mmq_tiled: 8 / ``strips`` x ``strips`` warps of ``strips`` strips x 8 ``blocks`` tokens,
    ``stages`` of 256 k, registers for ``resident`` blocks on an SM; ``cut`` cuts the tiles of the last wave along k so
    that every SM has its share."""

    blocks: int
    strips: int
    stages: int
    resident: int
    cut: bool = False

    @property
    def tokens(self) -> int:
        return 8 * self.blocks * self.strips

    def shared(self, kind: str) -> int:
        rows = (16 if KINDS[kind].minima else 8) if KINDS[kind].scales else 2
        stage = self.tokens * DEPTH + 8 * KINDS[kind].strip + rows * (self.tokens + 2) * 4
        return self.stages * stage

    def __str__(self) -> str:
        ring = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"tile {FEATURES} x {self.tokens}, {ring}{', last wave cut' if self.cut else ''}"


# us of a step of 256 k, measured on an H200 with q4_0. Only ratios matter.
STEP_COST = {
    Tiled(2, 1, 2, 2): 1.25,
    Tiled(4, 1, 2, 2): 1.9,
    Tiled(4, 2, 3, 1): 1.8,
    Tiled(4, 2, 2, 1): 1.85,
    Tiled(8, 2, 2, 1): 3.8,
}
ONE_STAGE_COST = {replace(t, stages=1): cost for t, cost in STEP_COST.items() if t.stages == 2}
"""On sm_75, where copies do not run beside the products: a ring would only take shared memory. Not measured there."""
START, CUT = 5.0, 4.0
"""us of a launch and its first loads, and of adding the parts of cut tiles."""

TILES, ONE_STAGE_TILES = tuple(STEP_COST), tuple(ONE_STAGE_COST)


def tiles(arch: int) -> tuple[Tiled, ...]:
    """What an architecture is offered."""
    return TILES if arch >= 80 else ONE_STAGE_TILES


def refuse_tile(spec: Spec, device: Device, t: Tiled) -> str | None:
    """None if the tile runs this module on this device, else why not."""
    if not KINDS[spec["kind"]].scales and t.blocks * t.strips > 8:
        return "sums of 128 k beside the whole ones take too many registers"
    if device.arch < 80 and t.blocks * t.strips > 8 and FIFTH in KINDS[spec["kind"]].codes:
        return "fifth bits and four instructions for one take too many registers"
    shared = t.shared(spec["kind"]) + STATIC
    return f"needs {shared} bytes of shared memory, a block has {device.shared}" if shared > device.shared else None


def _blocks(spec: Spec, device: Device, t: Tiled) -> int:
    """Blocks that run at once."""
    fitting = (device.shared + RESERVED) // (t.shared(spec["kind"]) + STATIC + RESERVED)
    return device.sms * min(t.resident, fitting)


def _work(spec: Spec, m: int, t: Tiled) -> tuple[int, int, int]:
    """(tiles along m, tiles along n, steps of k) of a product."""
    return -(-m // t.tokens), -(-spec["n"] // FEATURES), spec["k_padded"] // DEPTH


def _estimate(spec: Spec, m: int, device: Device, t: Tiled) -> float:
    """us on an H200, roughly."""
    rows, columns, steps = _work(spec, m, t)
    tiles, blocks = rows * columns, _blocks(spec, device, t)
    waves = tiles / blocks if t.cut else -(-tiles // blocks)
    cost = STEP_COST if device.arch >= 80 else ONE_STAGE_COST
    return START + waves * steps * cost[replace(t, cut=False)] + (CUT if t.cut else 0)


def choose_tile(
    spec: Spec, m: int, device: Device, batch_invariant: bool = False
) -> tuple[Tiled, tuple[tuple[str, str], ...]]:
    """The tile of the least estimated time, and why not each other one."""
    times: dict[Tiled, float] = {}
    refused: dict[str, str] = {}
    for tile in tiles(device.arch):
        for t in (tile, replace(tile, cut=True)):
            if why := refuse_tile(spec, device, t):
                refused[str(t)] = why
            elif t.cut and batch_invariant:
                refused[str(t)] = "adds in an order that depends on m"
            else:
                times[t] = _estimate(spec, m, device, t)
    best, others = fastest(times, refused)
    why = "its sums depend on m" if batch_invariant else f"serves up to {DECODE_TOKENS} tokens, m is {m}"
    return best, (("decode", why), *others)


def launch(spec: Spec, m: int, device: Device, x_dtype: str, t: Tiled) -> Plan:
    rows, columns, steps = _work(spec, m, t)
    blocks = _blocks(spec, device, t)
    waves, rest = divmod(rows * columns, blocks)
    streams = min(blocks, rest * steps) if t.cut and rest * steps * blocks < 2**32 else rest
    stage = Stage(
        kernel="mmq_tiled",
        variant=variant_of(spec, x_dtype, t.blocks, t.strips, t.stages, t.resident),
        target=f"sm_{device.arch}",
        grid=(blocks if waves else streams, 1, 1),
        block=256,
        shared=t.shared(spec["kind"]),
        args=(*args_of(spec), rows, waves, streams),
        overlap=device.overlaps,
    )
    cut = streams > rest
    return Plan(
        (stage,),
        f"{t}: {rows} x {columns} tiles on {device.sms} SMs take the least time by estimate",
        scratch=8 * streams * FEATURES * t.tokens if cut else 0,
        counters=rest if cut else 0,
    )
