"""Which kernels multiply with a Marlin module: a function of (module, m, device) and nothing else.

| m | kernel | work of a block |
| --- | --- | --- |
| 1 to 8 | marlin_decode | tiles of 64 features, k split over its warps: time is reading W once |
| 9 to 32, on Hopper | marlin_decode | the same, one or two tiles at once; not large matrices (refuse_many) |
| above | marlin_tiled | 64 to 256 features x 16 to 128 tokens |
| above, on Hopper | marlin_wgmma (marlin_hopper_plan) | 128 or 256 features x 16 to 256 tokens, or a part of their k |

Large matrices of 4-bit integers in groups of 16 take wgmma at any m, and batch-invariant products the tiles that add in
one order.

All read rows of x as they lie. Where they cannot (act-order, rows that do not start on 16 bytes, for marlin_decode
rows whose length is no multiple of 8) ``gather`` goes before them. float32 rows become ``pairs`` of f16 rows, which
marlin_decode and marlin_tiled multiply and add. On sm_75 these multiply f16 with the instructions it has (turing.cuh).

With numerics "int8_row" these two multiply integers: ``quantize_rows`` makes whole numbers q[m, k] and factors d[m]
of x (quantize.py), and with them

    y[m, n] = d[m] * sum over runs r of scale[n, r] * sum over k in r of q[m, k] * (code[n, k] - zero[n, r])

then bias, residual and rounding as ever (epilogue.py). A run is a part of a group, of at most 128 k. Its sum is exact;
those of a row are scaled and added in float32, each step rounded once, and d is the last factor. Where a scale belongs
to all of k a run is what a warp adds, in float32: exact up to 2^24, so for any x while k is at most 16513 (u4b8), 8806
(u4), 1032 (u8b128) or 518 (u8); a larger sum is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..formats.canonical import ELEMENTS, scale_words
from ..formats.errors import UnsupportedError
from . import marlin_hopper_plan as hopper
from . import marlin_scales as scales
from . import marlin_tiled_plan as tiled
from .launch import Device, Part, Plan, fastest
from .marlin_decode_plan import CHUNK, DECODE_TOKENS, Decode, choose_decode, choose_many, decode, refuse_decode
from .marlin_launch import WHOLE, gather_of, rows_read, with_rows, with_whole_rows
from .marlin_tiled_plan import Tiled
from .wgmma_plan import Wgmma

Spec = Mapping[str, Any]

X_DTYPES = ("f16", "bf16", "f32")

K_LIMIT = 2**21
"""Keeps the kernels' products of a block's number and of steps along k in 32 bits."""
GROUP_LIMIT = 2**38
"""k times group from which on a row of scales is not found: marlin_decode divides runs of 16 k below 2^30 exactly."""


def one_order(spec: Spec, x_dtype: str, tile: Tiled | Wgmma) -> bool:
    """Whether a tile adds the products of a row from the first k to the last, whatever its extents."""
    return hopper.one_order(spec, x_dtype, tile) if isinstance(tile, Wgmma) else not tile.cut and tile.wk == 1


def choose_tile(
    spec: Spec, m: int, device: Device, x_dtype: str, batch_invariant: bool = False, whole: bool = False
) -> tuple[Tiled | Wgmma, tuple[tuple[str, str], ...]]:
    """The tile of the least estimated time, and why not each other one. wgmma goes first wherever it runs.

    Raises UnsupportedError where none is left: ``batch_invariant`` leaves those that add in one order.
    """
    times: dict[Tiled | Wgmma, float] = {}
    refused: dict[str, str] = {}
    reason = "does not add pairs of rows" if x_dtype == "f32" else hopper.refuse(spec, device, x_dtype)
    reason = "most of its tiles scale weights before they add, not sums of integers" if whole else reason
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
        for t in tiled.TILES:
            for tile in (t, replace(t, cut=True)):
                if why := tiled.refuse_tile(spec, device, x_dtype, tile, whole):
                    refused[str(tile)] = why
                else:
                    times[tile] = tiled.estimate(spec, m, device, tile)
    if batch_invariant:
        invariant = {t: time for t, time in times.items() if one_order(spec, x_dtype, t)}
        refused |= {str(t): "adds in an order that depends on m" for t in times if t not in invariant}
        times = invariant
        if not times:
            raise UnsupportedError("no Marlin kernel adds the products of these types in one order")
    return fastest(times, refused)


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
            "too many input channels for a Marlin kernel",
            found=f"{spec['k_padded']}, padded to whole groups",
            need=f"at most {K_LIMIT}",
        )
    if spec["k_padded"] * spec["group"] >= GROUP_LIMIT:
        found, need = f"groups of {spec['group']}, {spec['k']} input channels", "a product below 2^38"
        raise UnsupportedError("too large groups for a Marlin kernel", found=found, need=need)
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
    quantized: bool = False,
) -> Plan:
    """The launches of y[m, n] = x[m, k] @ W.T for a module that ``marlin.spec`` describes.

    ``x_dtype``: "f16", "bf16" or "f32", also y's. ``aligned``: every row of x starts on 16 bytes. ``variant`` replaces
    the choice, for measuring. ``batch_invariant``: a row of y has the same bits whatever m is and the other rows are.
    ``numerics`` is one of ``numerics(spec)``, None for the first. ``quantized``: x may have been rounded already; it
    changes nothing, as a stage of its own always does that. Raises ``UnsupportedError`` where no kernel of ours runs.
    """
    check_supported(spec, device, x_dtype)
    if m == 0:
        return Plan((), "no rows")
    whole = numerics == WHOLE
    rows, before = rows_read(spec, m, device, x_dtype, aligned, whole)
    against = None if variant else refuse_decode(spec, rows, device, x_dtype, batch_invariant, whole)
    if variant is None and against is None:
        few = rows <= DECODE_TOKENS
        variant = choose_decode(spec, device) if few else choose_many(spec, rows, device)
    rejected: tuple[tuple[str, str], ...] = ()
    if variant is None:
        variant, rejected = choose_tile(spec, rows, device, x_dtype, batch_invariant, whole)
        assert against is not None
        rejected = (("decode", against), *rejected)
    if isinstance(variant, Decode):
        if spec["k"] % CHUNK and not whole:
            before = before or gather_of(spec, m, device)
        made = decode(Part(spec, 0, spec["n"]), rows, device, x_dtype, before, variant, whole=whole)
    elif isinstance(variant, Wgmma):
        assert not whole, variant
        made = hopper.launch(spec, m, device, x_dtype, before, variant)
    else:
        made = tiled.launch(spec, rows, device, x_dtype, before, variant, whole)
    ready = with_whole_rows(made, spec, m, device, x_dtype) if whole else with_rows(made, spec, m, x_dtype)
    return replace(ready, rejected=rejected or made.rejected)
