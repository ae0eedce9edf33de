"""The tensors of a compressed-tensors module: which dtypes and ranks they may have, and the extents they give."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from . import checks
from .container import Checkpoint, Tensor
from .errors import AS_WRITTEN, CorruptError, UnsupportedError

PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "bias")
UNPACKED = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "bias")
ALONE = ("weight_shape", "weight_g_idx", "weight_zero_point")
"""Members that mean nothing without codes."""

WORDS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "U32": np.dtype(np.uint32)}
INDICES: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
FLOATS = ("F16", "BF16", "F32")
# suffix -> dtypes it may have, numbers of dimensions
RULES: dict[str, tuple[Collection[str], tuple[int, ...]]] = {
    "weight_packed": (WORDS, (2,)),
    "weight": (("I8",), (2,)),
    "weight_scale": (FLOATS, (0, 1, 2)),
    "weight_zero_point": ((*WORDS, "I8"), (0, 1, 2)),
    "weight_g_idx": (INDICES, (1,)),
    "weight_shape": (INDICES, (1,)),
    "bias": (FLOATS, (1,)),
}


def checked(checkpoint: Checkpoint, module: str) -> dict[str, Tensor]:
    packed = checks.full_name(module, "weight_packed") in checkpoint.tensors
    needed = ("weight_packed", "weight_scale", "weight_shape") if packed else ("weight", "weight_scale")
    members = checks.members(checkpoint, module, PACKED if packed else UNPACKED, needed)
    for suffix, tensor in members.items():
        dtypes, ranks = RULES[suffix]
        checks.dtype(tensor, *dtypes)
        if 0 in tensor.shape:
            checks.shape(tensor, why="one that is not empty")
        if len(tensor.shape) not in ranks:
            raise UnsupportedError(
                "unexpected number of dimensions",
                file=tensor.file,
                tensor=tensor.name,
                found=list(tensor.shape),
                need=f"{max(ranks)}",
                do="stacked experts must be stored one by one" if len(tensor.shape) == 3 else AS_WRITTEN,
            )
    return members


def extents(packed: Tensor, shape: Tensor) -> tuple[int, int]:
    """(n, k) from weight_shape, which must agree with the rows of the packed codes."""
    checks.shape(shape, (2,), why="for a matrix")
    n, k = (int(extent) for extent in shape.array())
    if n != packed.shape[0] or k < 1:
        raise CorruptError(
            "shapes disagree",
            file=shape.file,
            tensor=shape.name,
            found=f"{n} x {k}",
            need=f"{packed.shape[0]} rows, as {packed.name} {list(packed.shape)} has",
        )
    return n, k
