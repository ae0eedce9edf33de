"""``--fuse`` and ``--stack-experts``: planned modules that become one, and why others stay apart.

    fuse      q_proj, k_proj, v_proj                     ->  qkv_proj        one product for three
    stack     experts.0.up_proj, experts.1.up_proj, ..   ->  experts.up_proj [E, n, k]
    both      gate and up of every expert, then all experts; of a stack all pairs are fused, or none

Whatever cannot be one stays as it is, converted, and is listed with the reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..formats.canonical import Outline
from ..formats.container import Checkpoint
from ..formats.errors import CorruptError
from ..formats.joining import along_n, stacked
from .families import Seat, family, seat
from .modules import Linear, Module

Build = Callable[[str, tuple[tuple[Linear, ...], ...], Outline], Module]
"""(name, linears of each expert, outline of all) -> the module, planned."""


@dataclass(frozen=True)
class Apart:
    """Linears that belong together and are not stored so."""

    name: str
    """Of the module that they would have been."""
    parts: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Grouping:
    """The work of one plan."""

    checkpoint: Checkpoint
    build: Build
    wide: Callable[[Outline], Outline]
    """An outline as ``--widen`` makes it."""

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self.checkpoint.tensors)

    def taken(self, name: str) -> bool:
        """Whether a tensor is called so, or begins so up to a dot."""
        at = bisect_left(self._names, f"{name}.")
        return name in self.checkpoint.tensors or any(n.startswith(f"{name}.") for n in self._names[at : at + 1])

    def fuse(self, modules: Sequence[Module], *, by_stack: bool) -> tuple[list[Module], list[Apart]]:
        """With ``by_stack``, the families of a layer's experts are fused all or none."""
        known = {m.name: m for m in modules}
        families = {f.name: f for m in modules if (f := family(m.name)) is not None}
        tried: dict[str, dict[str, Module | Apart]] = {}
        for name, group in families.items():
            made = self._fused(name, group.members, known)
            if made is not None:
                at = seat(name) if by_stack else None
                tried.setdefault(name if at is None else at.stack, {})[name] = made
        return _settled(modules, tried)

    def _fused(self, name: str, members: Sequence[str], known: Mapping[str, Module]) -> Module | Apart | None:
        """None when some of them are not there at all."""
        if not all(member in known or self.taken(member) for member in members):
            return None
        short = {member: _distinct(member, name) for member in members}
        for member in members:
            if member not in known:
                return Apart(name, tuple(members), f"{short[member]} is no quantised linear")
        if all(known[member].spec is None for member in members):
            return None
        found = [known[member] for member in members]
        for module in found:
            if module.spec is None:
                return Apart(name, tuple(members), f"{short[module.name]} is not converted")
        outline = along_n({short[m.name]: self.wide(m.outline) for m in found})
        return self._made(name, members, outline, (tuple(linear for m in found for linear in m.linears),), known)

    def _made(
        self,
        name: str,
        members: Sequence[str],
        outline: Outline | str,
        units: tuple[tuple[Linear, ...], ...],
        known: Mapping[str, Module],
    ) -> Module | Apart:
        if isinstance(outline, str):
            return Apart(name, tuple(members), outline)
        if name in known or self.taken(name):
            return Apart(name, tuple(members), f"there is a {name} already")
        module = self.build(name, units, outline)
        return module if module.refusal is None else Apart(name, tuple(members), f"as one: {module.refusal}")

    def stack(self, modules: Sequence[Module]) -> tuple[list[Module], list[Apart]]:
        """Raises CorruptError for experts of which nothing is there."""
        known = {m.name: m for m in modules}
        count: dict[str, int] = {}
        for tensor in self.checkpoint.tensors:
            if (at := seat(tensor)) is not None:
                count[at.block] = max(count.get(at.block, 0), at.expert + 1)
        stacks: dict[str, dict[int, tuple[Seat, Module]]] = {}
        for module in modules:
            if (at := seat(module.name)) is not None:
                stacks.setdefault(at.stack, {})[at.expert] = at, module
        tried: dict[str, dict[str, Module | Apart]] = {}
        for name, found in stacks.items():
            block = next(iter(found.values()))[0].block
            made = self._stacked(name, count[block], found, known)
            if made is not None:
                tried[name] = {name: made}
        return _settled(modules, tried)

    def _stacked(
        self, name: str, count: int, found: Mapping[int, tuple[Seat, Module]], known: Mapping[str, Module]
    ) -> Module | Apart | None:
        if all(module.spec is None for _, module in found.values()):
            return None
        members = tuple(module.name for _, module in found.values())
        for expert in range(count):
            if expert not in found:
                self._check_gap(name, expert, found)
                return Apart(name, members, f"expert {expert} is no quantised linear, or not as the others")
            if found[expert][1].spec is None:
                return Apart(name, members, f"expert {expert} is not converted")
        order = [found[expert][1] for expert in range(count)]
        outline = stacked({f"expert {e}": self.wide(m.outline) for e, m in enumerate(order)})
        return self._made(name, [m.name for m in order], outline, tuple(m.units[0] for m in order), known)

    def _check_gap(self, name: str, expert: int, found: Mapping[int, tuple[Seat, Module]]) -> None:
        """Raise CorruptError unless an expert that is no module of the kind has tensors of its own for it."""
        _, module = next(iter(found.values()))
        for linear in module.linears:
            at = seat(linear.name)
            assert at is not None, linear.name
            if not self.taken(at.of(expert)):
                raise CorruptError(
                    "an expert is missing",
                    file=self.checkpoint.path,
                    tensor=at.of(expert),
                    found=f"experts {_ranges(found)} of {name}",
                    need="every expert from 0 on",
                    do="get the checkpoint again, or convert without --stack-experts",
                )


def _settled(
    modules: Sequence[Module], tried: Mapping[str, Mapping[str, Module | Apart]]
) -> tuple[list[Module], list[Apart]]:
    """The modules after every group of attempts, which counts only when all of it has succeeded."""
    apart: list[Apart] = []
    inside: dict[str, Module] = {}
    for name, attempts in tried.items():
        refused = [one for one in attempts.values() if isinstance(one, Apart)]
        if refused:
            parts = tuple(part for one in attempts.values() for part in _names(one))
            first = refused[0]
            apart.append(Apart(name, parts, first.reason if first.name == name else f"{first.name}: {first.reason}"))
            continue
        for one in attempts.values():
            inside.update(dict.fromkeys(_names(one), one) if isinstance(one, Module) else {})
    chosen = (inside.get(module.linears[0].name, module) for module in modules)
    return list({module.name: module for module in chosen}.values()), apart


def _names(made: Module | Apart) -> tuple[str, ...]:
    return made.parts if isinstance(made, Apart) else tuple(linear.name for linear in made.linears)


def _distinct(member: str, fused: str) -> str:
    """The word of a member's name that is another one in the fused name."""
    return next(a for a, b in zip(member.split("."), fused.split("."), strict=True) if a != b)


def _ranges(numbers: Iterable[int]) -> str:
    """``0-2, 4``"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
