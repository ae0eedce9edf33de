"""MMQ strips: 16 rows x 256 k with their factors, codes in the order of the fragments of ``mma.m16n8k32`` (s8).

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| ``strips`` | u8 [(E,) Np/128, Kp/256, 8, strip] | planes of codes, then of factors (``mmq_kinds.KINDS``) |
| ``scales`` | source dtype [(E,) ceil(K/bk), ceil(N/bn)] | kind fp8 only: the grid as it is, k first |
|            | [(E,) ceil(K/bk), shards] | one scale for each fused shard (spec key ``shards``) |
| ``global_scale`` | f32 [1], [shards], [E], [E, shards] | a factor of scales and minima, always a multiplier |
| ``bias`` | its own dtype [(E,) N] | natural order |

128 rows x 256 k are one contiguous run. Factors follow the codes level by level, finest first, and row by row: all
scales of the row, then its minima; in q4_1 and q5_1 each scale with its minimum.

Np = N rounded up to 128, Kp = K to 256; padding is zero bytes in every plane, so it has scale 0 from the first whole
group on, and kernels take x as 0 for k >= K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.canonical import ELEMENTS, SCALE_DTYPES, Level, Outline, QuantTensor, from_shards, grid_shape
from ..formats.errors import UnsupportedError
from .factors import global_level, global_outline, global_shape, is_global, one_a_part, wrong_shards
from .launch import Device, Plan
from .mmq_kinds import DEPTH, GRIDS, KINDS, ROWS, Kind

Array = NDArray[Any]
Spec = dict[str, Any]
Levels = tuple[tuple[str, tuple[int, int]], ...]

STRIPS = 8
"""Strips that lie together: 128 rows, what one block of a kernel takes."""

MEMBERS = ("strips", "scales", "global_scale", "bias")
"""Every suffix a module may have."""

BYTES = {SCALE_DTYPES["e8m0"]: np.dtype(np.uint8)}
"""Types of a grid of scales that are stored as bytes."""


def _fits(native: Sequence[tuple[str, int]], found: Levels, k: int) -> bool:
    """Whether levels lie on the grid of a kind; a single level may be coarser: its factors are repeated."""
    if [dtype for dtype, _ in native] != [dtype for dtype, _ in found]:
        return False
    return all(
        bn == 1 and (bk == own or (len(native) == 1 and (bk % own == 0 or bk >= k)))
        for (_, own), (_, (bn, bk)) in zip(native, found, strict=True)
    )


def _holds(kind: Kind, q: Outline) -> bool:
    own = len(kind.scales) or 1
    scales, rest = q.scales[:own], q.scales[own:]
    minima, same = q.offsets[: len(kind.minima)], q.offsets[len(kind.minima) :]
    if q.element.name not in kind.elements or (rest and not is_global(q, rest)) or same != (rest if minima else ()):
        return False
    if not kind.scales:
        return scales[0][0] in GRIDS
    if q.shards and not rest:
        return False
    alike = not kind.pairs or [block for _, block in scales] == [block for _, block in minima]
    return alike and _fits(kind.scales, scales, q.k) and _fits(kind.minima, minima, q.k)


def _kind(q: Outline) -> str | None:
    return next((name for name, kind in KINDS.items() if _holds(kind, q)), None)


def accepts(q: Outline) -> str | None:
    """None if the layout holds the tensor exactly, else the reason and what to do."""
    name = q.element.name
    kinds = {title: kind for title, kind in KINDS.items() if name in kind.elements}
    if not kinds:
        if q.element.bits in (2, 3) and len(q.scales) == 1 and not q.offsets:
            return f"{q.element.bits}-bit codes have no strip; --widen stores them losslessly in 4-bit fields"
        return f"no strip for element {name}"
    if q.zero_max is not None:
        return "strips have no place for integer zero points"
    if q.perm:
        return "strips have no place for a column order (act-order)"
    if _kind(q) is None:
        held = "; ".join(f"{title} strips hold {_words(kind)}" for title, kind in kinds.items())
        return f"{held}; this has {_listed('scales', q.scales)}{_listed(' less', q.offsets)}"
    return wrong_shards(q)


def _words(kind: Kind) -> str:
    if not kind.scales:
        return f"scales {' or '.join(GRIDS)}"
    scales, minima = (tuple((d, (1, bk)) for d, bk in levels) for levels in (kind.scales, kind.minima))
    return f"{_listed('scales', scales)}{_listed(' less', minima)}"


def _listed(what: str, levels: Levels) -> str:
    return f"{what} {' x '.join(f'{dtype} ({bn}, {bk})' for dtype, (bn, bk) in levels)}" if levels else ""


def spec(q: Outline) -> Spec:
    """What an artifact records of a tensor ``accepts`` takes; ``unpack`` and ``plan`` need no more than this."""
    kind = _kind(q)
    assert kind is not None
    return {
        "layout": "mmq",
        "kind": kind,
        "element": q.element.name,
        "n": q.n,
        "k": q.k,
        "n_padded": -(-q.n // (ROWS * STRIPS)) * ROWS * STRIPS,
        "k_padded": -(-q.k // DEPTH) * DEPTH,
        "experts": q.experts,
        "group": q.group,
        "scale": q.scales[0][0],
        "scale_block": list(q.scales[0][1]),
        "zero": None,
        "perm": False,
        "bias": q.bias,
        **({"global": q.scales[-1][0]} if len(q.scales) > (len(KINDS[kind].scales) or 1) else {}),
        **({"shards": list(q.shards)} if q.shards else {}),
    }


def outline(spec: Spec) -> Outline:
    """The inverse of ``spec``, so far as it goes: a spec is sound when ``spec(outline(spec)) == spec``."""
    kind = KINDS.get(spec["kind"], Kind({}, ()))
    scales, offsets = _levels(kind, spec)
    whole = (global_outline(spec),) if "global" in spec else ()
    return Outline(
        element=ELEMENTS[spec["element"]],
        n=spec["n"],
        k=spec["k"],
        experts=spec["experts"],
        scales=(*scales, *whole),
        offsets=(*offsets, *whole) if offsets else (),
        perm=spec["perm"],
        bias=spec["bias"],
        shards=tuple(spec.get("shards", ())),
    )


def _levels(kind: Kind, spec: Spec) -> tuple[Levels, Levels]:
    """(scales, offsets) of a spec, without its global; the finest as it says, the others are the kind's."""
    finest = (spec["scale_block"][0], spec["scale_block"][1])
    scales = ((spec["scale"], finest), *((dtype, (1, bk)) for dtype, bk in kind.scales[1:]))
    offsets = ((kind.minima[0][0], finest), *((d, (1, bk)) for d, bk in kind.minima[1:])) if kind.minima else ()
    return scales, offsets


def pack(q: QuantTensor) -> tuple[dict[str, Array], Spec]:
    """Tensors by suffix, and their spec. The tensor must be one that ``accepts`` takes."""
    outline = q.outline()
    assert accepts(outline) is None, accepts(outline)
    s = spec(outline)
    kind = KINDS[s["kind"]]
    n, k, np_, kp, lead = s["n"], s["k"], s["n_padded"], s["k_padded"], q.codes.shape[:-2]
    codes = np.zeros((*lead, kp, np_), np.uint8)
    codes[..., :k, :n] = (q.codes ^ np.uint8(kind.elements[s["element"]])).swapaxes(-2, -1)

    strips = np.empty(_strips_shape(s), np.uint8)
    by_rows, at = strips.swapaxes(-3, -2), 0
    for plane in (*_code_planes(kind, codes), *_factor_planes(kind, s, q)):
        size = plane.shape[-1]
        by_rows[..., at : at + size] = plane.reshape(*by_rows.shape[:-1], size)
        at += size
    assert at == kind.strip
    tensors = {"strips": strips}
    if not kind.scales:
        grid = np.ascontiguousarray(one_a_part(q.scales[0]).swapaxes(-2, -1))
        tensors["scales"] = grid.view(BYTES.get(grid.dtype, grid.dtype))
    if "global" in s:
        tensors["global_scale"] = one_a_part(q.scales[-1]).reshape(global_shape(s))
        assert not kind.minima or np.array_equal(q.offsets[-1].data, q.scales[-1].data), "one factor of the whole"
    if q.bias is not None:
        tensors["bias"] = q.bias
    return tensors, s


def _code_planes(kind: Kind, codes: Array) -> Iterator[Array]:
    """codes [.., Kp, Np] -> uint8 [.., Np/16, Kp/256, bytes] for each plane."""
    *lead, kp, np_ = codes.shape
    for plane in kind.codes:
        bits = plane.tile.bits
        words = plane.tile.pack(codes if bits == 8 else codes >> plane.shift & 2**bits - 1)
        yield words.view(np.uint8).reshape(*lead, kp // DEPTH, np_ // ROWS, plane.nbytes).swapaxes(-3, -2)


def _factor_planes(kind: Kind, s: Spec, q: QuantTensor) -> Iterator[Array]:
    """uint8 [.., Np/16, Kp/256, bytes] for each level."""
    for i, (_, own) in enumerate(kind.scales):
        levels = [q.scales[i], *q.offsets[i : i + 1]]
        if kind.pairs:
            levels[1] = replace(levels[1], data=np.negative(levels[1].data))
        rows = [_by_strip(_finer(level, own, s), own) for level in levels]
        plane = np.stack(rows, axis=-2 if kind.pairs else -3)
        yield plane.reshape(*plane.shape[:-4], -1)


def _finer(level: Level, own: int, s: Spec) -> Array:
    """A level's factors, one for every ``own`` weights: [.., Np, Kp / own], padded with zero bytes."""
    n, k = s["n"], s["k"]
    grid = np.zeros((*level.data.shape[:-2], s["n_padded"], s["k_padded"] // own), level.data.dtype)
    group = np.arange(-(-k // own)) * own // level.block[1]
    grid[..., :n, : len(group)] = level.data[..., group]
    return grid


def _by_strip(grid: Array, own: int) -> Array:
    """[.., Np, Kp / own] -> uint8 [.., Np/16, Kp/256, 16, 256 / own, bytes of a factor]."""
    *lead, np_, _ = grid.shape
    rows = grid.view(np.uint8).reshape(*lead, np_ // ROWS, ROWS, -1, DEPTH // own, grid.dtype.itemsize)
    return rows.swapaxes(-4, -3)


def expected(spec: Spec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Suffix -> (dtype name, shape) of the tensors a spec promises; dtype names as in ``SCALE_DTYPES``, i32 and u8."""
    lead = () if spec["experts"] is None else (spec["experts"],)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"strips": ("u8", _strips_shape(spec))}
    if not KINDS[spec["kind"]].scales:
        stored = "u8" if SCALE_DTYPES[spec["scale"]] in BYTES else spec["scale"]
        shapes["scales"] = (stored, (*lead, *_grid_shape(spec)))
    if "global" in spec:
        shapes["global_scale"] = (spec["global"], global_shape(spec))
    if spec["bias"]:
        shapes["bias"] = (spec["bias"], (*lead, spec["n"]))
    return shapes


def _strips_shape(spec: Spec) -> tuple[int, ...]:
    lead = () if spec["experts"] is None else (spec["experts"],)
    blocks = spec["n_padded"] // (ROWS * STRIPS), spec["k_padded"] // DEPTH
    return (*lead, *blocks, STRIPS, KINDS[spec["kind"]].strip)


def _grid_shape(spec: Spec) -> tuple[int, int]:
    """Of ``scales``, k first."""
    bn, bk = spec["scale_block"]
    if "shards" in spec and "global" not in spec:
        return -(-spec["k"] // bk), len(spec["shards"])
    rows, columns = grid_shape(spec["n"], spec["k"], (bn, bk))
    return columns, rows


def unpack(tensors: Mapping[str, Array], spec: Spec) -> QuantTensor:
    """The inverse of ``pack``; ``source`` and ``residue`` are the artifact's to add."""
    kind, n, k = KINDS[spec["kind"]], spec["n"], spec["k"]
    strips = tensors["strips"].swapaxes(-3, -2)
    strips = strips.reshape(*strips.shape[:-4], -1, *strips.shape[-2:])  # [.., Np/16, Kp/256, strip]
    codes, at = _unpacked_codes(kind, strips)
    codes = codes[..., :k, :n].swapaxes(-2, -1) ^ np.uint8(kind.elements[spec["element"]])
    blocks = [block for _, block in _levels(kind, spec)[0]]
    scales: list[Level] = []
    offsets: list[Level] = []
    for (dtype, own), block in zip(kind.scales, blocks, strict=False):
        parts = 2 if kind.minima else 1
        size = ROWS * parts * DEPTH // own * SCALE_DTYPES[dtype].itemsize
        plane, at = strips[..., at : at + size], at + size
        first = np.arange(-(-k // block[1])) * block[1] // own
        grids = _unpacked_factors(plane, SCALE_DTYPES[dtype], parts, own, kind.pairs)
        scale, *minimum = (grid[..., :n, first] for grid in grids)
        scales.append(Level(scale, block))
        offsets += [Level(np.negative(low) if kind.pairs else low, block) for low in minimum]
    if not kind.scales:
        scales.append(_grid(spec, tensors["scales"]))
    if "global" in spec:
        whole = global_level(spec, tensors["global_scale"])
        scales.append(whole)
        offsets += [whole] if kind.minima else []
    return QuantTensor(
        element=ELEMENTS[spec["element"]],
        codes=codes,
        scales=tuple(scales),
        offsets=tuple(offsets),
        bias=tensors["bias"] if spec["bias"] else None,
    )


def _unpacked_codes(kind: Kind, strips: Array) -> tuple[Array, int]:
    """(uint8 [.., Kp, Np], the bytes of a strip that are codes)."""
    at = 0
    *lead, rows, steps, _ = strips.shape
    whole = np.zeros((*lead, steps * DEPTH, rows * ROWS), np.uint8)
    for plane in kind.codes:
        words = np.ascontiguousarray(strips[..., at : at + plane.nbytes].swapaxes(-3, -2)).view(np.int32)
        whole |= plane.tile.unpack(words.reshape(*lead, steps, -1)) << plane.shift
        at += plane.nbytes
    return whole, at


def _unpacked_factors(plane: Array, dtype: np.dtype[Any], parts: int, own: int, pairs: bool) -> list[Array]:
    """uint8 [.., Np/16, Kp/256, bytes] -> [.., Np, Kp / own] of each of the ``parts`` of a level."""
    *lead, rows, steps, _ = plane.shape
    per = DEPTH // own
    inner = (per, parts) if pairs else (parts, per)
    factors = np.ascontiguousarray(plane).view(dtype).reshape(*lead, rows, steps, ROWS, *inner)
    factors = np.moveaxis(factors, -1 if pairs else -2, 0).swapaxes(-3, -2)
    return [part.reshape(*lead, rows * ROWS, steps * per) for part in factors]


def _grid(spec: Spec, stored: Array) -> Level:
    """The scales of kind fp8 as a level."""
    data = stored.view(SCALE_DTYPES[spec["scale"]]).swapaxes(-2, -1)
    block_n, block_k = spec["scale_block"]
    if "shards" in spec and "global" not in spec:
        return from_shards(data, tuple(spec["shards"]), block_k)
    return Level(data, (block_n, block_k))


def plan(spec: Spec, m: int, device: Device, x_dtype: str, aligned: bool = True) -> Plan:
    """Raises UnsupportedError: no kernel multiplies with strips yet."""
    found = f"{spec['kind']}, {x_dtype} activations"
    raise UnsupportedError("no kernel for strips yet", found=found, do="dequantize instead")


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture: nothing yet."""
    return iter(())


def covering(target: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What CI compiles for a target: nothing yet."""
    return iter(())
