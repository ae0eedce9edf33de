"""Which kernels multiply with a Marlin module: a function of (module, m, device) and nothing else.

| m | kernel | work of a block |
| --- | --- | --- |
| 1 to 8 | marlin_decode | tiles of 64 features, k split over its warps: time is reading W once |
| above | marlin_tiled | 64 to 256 features x 16 to 128 tokens |
| above, on Hopper | marlin_wgmma (marlin_hopper_plan) | 128 to 512 features x 16 to 128 tokens |

Large matrices of 4-bit integers in groups of 16 take wgmma at any m, and batch-invariant products the tiles that add in
one order.

All read rows of x as they lie. Where they cannot (act-order, rows that do not start on 16 bytes) ``gather`` goes
before them. float32 rows become ``pairs`` of f16 rows, which the first two kernels multiply and add. On sm_75 these two
multiply f16 with the instructions it has (turing.cuh).

With numerics "int8_row" the first two multiply integers: ``quantize_rows`` makes whole numbers q[m, k] and factors d[m]
of x (quantize.py), and with them

    y[m, n] = d[m] * sum over runs r of scale[n, r] * sum over k in r of q[m, k] * (code[n, k] - zero[n, r])

then bias, residual and rounding as ever (epilogue.py). A run is a part of a group, of at most 128 k. Its sum is exact;
those of a row are scaled and added in float32, each step rounded once, and d is the last factor. Where a scale belongs
to all of k a run is what a warp adds, in float32: exact up to 2^24, so for any x while k is at most 16513 (u4b8), 8806
(u4), 1032 (u8b128) or 518 (u8); a larger sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..formats.canonical import ELEMENTS, scale_words
from ..formats.errors import UnsupportedError
from . import marlin_hopper_plan as hopper
from . import marlin_scales as scales
from . import quantize
from .launch import Device, Part, Plan, Stage, fastest, most_shared
from .marlin_decode_plan import Decode, choose_decode, decode, decode_run, parts_of_pair, refuse_decode
from .marlin_launch import WHOLE, args_of, gather_of, rows_read, run_of, variant_of, with_rows, with_whole_rows
from .wgmma_plan import NVRTC, Wgmma

Spec = Mapping[str, Any]

X_DTYPES = ("f16", "bf16", "f32")

CHECKED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_75")

K_LIMIT = 2**21
"""Keeps the kernels' products of a block's number and of steps along k in 32 bits."""

HOPPER_SHARED = 232448
"""Bytes of shared memory a block has on every sm_90."""

STATIC = 128
"""Bytes of shared memory the kernels take besides what a stage asks for."""


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
    mixed = scales.mixed(spec, x_dtype, whole)
    if t.blocks * t.columns > 16 and mixed:
        sums = "whole" if whole else x_dtype
        return f"{spec['scale']} scales multiply {sums} sums in fp32, which leaves too few registers"
    if t.blocks * t.columns > 8 and mixed and run_of(spec, 4) == 1 and scales.wide(spec):
        return f"{spec['scale']} scales of every 16 k and fp32 sums they multiply take too many registers"
    if device.arch < 80 and mixed and 0 < run_of(spec, 4) <= 2:
        zeros = spec["zero"] and ELEMENTS[spec["element"]].bits == 8 and spec["scale"] == "f32"
        if t.blocks * t.columns > 8 or (zeros and run_of(spec, 4) == 1 and t.columns == 4):
            return "fp32 sums of every 16 or 32 k and two instructions for one take too many registers"
    if t.blocks * t.columns > 16 and run_of(spec, 4) == 1 and spec["zero"] and ELEMENTS[spec["element"]].bits == 8:
        return "zero points of every 16 k and 8-bit codes take too many registers"
    large = t.blocks * t.columns > 8 and t.columns == 4
    if large and mixed and run_of(spec, 4) == 2 and spec["zero"] and ELEMENTS[spec["element"]].bits == 8:
        return "zero points of every 32 k, 8-bit codes and fp32 sums that scales multiply take too many registers"
    bytes_each = ELEMENTS[spec["element"]].bits == 8 and spec["scale"] == "e8m0" and not scales.block(spec)
    if large and bytes_each and 0 < run_of(spec, 4) <= 2:
        return "codes of 8 bits with e8m0 scales of every 16 or 32 k take too many registers"
    return None


def _work(spec: Spec, m: int, t: Tiled) -> tuple[int, int, int]:
    """(tiles along m, tiles along n, steps of k) of a product."""
    return -(-m // t.tokens), -(-spec["n_padded"] // t.features), -(-spec["k_padded"] // (64 * t.wk))


def _estimate(spec: Spec, m: int, device: Device, t: Tiled) -> float:
    """us on an H200, roughly."""
    rows, columns, steps = _work(spec, m, t)
    tiles = rows * columns
    waves = tiles / device.sms if t.cut else -(-tiles // device.sms)
    return START + waves * steps * STEP_COST[t.blocks, t.columns, t.wn] + (CUT if t.cut else 0)


def one_order(tile: Tiled | Wgmma) -> bool:
    """Whether a tile adds the products of a row from the first k to the last, whatever its extents."""
    return not tile.cut and (tile.ways if isinstance(tile, Wgmma) else tile.wk) == 1


def choose_tile(
    spec: Spec, m: int, device: Device, x_dtype: str, batch_invariant: bool = False, whole: bool = False
) -> tuple[Tiled | Wgmma, tuple[tuple[str, str], ...]]:
    """The tile of the least estimated time, and why not each other one. wgmma goes first wherever it runs.

    Raises UnsupportedError where none is left: ``batch_invariant`` leaves those that add in one order.
    """
    times: dict[Tiled | Wgmma, float] = {}
    refused: dict[str, str] = {}
    reason = "does not add pairs of rows" if x_dtype == "f32" else hopper.refuse(spec, device, x_dtype)
    reason = "scales weights before it adds, so that sums are not those of integers" if whole else reason
    if reason is None:
        refused["mma.sync"] = "slower than wgmma wherever both were measured"
        for w in hopper.TILES:
            for wide in (w, replace(w, cut=True)):
                if why := hopper.refuse_tile(spec, device, x_dtype, wide):
                    refused[str(wide)] = why
                else:
                    times[wide] = hopper.estimate(spec, m, device, wide)
    else:
        refused["wgmma"] = reason
        for t in TILES:
            for tile in (t, replace(t, cut=True)):
                if why := refuse_tile(spec, device, x_dtype, tile, whole):
                    refused[str(tile)] = why
                else:
                    times[tile] = _estimate(spec, m, device, tile)
    if batch_invariant:
        refused |= {str(t): "adds in an order that depends on m" for t in times if not one_order(t)}
        times = {t: time for t, time in times.items() if one_order(t)}
        if not times:
            raise UnsupportedError("no Marlin kernel adds the products of these types in one order")
    return fastest(times, refused)


def _variant(spec: Spec, x_dtype: str, t: Tiled, whole: bool) -> tuple[int, ...]:
    return variant_of(spec, x_dtype, run_of(spec, 4), t.blocks, t.columns, t.wn, t.wm, int(whole))


def _tiled(
    spec: Spec, rows: int, device: Device, x_dtype: str, before: Stage | None, t: Tiled, whole: bool = False
) -> Plan:
    down, across, steps = _work(spec, rows, t)
    blocks = device.sms * _resident(spec, x_dtype, t, whole)
    waves, rest = divmod(down * across, blocks)
    streams = min(blocks, rest * steps) if t.cut and rest * steps * blocks < 2**32 else rest
    stage = Stage(
        kernel="marlin_tiled",
        variant=_variant(spec, x_dtype, t, whole),
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


def refuse_device(arch: int, x_dtype: str) -> str | None:
    """None if kernels multiply ``x_dtype`` on an architecture, else what they need."""
    if arch < 75:
        return "sm_75 or newer"
    return "sm_80 or newer for bf16, which has no instructions before" if arch < 80 and x_dtype == "bf16" else None


def check_supported(spec: Spec, device: Device, x_dtype: str) -> None:
    if (reason := refuse_device(device.arch, x_dtype)) is not None:
        raise UnsupportedError(
            "no Marlin kernel for this GPU",
            found=f"sm_{device.arch}, {x_dtype} activations",
            need=reason,
            do="dequantize instead",
        )
    known = scales.SCALES.get(spec["element"], ())
    if x_dtype not in X_DTYPES or spec["scale"] not in known:
        found = f"{spec['element']} with {scale_words(spec['scale'])} scales, {x_dtype} activations"
        need = f"{' or '.join(known)} scales; {', '.join(X_DTYPES)} activations"
        raise UnsupportedError("no Marlin kernel for these types", found=found, need=need)
    if spec["k_padded"] > K_LIMIT:
        raise UnsupportedError(
            "too many input channels for a Marlin kernel", found=spec["k"], need=f"at most {K_LIMIT}"
        )
    if (reason := scales.refuse(spec)) is not None:
        raise UnsupportedError("no Marlin kernel for these scales", need=reason)


def numerics(spec: Spec) -> tuple[str, ...]:
    """What a product may be asked for (``launch.NUMERICS``): x as it is, or with codes that are integers in 8 bits."""
    return ("exact",) if ELEMENTS[spec["element"]].is_float else ("exact", WHOLE)


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
    """The launches of y[m, n] = x[m, k] @ W.T for a module that ``marlin.spec`` describes.

    ``x_dtype``: "f16", "bf16" or "f32", also y's. ``aligned``: every row of x starts on 16 bytes. ``variant`` replaces
    the choice, for measuring. ``batch_invariant``: a row of y has the same bits whatever m is and the other rows are.
    ``numerics`` is one of ``numerics(spec)``, None for the first. Raises ``UnsupportedError`` where no kernel of ours
    runs.
    """
    check_supported(spec, device, x_dtype)
    if m == 0:
        return Plan((), "no rows")
    whole = numerics == WHOLE
    rows, before = rows_read(spec, m, device, x_dtype, aligned, whole)
    against = None if variant else refuse_decode(spec, rows, device, x_dtype, batch_invariant, whole)
    if variant is None and against is None:
        variant = choose_decode(spec, device)
    rejected: tuple[tuple[str, str], ...] = ()
    if variant is None:
        variant, rejected = choose_tile(spec, rows, device, x_dtype, batch_invariant, whole)
        assert against is not None
        rejected = (("decode", against), *rejected)
    if isinstance(variant, Decode):
        if spec["k"] % 2 and not whole:
            before = before or gather_of(spec, m, device)
        made = decode(Part(spec, 0, spec["n"]), rows, device, x_dtype, before, variant, whole=whole)
    elif isinstance(variant, Wgmma):
        assert not whole, variant
        made = hopper.launch(spec, m, device, x_dtype, before, variant)
    else:
        made = _tiled(spec, rows, device, x_dtype, before, variant, whole)
    ready = with_whole_rows(made, spec, m, device, x_dtype) if whole else with_rows(made, spec, m, x_dtype)
    return replace(ready, rejected=rejected or made.rejected)


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture, for building ahead."""
    device = Device(arch, sms=1, shared=most_shared(arch))
    hopper_device = Device(90, sms=1, shared=HOPPER_SHARED, nvrtc=NVRTC)
    yield from ((kernel, (ordered,), f"sm_{arch}") for kernel in ("gather", "pairs") for ordered in (0, 1))
    yield from quantize.variants(arch, (WHOLE,))
    seen = set()
    every = (
        (spec, x_dtype)
        for element, group in product(elements or scales.STORED, (-1, 16, 32, 64, 128))
        for spec, x_dtype in product(scales.kinds(element, group), X_DTYPES)
        if refuse_device(arch, x_dtype) is None
    )
    for spec, x_dtype in every:
        known = (False, True) if WHOLE in numerics(spec) else (False,)
        tiles = [(t, whole) for whole in known for t in TILES if refuse_tile(spec, device, x_dtype, t, whole) is None]
        forms = [(0, 0), *((parts, 0) for parts in parts_of_pair(spec, arch)), *((0, 1) for whole in known if whole)]
        rows = [("marlin_decode", variant_of(spec, x_dtype, decode_run(spec), *form)) for form in forms]
        rows += [("marlin_tiled", _variant(spec, x_dtype, t, whole)) for t, whole in tiles]
        for row in rows:
            if row not in seen:
                seen.add(row)
                yield *row, f"sm_{arch}"
        if arch == 90 and x_dtype != "f32" and hopper.refuse(spec, hopper_device, x_dtype) is None:
            for variant in hopper.variants(spec, x_dtype, hopper_device):
                if ("marlin_wgmma", variant) not in seen:
                    seen.add(("marlin_wgmma", variant))
                    yield "marlin_wgmma", variant, "sm_90a"


def covering(target: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Half of a subset of ``variants`` in which every two values of two template arguments meet: what CI compiles.

    Where x is whole numbers, which changes little else, every value of an argument is there once.

    Each half falls to every other architecture, so that each pair is seen on older and newer ones; sm_90a has both.
    """
    if target not in (*CHECKED, "sm_90a"):
        return
    rows: tuple[list[tuple[str, tuple[int, ...]]], ...] = [], []
    for kernel, variant, made_for in variants(75 if target == "sm_75" else 90):
        if (made_for == "sm_90a") == (target == "sm_90a"):
            whole = kernel == "quantize_rows" or (kernel in ("marlin_decode", "marlin_tiled") and variant[-1])
            rows[bool(whole)].append((kernel, variant))
    chosen = _chosen(rows[0], lambda i: i + 1) + _chosen(rows[1], lambda i: 1)
    yield from chosen if target == "sm_90a" else chosen[CHECKED.index(target) % 2 :: 2]


def _chosen(rows: list[tuple[str, tuple[int, ...]]], count: Callable[[int], int]) -> list[tuple[str, tuple[int, ...]]]:
    """Rows in which a value of argument j meets those of ``count(j)`` arguments: itself, and the ones before it."""
    numbers: dict[tuple[object, ...], int] = {}
    pairs = []
    for kernel, variant in rows:
        last = len(variant) - (kernel in ("marlin_decode", "marlin_tiled"))  # the last is the same in all
        meet = ((kernel, j - i, variant[j - i], j, variant[j]) for j in range(last) for i in range(count(j)))
        pairs.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in meet))
    chosen, left = [], (1 << len(numbers)) - 1
    while left:  # the one with the most pairs not seen yet
        best = max(range(len(rows)), key=lambda row: (pairs[row] & left).bit_count())
        chosen.append(rows[best])
        left &= ~pairs[best]
    return chosen
