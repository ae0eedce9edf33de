"""A fuzzer's bytes as edits of a valid module: what it finds are lies that pass the header, not headers that fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from cases import Stored
from tiny import TINY, Tiny
from warptile.formats.container import DTYPES, nbytes
from warptile.formats.options import Options

MOST = 1 << 16
"""Bytes of a tensor."""
EXTENTS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 96, 127, 128, 256, 1024, 2**31, 2**40)
# fmt: off
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        4,
        5,
        8,
        16,
        24,
        32,
        64,
        128,
        2**31,
        2**63,
        -(2**63),
        10**30,
        0.5,
        -0.0,
        1e308,
    ),
    *("", "a", "gptq", "gptq_v2", "marlin", "awq", "gemm", "fp8", "modelopt", "compressed-tensors", "gguf", "onnx"),
    *("inverse", "e5m2", "ue8m0", "group", "channel", "float", "8x32", "x", "re:.*", "re:(a+)+$", "Linear", "\x1b[2J"),
    *(
        "f16",
        "bf16",
        "f32",
        "e4m3",
        "e8m0",
        "u4",
        "u4b8",
        "e2m1",
        "int",
        "ggml_rope",
        "swizzled",
        "none",
        "torch.int32",
    ),
    *(
        [],
        {},
        [1],
        [0, 0],
        [1, 64],
        [8, 32],
        [-1, 1],
        [None],
        [[1, 2]],
        ["a"],
        ["Linear"],
        [1.5, "a"],
        {"a": 1},
        {"": {}},
    ),
    *(
        {"a": {"weights": {}}},
        {"a": {"weights": []}},
        {"a": None},
        {".*": {"bits": 8}},
        {"-:a": {}},
        {"format": "gptq"},
    ),
)
KEYS = (
    *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "checkpoint_format"),
    *("format", "packing_format", "dynamic", "extra_config", "pack_dtype", "meta", "zero_point", "version", "backend"),
    *("modules_to_not_convert", "config_groups", "ignore", "sparsity_config", "is_marlin_format", "fmt", "scale_fmt"),
    *("weight_block_size", "weight_scale_semantics", "swizzled", "types", "architecture", "heads", "undo_rope_order"),
    *(
        "opsets",
        "nodes",
        "source",
        "residue",
        "perm",
        "bias",
        "shards",
        "global",
        "kind",
        "row_order",
        "experts",
        "zero",
    ),
    *("scale", "scale_block", "signed", "element", "n", "k", "n_padded", "k_padded", "layout", "group", "narrow"),
    *("parts", "name", "expert", "symmetric"),
)
# fmt: on
CONFIG_KEYS = ("text_config", "num_attention_heads", "num_key_value_heads", "quantization_config", "model_type")
SUFFIXES = sorted({name.rpartition(".")[2] for tiny in TINY.values() for name in tiny.tensors})
OPTIONS = (
    *({}, {"nan": "zero"}, {"scale_convention": "divide"}, {"scale_convention": "multiply"}, {"zero_wrap": "lane"}),
    *({"zero_wrap": "none"}, {"zero_wrap": "word"}, {"checkpoint_format": "gptq_v2"}, {"checkpoint_format": "marlin"}),
    *({"bits": 4}, {"bits": 3}, {"group_size": 32}, {"group_size": -1}, {"undo_rope_order": True}),
)


class Choices:
    """Decisions taken from bytes; without bytes, the first of everything."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> bool:
        return self.at < len(self.data)

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def below(self, count: int) -> int:
        value = self.byte()
        return (value if count <= 256 else value << 8 | self.byte()) % count

    def one(self, items: Any) -> Any:
        return items[self.below(len(items))]


def fitted(dtype: str, shape: tuple[int, ...], data: bytes) -> Stored:
    """What a container would have let through: as many bytes as the shape needs, and not too many."""
    if prod(extent for extent in shape if extent) >= 2**56:
        shape = (0,)
    if prod(shape) * DTYPES[dtype][1] > 8 * MOST:
        shape = (0, *shape[1:])
    if prod(shape) * DTYPES[dtype][1] % 8:
        shape = (*shape[:-1], 8)
    size = nbytes(dtype, shape)
    return (dtype, shape, (data * (size // len(data) + 1) if data else bytes(size))[:size]) if size <= MOST else fitted(
        dtype, (0, *shape[1:]), data
    )  # fmt: skip


def edited(base: Tiny, choices: Choices) -> Tiny:
    """The base after as many edits as there are bytes for."""
    while choices.left:
        base = choices.one(EDITS)(base, choices)
    return base


def _tensor(base: Tiny, choices: Choices, change: Callable[[Stored], Stored]) -> Tiny:
    if not base.tensors:
        return base
    name = choices.one(list(base.tensors))
    return replace(base, tensors={**base.tensors, name: change(base.tensors[name])})


def drop(base: Tiny, choices: Choices) -> Tiny:
    name = choices.one(list(base.tensors) or [""])
    return replace(base, tensors={n: stored for n, stored in base.tensors.items() if n != name})


def retype(base: Tiny, choices: Choices) -> Tiny:
    dtype = choices.one(list(DTYPES))
    return _tensor(base, choices, lambda t: fitted(dtype, t[1], t[2]))


def resize(base: Tiny, choices: Choices) -> Tiny:
    axis, extent = choices.below(4), choices.one(EXTENTS)
    return _tensor(base, choices, lambda t: fitted(t[0], (*t[1][:axis], extent, *t[1][axis + 1 :]), t[2]))


def reshape(base: Tiny, choices: Choices) -> Tiny:
    how = choices.below(4)
    shapes: tuple[Callable[[tuple[int, ...]], tuple[int, ...]], ...] = (
        *(lambda s: (1, *s), lambda s: (*s, 1), lambda s: s[1:], lambda s: tuple(reversed(s))),
    )
    return _tensor(base, choices, lambda t: fitted(t[0], shapes[how](t[1]), t[2]))


def rename(base: Tiny, choices: Choices) -> Tiny:
    old, suffix = choices.one(list(base.tensors) or ["a.weight"]), choices.one(SUFFIXES)
    new = f"{old.rpartition('.')[0]}.{suffix}" if choices.below(4) else suffix
    return replace(base, tensors={new if n == old else n: stored for n, stored in base.tensors.items()})


def graft(base: Tiny, choices: Choices) -> Tiny:
    """A tensor of another kind beside the module's own."""
    other = choices.one(list(TINY.values()))
    name = choices.one(list(other.tensors))
    module = next(iter(base.tensors), "a.weight").rpartition(".")[0]
    return replace(base, tensors={**base.tensors, f"{module}.{name.rpartition('.')[2]}": other.tensors[name]})


def poke(base: Tiny, choices: Choices) -> Tiny:
    at, value, count = choices.below(MOST), choices.byte(), choices.one((1, 1, 1, 2, 4, MOST))

    def change(t: Stored) -> Stored:
        data = bytearray(t[2])
        first = at % len(data) if data else 0
        data[first : first + count] = bytes([value]) * min(count, len(data) - first)
        return t[0], t[1], bytes(data)

    return _tensor(base, choices, change)


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(parent, key) of everything inside."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _nodes(value)


def retell(tree: dict[str, Any], choices: Choices, keys: tuple[str, ...] = KEYS) -> dict[str, Any]:
    """A table with one value at any depth replaced, removed or added."""
    tree = json.loads(json.dumps(tree))
    nodes = list(_nodes(tree))
    how = choices.below(4)
    if how == 0 or not nodes:
        tree[choices.one(keys)] = choices.one(VALUES)
        return tree
    parent, key = choices.one(nodes)
    if how == 1 and isinstance(parent, dict):
        del parent[key]
    elif how == 2 and isinstance(parent[key], dict):
        parent[key][choices.one(keys)] = choices.one(VALUES)
    else:
        parent[key] = choices.one(VALUES)
    return tree


def relabel(base: Tiny, choices: Choices) -> Tiny:
    return replace(base, quantization=retell(base.quantization, choices))


def reconfigure(base: Tiny, choices: Choices) -> Tiny:
    return replace(base, config=retell(base.config, choices, CONFIG_KEYS))


def choose(base: Tiny, choices: Choices) -> Tiny:
    return replace(base, options=Options(**choices.one(OPTIONS)))


EDITS = (relabel, poke, resize, retype, drop, rename, graft, reshape, relabel, poke, reconfigure, choose)
