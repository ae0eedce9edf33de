"""The codes of an FP8 module: one tensor, or experts' tensors apart whose scales are together, as transformers saves.

| tensor | dtype, shape | |
| --- | --- | --- |
| `B.experts.<e>.gate_proj.weight`, `.up_proj.weight` | F8_E4M3 [I, K] | rows of expert e, those of gate first |
| `B.experts.gate_up_proj_scale_inv` | [E, ceil(2 I / bn), ceil(K / bk)] | the grid over both |
| `B.experts.<e>.down_proj.weight`, `B.experts.down_proj_scale_inv` | the same | |

Such a stack is one module: `B.experts.gate_up_proj`, `B.experts.down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .container import Checkpoint, Tensor
from .errors import AS_WRITTEN, CorruptError, UnsupportedError

Array = NDArray[Any]

OWN = (".weight_scale_inv", ".weight_scale", ".scale")
"""Suffixes under which a module has a scale of its own."""
SHARED = "_scale_inv"
# Linears of an expert, in the order of their rows -> what those of all experts are called.
ROWS = {("gate_proj", "up_proj"): "gate_up_proj", ("down_proj",): "down_proj"}
APART = re.compile(r"(?P<block>(?:.*\.)?experts)\.(?P<expert>\d{1,7})\.(?P<linear>gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Weights:
    """Codes uint8 [(E,) n, k], wherever they lie."""

    tensors: tuple[Tensor, ...]
    """One; or of every expert, one expert after the other, ``each`` tensors below each other."""
    whole: Tensor
    """The one, or what all of them would be as one: it has a name and a shape, and no bytes."""
    each: int = 1

    def matrices(self, expert: int) -> list[Array]:
        """uint8 [rows, k] of an expert (0 where there are none), below each other."""
        if len(self.tensors) > 1:
            return [_bytes(tensor) for tensor in self.tensors[expert * self.each : (expert + 1) * self.each]]
        codes = _bytes(self.tensors[0])
        return [codes[expert] if codes.ndim == 3 else codes]

    def slab(self, expert: int, rows: slice, columns: slice) -> Array:
        """A copy: uint8 [rows, columns]."""
        pieces, start = [], 0
        for matrix in self.matrices(expert):
            inside = matrix[max(rows.start - start, 0) : max(rows.stop - start, 0), columns]
            pieces += [inside] if len(inside) else []
            start += len(matrix)
        return np.concatenate(pieces)

    def flat(self) -> Iterator[tuple[int, Array]]:
        """(position of its first code in all of them, codes) of each tensor."""
        start = 0
        for tensor in self.tensors:
            yield start, _bytes(tensor).reshape(-1)
            start += tensor.nbytes


def _bytes(tensor: Tensor) -> Array:
    return tensor.array().view(np.uint8)


def single(tensor: Tensor) -> Weights:
    """Codes that are one tensor."""
    return Weights((tensor,), tensor)


def stacks(checkpoint: Checkpoint) -> Mapping[str, list[Tensor]]:
    """{module: the experts' weights that its one scale tensor is for}, in the order of the file."""
    if "stacks" not in checkpoint.memo:
        found: dict[str, list[Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            if (named := APART.fullmatch(name)) is not None:
                stack = next(stack for linears, stack in ROWS.items() if named["linear"] in linears)
                module = f"{named['block']}.{stack}"
                alone = any(name.removesuffix(".weight") + suffix in checkpoint.tensors for suffix in OWN)
                if module + SHARED in checkpoint.tensors and tensor.dtype.startswith("F8_") and not alone:
                    found.setdefault(module, []).append(tensor)
        checkpoint.memo["stacks"] = found
    held: Mapping[str, list[Tensor]] = checkpoint.memo["stacks"]
    return held


def apart(checkpoint: Checkpoint, module: str) -> Weights:
    """The weights of a stack that ``stacks`` lists.

    Raises:
        CorruptError: other experts than the scale is for, or not all of one shape.
        UnsupportedError: not all of one type, or one with a bias.
    """
    found = {tensor.name: tensor for tensor in stacks(checkpoint)[module]}
    first, scale = next(iter(found.values())), checkpoint.tensors[module + SHARED]
    each = len(_linears(module))
    experts = scale.shape[0] if scale.shape else 0
    names = _names(module, min(experts, len(found)))
    if experts * each != len(found) or found.keys() != set(names):
        wrong = next((name for name in names if name not in found), None)
        raise CorruptError(
            f"module {module!r} has scales for other experts than there are",
            file=scale.file,
            tensor=scale.name,
            found=f"{len(found)} weights{f', no {wrong}' if wrong else ''}",
            need=f"those of {experts} experts, from 0 on",
        )
    for tensor in found.values():
        bias = tensor.name.removesuffix("weight") + "bias"
        if bias in checkpoint.tensors:
            what, do = "experts that have a bias and one scale for all", "store a scale beside each expert's weight"
            raise UnsupportedError(what, file=tensor.file, tensor=bias, do=do)
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape) or len(tensor.shape) != 2:
            error = CorruptError if tensor.dtype == first.dtype else UnsupportedError
            raise error(
                "experts of one stack differ",
                file=tensor.file,
                tensor=tensor.name,
                found=f"{tensor.dtype} {list(tensor.shape)}",
                need=f"a matrix {first.dtype} {list(first.shape)}, as {first.name}",
                do=AS_WRITTEN,
            )
    (n, k), nbytes = first.shape, sum(tensor.nbytes for tensor in found.values())
    whole = Tensor(module, first.dtype, (experts, each * n, k), first.file, first.offset, nbytes, first.state)
    return Weights(tuple(found[name] for name in names), whole, each)


def _linears(module: str) -> tuple[str, ...]:
    """KeyError for what is called like no stack."""
    return {name: linears for linears, name in ROWS.items()}[module.rpartition(".")[2]]


def _names(module: str, experts: int) -> list[str]:
    """The experts' weights of a stack, in the order of their rows."""
    block = module.rpartition(".")[0]
    return [f"{block}.{expert}.{linear}.weight" for expert in range(experts) for linear in _linears(module)]


def split(module: str, codes: Array) -> Mapping[str, Array]:
    """uint8 [E, n, k] of a stack as the experts' weights, by name."""
    names = _names(module, codes.shape[0])
    return dict(zip(names, codes.reshape(len(names), -1, codes.shape[-1]), strict=True))
