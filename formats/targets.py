"""Which scheme of a compressed-tensors configuration a module has: ``targets`` and ``ignore``.

A pattern is ``re:`` and a regular expression that matches from the start of the module's name, a whole name, or a
class name. Of several targets that match, an exact name wins over a regular expression, that over a class; the last
group that lists a target owns it. Files have no classes: ``Linear`` is every module here, other classes are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedError
from .patterns import matcher

REGEX = "re:"
EVERY = "Linear"


@dataclass(frozen=True)
class Scheme:
    """One entry of ``config_groups``."""

    group: str
    weights: Mapping[str, Any]
    """Its ``weights`` arguments; empty when the group is the name of a preset."""
    format: str | None


def schemes(config: Mapping[str, Any], file: str) -> dict[str, Scheme]:
    """Target -> scheme, in the order of preference. Raises UnsupportedError for groups that are no groups."""
    found: dict[str, Scheme] = {}
    for name, group in _mapping(config.get("config_groups"), "config_groups", file).items():
        if isinstance(group, list):
            group = {"targets": group}
        group = _mapping(group, f"config_groups.{name}", file)
        scheme = Scheme(name, _mapping(group.get("weights"), f"{name}.weights", file), group.get("format"))
        found.update((str(target), scheme) for target in group.get("targets") or ())
    return dict(sorted(found.items(), key=lambda item: (item[0] == EVERY, item[0].startswith(REGEX), item[0])))


def _mapping(value: Any, what: str, file: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedError(f"{what} is not a table", file=file, found=type(value).__name__)
    return value or {}


def matches(name: str, pattern: str, file: str) -> bool:
    """Whether a pattern means the module, if the module is a linear."""
    if pattern.startswith(REGEX):
        return matcher(pattern.removeprefix(REGEX), len(name), file).match(name) is not None
    return pattern in (name, EVERY)


def scheme_of(name: str, table: Mapping[str, Scheme], file: str) -> Scheme | None:
    """The module's scheme by a table of ``schemes``; None when no target means it."""
    return next((scheme for target, scheme in table.items() if matches(name, target, file)), None)


def idle(patterns: Iterable[str], names: Iterable[str], file: str) -> list[str]:
    """Patterns that mean none of the modules; class names cannot be told and are left out."""
    names = tuple(names)
    able = (p for p in patterns if p.startswith(REGEX) or "." in p or not p[:1].isupper())
    return [pattern for pattern in able if not any(matches(name, pattern, file) for name in names)]
