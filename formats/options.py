"""Switches that tell readers which of two readings to believe. Fields equal the command line's flags."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

CHOICES = {
    "checkpoint_format": ("gptq", "gptq_v2", "marlin"),
    "zero_wrap": ("lane", "word", "none"),
    "scale_convention": ("multiply", "divide"),
    "nan": ("zero",),
}
"""What switches with names for values take."""


@dataclass(frozen=True)
class Options:
    """None means: decide from the tensors, cross-check the labels, refuse when they disagree.

    Raises UsageError for a number that no checkpoint could have, and for a name that is none of CHOICES.
    """

    bits: int | None = None
    group_size: int | None = None
    checkpoint_format: str | None = None
    """gptq, gptq_v2, marlin: how zero points are stored."""
    zero_wrap: str | None = None
    """lane, word, none: what a stored zero of 2**bits - 1 means in a file that stores zero - 1."""
    scale_convention: str | None = None
    """multiply, divide: what a scale called ``_inv`` or ``global`` does."""
    nan: str | None = None
    """zero: read NaN codes as 0 instead of refusing them."""
    undo_rope_order: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise UsageError(f"unknown --{name.replace('_', '-')} {value!r}", need=" or ".join(allowed))
        if self.bits is not None and self.bits < 1:
            raise UsageError(f"--bits {self.bits}: no such width", need="1 or more")
        if self.group_size is not None and self.group_size < 1 and self.group_size != -1:
            raise UsageError(f"--group-size {self.group_size}: no such size", need="-1 or a positive number")
