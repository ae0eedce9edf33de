"""Integer linears of compressed-tensors (llm-compressor, auto-round): pack-quantized, int-quantized, naive-quantized.

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| ``P.weight_packed`` | int32 [N, ceil(K*b/32)] | row n is a little-endian stream of q + 2**(b-1) along k |
| ``P.weight_shape`` | int64 or int32 [2] | N, K |
| ``P.weight`` | int8 [N, K] | in place of the two above: q, in eight bits however few ``num_bits`` are |
| ``P.weight_scale`` | f16, bf16 or f32 [N, G]; [N, 1], [N]; [1], []; a grid of blocks | group; channel; tensor; block |
| ``P.weight_zero_point`` | int32 [ceil(N*b/32), G] packed along n; int8 like the scale | offset as the codes; or 0 |
| ``P.weight_g_idx`` | int32 [K] | group of each channel (actorder); absent or all -1: k // group |
| ``P.bias`` | [N] | optional |

    w[n, k] = scale[n, g] * (q[n, k] - zero[n, g])

Bits that do not divide 32 have two packings, see ``compressed_tensors_stream.py``. The tensors decide, the label's
``config_groups`` only cross-check. What belongs to activations and caches (``input_scale``, ``k_scale``, ...) passes
through as it is; floating point weights (F8_E4M3 ``weight``, U8 ``weight_packed``) are other readers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks, groups
from . import compressed_tensors_config as labels
from . import compressed_tensors_stream as streams
from .canonical import ELEMENTS, Element, Outline, QuantTensor, grid_shape
from .compressed_tensors_config import LABELS, Arguments
from .compressed_tensors_members import ALONE, INDICES, PACKED, UNPACKED, WORDS, checked, extents
from .compressed_tensors_shape import check_k
from .container import Checkpoint, Tensor
from .errors import CorruptError, UnsupportedError
from .linear import Linear, assuming
from .rows import unpack_columns
from .stream import Stream, whole

Array = NDArray[Any]

OPTIONS = ("bits", "group_size")

OFFSET = np.uint8(128)
"""Between a code of eight bits as two's complement and as an unsigned number."""
# bits -> (symmetric, with zero points)
ELEMENT_NAMES = {
    2: ("u2b2", "u2"),
    3: ("u3b4", "u3"),
    4: ("u4b8", "u4"),
    5: ("u5b16", "u5"),
    6: ("u6b32", None),
    8: ("u8b128", "u8"),
}


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Module -> the tensors it consumes. A module that lacks a member is listed: reading it names what is missing.

    Raises UnsupportedError for a format that is not known, a label of something else, and targets that mean nothing.
    """
    named = labels.method(checkpoint.quantization)
    if named in LABELS:
        labels.check_formats(checkpoint)
    found: dict[str, tuple[str, ...]] = {}
    for name, tensor in checkpoint.tensors.items():
        module, suffix = checks.parted(name)
        if suffix == "weight_packed" and tensor.dtype in WORDS:
            if named not in (None, *LABELS):
                raise UnsupportedError(
                    "the label contradicts the tensors",
                    file=tensor.file,
                    tensor=name,
                    found=f"a tensor of compressed-tensors under the label {named!r}",
                    do="correct quant_method, or get the configuration that belongs to this file",
                )
            members: tuple[str, ...] = PACKED
        elif suffix == "weight" and tensor.dtype == "I8" and _is_unpacked(checkpoint, module, named):
            members = UNPACKED
        else:
            continue
        names = tuple(n for s in members if (n := checks.full_name(module, s)) in checkpoint.tensors)
        checks.claim(found, module, names, tensor)
    if found and named in LABELS:
        labels.check_targets(checkpoint, found)
    return found


def orphans(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> what is missing, for tensors of a module without codes."""
    return {
        name: f"{module}.weight_packed or {module}.weight"
        for name in checkpoint.tensors
        for module, suffix in (checks.parted(name),)
        if suffix in ALONE and not {f"{module}.weight_packed", f"{module}.weight"} & checkpoint.tensors.keys()
    }


def _is_unpacked(checkpoint: Checkpoint, module: str, named: str | None) -> bool:
    """int8 weights are others' too: those of a label that is not ours, and those whose inputs are scaled as well."""
    if checks.full_name(module, "pre_quant_scale") in checkpoint.tensors:
        return False
    return named in LABELS or (named is None and checks.full_name(module, "weight_scale") in checkpoint.tensors)


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """Everything but codes; of those only the last word of a row, when it has bits to spare.

    Raises UnsupportedError and CorruptError.
    """
    return _linear(checkpoint, module).outline()


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """The module with codes uint8 [n, k]. Raises what ``describe`` raises, and CorruptError for scales that are NaN or
    infinite."""
    return whole(stream(checkpoint, module)).check()


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    linear = _linear(checkpoint, module)
    members, source, perm, bits = linear.members, linear.source, linear.perm, linear.element.bits
    checks.finite(linear.scales, linear.scales.array())
    if "weight_packed" in members:
        streams.check_tops(members["weight_packed"], bits, source["stream"])

    def slab(_: int, rows: slice, columns: slice) -> Array:
        channels = np.arange(columns.start, columns.stop) if perm is None else perm[columns]
        if "weight_packed" in members:
            starts = streams.starts(channels, bits, source["stream"])
            return unpack_columns(members["weight_packed"].array()[rows], bits, starts)
        codes = members["weight"].array().view(np.uint8)[rows]
        codes = codes[:, columns] if perm is None else codes[:, channels]
        return codes if linear.element.signed else codes ^ OFFSET

    scale = linear.scales.array().reshape(grid_shape(linear.n, linear.k, linear.block))
    return Stream(linear.tensor(scale), slab, along=0)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The tensors that ``read`` was given, by full name: very bytes, dtypes and shapes."""
    source, dtypes = q.source, q.source["dtypes"]
    codes = q.codes if q.perm is None else q.codes[:, np.argsort(q.perm)]
    scale = q.scales[0]
    tensors: dict[str, Any] = {"bias": q.bias}
    tensors["weight_scale"] = np.ascontiguousarray(scale.data).reshape(source["scale_shape"])
    zero = None if q.zero is None else q.zero.astype(np.uint8)
    if "weight_packed" in dtypes:
        bits, stream = q.element.bits, source["stream"]
        zero = np.full(scale.data.shape, 2 ** (bits - 1), np.uint8) if zero is None else zero
        for suffix, values in (("weight_packed", codes), ("weight_zero_point", zero.T)):
            if suffix in dtypes:
                words = streams.pack(values, bits, stream)
                if suffix in q.residue:
                    words[..., -1] |= q.residue[suffix].view(np.uint32)
                words = words if suffix == "weight_packed" else np.ascontiguousarray(words.T)
                tensors[suffix] = words.view(WORDS[dtypes[suffix]])
        tensors["weight_shape"] = np.array([q.n, q.k], INDICES[dtypes["weight_shape"]])
    else:
        tensors["weight"] = np.ascontiguousarray(codes if q.element.signed else codes ^ OFFSET).view(np.int8)
        zero = np.full(scale.data.shape, OFFSET) if zero is None else zero
        tensors["weight_zero_point"] = (zero ^ OFFSET).view(np.int8).reshape(source["scale_shape"])
    if "weight_g_idx" in dtypes:
        g_idx = groups.indices(q.perm, q.k, scale.block[1]) if source["g_idx"] else np.full(q.k, -1)
        tensors["weight_g_idx"] = g_idx.astype(INDICES[dtypes["weight_g_idx"]])
    return {checks.full_name(module, suffix): tensors[suffix] for suffix in dtypes}


def _linear(checkpoint: Checkpoint, module: str) -> Linear:
    """Everything but codes and scales, decided from the tensors and cross-checked with the label."""
    label = labels.arguments(checkpoint, module)
    said, say = assuming(checkpoint, module)
    for remark in label.remarks:
        say(remark)
    members = checked(checkpoint, module)
    scale, bits, stream = members["weight_scale"], 8, None
    if "weight_packed" in members:
        n, k = extents(members["weight_packed"], members["weight_shape"])
        check_k(members, n, k, label)
        by = "--bits" if "bits" in label.switched else "the label"
        points = members.get("weight_zero_point")
        column = None if points is None or len(points.shape) != 2 else (n, points.shape[0])
        bits, stream = streams.decide(members["weight_packed"], k, label.bits, by, label.version, column)
    else:
        n, k = members["weight"].shape
    if "bias" in members:
        checks.shape(members["bias"], (n,), why=f"for {n} outputs")
    g_idx, measured = None, None
    if "weight_g_idx" in members:
        checks.shape(members["weight_g_idx"], (k,), why=f"for {k} inputs")
        g_idx = members["weight_g_idx"].array()
        g_idx = None if (g_idx == -1).all() else g_idx
    if g_idx is not None:
        count = scale.shape[1] if len(scale.shape) == 2 else 1
        measured = groups.measured_group(g_idx, count, str(scale.file), members["weight_g_idx"].name)
    block = _block(scale, n, k, measured, label, say)
    zero, left = _zero(members, n, grid_shape(n, k, block), bits, stream, label)
    residue = {} if left is None else {"weight_zero_point": left}
    if stream is not None:
        left = streams.spare(members["weight_packed"].array(), bits, k, stream)
        residue |= {} if left is None else {"weight_packed": left}
    source = {
        "format": "compressed_tensors",
        "dtypes": {suffix: tensor.dtype for suffix, tensor in members.items()},
        "scale_shape": list(scale.shape),
        "g_idx": g_idx is not None,
        **({} if stream is None else {"stream": stream}),
        **({"assumed": said} if said else {}),
    }
    perm = None if g_idx is None else groups.order(g_idx, block[1])
    return Linear(members, scale, _element(members, bits, zero), n, k, block, zero, perm, source, residue)


def _element(members: Mapping[str, Tensor], bits: int, zero: Array | None) -> Element:
    if "weight" in members:
        return ELEMENTS["s8" if zero is None else "u8"]
    name = ELEMENT_NAMES.get(bits, (None, None))[zero is not None]
    if name is None:
        packed = members["weight_packed"]
        kind = "symmetric" if zero is None else "asymmetric"
        raise UnsupportedError(
            f"{kind} codes of {bits} bits are not ours",
            file=packed.file,
            tensor=packed.name,
            need=f"{', '.join(str(b) for b, names in ELEMENT_NAMES.items() if names[zero is not None])} bits",
            do="quantise it to one of these",
        )
    return ELEMENTS[name]


def _block(
    scale: Tensor, n: int, k: int, measured: int | None, label: Arguments, say: Callable[[str], None]
) -> tuple[int, int]:
    """Weights of one scale: (rows, channels)."""
    shape = scale.shape
    if prod(shape) == 1:
        return n, k
    if shape[0] == n and (len(shape) == 2 or shape == (n,)):
        count = prod(shape) // n
        switched = "group_size" in label.switched
        where = str(scale.file), scale.name
        return 1, groups.group_size(k, count, measured, label.group_size, say, *where, switched=switched)
    if label.block is not None and grid_shape(n, k, label.block) == shape:
        return label.block
    raise CorruptError(
        "shapes disagree",
        file=scale.file,
        tensor=scale.name,
        found=list(shape),
        need=f"[{n}, groups], [{n}, 1], [1] or the grid of block_structure for a weight of {n} x {k}",
    )


def _zero(
    members: Mapping[str, Tensor], n: int, grid: tuple[int, int], bits: int, stream: str | None, label: Arguments
) -> tuple[Array | None, Array | None]:
    """(uint8 on the scales' grid, None when all are the symmetric one; bits to spare after the last packed row)."""
    tensor = members.get("weight_zero_point")
    if tensor is None:
        if label.symmetric is False:
            first = next(iter(members.values()))
            raise CorruptError(
                "asymmetric, but its zero points are missing",
                file=first.file,
                tensor=first.name,
                need="weight_zero_point beside it",
            )
        return None, None
    checks.dtype(tensor, *(("I8",) if stream is None else WORDS))
    left, neutral = None, int(OFFSET)
    if stream is None:
        checks.shape(tensor, members["weight_scale"].shape, why="as weight_scale has")
        zero = tensor.array().view(np.uint8).reshape(grid) ^ OFFSET
    else:
        neutral = 2 ** (bits - 1)
        rows = streams.words(n, bits, stream)
        checks.shape(tensor, (rows, grid[1]), why=f"for {n} rows of {bits} bits and {grid[1]} groups")
        columns = tensor.array().T
        streams.check_tops(tensor, bits, stream, along=0)
        zero = streams.unpack(columns, bits, n, stream).T
        left = streams.spare(columns, bits, n, stream)
    if (zero == neutral).all():
        return None, left
    if label.symmetric:
        row, g = np.argwhere(zero != neutral)[0]
        raise UnsupportedError(
            "the label contradicts the tensors",
            file=tensor.file,
            tensor=tensor.name,
            found=f"symmetric, but a zero point of {int(zero[row, g]) - neutral} at [{row}, {g}]",
            need="every zero point 0",
            do="set symmetric to false if the zero points are meant",
        )
    return zero, left
