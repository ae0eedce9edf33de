"""Which kernels multiply with MMQ strips: none yet, so that a session decodes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..formats.errors import UnsupportedError
from . import quantize
from .launch import Device, Plan

Spec = Mapping[str, Any]


def numerics(spec: Spec) -> tuple[str, ...]:
    """What a product may be asked for: x as it is, or in the 8 bits that the kind's codes multiply with."""
    return ("exact", "e4m3") if spec["kind"] == "fp8" else ("exact", "int8")


def plan(spec: Spec, m: int, device: Device, x_dtype: str, aligned: bool = True, numerics: str | None = None) -> Plan:
    """Raises UnsupportedError: no kernel multiplies with strips yet."""
    found = f"{spec['kind']}, {x_dtype} activations"
    raise UnsupportedError("no kernel for strips yet", found=found, do="dequantize instead")


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture, for building ahead."""
    yield from quantize.variants(arch)


def covering(target: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What CI compiles for a target."""
    if target != "sm_90a":
        yield from ((kernel, variant) for kernel, variant, _ in quantize.variants(80))
