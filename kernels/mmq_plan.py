"""Which kernels multiply with MMQ strips: a function of (module, m, device) and nothing else.

| m | kernel | work of a block |
| --- | --- | --- |
| 1 to 8 | mmq_decode | rows of strips, k split over its warps: time is reading W once |
| above | mmq_tiled | 128 features x 16 to 128 tokens |
| 33 and more, on Hopper; any with x exact | mmq_wgmma (mmq_hopper_plan) | 256 features x 64 or 128 tokens, x as it is |

The others multiply x in 8 bits (``quantize``), which is the first stage: int8 with the integers of a strip, e4m3 with
fp8. On sm_75 the first two multiply integers with the instructions it has (turing.cuh), and y may be bf16 too: rounding
to it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..formats.canonical import SCALE_DTYPES, scale_words
from ..formats.errors import UnsupportedError
from . import mmq_hopper_plan as hopper
from . import quantize
from .factors import NEVER, bias_type, refuse_parts, starts
from .launch import Device, Plan, Stage, fastest, most_shared
from .mmq_strips import DEPTH, FIFTH, KINDS, ROWS
from .wgmma_plan import Wgmma

Spec = Mapping[str, Any]

DECODE_TOKENS = 8
FEATURES = 128
EXACT_FROM = 33
"""Rows from which Hopper multiplies with x as it is, unless int8 is asked for: faster wherever int8 takes a tile of 64
tokens or more, and x is not rounded."""
X_DTYPES = ("f16", "bf16", "f32")
IN_8_BITS = ("int8", "e4m3")
"""Kinds of ``quantize`` that kernels multiply with."""
GRIDS = ("f16", "bf16", "f32", "e8m0")
"""Types of scales beside strips that kernels read."""

CHECKED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_75")

WARPS = 16
"""Warps of 128 registers that an SM holds."""
STATIC = 128
"""Bytes of shared memory the kernels take besides what a stage asks for."""
RESERVED = 1024
"""Bytes of shared memory the system takes for each block."""
TOKENS = 4608
"""Bytes of it that a warp of mmq_decode needs for x."""


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


def _in_8_bits(spec: Spec) -> str:
    """What x is rounded to for a kind's codes."""
    return "e4m3" if spec["kind"] == "fp8" else "int8"


def numerics(spec: Spec) -> tuple[str, ...]:
    """What a product may be asked for: x in the 8 bits that a kind's codes multiply with, or as it is."""
    return _in_8_bits(spec), "exact"


def _beside(spec: Spec) -> bool:
    """Scales for blocks along k that lie beside the strips."""
    return not KINDS[spec["kind"]].scales and spec["group"] != -1


def _variant(spec: Spec, x_dtype: str, *shape: int) -> tuple[int, ...]:
    """The fields every ``Variant`` begins with, then the kernel's own."""
    dtypes = list(SCALE_DTYPES)
    grid = "f32" if KINDS[spec["kind"]].scales else spec["scale"]
    types = list(KINDS).index(spec["kind"]), dtypes.index(x_dtype), dtypes.index(grid)
    return *types, int(_beside(spec)), *shape


def _args(spec: Spec) -> tuple[str | int, ...]:
    """What both kernels begin with."""
    own, (block_n, block_k) = KINDS[spec["kind"]].scales, spec["scale_block"]
    whole = not own and spec["group"] == -1
    factors = "scales" if whole else "global_scale"
    columns = block_n if whole and len(spec.get("shards", ())) < 2 else NEVER
    operands = ("strips", "scales", factors, "bias", "quantized", "factors", "y", "residual", "scratch", "counters")
    grid = (block_n, block_k, -(-spec["n"] // block_n), -(-spec["k"] // block_k)) if _beside(spec) else (1, 128, 1, 1)
    extents = ("m", "n", "k_padded", "ldy", "ld_residual", "each")
    return (*operands, *extents, bias_type(spec), columns, *starts(spec), *grid)


def _extent(spec: Spec) -> tuple[int, int]:
    """(rows of strips that hold real rows, steps of 256 k)."""
    return -(-spec["n"] // ROWS), spec["k_padded"] // DEPTH


def choose_decode(spec: Spec, device: Device) -> Decode:
    """The division in which the busiest SM has the fewest strips; adding splits costs as long as 30 of them."""
    rows, steps = _extent(spec)
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


def _decode(spec: Spec, device: Device, x_dtype: str, d: Decode) -> Plan:
    rows, _ = _extent(spec)
    stage = Stage(
        kernel="mmq_decode",
        variant=_variant(spec, x_dtype),
        target=f"sm_{device.arch}",
        grid=(d.columns, d.splits, 1),
        block=32 * d.warps,
        shared=d.shared,
        args=(*_args(spec), rows, d.chunk),
        overlap=device.overlaps,
    )
    cut = d.splits > 1
    return Plan(
        (stage,),
        f"{d}: at m <= {DECODE_TOKENS} the time is that of reading the weights once",
        scratch=512 * d.splits * rows if cut else 0,
        counters=d.columns if cut else 0,
    )


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


def _tiled(spec: Spec, m: int, device: Device, x_dtype: str, t: Tiled) -> Plan:
    rows, columns, steps = _work(spec, m, t)
    blocks = _blocks(spec, device, t)
    waves, rest = divmod(rows * columns, blocks)
    streams = min(blocks, rest * steps) if t.cut and rest * steps * blocks < 2**32 else rest
    stage = Stage(
        kernel="mmq_tiled",
        variant=_variant(spec, x_dtype, t.blocks, t.strips, t.stages, t.resident),
        target=f"sm_{device.arch}",
        grid=(blocks if waves else streams, 1, 1),
        block=256,
        shared=t.shared(spec["kind"]),
        args=(*_args(spec), rows, waves, streams),
        overlap=device.overlaps,
    )
    cut = streams > rest
    return Plan(
        (stage,),
        f"{t}: {rows} x {columns} tiles on {device.sms} SMs take the least time by estimate",
        scratch=8 * streams * FEATURES * t.tokens if cut else 0,
        counters=rest if cut else 0,
    )


def _supported(spec: Spec, device: Device, x_dtype: str, kind: str) -> None:
    need = "sm_89" if kind == "e4m3" else "sm_75"
    if device.arch < int(need[3:]):
        found = f"sm_{device.arch}"
        raise UnsupportedError(
            f"no kernel for {kind} activations on this GPU",
            found=found,
            need=f"{need} or newer",
            do="dequantize instead",
        )
    if x_dtype not in X_DTYPES:
        raise UnsupportedError(
            "no kernel for these types", found=f"{x_dtype} activations", need=f"{', '.join(X_DTYPES)} activations"
        )
    if (reason := _refused_scales(spec)) is not None:
        raise UnsupportedError("no kernel for these scales", need=reason)


def _refused_scales(spec: Spec) -> str | None:
    if reason := refuse_parts(spec):
        return reason
    if KINDS[spec["kind"]].scales:
        return None
    if spec["scale"] not in GRIDS:
        return f"scales of {' or '.join(GRIDS)}, not {scale_words(spec['scale'])}"
    if spec["group"] != -1 and spec["scale_block"][1] % 128:
        return f"scales of a multiple of 128 k, not {spec['scale_block'][1]}"
    if spec["group"] == -1 and "global" in spec:
        return "one factor for all of k, not two"
    return None


def plan(
    spec: Spec,
    m: int,
    device: Device,
    x_dtype: str,
    aligned: bool = True,
    variant: Decode | Tiled | Wgmma | None = None,
    numerics: str | None = None,
    batch_invariant: bool = False,
) -> Plan:
    """The launches of y[m, n] = x[m, k] @ W.T for a module that ``mmq.spec`` describes.

    ``x_dtype``: "f16", "bf16" or "f32", also y's. ``variant`` replaces the choice, for measuring. ``numerics`` is one
    of ``numerics(spec)``, None for what suits the device and m. ``batch_invariant``: a row of y has the same bits
    whatever m is and the other rows are. Raises ``UnsupportedError`` where no kernel of ours runs.
    """
    if m == 0:
        return Plan((), "no rows")
    refused = hopper.refuse(spec, device, x_dtype)
    many = batch_invariant or m >= EXACT_FROM
    kind = numerics or ("exact" if many and refused is None else _in_8_bits(spec))
    if kind == "exact":
        if refused is not None:
            found = f"{spec['kind']}, {x_dtype} activations"
            raise UnsupportedError(
                "no kernel multiplies strips with activations as they are", found=found, need=refused,
                do="dequantize instead",
            )  # fmt: skip
        if isinstance(variant, Wgmma):
            return hopper.launch(spec, m, device, x_dtype, variant)
        tile, rejected = hopper.choose(spec, m, device, batch_invariant)
        return replace(hopper.launch(spec, m, device, x_dtype, tile), rejected=rejected)
    assert kind == _in_8_bits(spec), kind
    assert not isinstance(variant, Wgmma), variant
    _supported(spec, device, x_dtype, kind)
    if variant is None and m <= DECODE_TOKENS and not batch_invariant:
        variant = choose_decode(spec, device)
    rejected = (("tiled", f"its smallest tile has 16 tokens, m is {m}"),)
    if variant is None:
        variant, rejected = choose_tile(spec, m, device, batch_invariant)
    if isinstance(variant, Decode):
        made = _decode(spec, device, x_dtype, variant)
    else:
        made = _tiled(spec, m, device, x_dtype, variant)
    quantized, factors = quantize.nbytes(kind, m, spec["k"])
    first = quantize.stage(kind, m, spec["k"], device, x_dtype)
    return Plan(
        (first, *made.stages),
        made.why,
        made.scratch,
        counters=made.counters,
        quantized=quantized,
        factors=factors,
        quantizes=kind,
        rejected=rejected,
    )


def _kinds(elements: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """What a spec may say that decides a kernel."""
    for name, kind in KINDS.items():
        if elements and not set(elements) & set(kind.elements):
            continue
        if kind.scales:
            yield {"kind": name, "group": kind.scales[0][1]}
        else:
            yield from ({"kind": name, "scale": scale, "group": g} for scale, g in product(GRIDS, (128, -1)))


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture, for building ahead."""
    yield from quantize.variants(arch, IN_8_BITS)
    device = Device(arch, sms=1, shared=most_shared(arch))
    for spec, x_dtype in product(_kinds(elements), X_DTYPES):
        if KINDS[spec["kind"]].scales or arch >= 89:
            yield "mmq_decode", _variant(spec, x_dtype), f"sm_{arch}"
            for t in (t for t in tiles(arch) if refuse_tile(spec, device, t) is None):
                shape = t.blocks, t.strips, t.stages, t.resident
                yield "mmq_tiled", _variant(spec, x_dtype, *shape), f"sm_{arch}"
    if arch == 90:
        yield from hopper.variants(elements)


def covering(target: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What CI compiles for a target: every kind of strip in one of the kernels, in the other for the next target, in
    both for sm_75, whose instructions are others; all else takes turns."""
    if target == "sm_90a":
        yield from hopper.covering()
    if target not in CHECKED:
        return
    yield from ((kernel, variant) for kernel, variant, _ in quantize.variants(80, IN_8_BITS))
    turn = CHECKED.index(target)
    rows = [row[:2] for row in variants(int(target[3:])) if row[0].startswith("mmq") and row[2] == target]
    both = ("mmq_decode", "mmq_tiled")
    for i in range(len(KINDS)):
        for kernel in both if target == "sm_75" else (both[(i + turn) % 2],):
            mine = [row for row in rows if row[0] == kernel and row[1][0] == i]
            yield from mine[(3 * i + 7 * turn) % len(mine) :][:1] if mine else ()
