"""GPTQ linears as AutoGPTQ, GPTQModel and auto-round write them: 2, 3, 4 and 8 bit, by group, codes packed along k.

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| ``P.qweight`` | int32 or uint32 [K*bits/32, N] | column n is a little-endian stream of the codes of k = 0, 1, ... |
| ``P.qzeros`` | the same [G, ceil(N*bits/32)] | row g is such a stream along n; may be absent when symmetric |
| ``P.scales`` | f16, bf16 or f32 [G, N] | any sign |
| ``P.g_idx`` | int32 [K] | group of each k; absent or all zero: k // group |
| ``P.bias`` | [N] | optional |

    w[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

``P.B`` and ``P.s`` in place of these are Marlin tiles: see ``gptq_marlin.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks, gptq_config, gptq_marlin, gptq_zeros
from .canonical import ELEMENTS, Outline, QuantTensor
from .checks import full_name
from .container import Checkpoint, Tensor
from .errors import AS_WRITTEN, RIGHT_LABELS, UnsupportedError
from .fragment import TILES
from .gptq_config import METHODS, Label, is_marlin, method
from .gptq_members import INDICES, MEMBERS, TILED, WORDS, check_columns, checked, disagree
from .gptq_shapes import Say, Shapes, code_bits
from .groups import group_size, indices, measured_group, order
from .linear import Linear, assuming
from .rows import pack_rows, read_rows
from .stream import Stream, whole

Array = NDArray[Any]

OPTIONS = ("bits", "group_size", "checkpoint_format", "zero_wrap")

# bits -> (symmetric, with zero points)
ELEMENT_NAMES = {2: ("u2b2", "u2"), 3: ("u3b4", "u3"), 4: ("u4b8", "u4"), 8: ("u8b128", "u8")}


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Module -> the tensors it consumes. A module that lacks a member is listed: reading it names what is missing."""
    config = checkpoint.quantization
    named = method(config)
    if named is not None and (named == "awq" or named.startswith("auto_round:")):
        return {}
    suffixes: dict[str, set[str]] = {}
    for name in checkpoint.tensors:
        module, suffix = checks.parted(name)
        suffixes.setdefault(module, set()).add(suffix)
    tiled = is_marlin(config) or checkpoint.options.checkpoint_format == "marlin"
    found = {}
    for module, present in suffixes.items():
        if {"B", "s"} <= present or (tiled and present & {"B", "s"}):
            members: tuple[str, ...] = TILED
        elif _ours(checkpoint, module, present, named):
            members = MEMBERS
        else:
            continue
        found[module] = tuple(full_name(module, suffix) for suffix in members if suffix in present)
    return found


def _ours(checkpoint: Checkpoint, module: str, present: set[str], named: str | None) -> bool:
    """Names suffice under our own label; under another or none, AWQ and others share them and shapes tell."""
    if named in METHODS:
        return bool(present & {"qweight", "qzeros", "g_idx"}) or ("scales" in present and "weight" not in present)
    if not {"qweight", "scales"} <= present:
        return named is None and bool(present & {"qweight", "qzeros"})
    qweight, scales = (checkpoint.tensors[full_name(module, s)] for s in ("qweight", "scales"))
    columns, n = qweight.shape[-1:], scales.shape[-1:]
    same, awq = columns == n, n == tuple(8 * c for c in columns)
    return same and qweight.dtype in WORDS if named else not awq


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """Element, extents and grids from shapes, g_idx and qzeros. Raises UnsupportedError and CorruptError."""
    return _linear(checkpoint, module).outline()


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """The module with codes uint8 [n, k] as a transposed view. Raises what ``describe`` raises, and CorruptError for
    scales that are NaN or infinite."""
    return whole(stream(checkpoint, module)).check()


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    linear = _linear(checkpoint, module)
    members, k = linear.members, linear.k
    scales = linear.scales.array()
    checks.finite(linear.scales, scales)
    if "B" in members:
        scales = gptq_marlin.natural(scales)

    words = members["B" if "B" in members else "qweight"].array()

    def slab(_: int, rows: slice, columns: slice) -> Array:
        if "B" in members:
            return TILES[gptq_marlin.BITS].window(words, columns, rows).T
        channels = columns if linear.perm is None else _channels(linear.perm, k)[columns]
        return read_rows(words, linear.element.bits, channels, rows).T

    return Stream(linear.tensor(scales.T), slab)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The tensors that ``read`` was given, by full name: very bytes, dtypes and shapes."""
    dtypes = q.source["dtypes"]
    codes, scales = q.codes.T, np.ascontiguousarray(q.scales[0].data.T)
    if "B" in dtypes:
        tiles, scales = gptq_marlin.pack(codes, scales)
        tensors = {"B": tiles.view(WORDS[dtypes["B"]]), "s": scales}
    else:
        words = pack_rows(codes, q.element.bits, _channels(q.perm, q.k))
        tensors = {"qweight": words.view(WORDS[dtypes["qweight"]]), "scales": scales}
    tensors |= dict(_derived(q.source, q.element.bits, q.n, q.k, q.scales[0].block[1], q.zero, q.perm))
    if q.bias is not None:
        tensors["bias"] = q.bias
    tensors |= q.residue
    return {full_name(module, suffix): tensors[suffix] for suffix in dtypes}


def _derived(
    source: Mapping[str, Any], bits: int, n: int, k: int, group: int, zero: Array | None, perm: Array | None
) -> Iterator[tuple[str, Array]]:
    """qzeros and g_idx as they follow from the rest; where the file has other bytes, those are its residue."""
    dtypes = source["dtypes"]
    if "qzeros" in dtypes and source["zeros"]:
        rows = None if zero is None else zero.T
        words = gptq_zeros.store(rows, source["zeros"], -(-k // group), n, bits)
        yield "qzeros", np.ascontiguousarray(words).view(WORDS[dtypes["qzeros"]])
    if "g_idx" in dtypes:
        g_idx = np.zeros(k) if source["g_idx_zero"] else indices(perm, k, group)
        yield "g_idx", g_idx.astype(INDICES[dtypes["g_idx"]])


def _linear(checkpoint: Checkpoint, module: str) -> Linear:
    """Everything but codes and scales, decided from the tensors and cross-checked with the labels."""
    label = gptq_config.label(checkpoint.quantization, checkpoint.options, module, checkpoint.stated_in)
    said, say = assuming(checkpoint, module)
    for remark in label.remarks:
        say(remark)
    tiled = any(full_name(module, suffix) in checkpoint.tensors for suffix in TILED[:2])
    members = checked(checkpoint, module, TILED if tiled else MEMBERS)
    linear = (_tiled if tiled else _plain)(members, label, say)
    source = {
        "format": "gptq",
        "checkpoint_format": label.convention,
        "sym": label.sym,
        "dtypes": {suffix: tensor.dtype for suffix, tensor in members.items()},
        **linear.source,
    }
    if said:
        source["assumed"] = said
    derived = dict(_derived(source, linear.element.bits, linear.n, linear.k, linear.block[1], linear.zero, linear.perm))
    stored = {suffix: members[suffix].array() for suffix in ("qzeros", "g_idx") if suffix in members}
    residue: dict[str, Array] = {
        s: a for s, a in stored.items() if s not in derived or not np.array_equal(a, derived[s])
    }
    return replace(linear, source=source, residue=residue)


def _plain(members: dict[str, Tensor], label: Label, say: Say) -> Linear:
    """Packed along k: bits, group, order of channels and zero points from what is stored."""
    qweight, g_tensor, z_tensor = members["qweight"], members.get("g_idx"), members.get("qzeros")
    where = str(qweight.file), qweight.name
    rows, (groups, n) = qweight.shape[0], members["scales"].shape
    check_columns(qweight, n, label)
    if z_tensor is not None and z_tensor.shape[0] != groups:
        raise disagree(z_tensor, f"{groups} rows, as scales has")
    shapes = Shapes(
        rows,
        n,
        groups,
        None if g_tensor is None else g_tensor.shape[0],
        None if z_tensor is None else z_tensor.shape[1],
    )
    bits = code_bits(shapes, label, say, *where)
    k = rows * 32 // bits

    # An all-zero g_idx was never filled in: it says k // group, as no g_idx does.
    g_idx = None if g_tensor is None else g_tensor.array()
    unset = g_idx is not None and not g_idx.any()
    measured, perm = None, None
    if g_tensor is not None and g_idx is not None and not unset:
        measured = measured_group(g_idx, groups, where[0], g_tensor.name)
        perm = order(g_idx, measured)
    switched = "group_size" in label.switched
    group = group_size(k, groups, measured, label.group_size, say, *where, switched=switched)

    words = None if z_tensor is None else z_tensor.array().view(np.uint32)
    zeros = gptq_zeros.load(words, bits, n, label, say, where[0], where[1] if z_tensor is None else z_tensor.name)
    zero = None if zeros.zero is None else zeros.zero.T
    element = ELEMENTS[ELEMENT_NAMES[bits][zero is not None]]
    source = {"zeros": zeros.how, "g_idx_zero": unset}
    return Linear(members, members["scales"], element, n, k, (1, group), zero, perm, source)


def _tiled(members: dict[str, Tensor], label: Label, say: Say) -> Linear:
    """Marlin tiles: they have neither zeros nor g_idx, and one width."""
    tiles, scales = members["B"], members["s"]
    where = {"file": str(tiles.file), "tensor": tiles.name}
    extents = gptq_marlin.extents(tiles.shape, scales.shape)
    if extents is None:
        raise disagree(tiles, f"[k/16, 2n] for scales of {list(scales.shape)}, n divisible by 64")
    n, k, groups = extents
    bits = gptq_marlin.BITS
    if label.sym is False or any(b != bits for b in label.bits):
        switch = label.sym is not False and "bits" in label.switched
        who, do = ("--bits says", "leave it out") if switch else ("the label says", RIGHT_LABELS)
        raise UnsupportedError(f"Marlin tiles hold symmetric 4-bit codes, {who} otherwise", **where, do=do)
    switched = "group_size" in label.switched
    group = group_size(k, groups, None, label.group_size, say, **where, switched=switched)
    if group not in (gptq_marlin.GROUP, k):
        found = f"group size {group}"
        raise UnsupportedError("no such Marlin checkpoint", found=found, need="128 or -1", do=AS_WRITTEN, **where)
    if not label.found:
        say("assumed symmetric 4-bit codes, as Marlin tiles are")
    source = {"checkpoint_format": "marlin"}
    return Linear(members, scales, ELEMENTS[ELEMENT_NAMES[bits][0]], n, k, (1, group), None, None, source)


def _channels(perm: Array | None, k: int) -> Array:
    """[k]: the logical channel of each stored column."""
    return np.arange(k) if perm is None else perm
