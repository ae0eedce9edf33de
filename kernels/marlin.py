"""Marlin tiles: 4- and 8-bit codes in the order of tensor-core fragments, scales and zeros permuted to match.

| tensor           | dtype, shape                       | meaning |
| ---------------- | ---------------------------------- | ------- |
| ``qweight``      | int32 [(E,) Kp/16, Np*bits/2]      | tiles of 16 x 64, order of ``formats/fragment.py`` |
| ``scales``       | source dtype [(E,) G, Np]          | position 8i + v of every 64 is column i + 8v |
|                  | [(E,) ceil(K/bk), ceil(N/bn)]      | blocks of bn > 1 columns: the grid as it is, k first |
|                  | [(E,) ceil(K/bk), shards]          | one scale for each fused shard (spec key ``shards``) |
| ``global_scale`` | f32 [1], [shards], [E], [E, shards] | a second factor, always a multiplier |
| ``qzeros``       | int32 [(E,) G, Np*bits/32]         | true zeros, columns as ``ZERO_COLUMNS`` |
| ``perm``         | int32 [Kp]                         | stored row p is input channel perm[p] (act-order) |
| ``bias``         | its own dtype [(E,) N]             | natural order |

8-bit scales (e8m0, e4m3) are stored as U8. No constant is folded into a scale: an artifact serves every x dtype.

Np = N rounded up to 64; Kp = K rounded up to lcm(64, group). Padding decodes to zero, so it never changes a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.bits import contiguous, pack_stream, unpack_stream
from ..formats.canonical import ELEMENTS, SCALE_DTYPES, Level, Outline, QuantTensor, from_shards, grid_shape
from ..formats.fragment import SCALE_COLUMNS, TILE_K, TILE_N, TILES, reorder, restore
from ..formats.stream import Pieces, Stream, assembled, hollow, steps, streamed, whole
from .factors import global_level, global_outline, global_shape, is_global, one_a_part, wrong_shards
from .marlin_pair_plan import plan_pair as plan_pair
from .marlin_plan import numerics as numerics
from .marlin_plan import plan as plan
from .marlin_variants import covering as covering
from .marlin_variants import variants as variants

Array = NDArray[Any]
Spec = dict[str, Any]

K_STEP = 64  # k is padded to whole steps of the kernels

FLOATS = ("f16", "bf16", "f32")
# Element -> (the code that decodes to zero without a zero point, the types of its scales).
HELD: dict[str, tuple[int, tuple[str, ...]]] = {
    "u4b8": (8, FLOATS),
    "u8b128": (128, FLOATS),
    "u4": (0, FLOATS),
    "u8": (0, FLOATS),
    "e4m3": (0, (*FLOATS, "e8m0", "f64")),
    "e2m1": (0, (*FLOATS, "e8m0", "e4m3")),
}

MEMBERS = ("qweight", "scales", "global_scale", "qzeros", "perm", "bias")
"""Every suffix a module may have."""


def _zero_column(bits: int, position: Array) -> Array:
    """Column of the zero point at a stored position of every 64: a lane's eight (or four) columns share a word."""
    interleave = np.array({4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3, 4, 6, 5, 7]}[bits])
    column: Array = position // 8 + 8 * interleave[position % 8]
    return column


ZERO_COLUMNS = {bits: _zero_column(bits, np.arange(TILE_N)) for bits in (4, 8)}


def accepts(q: Outline) -> str | None:
    """None if the layout holds the tensor exactly, else the reason and what to do."""
    name = "u8b128" if q.element.signed else q.element.name
    if q.element.bits in (2, 3) and len(q.scales) == 1 and not q.offsets:
        return f"{q.element.bits}-bit codes have no Marlin tile; --widen stores them losslessly in 4-bit fields"
    if name not in HELD:
        return f"no Marlin tile for element {name}"
    if q.offsets:
        return "Marlin has no place for scaled minima"
    (dtype, (block_n, _)), *rest = q.scales
    if rest and not (q.element.is_float and is_global(q, rest)):
        return f"Marlin holds one level of scales, this has {len(q.scales)}"
    if dtype not in HELD[name][1]:
        return f"Marlin scales of {name} are {', '.join(HELD[name][1])}, not {dtype}"
    if block_n != 1 and not q.element.is_float:
        return f"Marlin scales belong to one output row, these to {block_n}"
    if (reason := wrong_shards(q)) is not None:
        return reason
    if q.group != -1 and q.group % TILE_K:
        return f"group size {q.group} is not a multiple of {TILE_K}"
    if q.zero_max is not None and (q.element.bias or q.element.signed or q.element.is_float):
        return f"element {name} already carries a fixed zero point"
    if q.zero_max is not None and q.zero_max >= 2**q.element.bits:
        return (
            f"zero point {q.zero_max} does not fit {q.element.bits} bits; read the zeros with --zero-wrap lane or word"
        )
    return None


def padded(n: int, k: int, group: int) -> tuple[int, int]:
    """(Np, Kp): whole tiles along n; whole steps and whole groups along k."""
    step = K_STEP if group == -1 else lcm(K_STEP, group)
    return -(-n // TILE_N) * TILE_N, -(-k // step) * step


def _pad(grid: Array, rows: int, cols: int) -> Array:
    """[.., r, c] -> [.., rows, cols], new entries zero bytes."""
    out = np.zeros((*grid.shape[:-2], rows, cols), grid.dtype)
    out[..., : grid.shape[-2], : grid.shape[-1]] = grid
    return out


BYTES = {SCALE_DTYPES[name]: np.dtype(np.uint8) for name in ("e8m0", "e4m3")}


def _scale_shape(spec: Spec) -> tuple[int, int]:
    """[groups, Np] when scales belong to one column, else the grid's [ceil(K / bk), columns of blocks or shards]."""
    bn, bk = spec["scale_block"]
    if "shards" in spec and "global" not in spec:
        return -(-spec["k"] // bk), len(spec["shards"])
    if bn == 1:
        return 1 if spec["group"] == -1 else spec["k_padded"] // spec["group"], spec["n_padded"]
    rows, columns = grid_shape(spec["n"], spec["k"], (bn, bk))
    return columns, rows


def spec(q: Outline) -> Spec:
    """What an artifact records of a tensor ``accepts`` takes; ``unpack`` and ``plan`` need no more than this."""
    group = q.group
    np_, kp = padded(q.n, q.k, group)
    return {
        "layout": "marlin",
        "element": "u8b128" if q.element.signed else q.element.name,
        "signed": q.element.signed,
        "n": q.n,
        "k": q.k,
        "n_padded": np_,
        "k_padded": kp,
        "experts": q.experts,
        "group": group,
        "scale": q.scales[0][0],
        "scale_block": list(q.scales[0][1]),
        "zero": None if q.zero_max is None else "int",
        "perm": q.perm,
        "bias": q.bias,
        **({"global": q.scales[1][0]} if len(q.scales) > 1 else {}),
        **({"shards": list(q.shards)} if q.shards else {}),
    }


def outline(spec: Spec) -> Outline:
    """The inverse of ``spec``, so far as it goes: a spec is sound when ``spec(outline(spec)) == spec``."""
    n, k, shards = spec["n"], spec["k"], tuple(spec.get("shards", ()))
    levels = [(spec["scale"], (spec["scale_block"][0], spec["scale_block"][1]))]
    if "global" in spec:
        levels.append(global_outline(spec))
    return Outline(
        element=ELEMENTS["s8" if spec["signed"] else spec["element"]],
        n=n,
        k=k,
        experts=spec["experts"],
        scales=tuple(levels),
        zero_max=None if spec["zero"] is None else 0,
        perm=spec["perm"],
        bias=spec["bias"],
        shards=shards,
    )


def pack(q: QuantTensor) -> tuple[dict[str, Array], Spec]:
    """Tensors by suffix, and their spec. The tensor must be one that ``accepts`` takes."""
    return assembled(*stream(streamed(q)))


def stream(source: Stream) -> tuple[dict[str, Array | Pieces], Spec]:
    """``pack``, the codes in pieces of whole tiles along k."""
    q = source.tensor
    outline = q.outline()
    assert accepts(outline) is None, accepts(outline)
    s = spec(outline)
    k, np_, kp, group = s["k"], s["n_padded"], s["k_padded"], s["group"]
    groups = 1 if group == -1 else kp // group
    element = ELEMENTS[s["element"]]

    shape = expected(s)["qweight"][1]
    runs = steps(kp, TILE_K, np_, across=not source.along)
    makers = [partial(_tiles, source, s, expert, run) for expert in range(q.experts or 1) for run in runs]
    tensors: dict[str, Array | Pieces] = {"qweight": Pieces(np.dtype(np.int32), shape, makers)}
    fine = one_a_part(q.scales[0]).swapaxes(-2, -1)
    if s["scale_block"][0] == 1 and not q.scales[0].shards:
        fine = reorder(_pad(fine, groups, np_), SCALE_COLUMNS)
    tensors["scales"] = np.ascontiguousarray(fine).view(BYTES.get(fine.dtype, fine.dtype))
    if len(q.scales) > 1:
        tensors["global_scale"] = one_a_part(q.scales[1]).reshape(global_shape(s))
    if q.zero is not None:
        zeros = _pad(q.zero.astype(np.uint8).swapaxes(-2, -1), groups, np_)
        tensors["qzeros"] = pack_stream(reorder(zeros, ZERO_COLUMNS[element.bits]), element.bits).view(np.int32)
    if q.perm is not None:
        tensors["perm"] = np.concatenate([q.perm, np.arange(k, kp, dtype=np.int32)])
    if q.bias is not None:
        tensors["bias"] = q.bias
    return tensors, s


def _tiles(source: Stream, s: Spec, expert: int, run: slice) -> Array:
    """The tiles of the padded columns ``run``: int32 [run / 16, Np * bits / 2]."""
    n, k, group = s["n"], s["k"], s["group"]
    element, last = ELEMENTS[s["element"]], min(run.stop, k)
    codes = np.empty((0, n), np.uint8)
    if run.start < k:
        codes = contiguous(source.slab(expert, slice(0, n), slice(run.start, last)).T)
        codes = codes ^ np.uint8(0x80) if s["signed"] else codes
    if run.stop > k or n < s["n_padded"]:
        padded = np.zeros((run.stop - run.start, s["n_padded"]), np.uint8)
        padded[: len(codes), :n] = codes
        # Padding inside the last real group decodes to zero; groups that are all padding keep code 0, scale 0.
        end = s["k_padded"] if group == -1 else -(-k // group) * group
        q = source.tensor
        zero = HELD[element.name][0] if q.zero is None else q.zero.reshape(-1, *q.zero.shape[-2:])[expert, :, -1]
        padded[max(k - run.start, 0) : max(end - run.start, 0), :n] = zero
        codes = padded
    return TILES[element.bits].pack(codes)


def expected(spec: Spec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Suffix -> (dtype name, shape) of the tensors a spec promises; dtype names as in ``SCALE_DTYPES``, i32 and u8."""
    bits = ELEMENTS[spec["element"]].bits
    lead = () if spec["experts"] is None else (spec["experts"],)
    n, np_, kp = spec["n"], spec["n_padded"], spec["k_padded"]
    stored = "u8" if SCALE_DTYPES[spec["scale"]] in BYTES else spec["scale"]
    shapes = {
        "qweight": ("i32", (*lead, kp // TILE_K, np_ * bits // 2)),
        "scales": (stored, (*lead, *_scale_shape(spec))),
    }
    if "global" in spec:
        shapes["global_scale"] = (spec["global"], global_shape(spec))
    if spec["zero"] is not None:
        shapes["qzeros"] = ("i32", (*lead, _scale_shape(spec)[0], np_ * bits // 32))
    if spec["perm"]:
        shapes["perm"] = ("i32", (kp,))
    if spec["bias"]:
        shapes["bias"] = (spec["bias"], (*lead, n))
    return shapes


def unpack(tensors: Mapping[str, Array], spec: Spec) -> QuantTensor:
    """The inverse of ``pack``; ``source`` and ``residue`` are the artifact's to add."""
    return whole(view(tensors, spec))


def view(tensors: Mapping[str, Array], spec: Spec) -> Stream:
    """``unpack``, its codes by the slab."""
    element, n, k = ELEMENTS[spec["element"]], spec["n"], spec["k"]
    bits, lead = element.bits, () if spec["experts"] is None else (spec["experts"],)
    (block_n, block_k), shards = spec["scale_block"], tuple(spec.get("shards", ()))
    groups = -(-k // block_k)
    fine = tensors["scales"].view(SCALE_DTYPES[spec["scale"]])
    if shards and "global" not in spec:
        levels = [from_shards(fine.swapaxes(-2, -1), shards, block_k)]
    else:
        fine = restore(fine, SCALE_COLUMNS)[..., :groups, :n] if block_n == 1 else fine
        levels = [Level(fine.swapaxes(-2, -1), (block_n, block_k))]
    if "global" in spec:
        levels.append(global_level(spec, tensors["global_scale"]))
    zero = None
    if spec["zero"] is not None:
        zero = restore(unpack_stream(tensors["qzeros"], bits), ZERO_COLUMNS[bits])[..., :groups, :n].swapaxes(-2, -1)
    tiles = tensors["qweight"].reshape(-1, *tensors["qweight"].shape[-2:])
    flip = np.uint8(0x80 if spec["signed"] else 0)

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        codes = TILES[bits].window(tiles[expert], columns, rows).T
        return codes ^ flip if flip else codes

    q = QuantTensor(
        element=ELEMENTS["s8"] if spec["signed"] else element,
        codes=hollow(*lead, n, k),
        scales=tuple(levels),
        zero=zero,
        perm=tensors["perm"][:k] if spec["perm"] else None,
        bias=tensors["bias"] if spec["bias"] else None,
    )
    return Stream(q, slab)
