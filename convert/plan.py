"""What a conversion will do, known from headers, g_idx and zero points alone: what becomes of each tensor and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any

from ..formats import artifact, checks, sources
from ..formats.canonical import Outline, widened
from ..formats.container import Checkpoint
from ..formats.errors import CorruptError, UnsupportedError, UsageError
from ..formats.options import Options
from ..formats.parts import entry
from ..kernels import layouts
from .grouping import Apart, Grouping
from .modules import Linear, Module
from .shards import Stored
from .workers import threads

Widen = Callable[[Outline], Outline]


@dataclass(frozen=True)
class Plan:
    """Every input tensor is in exactly one place: a converted module's members, or ``passed``."""

    checkpoint: Checkpoint
    layout: str
    modules: tuple[Module, ...]
    """In the order of their first tensor in the file; refused ones too."""
    apart: tuple[Apart, ...] = ()
    """What was to be grouped and could not be."""
    workers: int = 0
    """Threads that are to pack; 0 is one for every core."""

    @cached_property
    def converted(self) -> tuple[Module, ...]:
        return tuple(m for m in self.modules if m.spec is not None)

    @cached_property
    def refused(self) -> tuple[Module, ...]:
        return tuple(m for m in self.modules if m.spec is None)

    @cached_property
    def passed(self) -> tuple[str, ...]:
        """Names of the tensors copied byte for byte, in file order."""
        consumed = {name for m in self.converted for name in m.members}
        return tuple(name for name in self.checkpoint.tensors if name not in consumed)

    @cached_property
    def pieces(self) -> tuple[tuple[Stored, ...], ...]:
        """What is written, in order; a piece is never split between shards."""
        order = {name: i for i, name in enumerate(self.checkpoint.tensors)}
        first = {min(m.members, key=order.__getitem__): m for m in self.converted}
        whole = {name: m for m in self.converted for name in m.members}
        out = []
        for name, tensor in self.checkpoint.tensors.items():
            if name in first:
                out.append(first[name].tensors)
            elif name not in whole:
                out.append((Stored(name, tensor.dtype, tensor.shape, tensor.nbytes),))
        return tuple(out)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for piece in self.pieces for t in piece)

    @property
    def peak(self) -> int:
        """An estimate of the anonymous memory of a run; mapped input pages are the kernel's and not counted."""
        return max((m.peak(threads(self.workers)) for m in self.converted), default=0)

    @property
    def counts(self) -> dict[str, int]:
        """Input tensors by fate; converted + consumed + passed through = input."""
        members = sum(len(m.members) for m in self.converted)
        counts = {
            "input": len(self.checkpoint.tensors),
            "converted": len(self.converted),
            "consumed": members - len(self.converted),
            "passed_through": len(self.passed),
        }
        assert counts["input"] == counts["converted"] + counts["consumed"] + counts["passed_through"], counts
        return counts


def claims(checkpoint: Checkpoint, source: str | None) -> dict[str, tuple[str, tuple[str, ...]]]:
    """{module: (source name, its tensors)} by one reader, or by all of them merged.

    Tensors that only make sense inside a quantised module, and are in none, are an error whichever reader was asked
    for: a source module names them in ``orphans(checkpoint) -> {tensor: what is missing}``.

    Raises:
        CorruptError: a member without its module.
        UsageError: a switch that no reader of these modules understands.
        UnsupportedError: the named reader finds nothing, or one module is there twice.
    """
    found = {name: module.modules(checkpoint) for name, module in sources().items()}
    _check_claims(checkpoint, found)
    if source is not None and not found[source]:
        others = [name for name, claimed in found.items() if claimed]
        raise UnsupportedError(
            f"no {source} modules in it",
            file=checkpoint.path,
            found=f"modules of {', '.join(others)}" if others else "no quantised module at all",
            do=f"try {others[0]} or auto" if others else "there is nothing to convert",
        )
    order = {tensor: i for i, tensor in enumerate(checkpoint.tensors)}
    chosen = [
        (module, (name, tuple(sorted(members, key=order.__getitem__))))
        for name, claimed in found.items()
        if source in (None, name)
        for module, members in claimed.items()
    ]
    _check_switches(checkpoint, dict.fromkeys(reader for _, (reader, _) in chosen))
    return dict(sorted(chosen, key=lambda claim: order[claim[1][1][0]]))


def _check_switches(checkpoint: Checkpoint, readers: Iterable[str]) -> None:
    """Refuse a switch that none of the readers understands: whoever gave it believes that it was heeded."""
    heeded = {name for reader in readers for name in getattr(sources()[reader], "OPTIONS", ())}
    given = (f.name for f in fields(Options) if getattr(checkpoint.options, f.name) != f.default)
    idle = [f"--{name.replace('_', '-')}" for name in given if name not in heeded]
    if idle and readers:
        raise UsageError(
            f"{', '.join(idle)} means nothing to the modules in it",
            file=checkpoint.path,
            found=f"modules of {', '.join(readers)}",
            do="leave it out",
        )


def _check_claims(checkpoint: Checkpoint, found: Mapping[str, Mapping[str, tuple[str, ...]]]) -> None:
    """Every module has a name, one format and one weight, every tensor at most one owner, and none is left alone."""
    owner: dict[str, str] = {}
    readers: dict[str, str] = {}
    for name, claimed in found.items():
        for module, members in claimed.items():
            _check_name(checkpoint, module, members)
            for tensor in members:
                if owner.setdefault(tensor, name) != name:
                    raise UnsupportedError(
                        "one tensor in two formats",
                        file=checkpoint.tensors[tensor].file,
                        tensor=tensor,
                        found=f"part of a {owner[tensor]} module and of a {name} module",
                        do="remove the tensors of one of them",
                    )
            if readers.setdefault(module, name) != name:
                raise UnsupportedError(
                    "one module in two formats",
                    file=checkpoint.tensors[members[0]].file,
                    tensor=module,
                    found=f"{readers[module]} and {name}",
                    do="remove the tensors of one of them",
                )
    for source in sources().values():
        orphans = source.orphans(checkpoint) if hasattr(source, "orphans") else {}
        for tensor, missing in orphans.items():
            if tensor not in owner:
                raise CorruptError(
                    "part of a quantised module that is not whole",
                    file=checkpoint.tensors[tensor].file,
                    tensor=tensor,
                    need=missing,
                    do="get the checkpoint again",
                )


def _check_name(checkpoint: Checkpoint, module: str, members: tuple[str, ...]) -> None:
    """Refuse a module whose name is nothing but dots and suffixes, and one with a plain weight beside its codes."""
    first = checkpoint.tensors[members[0]]
    if module.startswith(".") or module.endswith(".") or (not module and first.name.startswith(".")):
        raise UnsupportedError(
            "a module needs a name",
            file=first.file,
            tensor=first.name,
            found=repr(module),
            need="one before its suffix",
            do="rename its tensors",
        )
    plain = checks.full_name(module, "weight")
    if plain in checkpoint.tensors and plain not in members:
        raise UnsupportedError(
            "two weights for one module",
            file=checkpoint.tensors[plain].file,
            tensor=plain,
            found=f"it beside {', '.join(members[:3])}",
            do="remove the one that does not count",
        )


def make(
    checkpoint: Checkpoint,
    source: str | None,
    layout: str,
    *,
    widen: bool = False,
    fuse: bool = False,
    stack_experts: bool = False,
    workers: int = 0,
) -> Plan:
    """Plan a conversion by ``workers`` threads; nothing is written, no codes are read.

    Raises:
        UnsupportedError, CorruptError: the checkpoint, as its readers say; with ``stack_experts`` also a gap.
    """
    artifact.refuse_artifact(checkpoint)
    wide = partial(_widened, widen=widen)
    modules = [
        _single(checkpoint, name, reader, members, layout, wide)
        for name, (reader, members) in claims(checkpoint, source).items()
    ]
    grouping = Grouping(checkpoint, partial(_written, layout=layout, wide=wide), wide)
    apart: list[Apart] = []
    for wanted, group in ((fuse, partial(grouping.fuse, by_stack=stack_experts)), (stack_experts, grouping.stack)):
        if wanted:
            modules, refused = group(modules)
            apart += refused
    plan = Plan(checkpoint, layout, tuple(modules), tuple(apart), workers)
    _check_names(plan)
    return plan


def known(name: str | None, registry: Iterable[str], what: str) -> None:
    """Raise UsageError unless the name is listed (None: not asked for)."""
    if name is not None and name not in registry:
        raise UsageError(f"unknown {what} {name!r}", need=" or ".join(registry))


def _widened(outline: Outline, *, widen: bool) -> Outline:
    return replace(outline, element=widened(outline.element)) if widen else outline


def _single(
    checkpoint: Checkpoint, name: str, reader: str, members: tuple[str, ...], layout: str, wide: Widen
) -> Module:
    """A linear as a module for itself."""
    outline: Outline = sources()[reader].describe(checkpoint, name)
    units = ((Linear(name, reader, members, outline),),)
    module = _written(name, units, outline, layout=layout, wide=wide)
    refusal = module.refusal
    if refusal is not None:
        refusal += _elsewhere(wide(outline), reader)
    else:
        refusal = _stranger(checkpoint, name, members, layouts()[layout])
    if refusal is None:
        return module
    as_they_are = (checkpoint.tensors[member] for member in members)
    return Module(
        name, units, outline, None, refusal, tuple(Stored(t.name, t.dtype, t.shape, t.nbytes) for t in as_they_are)
    )


def _written(name: str, units: tuple[tuple[Linear, ...], ...], outline: Outline, *, layout: str, wide: Widen) -> Module:
    """What is stored of linears as one module; ``outline`` is that of all of them."""
    kernel, stored = layouts()[layout], wide(outline)
    refusal = kernel.accepts(stored)
    if refusal is not None:
        return Module(name, units, outline, None, refusal, ())
    linears, residue = [linear for unit in units for linear in unit], outline.residue
    stack = outline.experts != linears[0].outline.experts
    if len(linears) == 1 and not stack:
        spec = artifact.module_spec(kernel.spec(stored), foretold_source(outline, stored), residue)
    else:
        entries = [
            _entry(linear, stored, wide(linear.outline), e if stack else None)
            for e, unit in enumerate(units)
            for linear in unit
        ]
        residue = tuple(
            (f"{i}.{suffix}", dtype, shape)
            for i, linear in enumerate(linears)
            for suffix, dtype, shape in linear.outline.residue
        )
        spec = artifact.grouped_spec(kernel.spec(stored), entries, residue)
    tensors = tuple(
        Stored(f"{name}.{suffix}", dtype, shape, artifact.nbytes(dtype, shape))
        for suffix, (dtype, shape) in artifact.stored(spec, kernel, residue).items()
    )
    return Module(name, units, outline, spec, None, tensors)


def _entry(linear: Linear, whole: Outline, wide: Outline, expert: int | None) -> dict[str, Any]:
    """What the spec of a module says of one of its linears."""
    symmetric = wide.element.name if whole.zero_max is not None and wide.zero_max is None else None
    return entry(linear.name, wide.n, foretold_source(linear.outline, wide), expert, symmetric)


def _elsewhere(q: Outline, reader: str) -> str:
    """The commands that would convert what this one does not, as the end of a sentence."""
    names = [f"{reader}-to-{name}".replace("_", "-") for name, kernel in layouts().items() if kernel.accepts(q) is None]
    return f"; {' or '.join(names)} converts it" if names else ""


def _stranger(checkpoint: Checkpoint, name: str, members: tuple[str, ...], kernel: ModuleType) -> str | None:
    """Why a module cannot be written: a tensor that is not its own has the name of a part of it."""
    names = (f"{name}.{suffix}" for suffix in kernel.MEMBERS)
    strangers = [n for n in names if n in checkpoint.tensors and n not in members]
    return f"{strangers[0]} is not part of the module and would be taken for it" if strangers else None


def foretold_source(outline: Outline, wide: Outline) -> dict[str, Any]:
    """The spec's ``source``: the reader's own, and the narrow element that ``--widen`` left."""
    narrow = {artifact.NARROW: outline.element.name} if wide.element != outline.element else {}
    return {**outline.source, **narrow}


def _check_names(plan: Plan) -> None:
    seen: set[str] = set()
    for tensor in (t for piece in plan.pieces for t in piece):
        if tensor.name in seen:
            raise CorruptError(
                "the converted module's tensor and another tensor would have one name",
                file=plan.checkpoint.path,
                tensor=tensor.name,
                need="names that differ",
                do="rename one of the two in the source",
            )
        seen.add(tensor.name)
