"""AWQ linears in the ``gemm`` version (AutoAWQ, GPTQModel, auto-round): 4 bit, by group, codes packed along n.

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| ``P.qweight`` | int32 or uint32 [K, N/8] | nibble p of word w is the code of column 8w + COLUMNS[p] |
| ``P.qzeros`` | the same [G, N/8] | zero points in the same order, as they are; all 8 when symmetric |
| ``P.scales`` | f16, bf16 or f32 [G, N] | any sign |
| ``P.bias`` | [N] | optional |

    w[n, k] = scales[k // group, n] * (code[k, n] - zero[k // group, n])

The tensor names are those of formats that pack along k: shapes tell them apart, and a label that says otherwise is
refused. So are the other versions (gemv, gemv_fast, llm-awq), whose order of bits is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import awq_kinds as kinds
from . import checks
from .bits import pack_stream, split_words
from .canonical import ELEMENTS, Outline, QuantTensor
from .errors import UnsupportedError
from .fragment import reorder
from .groups import group_size
from .linear import Linear, assuming
from .stream import Stream, whole

if TYPE_CHECKING:
    from .container import Checkpoint, Tensor

Array = NDArray[Any]

OPTIONS = ("group_size",)

BITS = 4
COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
SHIFTS = BITS * np.argsort(COLUMNS)
"""The bit at which the code of each of eight columns begins."""
NEUTRAL = 8
"""The zero point of a symmetric module."""

MEMBERS = ("qweight", "qzeros", "scales", "bias")
WORDS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "U32": np.dtype(np.uint32)}


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Module -> the tensors it consumes.

    Raises UnsupportedError for a label that contradicts the shapes and for AWQ in another order of bits.
    """
    named = kinds.method(checkpoint.quantization)
    found = {}
    for name, tensor in checkpoint.tensors.items():
        module, suffix = checks.parted(name)
        if suffix == "weight":
            kinds.refuse_paired_rows(tensor, checkpoint.tensors.get(f"{module}.weight_scale"))
        if suffix != "qweight":
            continue
        kind = kinds.kind(checkpoint, module, tensor)
        if kind == "gemm" and named is not None and named not in kinds.LABELS:
            raise kinds.mislabelled(tensor, f"AWQ, packed along n, under the label {named!r}")
        if named in kinds.LABELS and kind == "packed along k":
            raise kinds.mislabelled(tensor, f"codes packed along k, which AWQ never has, under the label {named!r}")
        if kind in kinds.OTHERS and named in (None, *kinds.LABELS):
            raise UnsupportedError(
                f"AWQ stored as {kind}, another order of bits than the gemm version",
                file=tensor.file,
                tensor=name,
                found=kinds.OTHERS[kind],
                do="quantise again, or convert the checkpoint to version gemm with the tool that wrote it",
            )
        if kind == "gemm" or named in kinds.LABELS:
            found[module] = tuple(n for s in MEMBERS if (n := checks.full_name(module, s)) in checkpoint.tensors)
    if found:
        kinds.check_version(checkpoint)
    return found


def orphans(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> what is missing, for zero points without codes."""
    if kinds.method(checkpoint.quantization) not in kinds.LABELS:
        return {}
    names = [name for name in checkpoint.tensors if checks.parted(name)[1] == "qzeros"]
    codes = {name: name.removesuffix("qzeros") + "qweight" for name in names}
    return {name: missing for name, missing in codes.items() if missing not in checkpoint.tensors}


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """Element, extents and groups from shapes and qzeros. Raises UnsupportedError and CorruptError."""
    return _linear(checkpoint, module).outline()


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """The module with codes uint8 [n, k] as a transposed view. Raises what ``describe`` raises, and CorruptError for
    scales that are NaN or infinite."""
    return whole(stream(checkpoint, module)).check()


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    linear = _linear(checkpoint, module)
    scales, words = linear.scales.array(), linear.members["qweight"].array()
    checks.finite(linear.scales, scales)
    return Stream(linear.tensor(scales.T), lambda _, rows, columns: split_words(words[columns], SHIFTS)[:, rows].T)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The tensors that ``read`` was given, by full name: very bytes, dtypes and shapes."""
    dtypes = q.source["dtypes"]
    scales = np.ascontiguousarray(q.scales[0].data.T)
    zero = np.full(scales.shape, NEUTRAL, np.uint8) if q.zero is None else q.zero.T.astype(np.uint8)
    tensors: dict[str, Any] = {"scales": scales, "bias": q.bias}
    for suffix, values in (("qweight", q.codes.T), ("qzeros", zero)):
        if suffix in dtypes:
            tensors[suffix] = pack_stream(reorder(values, COLUMNS), BITS).view(WORDS[dtypes[suffix]])
    return {checks.full_name(module, suffix): tensors[suffix] for suffix in dtypes}


def _unpack(words: Tensor) -> Array:
    """[r, N/8] words -> uint8 [r, N]."""
    return split_words(words.array(), SHIFTS)


def _linear(checkpoint: Checkpoint, module: str) -> Linear:
    """Everything but codes and scales, decided from the tensors and cross-checked with the labels."""
    config = checkpoint.quantization
    symmetric = config.get("zero_point") is False
    needed = ("qweight", "scales") if symmetric else ("qweight", "scales", "qzeros")
    members = checks.members(checkpoint, module, MEMBERS, needed)
    for suffix, tensor in members.items():
        checks.dtype(tensor, *(kinds.FLOATS if suffix in ("scales", "bias") else WORDS))
        if 0 in tensor.shape or len(tensor.shape) != (1 if suffix == "bias" else 2):
            checks.shape(tensor, why="a matrix that is not empty; a bias has one dimension")
    qweight, scales = members["qweight"], members["scales"]
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    groups = scales.shape[0]
    checks.shape(scales, (groups, n), why=f"for the {n} columns of {qweight.name}")
    if "qzeros" in members:
        checks.shape(members["qzeros"], (groups, n // 8), why=f"for the {groups} groups of {scales.name}")
    if "bias" in members:
        checks.shape(members["bias"], (n,), why=f"for the {n} columns of {qweight.name}")
    _check_bits(checkpoint, config)

    said, say = assuming(checkpoint, module)
    if not config:
        say("assumed AWQ of version gemm from the shapes: there is no label")
    file = checkpoint.stated_in
    excluded = [part for part in checks.texts(config, "modules_to_not_convert", file) if part in module]
    if excluded:
        say(f"modules_to_not_convert lists {excluded[0]!r}, its tensors say it is quantised: read as such")
    claims = (
        checkpoint.options.group_size,
        *(checks.number(config, key, file) for key in ("group_size", "q_group_size")),
    )
    sizes = tuple(g for g in claims if g is not None)[:1]
    switched = checkpoint.options.group_size is not None
    group = group_size(k, groups, None, sizes, say, str(scales.file), scales.name, switched=switched)
    zero = _zero(members.get("qzeros"), symmetric)
    source: dict[str, Any] = {"format": "awq", "dtypes": {suffix: tensor.dtype for suffix, tensor in members.items()}}
    source |= {"assumed": said} if said else {}
    element = ELEMENTS["u4b8" if zero is None else "u4"]
    return Linear(members, scales, element, n, k, (1, group), None if zero is None else zero.T, None, source)


def _check_bits(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    for key in ("bits", "w_bit"):
        if config.get(key) not in (None, BITS):
            raise UnsupportedError(
                "the label contradicts the shapes",
                file=checkpoint.stated_in,
                found=f"{key} {config[key]!r}",
                need=f"{BITS}, as eight codes a word say",
                do="correct the label",
            )


def _zero(qzeros: Tensor | None, symmetric: bool) -> Array | None:
    """uint8 [G, n], None when every zero point is the symmetric one."""
    if qzeros is None:
        return None
    zero = _unpack(qzeros)
    if (zero == NEUTRAL).all():
        return None
    if symmetric:
        g, column = np.argwhere(zero != NEUTRAL)[0]
        raise UnsupportedError(
            "the label contradicts the tensors",
            file=qzeros.file,
            tensor=qzeros.name,
            found=f"zero_point false, but a zero point of {zero[g, column]} at [{g}, {column}]",
            need=f"every zero point {NEUTRAL}",
            do="set zero_point to true if the zero points are meant",
        )
    return zero
