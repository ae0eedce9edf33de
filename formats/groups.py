"""Groups of input channels that share a row of scales: their size from grids, labels and ``g_idx``, and act-order.

``g_idx`` [k] is the group of each logical channel. The canonical form stores channels sorted by group, stably:
``perm = argsort(g_idx)``, so that ``g_idx[perm[p]] = p // group``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import AS_WRITTEN, CorruptError, UnsupportedError

Array = NDArray[Any]

USUAL = (16, 32, 64, 128, 256, 512, 1024)


def covers(group: int, k: int, groups: int) -> bool:
    """``groups`` rows of scales are what ``group`` (-1: all of k) gives over k channels, the last one maybe short."""
    return groups == (1 if group == -1 else -(-k // group))


def group_size(
    k: int,
    groups: int,
    measured: int | None,
    said: tuple[int, ...],
    say: Callable[[str], None],
    file: str,
    tensor: str,
    *,
    switched: bool = False,
) -> int:
    """Input channels of one row of scales, at most k.

    Args:
        measured: what g_idx shows, None when it shows nothing.
        said: sizes that labels or switches give, to be believed in this order; empty when nothing is said.
        say: takes what was assumed.
        switched: the first of ``said`` is that of ``--group-size``.

    Raises:
        CorruptError: more groups than channels.
        UnsupportedError: no such size, a label or switch that contradicts the tensors, or several possible sizes.
    """
    for size in said:
        if size < 1 and size != -1:
            raise UnsupportedError(
                "no such group size",
                file=file,
                tensor=tensor,
                found=size,
                need="-1 or a positive number",
                do="--group-size says which is true",
            )
    if not 0 < groups <= k:
        raise CorruptError(
            "shapes disagree", file=file, tensor=tensor, found=f"{groups} groups", need=f"1 to {k} (input channels)"
        )
    for size in said:
        if covers(size, k, groups) and (measured is None or groups == 1 or size == measured):
            return k if size == -1 else min(size, k)
    usual = {g for g in USUAL if covers(g, k, groups)}
    exact = {k // groups} if k % groups == 0 else set()
    possible = sorted({measured} if measured is not None else {k} if groups == 1 else usual | exact)
    if said:
        raise UnsupportedError(
            f"{'--group-size' if switched else 'the label'} contradicts the tensors",
            file=file,
            tensor=tensor,
            found=f"{groups} groups over {k} channels",
            need=f"group size {claimed(said, '--group-size' if switched else None)}",
            do=f"--group-size {possible[0]} believes the tensors" if possible else "--group-size says which is true",
        )
    if len(possible) != 1:
        raise UnsupportedError(
            "the shapes do not tell the group size",
            file=file,
            tensor=tensor,
            found=f"{groups} groups over {k} channels" + (f", {_either(possible)} possible" if possible else ""),
            do="say --group-size",
        )
    say(f"assumed group size {'-1' if groups == 1 else possible[0]} from the shapes")
    return possible[0]


def claimed(values: Sequence[int], switch: str | None) -> str:
    """Numbers and who says so: labels, but for the first when it is that of a switch."""
    by_label = f"{_either(values[1:] if switch else values)} as the label says"
    by_switch = [f"{values[0]} as {switch} says"] if switch else []
    return " or ".join([*by_switch, *([by_label] if len(values) > len(by_switch) else [])])


def _either(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def measured_group(g_idx: Array, groups: int, file: str, tensor: str) -> int:
    """Channels of every group but the last, from g_idx [k]. Raises CorruptError (out of range) and UnsupportedError
    (groups of unequal sizes)."""
    outside = (g_idx < 0) | (g_idx >= groups)
    if outside.any():
        at = int(outside.argmax())
        raise CorruptError(
            "a channel's group is out of range",
            file=file,
            tensor=tensor,
            found=f"{int(g_idx[at])} at [{at}]",
            need=f"0 to {groups - 1}",
        )
    sizes = np.bincount(g_idx.astype(np.int64), minlength=groups)
    unequal = sizes[:-1] != sizes[0]
    if unequal.any() or not 0 < sizes[-1] <= sizes[0]:
        at = int(unequal.argmax()) if unequal.any() else groups - 1
        raise UnsupportedError(
            "groups have unequal numbers of channels",
            file=file,
            tensor=tensor,
            found=f"{sizes[at]} in group {at}, {sizes[0]} in group 0",
            need="equal sizes, only the last may be smaller",
            do=AS_WRITTEN,
        )
    return int(sizes[0])


def order(g_idx: Array, group: int) -> Array | None:
    """int32 [k], the canonical ``perm``; None when g_idx is k // group."""
    if np.array_equal(g_idx, np.arange(g_idx.size) // group):
        return None
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def indices(perm: Array | None, k: int, group: int) -> Array:
    """The inverse of ``order``: g_idx as int64 [k]."""
    g_idx = np.arange(k) // group
    if perm is not None:
        g_idx[perm] = np.arange(k) // group
    return g_idx
