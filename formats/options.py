"""Switches that tell readers which of two readings to believe. Fields equal the command line's flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """None means: decide from the tensors, cross-check the labels, refuse when they disagree."""

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
    stack_experts: bool = False
