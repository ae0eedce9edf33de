"""What layouts share: a second level of scales over the whole weight, and one factor for each part of a fused one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import gcd
from typing import Any

from numpy.typing import NDArray

from ..formats.canonical import SCALE_DTYPES, Level, Outline, from_shards, per_shard

Array = NDArray[Any]

GLOBAL = "f32"

PARTS = 4
"""Parts of a fused weight that may have a factor each, in a kernel."""
NEVER = 2**31 - 1
"""Where a part begins that is not there."""


def is_global(q: Outline, levels: Sequence[tuple[str, tuple[int, int]]]) -> bool:
    """Whether ``levels`` is one f32 over all of k, and over all rows or those of a shard."""
    (dtype, (block_n, block_k)), *more = levels
    return not more and dtype == GLOBAL and block_k >= q.k and (block_n >= q.n or bool(q.shards))


def wrong_shards(q: Outline) -> str | None:
    """Why shards do not make up the rows, None when they do or there are none."""
    if q.shards and (sum(q.shards) != q.n or q.scales[-1][1] != (gcd(*q.shards), q.k)):
        return f"shards of {', '.join(map(str, q.shards))} rows do not make up {q.n}"
    return None


def one_a_part(level: Level) -> Array:
    """A level's data, one row of factors for each shard where it has shards."""
    return per_shard(level) if level.shards else level.data


def global_shape(spec: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of ``P.global_scale``."""
    lead = () if spec["experts"] is None else (spec["experts"],)
    return (*lead, len(spec["shards"])) if "shards" in spec else lead or (1,)


def global_outline(spec: Mapping[str, Any]) -> tuple[str, tuple[int, int]]:
    """(dtype, block) of the global of a spec that has one."""
    n, k, shards = spec["n"], spec["k"], spec.get("shards")
    return spec["global"], (gcd(*shards) if shards else n, k)


def global_level(spec: Mapping[str, Any], stored: Array) -> Level:
    """``P.global_scale`` as a level."""
    lead = () if spec["experts"] is None else (spec["experts"],)
    n, k, shards = spec["n"], spec["k"], tuple(spec.get("shards", ()))
    whole = stored.reshape(*lead, -1, 1)
    return from_shards(whole, shards, k) if shards else Level(whole, (n, k))


def refuse_parts(spec: Mapping[str, Any]) -> str | None:
    """None if kernels know as many factors as the module has parts, else what they need."""
    count = len(spec.get("shards", ()))
    return f"at most {PARTS} fused parts, not {count}" if count > PARTS else None


def starts(spec: Mapping[str, Any]) -> tuple[int, ...]:
    """The first columns of the parts of a fused weight but its first, as kernels take them."""
    found = (*accumulate(spec["shards"][:-1]),) if "shards" in spec else ()
    return (*found, *(NEVER,) * (PARTS - 1))[: PARTS - 1]


def bias_type(spec: Mapping[str, Any]) -> int:
    """The bias's dtype by number; any where there is none."""
    return list(SCALE_DTYPES).index(spec["bias"]) if spec["bias"] else 0
