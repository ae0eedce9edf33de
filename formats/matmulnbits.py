"""ONNX Runtime's ``MatMulNBits`` (domain com.microsoft): codes of 2, 4 or 8 bits in blocks along k.

Attributes K, N, block_size (a power of two, at least 16), bits (4 when absent). With blocks = ceil(K / block_size):

| input | dtype, shape | meaning |
| --- | --- | --- |
| 1 B | uint8 [N, blocks, block_size * bits / 8] | code of even k in the low bits; codes past K mean nothing |
| 2 scales | f16, bf16 or f32 [N, blocks] or flat | |
| 3 zero_points | uint8 [N, ceil(blocks * bits / 8)] or flat | packed like B; absent: 2**(bits - 1) |
| 4 g_idx | int32 [K] or [blocks * block_size] | block of each channel; absent: k // block_size |
| 5 bias | [N] | optional; one that an Add applies is no part of the module |

    w[n, k] = scales[n, g] * (code[n, k] - zero[n, g])        g = g_idx[k]

A module is called like its B without ``_Q4`` or ``.qweight``: like the weight the model had before it was quantised, so
that ``fc1.bias`` beside ``fc1.weight`` stays what it is. Everything a node says is kept in ``source``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks, groups
from .bits import pack_ragged, unpack_ragged
from .canonical import ELEMENTS, Outline, QuantTensor
from .container import Checkpoint, Tensor
from .errors import AS_WRITTEN, CorruptError, UnsupportedError
from .linear import Linear
from .rows import unpack_columns
from .stream import Stream, whole

Array = NDArray[Any]

OP, DOMAIN = "MatMulNBits", "com.microsoft"
INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")
FLOATS = ("F16", "BF16", "F32")

LONGEST = 256
"""A block that the operator knows; only such a one may be longer than two rows."""
# bits -> (symmetric, with zero points)
ELEMENT_NAMES = {2: ("u2b2", "u2"), 4: ("u4b8", "u4"), 8: ("u8b128", "u8")}


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Module -> the initializers it consumes. Raises UnsupportedError as ``_nodes``."""
    found = {}
    for module, node in _nodes(checkpoint).items():
        members = tuple(name for name in _inputs(node).values() if name in checkpoint.tensors)
        if (b := _inputs(node)["B"]) in checkpoint.tensors:
            found[module] = members
        elif members:
            checkpoint.note("", f"{b} is no initializer: its {OP} stays as it is")
    return found


def _inputs(node: Mapping[str, Any]) -> dict[str, str]:
    """The inputs that a node has, but for its activations."""
    return {role: name for role, name in zip(INPUTS, node["inputs"], strict=False) if name and role != "A"}


def _nodes(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Module -> node; matched once for all modules, in time linear in the nodes. Raises as ``_matched``."""
    if "nodes" not in checkpoint.memo:
        checkpoint.memo["nodes"] = _matched(checkpoint)
    found: dict[str, Mapping[str, Any]] = checkpoint.memo["nodes"]
    return found


def _matched(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Module -> node, whether or not B is among the tensors: names do not depend on which of them are there.

    Raises UnsupportedError for a domain or operator set that has no such operator, for initializers that two modules
    share, and for one B that two nodes read in two ways.
    """
    found: dict[str, Mapping[str, Any]] = {}
    by_b: dict[str, Mapping[str, Any]] = {}
    owner: dict[str, str] = {}
    for node in _listed(checkpoint):
        if node["op"] != OP:
            continue
        _check_domain(checkpoint, node)
        inputs = _inputs(node)
        b = inputs.get("B")
        if b is None:
            checkpoint.note("", f"a {OP} without B stays as it is")
            continue
        there = b in checkpoint.tensors
        first = by_b.setdefault(b, node)
        if first is not node:
            if there and (inputs, node["attributes"]) != (_inputs(first), first["attributes"]):
                do = "give each node its own"
                raise UnsupportedError("two nodes read it in two ways", file=checkpoint.path, tensor=b, do=do)
            continue
        module = _name(b)
        module = b if module in found else module
        for name in inputs.values() if there else ():
            if owner.setdefault(name, module) != module:
                raise UnsupportedError(
                    "two modules share an initializer",
                    file=checkpoint.path,
                    tensor=name,
                    found=f"{owner[name]} and {module}",
                    do="give each node its own",
                )
        found[module] = node
    return found


def _listed(checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    """The nodes of a model, also as an artifact tells of them. Raises CorruptError for what no model has."""
    said = checkpoint.quantization
    if said.get("quant_method") != "onnx":
        return []
    nodes, opsets = said.get("nodes"), said.get("opsets")
    if not isinstance(opsets, dict) or not isinstance(nodes, list) or not all(map(_is_node, nodes)):
        raise CorruptError("the list of nodes is damaged", file=checkpoint.path, need="opsets and nodes")
    return nodes


def _is_node(node: object) -> bool:
    if not isinstance(node, dict) or not all(isinstance(node.get(key), str) for key in ("op", "domain")):
        return False
    inputs, attributes = node.get("inputs"), node.get("attributes")
    texts = isinstance(inputs, list) and all(isinstance(name, str) for name in inputs)
    return texts and isinstance(attributes, dict) and all(type(v) in (int, str) for v in attributes.values())


def _name(b: str) -> str:
    """fc1.weight_Q4 -> fc1.weight, q_proj.MatMul.qweight -> q_proj.MatMul, onnx::MatMul_7_Q4 -> onnx::MatMul_7."""
    return re.sub(r"(_Q\d+|\.qweight)$", "", b) or b


def _check_domain(checkpoint: Checkpoint, node: Mapping[str, Any]) -> None:
    opsets = checkpoint.quantization["opsets"]
    if node["domain"] != DOMAIN or DOMAIN not in opsets:
        domain = repr(node["domain"]) if node["domain"] != DOMAIN else f"operator sets {', '.join(map(repr, opsets))}"
        raise UnsupportedError(
            f"the model uses {OP} without the operator set that has it",
            file=checkpoint.path,
            tensor=_inputs(node).get("B"),
            found=domain,
            need=f"domain {DOMAIN}",
            do="export the model again with ONNX Runtime's quantiser",
        )


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """Everything but codes; of those only what lies past K. Raises UnsupportedError and CorruptError."""
    return _linear(checkpoint, module).outline()


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """The module with codes uint8 [n, k]. Raises what ``describe`` raises, and CorruptError for scales that are NaN or
    infinite."""
    return whole(stream(checkpoint, module)).check()


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    linear = _linear(checkpoint, module)
    checks.finite(linear.scales, linear.scales.array())
    bits = linear.element.bits

    def slab(_: int, rows: slice, columns: slice) -> Array:
        channels = np.arange(columns.start, columns.stop) if linear.perm is None else linear.perm[columns]
        words = linear.members["B"].array().reshape(linear.n, -1).view(np.uint32)
        return unpack_columns(words[rows], bits, channels.astype(np.int64) * bits)

    return Stream(linear.tensor(linear.scales.array().reshape(linear.n, -1)), slab, along=0)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The initializers that ``read`` was given, by full name: very bytes, dtypes and shapes."""
    source = q.source
    bits, block = q.element.bits, source["attributes"]["block_size"]
    if not _sound(block, q.k):
        raise ValueError(f"block_size {block}")
    scales = np.ascontiguousarray(q.scales[0].data)
    blocks = scales.shape[1]
    codes = np.zeros((q.n, blocks * block), np.uint8)
    codes[:, slice(q.k) if q.perm is None else q.perm] = q.codes
    _fill(codes[:, q.k :], q.residue.get("codes_past_k", 0))
    zero = np.zeros((q.n, -(-blocks * bits // 8) * 8 // bits), np.uint8)
    zero[:, :blocks] = 2 ** (bits - 1) if q.zero is None else q.zero
    _fill(zero[:, blocks:], q.residue.get("zeros_past_blocks", 0))
    tensors: dict[str, Any] = {
        "B": _pack(codes, bits),
        "scales": scales,
        "zero_points": _pack(zero, bits),
        "g_idx": np.full(blocks * block, blocks - 1, np.int32),
        "bias": q.bias,
    }
    tensors["g_idx"][: q.k] = groups.indices(q.perm, q.k, min(block, q.k))
    if "g_idx" in source["shapes"]:
        tensors["g_idx"] = tensors["g_idx"][: source["shapes"]["g_idx"][0]]
        _fill(tensors["g_idx"][q.k :], q.residue.get("g_idx_past_k", blocks - 1))
    return {name: tensors[role].reshape(source["shapes"][role]) for role, name in source["names"].items()}


def _sound(block: int, k: int) -> bool:
    """A block may be longer than a row, but not as long as a hostile file likes: all of it is stored."""
    return 16 <= block <= max(LONGEST, 2 * k - 1) and block & (block - 1) == 0


def _fill(rest: Array, values: Array | int) -> None:
    """What a file had where nothing means anything. Raises TypeError for values of another kind."""
    np.copyto(rest, values if isinstance(values, np.ndarray) else rest.dtype.type(values), casting="same_kind")


def _unpack(data: Array, bits: int, count: int) -> Array:
    """uint8 [r, bytes] -> uint8 [r, count], lowest bits first."""
    words = np.zeros((data.shape[0], -(-data.shape[1] // 4) * 4), np.uint8)
    words[:, : data.shape[1]] = data
    return unpack_ragged(words.view(np.uint32), bits, count)


def _pack(codes: Array, bits: int) -> Array:
    """The inverse of ``_unpack`` for whole bytes."""
    return np.ascontiguousarray(pack_ragged(codes, bits)).view(np.uint8)[:, : codes.shape[1] * bits // 8]


def _linear(checkpoint: Checkpoint, module: str) -> Linear:
    """Everything but codes and scales, from a node and its initializers."""
    node = _nodes(checkpoint)[module]
    names = _inputs(node)
    members = {role: checkpoint.tensors[name] for role, name in names.items() if name in checkpoint.tensors}
    for role, name in names.items():
        if role not in members:
            do = "make it an initializer, by constant folding"
            raise UnsupportedError(f"{role} is computed at run time", file=checkpoint.path, tensor=name, do=do)
    if "scales" not in members:
        raise CorruptError(f"module {module!r} is incomplete", file=checkpoint.path, tensor=names["B"], need="scales")
    b = members["B"]
    n, k, block, bits = (_attribute(node, b, key) for key in ("N", "K", "block_size", "bits"))
    if bits not in ELEMENT_NAMES:
        do = "quantise it to one of these"
        raise UnsupportedError("unknown bits", file=b.file, tensor=b.name, found=bits, need="2, 4 or 8", do=do)
    if not _sound(block, k):
        raise CorruptError(
            "no such block_size",
            file=b.file,
            tensor=b.name,
            found=block,
            need=f"a power of two from 16 to {max(LONGEST, 2 * k - 1)}",
        )
    if node["attributes"].get("weight_prepacked", 0) != 0:
        raise UnsupportedError(
            "already repacked for one machine",
            file=b.file,
            tensor=b.name,
            found=f"weight_prepacked {node['attributes']['weight_prepacked']}",
            need="0",
            do="convert the model as its quantiser wrote it",
        )
    blocks = -(-k // block)
    _check_members(members, n, k, block, blocks, bits)
    past_k = _unpack(b.array()[:, -1], bits, block)[:, k - (blocks - 1) * block :]
    residue = {"codes_past_k": past_k} if past_k.any() else {}
    zero, past_blocks = _zero(members.get("zero_points"), n, blocks, bits)
    residue |= {"zeros_past_blocks": past_blocks} if past_blocks.any() else {}
    perm = None
    if "g_idx" in members:
        g_idx, file = members["g_idx"].array(), str(b.file)
        size = groups.measured_group(g_idx[:k], blocks, file, members["g_idx"].name)
        if size != min(block, k):
            raise UnsupportedError(
                "groups are not blocks",
                file=file,
                tensor=members["g_idx"].name,
                found=size,
                need=min(block, k),
                do=AS_WRITTEN,
            )
        perm = groups.order(g_idx[:k], size)
        _check_order(checkpoint, module, b, bits, perm is not None and zero is not None)
        residue |= {"g_idx_past_k": g_idx[k:]} if (g_idx[k:] != blocks - 1).any() else {}
    source = {
        "format": "matmulnbits",
        "names": names,
        "shapes": {role: list(tensor.shape) for role, tensor in members.items()},
        "attributes": node["attributes"],
    }
    element = ELEMENTS[ELEMENT_NAMES[bits][zero is not None]]
    return Linear(members, members["scales"], element, n, k, (1, min(block, k)), zero, perm, source, residue)


def _check_order(checkpoint: Checkpoint, module: str, b: Tensor, bits: int, zeros: bool) -> None:
    """Where ONNX Runtime's kernels part from the operator's definition (seen in 1.32, CPU)."""
    if bits == 2:
        raise UnsupportedError(
            "2-bit codes with g_idx: the runtime's kernels do not agree on their meaning",
            file=b.file,
            tensor=b.name,
            do="quantise it without act-order, or to 4 bits",
        )
    if zeros:
        checkpoint.note(
            module, "has g_idx and zero points: read as defined, ONNX Runtime 1.32 on a CPU leaves the zeros out"
        )


def _attribute(node: Mapping[str, Any], b: Tensor, key: str) -> int:
    value = node["attributes"].get(key, 4 if key == "bits" else None)
    if not isinstance(value, int) or value < 1:
        found = "none" if value is None else value
        raise CorruptError(
            f"{OP} needs a positive {key}", file=b.file, tensor=b.name, found=found, need="a positive number"
        )
    return value


def _check_members(members: Mapping[str, Tensor], n: int, k: int, block: int, blocks: int, bits: int) -> None:
    width = -(-blocks * bits // 8)
    for role, dtypes, shapes in (
        ("B", ("U8",), ((n, blocks, block * bits // 8),)),
        ("scales", FLOATS, ((n, blocks), (n * blocks,))),
        ("zero_points", ("U8",), ((n, width), (n * width,))),
        ("g_idx", ("I32",), ((k,), (blocks * block,))),
        ("bias", FLOATS, ((n,),)),
    ):
        if role in members:
            checks.dtype(members[role], *dtypes)
            checks.shape(members[role], *shapes, why=f"for N {n}, K {k}, {bits} bits and blocks of {block}")


def _zero(tensor: Tensor | None, n: int, blocks: int, bits: int) -> tuple[Array | None, Array]:
    """(uint8 [n, blocks], None when all are the default; what lies after the last block's in each row)."""
    if tensor is None:
        return None, np.empty((n, 0), np.uint8)
    packed = tensor.array().reshape(n, -1)
    lanes = _unpack(packed, bits, packed.shape[1] * 8 // bits)
    zero = lanes[:, :blocks]
    return (None if (zero == 2 ** (bits - 1)).all() else zero), lanes[:, blocks:]
