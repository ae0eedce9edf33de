"""Which scheme of a compressed-tensors configuration a module has: ``targets`` and ``ignore``.

A pattern is ``re:`` and a regular expression that matches from the start of the module's name, a whole name, or a
class name. Of several targets that match, an exact name wins over a regular expression, that over a class; the last
group that lists a target owns it. Files have no classes: ``Linear`` is every module here, other classes are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import checks
from .patterns import matcher

REGEX = "re:"
EVERY = "Linear"


@dataclass(frozen=True)
class Scheme:
    """One entry of ``config_groups``."""

    group: str
    weights: Mapping[str, Any]
    """Its ``weights`` arguments; empty when the group is the name of a preset."""
    format: Any
    """The compressor's name, None when the whole file has one."""


def schemes(config: Mapping[str, Any], file: str) -> dict[str, Scheme]:
    """Target -> scheme, in the order of preference. Raises UnsupportedError for groups that are no groups."""
    found: dict[str, Scheme] = {}
    groups = checks.table(config, "config_groups", file)
    for name in groups:
        group = {"targets": groups[name]} if isinstance(groups[name], list) else checks.table(groups, name, file)
        scheme = Scheme(name, checks.table(group, "weights", file), group.get("format"))
        found.update((target, scheme) for target in checks.texts(group, "targets", file))
    return dict(sorted(found.items(), key=lambda item: (item[0] == EVERY, item[0].startswith(REGEX), item[0])))


def matches(name: str, pattern: str, file: str) -> bool:
    """Whether a pattern means the module, if the module is a linear."""
    if pattern.startswith(REGEX):
        return matcher(pattern.removeprefix(REGEX), len(name), file).match(name)
    return pattern in (name, EVERY)


def scheme_of(name: str, table: Mapping[str, Scheme], file: str) -> Scheme | None:
    """The module's scheme by a table of ``schemes``; None when no target means it."""
    return next((scheme for target, scheme in table.items() if matches(name, target, file)), None)


def idle(patterns: Iterable[str], names: Iterable[str], file: str) -> list[str]:
    """Patterns that mean none of the modules; class names cannot be told and are left out."""
    names = dict.fromkeys(names)
    able = (p for p in patterns if p.startswith(REGEX) or "." in p or not p[:1].isupper())
    return [p for p in able if p not in names and not any(matches(name, p, file) for name in names)]
