"""What a compressed-tensors configuration says. Labels only: the tensors decide, in ``compressed_tensors.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import checks, targets
from .errors import RIGHT_LABELS, UnsupportedError
from .strict_json import shown

if TYPE_CHECKING:
    from .container import Checkpoint

DEEPEST = 64
LABELS = ("compressed-tensors", "auto_round:llm_compressor")
# What a label may name. Modules of the second row are other readers'.
FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)


@dataclass(frozen=True)
class Arguments:
    """The claims about one module's weights; None or empty where nothing is said."""

    bits: int | None
    group_size: tuple[int, ...]
    """At most one; -1 is one group over all of k."""
    switched: frozenset[str]
    """Those of the two above that are the command line's."""
    symmetric: bool | None
    block: tuple[int, int] | None
    """Rows and channels of one scale, for scales in blocks."""
    version: str
    remarks: tuple[str, ...]


def method(config: Mapping[str, Any]) -> str | None:
    """What a configuration is of, None when there is none; ``config_groups`` need no name beside them."""
    if not config:
        return None
    named = config.get("quant_method", LABELS[0] if "config_groups" in config else "unnamed")
    packing = config.get("packing_format")
    return packing if packing in LABELS else str(named)


def check_formats(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a compressor format that is not known, sparse ones included."""
    config, file = checkpoint.quantization, checkpoint.stated_in
    groups = checks.table(config, "config_groups", file).values()
    each = [group.get("format") for group in groups if isinstance(group, Mapping)]
    for name in (config.get("format"), *each, checks.table(config, "sparsity_config", file).get("format")):
        if name is not None and name not in FORMATS:
            raise UnsupportedError(
                "unknown compressor format",
                file=file,
                found=repr(name),
                need=", ".join(FORMATS),
                do="save it in one of these",
            )


def check_targets(checkpoint: Checkpoint, quantised: Mapping[str, Any]) -> None:
    """Note patterns that mean no module. Raises UnsupportedError when no target means any quantised one."""
    config, file = checkpoint.quantization, checkpoint.stated_in
    table = targets.schemes(config, file)
    if table and not any(targets.scheme_of(module, table, file) for module in quantised):
        raise UnsupportedError(
            "the targets match no module, yet there are quantised ones",
            file=file,
            tensor=next(iter(quantised)),
            found=", ".join(table),
            need="targets that name the quantised modules",
            do="get the configuration that belongs to this file",
        )
    names = dict.fromkeys(prefix for name in checkpoint.tensors for prefix in _prefixes(name))
    for key, patterns in (("targets", table), ("ignore", checks.texts(config, "ignore", file))):
        idle = targets.idle(patterns, names, file)
        if idle:
            checkpoint.note("", f"{key} that match no module: {', '.join(idle)}")


def _prefixes(name: str) -> Iterator[str]:
    """The modules that a tensor's name passes through, so far as modules lie one in the other."""
    parts = name.split(".", DEEPEST)
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def arguments(checkpoint: Checkpoint, module: str) -> Arguments:
    """The switches, then the scheme whose target means the module. Raises UnsupportedError for one of other weights."""
    config, options, file = checkpoint.quantization, checkpoint.options, checkpoint.stated_in
    switched = frozenset(key for key in ("bits", "group_size") if getattr(options, key) is not None)
    if method(config) not in LABELS:
        groups = () if options.group_size is None else (options.group_size,)
        assumed = "assumed compressed-tensors from the tensors: there is no label"
        return Arguments(options.bits, groups, switched, None, None, "", (assumed,))
    scheme = targets.scheme_of(module, targets.schemes(config, file), file)
    remarks = [] if scheme else ["no target means it, its tensors say it is quantised: read as they are"]
    for pattern in checks.texts(config, "ignore", file):
        if targets.matches(module, pattern, file):
            remarks = [f"ignored by {pattern!r}, its tensors say it is quantised: read as they are"]
            scheme = None
    weights = scheme.weights if scheme else {}
    if weights.get("type") not in (None, "int"):
        raise UnsupportedError(
            "the label contradicts the tensors",
            file=file,
            tensor=module,
            found=f"integer codes, type {weights['type']!r} in {scheme.group if scheme else ''}",
            do="get the configuration that belongs to this file",
        )
    symmetric = weights.get("symmetric", True) if weights else None
    return Arguments(
        bits=checks.number(weights, "num_bits", file) if options.bits is None else options.bits,
        group_size=_group(weights, file) if options.group_size is None else (options.group_size,),
        switched=switched,
        symmetric=symmetric if isinstance(symmetric, bool) else None,
        block=_block(weights, file),
        version=str(config.get("version") or ""),
        remarks=tuple(remarks),
    )


def _group(weights: Mapping[str, Any], file: str) -> tuple[int, ...]:
    size, strategy = checks.number(weights, "group_size", file), weights.get("strategy")
    if strategy in ("channel", "tensor"):
        return (-1,)
    if strategy in ("group", None) and size is not None:
        return (size,)
    return ()


def _block(weights: Mapping[str, Any], file: str) -> tuple[int, int] | None:
    """``block_structure``: [rows, channels], or "128x128" in old files."""
    structure = weights.get("block_structure")
    if structure is None:
        return None
    sides = structure.split("x") if isinstance(structure, str) else structure
    try:
        rows, channels = (int(side) for side in sides)
    except (TypeError, ValueError):
        rows = channels = 0
    if not (0 < rows <= checks.MAX_EXTENT and 0 < channels <= checks.MAX_EXTENT):
        found = shown(repr(structure))
        raise UnsupportedError("block_structure is no pair of sizes", file=file, found=found, do=RIGHT_LABELS)
    return rows, channels
