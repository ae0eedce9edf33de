"""Codes packed down the columns of a matrix of words, as GPTQ has them along k."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import loops, plain

Array = NDArray[Any]


def _starts(rows: Array, bits: int) -> Array:
    return rows.astype(np.int64) * bits


def unpack_rows(words: Array, bits: int, rows: Array) -> Array:
    """uint32 [W, N] -> uint8 [p, N]: every column is one stream, its codes number rows[p] in that order."""
    starts, n = _starts(rows, bits), words.shape[1]
    out = np.empty((len(rows), n), np.uint8)
    fast = loops(out.size)
    if fast is not None:
        fast.unpack_rows(plain(words), starts, bits, out)
        return out
    mask = np.uint32(2**bits - 1)
    for p, (word, low) in enumerate(zip(*divmod(starts, 32), strict=True)):
        value = words[word] >> np.uint32(low)
        if low + bits > 32:
            value |= words[word + 1] << np.uint32(32 - low)
        out[p] = value & mask
    return out


def pack_rows(values: Array, bits: int, rows: Array) -> Array:
    """The inverse of ``unpack_rows``: uint8 [K, N] -> uint32 [K * bits / 32, N]; ``rows`` holds 0 to K - 1 once."""
    starts, n = _starts(rows, bits), values.shape[1]
    out = np.zeros((len(rows) * bits // 32, n), np.uint32)
    fast = loops(values.size)
    if fast is not None:
        fast.pack_rows(plain(values), starts, bits, out)
        return out
    for p, (word, low) in enumerate(zip(*divmod(starts, 32), strict=True)):
        value = values[p].astype(np.uint32)
        out[word] |= value << np.uint32(low)
        if low + bits > 32:
            out[word + 1] |= value >> np.uint32(32 - low)
    return out
