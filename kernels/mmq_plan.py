"""Which kernels multiply with MMQ strips: none yet, so that a session decodes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..formats.errors import UnsupportedError
from .launch import Device, Plan

Spec = Mapping[str, Any]


def plan(spec: Spec, m: int, device: Device, x_dtype: str, aligned: bool = True) -> Plan:
    """Raises UnsupportedError: no kernel multiplies with strips yet."""
    found = f"{spec['kind']}, {x_dtype} activations"
    raise UnsupportedError("no kernel for strips yet", found=found, do="dequantize instead")


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture: nothing yet."""
    return iter(())


def covering(target: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What CI compiles for a target: nothing yet."""
    return iter(())
