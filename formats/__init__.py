"""Other people's bytes. The file name is the registry: a module here that defines the names below is a source."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def listing(package: str, path: list[str], needs: tuple[str, ...]) -> dict[str, ModuleType]:
    """The modules of a package that define every name in ``needs``, by file name; an underscore hides one."""
    names = [info.name for info in iter_modules(path) if not info.name.startswith("_")]
    found = {name: import_module(f"{package}.{name}") for name in names}
    return {name: module for name, module in sorted(found.items()) if all(hasattr(module, need) for need in needs)}


@cache
def sources() -> dict[str, ModuleType]:
    """Every source format: ``{"gptq": module, ...}``.

    A source may also have ``OPTIONS``, the fields of ``Options`` it understands, and ``orphans(checkpoint)``: {tensor:
    what is missing} of tensors that only make sense inside a module of the format and are in none.
    """
    return listing(__name__, list(__path__), ("modules", "describe", "stream", "read", "write"))
