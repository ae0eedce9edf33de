"""``inspect()`` and ``formats()``: what lies in a file, and what this program reads and writes. No codes are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..formats import artifact, sources
from ..formats.canonical import ELEMENTS, Element, Outline
from ..formats.container import Checkpoint, open_checkpoint
from ..formats.options import Options
from ..formats.parts import parts
from ..kernels import layouts
from .plan import claims


@dataclass(frozen=True)
class Linear:
    """One quantised module of a checkpoint or an artifact."""

    name: str
    holder: str
    """The source format or the layout it is stored in."""
    element: str
    n: int
    k: int
    experts: int | None
    group: int
    scale: str
    zero: bool
    perm: bool
    bias: bool
    nbytes: int
    refusals: Mapping[str, str]
    """{layout: reason} of the layouts that cannot hold it; empty for an artifact's."""
    parts: tuple[str, ...] = ()
    """The source's linears that an artifact's module holds; empty when it is one itself."""


@dataclass(frozen=True)
class Contents:
    """What ``inspect`` found."""

    path: Path
    kind: str
    """``checkpoint`` or ``artifact``."""
    linears: tuple[Linear, ...]
    others: Mapping[str, tuple[int, int]]
    """{dtype: (tensors, bytes)} of everything else."""
    notes: tuple[tuple[str, str], ...]


def inspect(path: str | Path, **options: Any) -> Contents:
    """List the quantised modules of a checkpoint or an artifact, and which layouts would take them.

    Raises:
        WarptileError: the file cannot be read, or a reader refuses it.
    """
    checkpoint = open_checkpoint(Path(path), Options(**options))
    if artifact.is_artifact(checkpoint):
        return _artifact(artifact.open_artifact(Path(path), layouts()))
    claimed = claims(checkpoint, None)
    linears = tuple(
        _linear(checkpoint, name, reader, sources()[reader].describe(checkpoint, name), members)
        for name, (reader, members) in claimed.items()
    )
    rest = set(checkpoint.tensors) - {t for _, members in claimed.values() for t in members}
    return Contents(checkpoint.path, "checkpoint", linears, _by_dtype(checkpoint, rest), tuple(checkpoint.notes))


def _linear(checkpoint: Checkpoint, name: str, reader: str, q: Outline, members: tuple[str, ...]) -> Linear:
    reasons = {layout: module.accepts(q) for layout, module in layouts().items()}
    return Linear(
        name,
        reader,
        q.element.name,
        q.n,
        q.k,
        q.experts,
        q.group,
        q.scales[0][0],
        q.zero_max is not None,
        q.perm,
        q.bias is not None,
        sum(checkpoint.tensors[t].nbytes for t in members),
        {layout: reason for layout, reason in reasons.items() if reason is not None},
    )


def _artifact(opened: artifact.Artifact) -> Contents:
    linears = tuple(
        Linear(
            name,
            spec["layout"],
            spec["element"],
            spec["n"],
            spec["k"],
            spec["experts"],
            spec["group"],
            spec["scale"],
            spec["zero"] is not None,
            bool(spec["perm"]),
            bool(spec["bias"]),
            sum(t.nbytes for t in opened.tensors(name).values()),
            {},
            tuple(part.name for part in parts(name, spec) if not part.alone),
        )
        for name, spec in opened.modules.items()
    )
    others = _by_dtype(opened.checkpoint, set(opened.passthrough))
    return Contents(opened.checkpoint.path, "artifact", linears, others, tuple(opened.checkpoint.notes))


def _by_dtype(checkpoint: Checkpoint, names: set[str]) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    for tensor in (t for t in checkpoint.tensors.values() if t.name in names):
        count, nbytes = out.get(tensor.dtype, (0, 0))
        out[tensor.dtype] = count + 1, nbytes + tensor.nbytes
    return dict(sorted(out.items()))


Levels = tuple[tuple[str, int], ...]

# (scales, offsets) that come with one element or another, finest first, blocks along k.
USUAL: tuple[tuple[Levels, Levels], ...] = (
    ((("f16", 32),), ()),
    ((("f16", 32),), (("f16", 32),)),
    ((("u6", 32), ("f16", 256)), (("u6", 32), ("f16", 256))),
    ((("s8", 16), ("f16", 256)), ()),
    ((("e8m0", 32),), ()),
    ((("e4m3", 16),), ()),
)


@dataclass(frozen=True)
class Support:
    """The registry, asked."""

    sources: Mapping[str, str]
    """{source: the first line of its documentation}"""
    layouts: Mapping[str, str]
    elements: Mapping[str, Mapping[str, bool]]
    """{element: {layout: whether it holds one, with scales that are usual}}"""


def formats() -> Support:
    """Every source, every layout, and which elements each layout holds."""
    return Support(
        {name: _title(module) for name, module in sources().items()},
        {name: _title(module) for name, module in layouts().items()},
        {name: {layout: _holds(module, e) for layout, module in layouts().items()} for name, e in ELEMENTS.items()},
    )


def _holds(layout: ModuleType, element: Element) -> bool:
    def blocks(levels: Levels) -> tuple[tuple[str, tuple[int, int]], ...]:
        return tuple((dtype, (1, bk)) for dtype, bk in levels)

    outlines = (Outline(element, 256, 256, None, blocks(a), offsets=blocks(b)) for a, b in USUAL)
    return any(layout.accepts(q) is None for q in outlines)


def _title(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().split("\n")[0]
