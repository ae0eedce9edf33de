"""Our bytes. The file name is the registry: a module here that defines ``pack`` and ``unpack`` is a layout."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from ..formats import listing


@cache
def layouts() -> dict[str, ModuleType]:
    """Every target layout: ``{"marlin": module, ...}``.

    One with ``stream`` and ``view`` (see ``formats/stream.py``) packs and unpacks a few megabytes at a time.
    """
    return listing(__name__, list(__path__), ("accepts", "pack", "unpack", "plan", "numerics"))
