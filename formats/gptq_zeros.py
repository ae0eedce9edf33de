"""Zero points of GPTQ files: packed along n, stored as they are (gptq_v2) or minus one (gptq).

Minus one has no answer for zero 0. Writers store 2**bits - 1 in the lane (``lane``), or subtract whole words so that
the borrow runs into the next lane (``word``); readers without a mask take the lane as 2**bits (``none``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import pack_ragged, unpack_ragged
from .errors import CorruptError, UnsupportedError
from .gptq_config import Label

Array = NDArray[Any]


@dataclass(frozen=True)
class Zeros:
    """True zero points of a module and how its file spells them."""

    zero: Array | None
    """[G, n] integers 0 .. 2**bits, None for a symmetric module."""
    how: dict[str, Any]
    """JSON for ``store``: {"lane": c} when all stored lanes are c, else {"convention": ..., "wrap": ...}."""


def width(n: int, bits: int) -> int:
    """Words for one row of n lanes."""
    return -(-n * bits // 32)


def _ones(n: int, bits: int) -> Array:
    """uint32 [1, width(n)]: 1 in every lane, those after the last too, as whole-word writers have it."""
    return pack_ragged(np.ones((1, n + 32), np.uint8), bits)[:, : width(n, bits)]


def _true(words: Array, bits: int, n: int, convention: str, wrap: str | None) -> Array:
    """The zero points that stored words mean: [G, n]."""
    if convention != "gptq":
        return unpack_ragged(words, bits, n)
    if wrap == "word":
        return unpack_ragged(words + _ones(n, bits), bits, n)
    zero = unpack_ragged(words, bits, n).astype(np.uint16) + np.uint16(1)
    return zero if wrap == "none" else (zero & np.uint16(2**bits - 1)).astype(np.uint8)


def store(zero: Array | None, how: dict[str, Any], groups: int, n: int, bits: int) -> Array:
    """The inverse of ``load``: uint32 [G, width(n)]."""
    if "lane" in how:
        return pack_ragged(np.full((groups, n), how["lane"], np.uint8), bits)
    if zero is None:
        raise ValueError(f"zeros stored as {how!r}, and there are none")
    if how["convention"] != "gptq":
        return pack_ragged(zero.astype(np.uint8), bits)
    if how["wrap"] == "word":
        return pack_ragged(zero.astype(np.uint8), bits) - _ones(n, bits)
    return pack_ragged(((zero.astype(np.uint16) - np.uint16(1)) & np.uint16(2**bits - 1)).astype(np.uint8), bits)


def load(
    words: Array | None, bits: int, n: int, label: Label, say: Callable[[str], None], file: str, tensor: str
) -> Zeros:
    """Decide what stored zeros (uint32 [G, width(n)], None when the file has none) mean.

    ``say`` takes what was assumed or found odd. Raises UnsupportedError when two readings are possible, CorruptError
    when an asymmetric module has no zeros.
    """
    half, top = 2 ** (bits - 1), 2**bits - 1
    if words is None:
        if label.sym is False:
            raise CorruptError("asymmetric, but its qzeros are missing", file=file, tensor=tensor)
        if label.sym is None and not label.found:
            say("assumed symmetric: there are no qzeros")
        return Zeros(None, {})
    lanes = unpack_ragged(words, bits, n)
    low, high = int(lanes.min()), int(lanes.max())
    constant = low if low == high else None

    symmetric = constant in (half - 1, half) if label.sym is None else label.sym
    if label.sym is None and (not symmetric or not label.found):
        say(f"assumed {'symmetric' if symmetric else 'asymmetric'} from the stored zeros: nothing says sym")
    if symmetric:
        odd = _oddity(constant, half, label)
        if odd:
            say(odd)
        return Zeros(None, {} if constant is None else {"lane": constant})

    convention, do = label.convention, "--checkpoint-format says which"
    if convention is None or not (label.found or label.forced):
        raise UnsupportedError(
            f"{'the label does not say' if label.found else 'nothing says'} how zero points are stored",
            file=file,
            tensor=tensor,
            need="gptq (minus one) or gptq_v2 (as they are)",
            do=do,
        )
    if convention == "gptq" and constant == half and not label.forced:
        raise UnsupportedError(
            f"every stored zero is {half}: {half + 1} as the label gptq has it, or {half} if the file is gptq_v2",
            file=file,
            tensor=tensor,
            do=do,
        )
    if convention == "gptq" and high == top and label.wrap is None:
        hint = f"; its writer, {label.quantizer}, suggests word" if label.quantizer.startswith("gptqmodel") else ""
        g, column = np.argwhere(lanes == top)[0]
        raise UnsupportedError(
            f"a stored zero of {top} means 0 or {top + 1}",
            file=file,
            tensor=tensor,
            found=f"{int((lanes == top).sum())} of them, the first at [{g}, {column}]",
            do=f"--zero-wrap lane (0), word (0, with a borrow from the next lane) or none ({top + 1}){hint}",
        )
    zero = _true(words, bits, n, convention, label.wrap)
    if constant is not None and (zero == half).all():
        return Zeros(None, {"lane": constant})
    return Zeros(zero, {"convention": convention, "wrap": label.wrap if convention == "gptq" else None})


def _oddity(constant: int | None, half: int, label: Label) -> str | None:
    """What is strange about the zeros of a symmetric module, all read as ``half``."""
    said = "--checkpoint-format" if label.forced else "labelled"
    if constant == half and label.convention == "gptq":
        return f"{said} gptq, but every stored zero is {half}: it is gptq_v2, and read so"
    if constant == half - 1 and label.convention == "gptq_v2":
        return f"{said} gptq_v2, but every stored zero is {half - 1}: it is gptq, and read so"
    if constant not in (half - 1, half):
        return f"symmetric, but the stored zeros are not all {half - 1} or all {half}: ignored, the zero is {half}"
    return None
