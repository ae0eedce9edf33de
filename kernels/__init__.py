"""Our bytes. The file name is the registry: a module here that defines the names below is a layout."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from ..formats import listing


@cache
def layouts() -> dict[str, ModuleType]:
    """Every target layout: ``{"marlin": module, ...}``."""
    needs = "accepts", "stream", "view", "pack", "unpack", "plan", "numerics"
    return listing(__name__, list(__path__), needs)
