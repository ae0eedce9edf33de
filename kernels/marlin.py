"""Marlin tiles: 4- and 8-bit codes in the order of tensor-core fragments, scales and zeros permuted to match.

| tensor      | dtype, shape                       | meaning |
| ----------- | ---------------------------------- | ------- |
| ``qweight`` | int32 [(E,) Kp/16, Np*bits/2]      | tiles of 16 x 64, order of ``formats/fragment.py`` |
| ``scales``  | source dtype [(E,) G, Np]          | position 8i + v of every 64 is column i + 8v |
| ``qzeros``  | int32 [(E,) G, Np*bits/32]         | true zeros, columns as ``ZERO_COLUMNS`` |
| ``perm``    | int32 [Kp]                         | stored row p is input channel perm[p] (act-order) |
| ``bias``    | its own dtype [(E,) N]             | natural order |

Np = N rounded up to 64; Kp = K rounded up to lcm(64, group). Padding decodes to zero, so it never changes a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.bits import pack_stream, unpack_stream
from ..formats.canonical import ELEMENTS, Level, Outline, QuantTensor
from ..formats.fragment import SCALE_COLUMNS, TILE_K, TILE_N, TILES, reorder, restore
from .marlin_plan import plan as plan

Array = NDArray[Any]
Spec = dict[str, Any]

K_STEP = 64  # k is padded to whole steps of the kernels

# Each row: the code that decodes to zero without a zero point.
NEUTRAL = {"u4b8": 8, "u8b128": 128, "u4": 0, "u8": 0}
SCALES = ("f16", "bf16", "f32")

MEMBERS = ("qweight", "scales", "qzeros", "perm", "bias")
"""Every suffix a module may have."""


def _zero_column(bits: int, position: Array) -> Array:
    """Column of the zero point at a stored position of every 64: a lane's eight (or four) columns share a word."""
    interleave = np.array({4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3, 4, 6, 5, 7]}[bits])
    column: Array = position // 8 + 8 * interleave[position % 8]
    return column


ZERO_COLUMNS = {bits: _zero_column(bits, np.arange(TILE_N)) for bits in (4, 8)}


def accepts(q: Outline) -> str | None:
    """None if the layout holds the tensor exactly, else the reason and what to do."""
    if q.element.name in ("u2", "u2b2", "u3", "u3b4"):
        return f"{q.element.bits}-bit codes have no Marlin tile; --widen stores them losslessly in 4-bit fields"
    if q.element.name not in NEUTRAL and q.element.name != "s8":
        return f"no Marlin tile for element {q.element.name}"
    if q.offsets:
        return "Marlin has no place for scaled minima; convert to mmq instead"
    if len(q.scales) != 1:
        return f"Marlin holds one level of scales, this has {len(q.scales)}; convert to mmq instead"
    dtype, (block_n, _) = q.scales[0]
    if dtype not in SCALES:
        return f"Marlin scales are {', '.join(SCALES)}, not {dtype}"
    if block_n != 1:
        return f"Marlin scales belong to one output row, these to {block_n}"
    if q.group != -1 and q.group % TILE_K:
        return f"group size {q.group} is not a multiple of {TILE_K}"
    if q.zero_max is not None and q.zero_max >= 2**q.element.bits:
        return (
            f"zero point {q.zero_max} does not fit {q.element.bits} bits; read the zeros with --zero-wrap lane or word"
        )
    if q.zero_max is not None and (q.element.bias or q.element.signed):
        return f"element {q.element.name} already carries a fixed zero point"
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
    }


def outline(spec: Spec) -> Outline:
    """The inverse of ``spec``, so far as it goes: a spec is sound when ``spec(outline(spec)) == spec``."""
    return Outline(
        element=ELEMENTS["s8" if spec["signed"] else spec["element"]],
        n=spec["n"],
        k=spec["k"],
        experts=spec["experts"],
        scales=((spec["scale"], (spec["scale_block"][0], spec["scale_block"][1])),),
        zero_max=None if spec["zero"] is None else 0,
        perm=spec["perm"],
        bias=spec["bias"],
    )


def pack(q: QuantTensor) -> tuple[dict[str, Array], Spec]:
    """Tensors by suffix, and their spec. The tensor must be one that ``accepts`` takes."""
    outline = q.outline()
    assert accepts(outline) is None, accepts(outline)
    s = spec(outline)
    n, k, np_, kp, group = s["n"], s["k"], s["n_padded"], s["k_padded"], s["group"]
    groups = 1 if group == -1 else kp // group
    element = ELEMENTS[s["element"]]

    codes = np.zeros((*q.codes.shape[:-2], kp, np_), np.uint8)
    codes[..., :k, :n] = (q.codes ^ np.uint8(0x80) if s["signed"] else q.codes).swapaxes(-2, -1)
    # Padding inside the last real group decodes to zero; groups that are all padding keep code 0, scale 0.
    end = kp if group == -1 else -(-k // group) * group
    codes[..., k:end, :n] = NEUTRAL[element.name] if q.zero is None else q.zero[..., -1:].swapaxes(-2, -1)

    tensors = {"qweight": TILES[element.bits].pack(codes)}
    tensors["scales"] = reorder(_pad(q.scales[0].data.swapaxes(-2, -1), groups, np_), SCALE_COLUMNS)
    if q.zero is not None:
        zeros = _pad(q.zero.astype(np.uint8).swapaxes(-2, -1), groups, np_)
        tensors["qzeros"] = pack_stream(reorder(zeros, ZERO_COLUMNS[element.bits]), element.bits).view(np.int32)
    if q.perm is not None:
        tensors["perm"] = np.concatenate([q.perm, np.arange(k, kp, dtype=np.int32)])
    if q.bias is not None:
        tensors["bias"] = q.bias
    return tensors, s


def expected(spec: Spec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Suffix -> (dtype name, shape) of the tensors a spec promises; dtype names as in ``SCALE_DTYPES``, and ``i32``."""
    bits = ELEMENTS[spec["element"]].bits
    lead = () if spec["experts"] is None else (spec["experts"],)
    n, np_, kp = spec["n"], spec["n_padded"], spec["k_padded"]
    groups = 1 if spec["group"] == -1 else kp // spec["group"]
    shapes = {
        "qweight": ("i32", (*lead, kp // TILE_K, np_ * bits // 2)),
        "scales": (spec["scale"], (*lead, groups, np_)),
    }
    if spec["zero"] is not None:
        shapes["qzeros"] = ("i32", (*lead, groups, np_ * bits // 32))
    if spec["perm"]:
        shapes["perm"] = ("i32", (kp,))
    if spec["bias"]:
        shapes["bias"] = (spec["bias"], (*lead, n))
    return shapes


def unpack(tensors: Mapping[str, Array], spec: Spec) -> QuantTensor:
    """The inverse of ``pack``; ``source`` and ``residue`` are the artifact's to add."""
    element, n, k = ELEMENTS[spec["element"]], spec["n"], spec["k"]
    bits = element.bits
    codes = TILES[bits].unpack(tensors["qweight"])[..., :k, :n].swapaxes(-2, -1)
    block = (1, spec["scale_block"][1])
    groups = -(-k // block[1])
    scales = restore(tensors["scales"], SCALE_COLUMNS)[..., :groups, :n].swapaxes(-2, -1)
    zero = None
    if spec["zero"] is not None:
        zero = restore(unpack_stream(tensors["qzeros"], bits), ZERO_COLUMNS[bits])[..., :groups, :n].swapaxes(-2, -1)
    if spec["signed"]:
        element, codes = ELEMENTS["s8"], codes ^ np.uint8(0x80)
    return QuantTensor(
        element=element,
        codes=codes,
        scales=(Level(scales, block),),
        zero=zero,
        perm=tensors["perm"][:k] if spec["perm"] else None,
        bias=tensors["bias"] if spec["bias"] else None,
    )
