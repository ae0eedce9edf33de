"""Codes packed down the columns of a matrix of words, as GPTQ has them along k."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

STRIP = 1 << 16  # words


def _run(bits: int) -> tuple[int, int]:
    """(codes, words) after which the stream is at a word's beginning again: 32 in 3 for 3 bits, 8 in 1 for 4."""
    return 32 // gcd(bits, 32), bits // gcd(bits, 32)


def _strips(runs: int, n: int) -> Iterator[tuple[int, int]]:
    """(first, end) of the runs worked on at once, so that temporaries stay in cache."""
    step = max(1, STRIP // n)
    return ((first, min(first + step, runs)) for first in range(0, runs, step))


def unpack_rows(words: Array, bits: int, place: Array | None) -> Array:
    """uint32 [K*bits/32, N] -> uint8 [K, N]: every column is one stream, the code of k goes to row place[k]."""
    codes, count = _run(bits)
    runs, n = words.reshape(-1, count, words.shape[1]), words.shape[1]
    out = np.empty((runs.shape[0] * codes, n), np.uint8)
    mask = np.uint32(2**bits - 1)
    for first, end in _strips(runs.shape[0], n):
        for i in range(codes):
            word, shift = divmod(bits * i, 32)
            value = runs[first:end, word] >> np.uint32(shift)
            if shift + bits > 32:
                value |= runs[first:end, word + 1] << np.uint32(32 - shift)
            rows = slice(first * codes + i, end * codes, codes)
            out[rows if place is None else place[rows]] = value & mask
    return out


def pack_rows(values: Array, bits: int, place: Array | None) -> Array:
    """The inverse of ``unpack_rows``."""
    codes, count = _run(bits)
    n = values.shape[1]
    out = np.zeros((values.shape[0] // codes, count, n), np.uint32)
    for first, end in _strips(out.shape[0], n):
        for i in range(codes):
            word, shift = divmod(bits * i, 32)
            rows = slice(first * codes + i, end * codes, codes)
            value = values[rows if place is None else place[rows]].astype(np.uint32)
            out[first:end, word] |= value << np.uint32(shift)
            if shift + bits > 32:
                out[first:end, word + 1] |= value >> np.uint32(32 - shift)
    return out.reshape(-1, n)
