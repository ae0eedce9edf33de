"""Streams of codes in the columns of a matrix of words, as GPTQ has them along k, or in its rows, as others do."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import loops, plain

Array = NDArray[Any]


def unpack_rows(words: Array, bits: int, starts: Array) -> Array:
    """uint32 [W, N] -> uint8 [p, N]: every column is one stream; row p is its codes that begin at bit starts[p]."""
    n = words.shape[1]
    out = np.empty((len(starts), n), np.uint8)
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


def read_rows(words: Array, bits: int, channels: slice | Array, columns: slice) -> Array:
    """The codes of some ``channels`` [p] of stored words [W, N], unaligned ones too: uint8 [p, columns]. No other rows
    are read."""
    if isinstance(channels, slice):
        first, last = channels.start * bits // 32, -(-channels.stop * bits // 32)
        starts = np.arange(channels.start * bits - 32 * first, channels.stop * bits - 32 * first, bits)
        return unpack_rows(words[first:last, columns].view(np.uint32), bits, starts)
    needed, starts = _needed(channels.astype(np.int64) * bits, bits)
    taken = np.take(words.view(np.uint8), needed, axis=0).view(np.uint32)  # NumPy aligns all of a matrix to take rows
    return unpack_rows(taken[:, columns], bits, starts)


def unpack_columns(words: Array, bits: int, starts: Array) -> Array:
    """uint32 or int32 [N, W] -> uint8 [N, p], a transposed view: every row is one stream, column p its codes that begin
    at bit starts[p]. No other words are read."""
    needed, starts = _needed(starts, bits)
    fast = loops(len(starts) * len(words))
    if fast is None or not words.flags.c_contiguous:
        return unpack_rows(words.T[needed].view(np.uint32), bits, starts).T
    turned = np.empty((len(needed), len(words)), np.uint32)
    stored = words.reshape(-1).view(np.uint8)
    stored.setflags(write=False)
    fast.take_columns(stored, words.strides[0], needed, turned)
    return unpack_rows(turned, bits, starts).T


def _needed(starts: Array, bits: int) -> tuple[Array, Array]:
    """(the words of a stream that codes lie in, the bit among these at which each begins)."""
    first, last = starts // 32, (starts + bits - 1) // 32
    needed = np.unique(np.concatenate((first, last)))
    return needed, 32 * np.searchsorted(needed, first) + starts % 32


def pack_rows(values: Array, bits: int, channels: Array) -> Array:
    """The inverse of ``unpack_rows``: uint8 [K, N] -> uint32 [K * bits / 32, N]; ``channels`` holds 0 to K - 1 once.

    Raises ValueError when K codes are no whole words: an artifact's k may be any number.
    """
    starts, n = channels.astype(np.int64) * bits, values.shape[1]
    height, rest = divmod(len(channels) * bits, 32)
    if rest:
        raise ValueError(f"{len(channels)} codes of {bits} bits are no whole words")
    out = np.zeros((height, n), np.uint32)
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
