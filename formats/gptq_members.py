"""The tensors of a GPTQ module: which dtypes and ranks they may have, and what wrong ones are called."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from . import checks
from .container import Checkpoint, Tensor
from .errors import CorruptError, UnsupportedError
from .gptq_config import Label

MEMBERS = ("qweight", "qzeros", "scales", "g_idx", "bias")
TILED = ("B", "s", "bias")
NEEDED = ("qweight", "scales", "B", "s")

WORDS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "U32": np.dtype(np.uint32)}
INDICES: dict[str, np.dtype[Any]] = {**WORDS, "I64": np.dtype(np.int64)}
FLOATS = {"F16": "f16", "BF16": "bf16", "F32": "f32"}

# suffix -> dtypes it may have, dimensions
RULES: dict[str, tuple[Collection[str], int]] = {
    "qweight": (WORDS, 2),
    "qzeros": (WORDS, 2),
    "scales": (FLOATS, 2),
    "g_idx": (INDICES, 1),
    "bias": (FLOATS, 1),
    "B": (WORDS, 2),
    "s": (FLOATS, 2),
}


def checked(checkpoint: Checkpoint, module: str, order: tuple[str, ...]) -> dict[str, Tensor]:
    """The module's tensors by suffix in ``order``. Raises CorruptError (missing, wrong rank, a bias that does not fit)
    and UnsupportedError (dtype)."""
    members = checks.members(checkpoint, module, order, [suffix for suffix in order if suffix in NEEDED])
    for suffix, tensor in members.items():
        dtypes, rank = RULES[suffix]
        checks.dtype(tensor, *dtypes)
        if len(tensor.shape) != rank or 0 in tensor.shape:
            raise disagree(tensor, f"{rank} dimensions, none empty")
    n = members["s" if "s" in members else "scales"].shape[1]
    if "bias" in members and members["bias"].shape != (n,):
        raise disagree(members["bias"], f"[{n}], one for each output")
    return members


def check_columns(qweight: Tensor, n: int, label: Label) -> None:
    """qweight has a column for each of the n columns of scales; some other ratios have a name."""
    columns = qweight.shape[1]
    if columns == n:
        if label.convention == "marlin":
            raise UnsupportedError(
                f"{'--checkpoint-format' if label.forced else 'labelled'} marlin, but stored as plain GPTQ",
                file=qweight.file,
                tensor=qweight.name,
                do="--checkpoint-format gptq or gptq_v2 says how its zeros are stored",
            )
        return
    reason = None
    if n == 8 * columns:
        reason = "AWQ, packed along n"
    elif columns in (2 * n, 4 * n):
        reason = "already repacked into Marlin tiles"
    if reason is None:
        raise disagree(qweight, f"{n} columns, as scales has")
    raise UnsupportedError(
        f"labelled GPTQ, but it is {reason}",
        file=qweight.file,
        tensor=qweight.name,
        found=f"{columns} columns for {n} columns of scales",
        need="the same number",
        do="convert the checkpoint as the tool that quantised it wrote it",
    )


def disagree(tensor: Tensor, need: str) -> CorruptError:
    """The error for a tensor whose shape contradicts the others'."""
    return CorruptError("shapes disagree", file=tensor.file, tensor=tensor.name, found=list(tensor.shape), need=need)
