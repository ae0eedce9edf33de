"""GGUF: ggml's block types, each tensor for itself; codes and factors as they are stored.

| tensor | dtype, shape | |
| --- | --- | --- |
| `P.weight` | blocks of one type [(E,) N, K] | held as U8 [(E,) N, bytes of a row]; the types: ``gguf_blocks.py`` |
| `P.scale` | F32, one value, or one for each of E experts | a factor of scales and minima, beside any type |
| `P.bias` | F16, BF16, F32 [(E,) N] | |

F16, BF16, F32 and integer tensors pass through as what they are, types without a row in ``gguf_blocks.py`` as bytes.

Files of some architectures have the rows of q and k, head by head, in the order in which ggml's rope takes pairs:
w[h, 2i + s] = hf[h, D/2 * s + i]. They stay so, ``source["row_order"]`` says it, and ``--undo-rope-order`` puts rows,
scales and biases back; ``write`` gives the file's order in both cases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks
from .canonical import ELEMENTS, Level, Outline, QuantTensor
from .container import Checkpoint, Tensor
from .errors import CorruptError, UnsupportedError
from .gguf_blocks import BLOCK_TYPES, BlockType, code_fields, pack, unpack_codes, unpack_factors
from .gguf_file import UNDO, types
from .stream import Blocks, Stream, hollow, whole

Array = NDArray[Any]

OPTIONS = ("undo_rope_order",)

WEIGHT, SCALE, BIAS = ".weight", ".scale", ".bias"
ROPE_ORDER, UNDONE = "ggml_rope", "undone"
"""Values of ``source["row_order"]``."""
ROPED = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<role>[qk])")
# Architectures whose q and k llama.cpp's converters write in that order (conversion/*.py).
REORDERED = (
    *("arcee", "arctic", "baichuan", "bailingmoe", "chameleon", "deci", "deepseek", "eagle3", "granite"),
    *("granitehybrid", "granitemoe", "internlm2", "llada", "llama", "minicpm", "mistral3", "olmo", "smollm3", "xverse"),
)


@dataclass(frozen=True)
class _Linear:
    """A module as its headers describe it."""

    weight: Tensor
    kind: BlockType
    scale: Tensor | None
    bias: Tensor | None
    lead: list[int]
    n: int
    k: int
    source: dict[str, Any]


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """{P: its tensors}: every matrix, or stack of them, of blocks that can be read."""
    found = {}
    for name, kind in types(checkpoint.quantization).items():
        module = name.removesuffix(WEIGHT)
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            continue
        if kind in BLOCK_TYPES and name != module and len(tensor.shape) in (2, 3):
            beside = (module + suffix for suffix in (SCALE, BIAS))
            found[module] = (name, *(other for other in beside if other in checkpoint.tensors))
        else:
            checkpoint.note(module, f"{kind} passes through as bytes")
    if checkpoint.quantization.get(UNDO):
        for name, tensor in checkpoint.tensors.items():
            module = name.removesuffix(WEIGHT)
            if module not in found and _is_reordered(checkpoint, module) and len(tensor.shape) == 2:
                checkpoint.note(module, "passes through with its rows in the order of ggml's rope")
    return found


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """What the headers say; no block is read.

    Raises:
        UnsupportedError: a dtype beside the blocks; with ``--undo-rope-order``, heads that are unknown or do not fit.
        CorruptError: shapes that disagree.
    """
    p = _linear(checkpoint, module)
    whole = (("f32", (p.n, p.k)),) if p.scale is not None else ()
    offsets = tuple((f.dtype, (1, f.block)) for f in p.kind.offsets)
    return Outline(
        element=ELEMENTS[p.kind.element],
        n=p.n,
        k=p.k,
        experts=p.lead[0] if p.lead else None,
        scales=(*((f.dtype, (1, f.block)) for f in p.kind.scales), *whole),
        offsets=(*offsets, *whole) if offsets else (),
        bias=None if p.bias is None else p.bias.dtype.lower(),
        source=p.source,
    )


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """Codes and factors as stored. Raises as ``describe``, and CorruptError for factors that are no finite numbers, or
    in NVFP4 negative."""
    return whole(stream(checkpoint, module))


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    p = _linear(checkpoint, module)
    data = p.weight.array()
    scales, offsets = unpack_factors(p.kind, data)
    for level in (*scales, *offsets):
        _check_factors(p.weight, level)
    if p.scale is not None:
        checks.finite(p.scale, p.scale.array())
        each = np.broadcast_to(p.scale.array().reshape(-1, 1, 1), (prod(p.lead), 1, 1))
        factor = Level(each.reshape(*p.lead, 1, 1), (p.n, p.k))
        scales, offsets = (*scales, factor), (*offsets, factor) if offsets else ()
    q = QuantTensor(
        element=ELEMENTS[p.kind.element],
        codes=hollow(*p.lead, p.n, p.k),
        scales=scales,
        offsets=offsets,
        bias=checks.bias_values(p.bias),
        source=p.source,
    )
    order = _logical_rows(p.n, p.source["heads"]) if "heads" in p.source else None

    def stored_rows(expert: int, rows: slice) -> Array:
        stored: Array = (data if p.lead else data[None])[expert][rows if order is None else order[rows]]
        return stored

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        stored = stored_rows(expert, rows)
        first, last = columns.start // p.kind.size, -(-columns.stop // p.kind.size)
        codes = unpack_codes(p.kind, stored[:, first * p.kind.nbytes : last * p.kind.nbytes])
        return codes[:, columns.start - first * p.kind.size :][:, : columns.stop - columns.start]

    fields = code_fields(p.kind)
    blocks = None if fields is None else Blocks(fields, stored_rows)
    return Stream(q if order is None else _in_order(q, order), slab, along=0, blocks=blocks)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The module's tensors as they were stored, by full name."""
    source = q.source
    kind = BLOCK_TYPES[source["type"]]
    if "heads" in source:
        q = _in_order(q, np.argsort(_logical_rows(q.n, source["heads"])))
    own = len(kind.scales)
    tensors = {module + WEIGHT: pack(kind, q.codes, q.scales[:own], q.offsets[: len(kind.offsets)])}
    if "scale_shape" in source:
        shape = source["scale_shape"]
        tensors[module + SCALE] = q.scales[own].data.reshape(-1)[: prod(shape)].reshape(shape)
    if q.bias is not None:
        tensors[module + BIAS] = q.bias
    return tensors


def _linear(checkpoint: Checkpoint, module: str) -> _Linear:
    weight = checkpoint.tensors[module + WEIGHT]
    kind = BLOCK_TYPES[types(checkpoint.quantization)[weight.name]]
    checks.dtype(weight, "U8")
    *lead, n, row = weight.shape
    blocks, rest = divmod(row, kind.nbytes)
    if rest or 0 in weight.shape:
        raise CorruptError(
            f"rows are not whole blocks of {kind.name}",
            file=weight.file,
            tensor=weight.name,
            found=f"rows of {row} bytes",
            need=f"a multiple of {kind.nbytes}",
        )
    scale, bias = (checkpoint.tensors.get(module + suffix) for suffix in (SCALE, BIAS))
    checks.bias(bias, weight, lead, n)
    source: dict[str, Any] = {"format": "gguf", "type": kind.name}
    if scale is not None:
        checks.dtype(scale, "F32")
        checks.shape(scale, (1,), (), tuple(lead), why="for one factor, or one an expert")
        source["scale_shape"] = list(scale.shape)
    if not lead and _is_reordered(checkpoint, module):
        source |= _row_order(checkpoint, module, weight, n)
    return _Linear(weight, kind, scale, bias, lead, n, blocks * kind.size, source)


def _check_factors(tensor: Tensor, level: Level) -> None:
    raw = level.data.view(np.uint8)
    if level.dtype == "f16":
        checks.finite(tensor, level.data)
    elif level.dtype == "e8m0":
        checks.refuse_any(tensor, raw == 255, "scales of 255 are NaN", "0 to 254")
    elif level.dtype == "e4m3":
        checks.refuse_any(
            tensor, raw > 0x7E, "block scales are NaN or negative", "bytes 0x00 to 0x7E", values=level.data
        )


def _is_reordered(checkpoint: Checkpoint, module: str) -> bool:
    known = checkpoint.quantization.get("architecture") in REORDERED
    return known and ROPED.fullmatch(module.removesuffix(BIAS)) is not None


def _row_order(checkpoint: Checkpoint, module: str, weight: Tensor, n: int) -> dict[str, Any]:
    """What ``source`` says of a module whose rows are in ggml's order."""
    if not checkpoint.quantization.get(UNDO):
        return {"row_order": ROPE_ORDER}
    heads = _heads(checkpoint.quantization.get("heads"), module)
    if type(heads) is not int or heads < 1 or n % (2 * heads):
        raise UnsupportedError(
            "the row order of ggml's rope cannot be undone",
            file=weight.file,
            tensor=weight.name,
            found=f"{'no number of' if heads is None else heads} heads for {n} rows",
            need="the model's number of heads, of an even number of rows each",
            do="convert without --undo-rope-order",
        )
    return {"row_order": UNDONE, "heads": heads}


def _heads(said: Any, module: str) -> Any:
    """Of a ``heads`` entry [of q, of k], each a number or one for each layer, the number for a module."""
    named = ROPED.fullmatch(module)
    assert named is not None, module
    try:
        of = said["qk".index(named["role"])]
        return of[int(named["layer"])] if isinstance(of, list) else of
    except (LookupError, TypeError, ValueError):
        return None


def _logical_rows(n: int, heads: int) -> Array:
    """intp [n]: the stored row of each logical one."""
    return np.arange(n).reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(n)


def _in_order(q: QuantTensor, rows: Array) -> QuantTensor:
    """Row i from row rows[i]; factors of single rows and the bias go with them."""

    def moved(levels: tuple[Level, ...]) -> tuple[Level, ...]:
        return tuple(replace(x, data=x.data[..., rows, :]) if x.block[0] == 1 else x for x in levels)

    return replace(
        q,
        codes=q.codes[..., rows, :],
        scales=moved(q.scales),
        offsets=moved(q.offsets),
        bias=None if q.bias is None else q.bias[..., rows],
    )
