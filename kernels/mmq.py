"""MMQ strips: 16 rows x 256 k with their factors, codes in the order of the fragments of ``mma.m16n8k32`` (s8).

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| ``strips`` | u8 [(E,) Np/128, Kp/256, 8, strip] | planes of codes, then of factors (``mmq_strips.KINDS``) |
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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.canonical import ELEMENTS, SCALE_DTYPES, Level, Outline, QuantTensor, from_shards, grid_shape
from ..formats.stream import Pieces, Stream, assembled, hollow, steps, streamed, whole
from .factors import global_level, global_outline, global_shape, is_global, one_a_part, wrong_shards
from .mmq_pieces import piece
from .mmq_plan import numerics as numerics
from .mmq_plan import plan as plan
from .mmq_strips import BLOCK, DEPTH, GRIDS, KINDS, STRIPS, Kind, unpack_codes, unpack_factors
from .mmq_variants import covering as covering
from .mmq_variants import variants as variants

Array = NDArray[Any]
Spec = dict[str, Any]
Levels = tuple[tuple[str, tuple[int, int]], ...]

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
        "n_padded": -(-q.n // BLOCK) * BLOCK,
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
    return assembled(*stream(streamed(q)))


def stream(source: Stream) -> tuple[dict[str, Array | Pieces], Spec]:
    """``pack``, the strips in pieces of 128 rows or a multiple."""
    q = source.tensor
    outline = q.outline()
    assert accepts(outline) is None, accepts(outline)
    s = spec(outline)
    kind = KINDS[s["kind"]]
    cuts = [
        (e, run)
        for e in range(q.experts or 1)
        for run in steps(s["n_padded"], BLOCK, s["k_padded"], across=bool(source.along))
    ]
    flip = kind.elements[s["element"]]
    makers = [partial(piece, source, kind, flip, s["k_padded"], expert, run) for expert, run in cuts]
    tensors: dict[str, Array | Pieces] = {"strips": Pieces(np.dtype(np.uint8), _strips_shape(s), makers)}
    if not kind.scales:
        grid = np.ascontiguousarray(one_a_part(q.scales[0]).swapaxes(-2, -1))
        tensors["scales"] = grid.view(BYTES.get(grid.dtype, grid.dtype))
    if "global" in s:
        tensors["global_scale"] = one_a_part(q.scales[-1]).reshape(global_shape(s))
        assert not kind.minima or np.array_equal(q.offsets[-1].data, q.scales[-1].data), "one factor of the whole"
    if q.bias is not None:
        tensors["bias"] = q.bias
    return tensors, s


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
    blocks = spec["n_padded"] // BLOCK, spec["k_padded"] // DEPTH
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
    return whole(view(tensors, spec))


def view(tensors: Mapping[str, Array], spec: Spec) -> Stream:
    """``unpack``, its codes by the slab."""
    kind, n, k = KINDS[spec["kind"]], spec["n"], spec["k"]
    lead = () if spec["experts"] is None else (spec["experts"],)
    strips = tensors["strips"].reshape(-1, *_strips_shape(spec)[-4:])
    flip = kind.elements[spec["element"]]

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        top, left = rows.start // BLOCK, columns.start // DEPTH
        held = strips[expert, top : -(-rows.stop // BLOCK), left : -(-columns.stop // DEPTH)]
        codes = unpack_codes(kind, flip, held.swapaxes(1, 2))[
            rows.start - top * BLOCK :, columns.start - left * DEPTH :
        ]
        return codes[: rows.stop - rows.start, : columns.stop - columns.start]

    scales, offsets = _unpacked_levels(kind, spec, [unpack_factors(kind, one.swapaxes(1, 2)) for one in strips], lead)
    if not kind.scales:
        scales.append(_grid(spec, tensors["scales"]))
    if "global" in spec:
        factor = global_level(spec, tensors["global_scale"])
        scales.append(factor)
        offsets += [factor] if kind.minima else []
    q = QuantTensor(
        element=ELEMENTS[spec["element"]],
        codes=hollow(*lead, n, k),
        scales=tuple(scales),
        offsets=tuple(offsets),
        bias=tensors["bias"] if spec["bias"] else None,
    )
    return Stream(q, slab, along=0)


def _unpacked_levels(
    kind: Kind, spec: Spec, experts: Sequence[list[list[Array]]], lead: tuple[int, ...]
) -> tuple[list[Level], list[Level]]:
    """Scales and offsets from the factors of each expert, without padding and repetition."""
    n, k = spec["n"], spec["k"]
    scales: list[Level] = []
    offsets: list[Level] = []
    for i, ((_, own), (_, block)) in enumerate(zip(kind.scales, _levels(kind, spec)[0], strict=False)):
        count, step = -(-k // block[1]), max(1, block[1] // own)
        for j, levels in enumerate((scales, offsets) if kind.minima else (scales,)):
            data = np.stack([one[i][j][:n, ::step][:, :count] for one in experts])
            data = data.reshape(*lead, *data.shape[1:])
            levels.append(Level(np.negative(data) if kind.pairs and j else data, block))
    return scales, offsets


def _grid(spec: Spec, stored: Array) -> Level:
    """The scales of kind fp8 as a level."""
    data = stored.view(SCALE_DTYPES[spec["scale"]]).swapaxes(-2, -1)
    block_n, block_k = spec["scale_block"]
    if "shards" in spec and "global" not in spec:
        return from_shards(data, tuple(spec["shards"]), block_k)
    return Level(data, (block_n, block_k))
