"""Which kernels there are for Marlin tiles: all that ``plan`` can ask for, and those that CI compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from . import marlin_hopper_plan as hopper
from . import marlin_scales as scales
from . import marlin_tiled_plan as tiled
from . import quantize
from .launch import CHECKED, Device, most_shared
from .marlin_decode_plan import decode_run, parts_of_pair, row_tiles
from .marlin_launch import WHOLE, variant_of
from .marlin_plan import X_DTYPES, numerics, refuse_device
from .wgmma_plan import NVRTC, SHARED


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture, for building ahead."""
    device = Device(arch, sms=1, shared=most_shared(arch))
    hopper_device = Device(90, sms=3, shared=SHARED, nvrtc=NVRTC)
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
        tiles = [
            (t, whole)
            for whole in known
            for t in tiled.TILES
            if tiled.refuse_tile(spec, device, x_dtype, t, whole) is None
        ]
        forms = [(0, 1, 0), *((parts, 1, 0) for parts in parts_of_pair(spec, arch)), *((0, 1, 1) for w in known if w)]
        forms += [(0, tiles, 0) for tiles in row_tiles(spec, x_dtype, arch)[1:]]
        rows = [("marlin_decode", variant_of(spec, x_dtype, decode_run(spec), *form)) for form in forms]
        rows += [("marlin_tiled", tiled.variant(spec, x_dtype, t, whole)) for t, whole in tiles]
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
