"""Which kernels there are for MMQ strips: all that ``plan`` can ask for, and those that CI compiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from . import mmq_hopper_plan as hopper
from . import mmq_tiled_plan as tiled
from . import quantize
from .launch import CHECKED, Device, most_shared
from .mmq_launch import variant_of
from .mmq_plan import GRIDS, IN_8_BITS, X_DTYPES
from .mmq_strips import KINDS


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
            yield from (("mmq_decode", variant_of(spec, x_dtype, rounding), f"sm_{arch}") for rounding in (0, 1))
            for t in (t for t in tiled.tiles(arch) if tiled.refuse_tile(spec, device, t) is None):
                shape = t.blocks, t.strips, t.stages, t.resident
                yield "mmq_tiled", variant_of(spec, x_dtype, *shape), f"sm_{arch}"
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
