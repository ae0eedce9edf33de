"""Linears of a source that are stored in one module: what its spec says of each, and both directions.

    spec["parts"] = [{"name", "n", "source"}, ...]      in the order of rows, those of expert 0 first
        "expert"      which slice of a stack it is; every part of a stack has it, no other
        "symmetric"   its element, where the module has zero points only because other experts have them

A module that is one linear has ``source`` in place of ``parts``: it is its own only part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from .canonical import ELEMENTS, Element, Outline, widened
from .errors import AGAIN, CorruptError
from .joining import asymmetric, cut, with_zeros, without_zeros
from .stream import Stream, recoded

Array = NDArray[Any]
Spec = dict[str, Any]

NARROW = "narrow"
"""Key of ``source``: the element whose codes ``--widen`` put into wider fields."""


@dataclass(frozen=True)
class Part:
    """Where a linear of the source is stored."""

    name: str
    module: str
    source: Mapping[str, Any]
    """As its reader gave it, and ``NARROW``."""
    rows: slice
    """Those of the module, or of one expert of it."""
    expert: int | None = None
    index: int | None = None
    """Its place among several parts: the residue of part 2 has suffixes that begin with ``2.``."""
    symmetric: str | None = None

    @property
    def reader(self) -> str:
        """The source format's name."""
        return str(self.source["format"])

    @property
    def alone(self) -> bool:
        """Whether it is the module."""
        return self.index is None

    @property
    def prefix(self) -> str:
        """What the suffixes of its residue begin with."""
        return "" if self.index is None else f"{self.index}."


def entry(name: str, n: int, source: Mapping[str, Any], expert: int | None, symmetric: str | None) -> dict[str, Any]:
    """A part as it stands in a spec."""
    more = {"expert": expert, "symmetric": symmetric}
    return {"name": name, "n": n, "source": dict(source), **{k: v for k, v in more.items() if v is not None}}


def parts(module: str, spec: Spec) -> tuple[Part, ...]:
    """The linears of a module, in the order they are stored in."""
    if "parts" not in spec:
        return (Part(module, module, spec["source"], slice(0, spec["n"])),)
    found, end, last = [], 0, None
    for index, said in enumerate(spec["parts"]):
        start = 0 if said.get("expert") != last else end
        last, end = said.get("expert"), start + said["n"]
        where = slice(start, end), said.get("expert"), index, said.get("symmetric")
        found.append(Part(said["name"], module, said["source"], *where))
    return tuple(found)


def is_source(said: object) -> bool:
    """Whether it may be what a reader says of a linear."""
    return isinstance(said, dict) and isinstance(said.get("format"), str) and said["format"] != ""


def is_entries(said: object) -> bool:
    """Whether it may be a spec's ``parts``."""
    return isinstance(said, list) and bool(said) and all(map(_is_entry, said))


def _is_entry(said: object) -> bool:
    if not isinstance(said, dict) or not {"name", "n", "source"} <= said.keys():
        return False
    name, n, expert, symmetric = (said.get(key) for key in ("name", "n", "expert", "symmetric"))
    texts = isinstance(name, str) and name != "" and (symmetric is None or symmetric in list(ELEMENTS))
    sizes = type(n) is int and n > 0 and (expert is None or (type(expert) is int and expert >= 0))
    known = said.keys() <= {"name", "n", "source", "expert", "symmetric"}
    return texts and sizes and known and is_source(said["source"])


def misplaced(spec: Spec, outline: Outline) -> str | None:
    """What the parts of a spec ought to be, None when they make up the module that ``outline`` describes."""
    found = parts("", spec)
    for part in found:
        narrow, element = part.source.get(NARROW), outline.element
        if part.symmetric is not None:
            element = ELEMENTS[part.symmetric]
            same = asymmetric(element)
            if same is None or same[0] != outline.element or outline.zero_max is None:
                return f"a symmetric element that is {outline.element.name} with zero points"
        if narrow is not None and not _narrower(narrow, element):
            return f"an element narrower than {element.name}"
    if "parts" not in spec:
        return None
    runs = [list(run) for _, run in groupby(found, key=lambda part: part.expert)]
    experts, rows = [run[0].expert for run in runs], _sizes(runs[0])
    if experts != [None] and experts != list(range(outline.experts or 0)):
        return "every expert of the stack, in order"
    if any(_sizes(run) != rows for run in runs) or sum(rows) != outline.n:
        return f"{outline.n} rows, cut alike in every expert"
    if len(rows) > 1 and outline.shards not in ((), rows):
        return "the rows of the shards"
    if any(start % bn for start in accumulate(rows[:-1]) for _, (bn, _) in (*outline.scales, *outline.offsets)):
        return "rows that begin where blocks of scales do"
    return None


def _sizes(run: Sequence[Part]) -> tuple[int, ...]:
    return tuple(part.rows.stop - part.rows.start for part in run)


def _narrower(name: object, wide: Element) -> bool:
    return isinstance(name, str) and name in ELEMENTS and ELEMENTS[name] != wide and widened(ELEMENTS[name]) == wide


def packed(stream: Stream, part: Part) -> Stream:
    """A linear as its reader gave it -> as its module holds it."""
    if NARROW in part.source:
        stream = recoded(stream, widened(stream.tensor.element))
    return stream if part.symmetric is None else with_zeros(stream)


def unpacked(stream: Stream, part: Part, file: Path, residue: Mapping[str, Array], *, in_range: bool = True) -> Stream:
    """The inverse, of the module or of the part's expert of it; ``residue`` is that of the module.

    Raises CorruptError for zero points that are not those of a symmetric element; slabs do for codes that a narrow one
    does not have, unless they need not be ``in_range``.
    """
    stream = cut(stream, part.rows)
    if part.symmetric is not None:
        found = without_zeros(stream, ELEMENTS[part.symmetric])
        if found is None:
            need = f"those of {part.symmetric}"
            raise CorruptError(
                "zero points of a symmetric part are others", file=file, tensor=part.name, need=need, do=AGAIN
            )
        stream = found
    source = dict(part.source)
    narrow = source.pop(NARROW, None)
    if narrow is not None:
        stream = recoded(stream, ELEMENTS[narrow])
        stream = _in_range(stream, part.name, file) if in_range else stream
    kept = {suffix.removeprefix(part.prefix): a for suffix, a in residue.items() if suffix.startswith(part.prefix)}
    return replace(stream, tensor=replace(stream.tensor, source=source, residue=kept))


def _in_range(stream: Stream, name: str, file: Path) -> Stream:
    element = stream.tensor.element

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        codes = stream.slab(expert, rows, columns)
        if int(codes.max(initial=0)) >= 2**element.bits:
            raise CorruptError(
                "a code is out of range",
                file=file,
                tensor=name,
                found=int(codes.max()),
                need=f"< {2**element.bits}, as {element.name}",
                do=AGAIN,
            )
        return codes

    return replace(stream, blocks=None, slab=slab)


def expert_of(
    layout: ModuleType, spec: Spec, tensors: Mapping[str, Array], expert: int
) -> tuple[dict[str, Array], Spec]:
    """(tensors, spec) of one expert: every layout stores stacks as one expert's tensors after the other's."""
    one = {**spec, "experts": None}
    alone, stack = layout.expected(one), layout.expected(spec)
    slices = {s: a if alone[s] == stack[s] else a[expert].reshape(alone[s][1]) for s, a in tensors.items()}
    return slices, one


def shared(layout: ModuleType, spec: Spec) -> set[str]:
    """Suffixes of the tensors that all experts of a stack have in common."""
    alone, stack = layout.expected({**spec, "experts": None}), layout.expected(spec)
    return {suffix for suffix in stack if alone[suffix] == stack[suffix]}
