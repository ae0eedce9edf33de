"""What a layout's ``plan`` returns: which kernels to launch, how, and why. Pure data; the runtime carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

NUMERICS = ("exact", "int8", "e4m3", "int8_row")
"""What may be asked of a product: x as it is, or in 8 bits. Each but the first is a kind of ``quantize``."""


@dataclass(frozen=True)
class Device:
    """The facts a plan may depend on, and nothing else (never timing at run time)."""

    arch: int
    """Compute capability x 10: 75, 80, 86, 89, 90, 100, 120."""
    sms: int
    shared: int
    """Bytes of shared memory one block may opt in to."""
    nvrtc: tuple[int, int] = (0, 0)
    """Version of the compiler that will build the kernels; before 13.3 no wgmma with A in registers."""

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may start while the one before it on the stream still runs."""
        return self.arch >= 90


CHECKED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_75")
"""What CI compiles the kernels of every GPU for; sm_75 is last, since its instructions are others."""
STATIC = 128
"""Bytes of shared memory the kernels take besides what a stage asks for."""


def most_shared(arch: int) -> int:
    """Bytes of shared memory that plans made ahead may count on: all a block has on sm_75, where that decides which
    kernels there are; elsewhere any device may have more than another."""
    return 65536 if arch < 80 else 1 << 20


@dataclass(frozen=True)
class Part:
    """Outputs ``first`` to ``first + n - 1`` of a module."""

    spec: Mapping[str, Any]
    first: int
    n: int


@dataclass(frozen=True)
class At:
    """A tensor by the name it has among ``Stage.args``, from a byte on; null where there is none."""

    name: str
    offset: int


@dataclass(frozen=True)
class Stage:
    """One kernel launch.

    ``kernel`` is the stem of its .cu file and its entry's name, ``variant`` its template argument: values of the
    file's ``Variant`` struct in field order. ``args`` names its parameters in order:

    | names | passed as |
    | --- | --- |
    | a tensor of the module (``qweight``), of a second one after ``up.`` | pointer, null where there is none |
    | ``x``, ``y``, ``residual`` (what is added to y) | pointer; the caller's, ``residual`` may be null |
    | ``gathered`` (x in stored column order), ``scratch``, ``counters`` | pointer into memory that the plan asks for |
    | ``quantized``, ``factors`` (see quantize.py, or pairs.cu for float32 rows) | likewise |
    | ``m``, ``n``, ``k``, ``n_padded``, ``k_padded``, ``group``, ``each`` (1: y is rounded after each step) | int32 |
    | ``ldx``, ``ldy``, ``ld_residual``, ``ld_gathered`` (k_padded), ``ld_quantized``: row strides in elements | int64 |
    | a number | int32 |
    | ``x_map``, ``gathered_map`` | CUtensorMap by value |

    A map (128 bytes, a __grid_constant__ parameter) is that of the matrix of 16-bit numbers [m, k] or [m, k_padded],
    read in boxes of ``box``, 128-byte swizzled, zero outside the matrix. A kernel without ``residual`` and ``each``
    among its ``args`` ends with one rounding of sum and bias.
    """

    kernel: str
    variant: tuple[int, ...]
    target: str
    """sm_80, sm_90a, ...: what to compile for."""
    grid: tuple[int, int, int]
    block: int
    shared: int
    args: tuple[str | int | At, ...]
    box: tuple[int, int] | None = None
    """(rows, columns) of a copy through the map among ``args``; 64 columns are the 128 bytes of a swizzled row."""
    cluster: int = 1
    """Blocks of a thread block cluster."""
    overlap: bool = False
    """May start while the kernel before it on the stream still runs: it waits itself before it touches anything but
    weights (programmatic dependent launch, sm_90 and newer)."""


@dataclass(frozen=True)
class Plan:
    """The launches of one product y[m, n] = x[m, k] @ W.T (+ bias), in order."""

    stages: tuple[Stage, ...]
    why: str
    scratch: int = 0
    """Bytes of scratch, contents undefined before and after."""
    gathered: int = 0
    """Bytes for x in stored column order (act-order, or rows of x that do not start on 16 bytes), 0 when unused."""
    counters: int = 0
    """uint32 words, zero before; the kernels leave them zero."""
    quantized: int = 0
    factors: int = 0
    """Bytes for x in 8 bits and for its factors, 0 when unused."""
    quantizes: str | None = None
    """The kind (``quantize.KINDS``) that the first stage quantises x to. Only that stage reads x, so that whoever has
    ``quantized`` and ``factors`` already launches the others alone."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(variant, reason) of every candidate not chosen."""


def fastest(times: Mapping[T, float], refused: Mapping[str, str]) -> tuple[T, tuple[tuple[str, str], ...]]:
    """The tile of the least estimated time, and (tile, reason) of every other and of those refused."""
    best = min(times, key=lambda tile: times[tile])
    slower = {str(t): f"about {time / times[best]:.2f} times as long" for t, time in times.items() if t != best}
    return best, (*refused.items(), *slower.items())
