"""What an FP8 scale tensor means: which weights each value covers, and whether it multiplies or divides them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from numpy.typing import NDArray

from . import checks
from .canonical import grid_shape
from .container import Checkpoint, Tensor
from .errors import RIGHT_LABELS, CorruptError, UnsupportedError
from .strict_json import shown

Array = NDArray[Any]
Reading = tuple[tuple[int, int], tuple[int, ...]]

DEFAULT_BLOCK = (128, 128)


def divides(scale: Tensor, values: Array, checkpoint: Checkpoint) -> bool:
    """Whether the scales are divisors: as the switch says, else the label, else not.

    No weight reaches 448, the largest code, so real multipliers are below 1 and real divisors above: a label, or the
    lack of one, that has it the other way round is refused (UnsupportedError). UsageError for an unknown switch.
    """
    said, label = checkpoint.options.scale_convention, checkpoint.quantization.get("weight_scale_semantics")
    if said is not None:
        divide = said == "divide"
    elif label in (None, "inverse"):
        divide = label == "inverse"
        odd = values.size and (values.max() < 1 if divide else values.min() > 1)
        if odd:
            raise UnsupportedError(
                f"scales do not look like {'divisors, as the label says' if divide else 'multipliers'}",
                file=scale.file,
                tensor=scale.name,
                found=f"{values.min():g} to {values.max():g}",
                need="weights below 448",
                do="say --scale-convention multiply or divide",
            )
    else:
        raise UnsupportedError(
            "unknown direction of the scales",
            file=scale.file,
            tensor=scale.name,
            found=f"weight_scale_semantics {label!r}",
            need="inverse, or no such label",
            do="say --scale-convention multiply or divide",
        )
    if divide:
        checks.refuse_any(scale, values == 0, "a divisor is zero", "none", "--scale-convention multiply, if it is none")
    return divide


def block(checkpoint: Checkpoint, module: str, weight: Tensor, scale: Tensor) -> Reading:
    """(block, shards) by the scale's shape: block (bn, bk), with n or k where one value covers them all.

    Raises CorruptError for a shape that fits nothing, UnsupportedError for one that fits two things.
    """
    *lead, n, k = weight.shape
    shape = scale.shape[len(lead) :]
    declared, only_blocks = _declared(checkpoint, weight)
    blocks = declared or [DEFAULT_BLOCK]
    readings: list[Reading] = []
    if list(scale.shape[: len(lead)]) == lead:
        readings += [(b, ()) for b in blocks if _is_grid(shape, grid_shape(n, k, b))]
        if not only_blocks:
            shards = checks.rows_of_shards(checkpoint.config, module, n)
            readings += [((1, k), ())] if shape in ((n,), (n, 1)) else []
            readings += [((n, k), shards)] if len(shards) > 1 and shape in ((len(shards),), (len(shards), 1)) else []
            if prod(shape) == 1:
                readings = [((n, k), ())]
    if not readings:
        wanted = [(*lead, *grid_shape(n, k, b)) for b in blocks]
        other = "" if only_blocks else ", or one scale a row or tensor,"
        sizes = " or ".join(f"{bn} x {bk}" for bn, bk in blocks)
        checks.shape(scale, *wanted, why=f"in blocks of {sizes}{other} for {n} x {k} weights")
    if len(set(readings)) > 1:
        raise UnsupportedError(
            "the scale's shape can be read in two ways",
            file=scale.file,
            tensor=scale.name,
            found=list(scale.shape),
            need="weight_block_size in config.json",
            do="add it there",
        )
    if readings[0] == (DEFAULT_BLOCK, ()) and not declared:
        checkpoint.note("", "blocks of 128 x 128 are assumed for FP8 scales: no label names their size")
    return readings[0]


def _is_grid(shape: tuple[int, ...], grid: tuple[int, int]) -> bool:
    """As it is, as [a, 1, b, 1], or squeezed where one block covers an axis."""
    a, b = grid
    squeezed = ((a * b,), () if a * b == 1 else (a * b,)) if 1 in grid else ()
    return shape in (grid, (a, 1, b, 1), *squeezed)


def _declared(checkpoint: Checkpoint, weight: Tensor) -> tuple[list[tuple[int, int]], bool]:
    """Block shapes that the label names, and whether it allows nothing else."""
    label = checkpoint.quantization
    sizes: list[Any] = [label.get("weight_block_size")]
    file = checkpoint.stated_in
    for group in checks.table(label, "config_groups", file).values():
        weights = checks.table(group, "weights", file) if isinstance(group, Mapping) else {}
        structure = weights.get("block_structure")
        sizes.append(structure.split("x") if isinstance(structure, str) else structure)
        if (weights.get("type"), weights.get("num_bits"), weights.get("strategy")) == ("float", 8, "group"):
            sizes.append([1, weights.get("group_size")])
    try:
        blocks = [(int(bn), int(bk)) for bn, bk in filter(None, sizes)]
    except (TypeError, ValueError):
        blocks = [(0, 0)]
    if any(min(b) < 1 or max(b) > checks.MAX_EXTENT for b in blocks):
        need = f"1 to {checks.MAX_EXTENT}"
        raise CorruptError(
            "a block size is no pair of sizes", file=weight.file, found=shown(sizes), need=need, do=RIGHT_LABELS
        )
    return list(dict.fromkeys(blocks)), sizes[0] is not None
