"""Fields of a few bits in little-endian streams, and the index maps from matrix coordinates to fields.

A layout is written once, as a function from coordinates to (word, field); packing, unpacking and the pictures in
the documentation all come from that function through ``Tile``. Large arrays go through the compiled loops of
``_compiled.py``, fed with tables of that same function; NumPy is the reference, and what is left without numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from math import gcd
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LARGE = 1 << 18
"""Codes below which NumPy is done before a compiled loop is loaded."""
PACKED, UNPACKED = 256, 64
"""Columns of tiles that go through the compiled loops as one: they take their time between rows, not in them."""
NIBBLES, LOW_NIBBLES = np.arange(0, 32, 4, dtype=np.uint64), np.arange(0, 64, 8, dtype=np.uint64)
"""Bits at which nibbles begin: eight in a word; the low ones of eight bytes."""


@cache
def _compiled() -> ModuleType | None:
    try:
        return import_module("._compiled", __package__)
    except ImportError:
        return None


def loops(count: int) -> ModuleType | None:
    """The compiled loops for ``count`` codes; None when they are not worth loading, or numba cannot be imported."""
    return _compiled() if count >= LARGE else None


def plain(array: Array) -> Array:
    """The array as compiled loops read it: C order, aligned, and read-only as mapped files are; a copy if it must."""
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.require(array, requirements=("C", "A"))
    view = array.view()
    view.setflags(write=False)
    return view


def contiguous(matrix: Array) -> Array:
    """uint8 [a, b] in C order; the transpose of rows that are contiguous is copied by blocks."""
    fast = loops(matrix.size)
    (a, b), turned = matrix.shape, matrix.T
    if fast is None or matrix.flags.c_contiguous or turned.strides[-1] != 1 or a % 8 or b % 8:
        return np.ascontiguousarray(matrix)
    out = np.empty((a, b), np.uint8)
    fast.transpose(plain(turned), out)
    return out


def has_masked(codes: Array, mask: int) -> bool:
    """Whether any code, uint8 of any shape, has all bits of ``mask``, of which the top one is none."""
    fast = loops(codes.size)
    if fast is None or not codes.flags.c_contiguous or codes.size % 8:
        return bool(((codes & np.uint8(mask)) == mask).any())
    return bool(fast.has_masked(plain(codes).reshape(-1).view(np.uint64), np.uint64(0x0101010101010101 * mask)))


def pack_stream(values: Array, bits: int) -> Array:
    """uint8 [.., c] codes -> uint32 [.., c * bits / 32], value i at bits ``bits * i`` (may straddle words).

    c * bits must be a multiple of 32. For 2, 4 and 8 bits this is the usual packing of 32 / bits fields a word.
    """
    lead, count = values.shape[:-1], values.shape[-1]
    assert count * bits % 32 == 0, (count, bits)
    if bits == 8:
        return np.ascontiguousarray(values).view("<u4").astype(np.uint32, copy=False)
    fast = loops(values.size)
    if fast is not None and bits == 4:
        words = np.empty((*lead, count // 8), np.uint32)
        fast.move_nibbles(plain(values).reshape(-1).view(np.uint64), LOW_NIBBLES, NIBBLES, words.reshape(-1))
        return words
    if 32 % bits == 0:
        fields = np.ascontiguousarray(values).reshape(*lead, -1, 32 // bits)
        words = np.zeros(fields.shape[:-1], np.uint32)
        for p in range(32 // bits):
            words |= fields[..., p].astype(np.uint32) << np.uint32(bits * p)
        return words
    one_bit_each = np.unpackbits(np.ascontiguousarray(values)[..., None], axis=-1, count=bits, bitorder="little")
    stream = np.packbits(one_bit_each.reshape(*lead, -1), axis=-1, bitorder="little")
    return stream.view("<u4").astype(np.uint32, copy=False)


def unpack_stream(words: Array, bits: int) -> Array:
    """The inverse of ``pack_stream``: uint32 or int32 [.., w] -> uint8 [.., w * 32 / bits]."""
    words = np.ascontiguousarray(words)
    lead, count = words.shape[:-1], words.shape[-1] * 32 // bits
    if bits == 8:
        return words.view(np.uint8).reshape(*lead, count)
    if loops(words.size * 8) is not None and bits == 4:
        return split_words(words, NIBBLES)
    if 32 % bits == 0:
        unsigned, mask = words.view(np.uint32), np.uint32(2**bits - 1)
        fields = np.empty((*words.shape, 32 // bits), np.uint8)
        for p in range(32 // bits):
            fields[..., p] = (unsigned >> np.uint32(bits * p)) & mask
        return fields.reshape(*lead, count)
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(*lead, count, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]


def split_words(words: Array, shifts: Array) -> Array:
    """uint32 or int32 [.., w] of eight nibbles -> uint8 [.., 8 w]: code i of a word is at bit shifts[i]."""
    out = np.empty((*words.shape[:-1], words.shape[-1] * 8), np.uint8)
    fast = loops(out.size)
    if fast is not None:
        stored = plain(words).view(np.uint32).reshape(-1)
        fast.move_nibbles(stored, np.asarray(shifts, np.uint64), LOW_NIBBLES, out.reshape(-1).view(np.uint64))
        return out
    fields = out.reshape(*words.shape, 8)
    for i, shift in enumerate(shifts):
        fields[..., i] = (words.view(np.uint32) >> np.uint32(shift)) & np.uint32(15)
    return out


def pack_ragged(values: Array, bits: int) -> Array:
    """``pack_stream`` of any number of codes: uint32 [.., ceil(c * bits / 32)], bits after the last code are 0."""
    count = values.shape[-1]
    unit = 32 // gcd(bits, 32)
    padded = np.zeros((*values.shape[:-1], -(-count // unit) * unit), np.uint8)
    padded[..., :count] = values
    return pack_stream(padded, bits)[..., : -(-count * bits // 32)]


def unpack_ragged(words: Array, bits: int, count: int) -> Array:
    """The inverse: [.., ceil(count * bits / 32)] -> uint8 [.., count]; bits after the last code are not looked at."""
    unit = bits // gcd(bits, 32)
    padded = words
    if words.shape[-1] % unit:
        padded = np.zeros((*words.shape[:-1], -(-words.shape[-1] // unit) * unit), words.dtype)
        padded[..., : words.shape[-1]] = words
    return unpack_stream(padded, bits)[..., :count]


def split_nibbles(data: Array) -> Array:
    """uint8 [.., c] -> uint8 [.., 2c], the low nibble first."""
    if data.shape[-1] % 4 == 0 and loops(data.size) is not None:
        return split_words(plain(data).view(np.uint32), NIBBLES)
    codes: Array = np.stack((data & 0x0F, data >> 4), axis=-1).reshape(*data.shape[:-1], -1)
    return codes


def join_nibbles(codes: Array) -> Array:
    """The inverse of ``split_nibbles``."""
    data: Array = codes[..., ::2] | codes[..., 1::2] << 4
    return data


@dataclass(frozen=True)
class Tables:
    """An index map as the compiled loops want it: rows of a tile whose codes meet in the same words go together.

    All uint32: a signed index costs a comparison."""

    members: Array
    """[sets, rows of a set]: the rows k of each set."""
    shifts: Array
    """[k, n]: the bit of its word at which a code begins."""
    places: Array
    """[sets, n]: the word that the codes of a column of a set are in."""
    firsts: Array
    """[words]: the first entry of ``places``, flat, that is this word."""
    folds: Array
    """[columns of a word - 1]: how far behind it the others are, the same in every word."""


@dataclass(frozen=True)
class Tile:
    """A rectangle of k x n codes stored as one run of 32-bit words, in the order ``place`` says."""

    k: int
    n: int
    bits: int
    place: Callable[[Array, Array], tuple[Array, Array]]
    """(k in tile, n in tile) -> (word, field within the word, lowest first); elementwise on integer arrays."""

    def _fields(self) -> tuple[Array, Array]:
        """(word, field) of every code, both [k, n]."""
        word, field = self.place(*np.meshgrid(np.arange(self.k), np.arange(self.n), indexing="ij"))
        return word, field

    @cached_property
    def order(self) -> Array:
        """intp [k * n]: the field at stream position i holds the code at row-major position order[i]."""
        word, field = self._fields()
        order = np.argsort((word * (32 // self.bits) + field).reshape(-1))
        return order

    def side_by_side(self, count: int) -> Tile:
        """As many of these tiles along n, as one."""
        words = self.k * self.n * self.bits // 32

        def place(k: Array, n: Array) -> tuple[Array, Array]:
            word, field = self.place(k, n % self.n)
            return words * (n // self.n) + word, field

        return Tile(self.k, self.n * count, self.bits, place)

    def together(self, columns: int, most: int) -> Tables:
        """The tables of as many tiles side by side, up to ``most`` columns of them, as divide ``columns``."""
        return _tables(self, gcd(columns // self.n, max(1, most // self.n)))

    @cached_property
    def tables(self) -> Tables:
        """``place`` as tables."""
        word, field = self._fields()
        places, which = np.unique(word, axis=0, return_inverse=True)
        members = np.argsort(which.reshape(-1), kind="stable").reshape(len(places), -1)
        terms = np.argsort(places.reshape(-1), kind="stable").reshape(self.k * self.n * self.bits // 32, -1)
        folds = terms[0, 1:] - terms[0, 0]
        assert (terms[:, 1:] - terms[:, :1] == folds).all(), "the columns of a word lie alike in every word"
        tables = members, field * self.bits, places, terms[:, 0], folds
        return Tables(*(np.ascontiguousarray(table, np.uint32) for table in tables))

    def pack(self, codes: Array) -> Array:
        """uint8 [.., K, N] -> int32 [.., K / k, N / n * words a tile]; K and N are multiples of the tile's."""
        *lead, K, N = codes.shape
        fast = loops(codes.size)
        if fast is not None:
            words, t = np.empty((*lead, K // self.k, N * self.k * self.bits // 32), np.uint32), self.together(N, PACKED)
            matrix = contiguous(codes) if not lead else codes
            fast.pack_tiles(
                plain(matrix).reshape(-1, N), t.members, t.shifts, t.firsts, t.folds, words.reshape(-1, words.shape[-1])
            )
            return words.view(np.int32)
        tiles = codes.reshape(*lead, K // self.k, self.k, N // self.n, self.n).swapaxes(-3, -2)
        tiles = tiles.reshape(*lead, K // self.k, N // self.n, self.k * self.n)
        return pack_stream(tiles[..., self.order], self.bits).reshape(*lead, K // self.k, -1).view(np.int32)

    def unpack(self, words: Array) -> Array:
        """The inverse of ``pack``."""
        *lead, kt, per_row = words.shape
        nt = per_row * (32 // self.bits) // (self.k * self.n)
        fast = loops(words.size * (32 // self.bits))
        if fast is not None:
            codes, t = np.empty((*lead, kt * self.k, nt * self.n), np.uint8), self.together(nt * self.n, UNPACKED)
            stored = plain(words).view(np.uint32).reshape(-1, per_row)
            mask = np.uint32(2**self.bits - 1)
            fast.unpack_tiles(stored, t.members, t.shifts, t.places, mask, codes.reshape(-1, nt * self.n))
            return codes
        stream = unpack_stream(words.reshape(*lead, kt, nt, -1), self.bits)
        tiles = np.empty_like(stream)
        tiles[..., self.order] = stream
        tiles = tiles.reshape(*lead, kt, nt, self.k, self.n).swapaxes(-3, -2)
        return tiles.reshape(*lead, kt * self.k, nt * self.n)

    def window(self, words: Array, rows: slice, columns: slice) -> Array:
        """``unpack`` of int32 [K / k, words of a row] for some rows k and columns n only: uint8 [rows, columns]."""
        per = self.k * self.n * self.bits // 32
        top, left = rows.start // self.k, columns.start // self.n
        held = words[top : -(-rows.stop // self.k), left * per : -(-columns.stop // self.n) * per]
        codes = self.unpack(held)[rows.start - top * self.k :, columns.start - left * self.n :]
        return codes[: rows.stop - rows.start, : columns.stop - columns.start]

    def picture(self, rows: int, cols: int) -> str:
        """The first rows x cols of the tile, each entry 'word.field'; rows run along k, columns along n."""
        k, n = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
        word, field = self.place(k, n)
        lines = ["  k\\n" + "".join(f"{j:7d}" for j in range(cols))]
        lines += [f"{i:5d}" + "".join(f"{word[i, j]:5d}.{field[i, j]}" for j in range(cols)) for i in range(rows)]
        return "\n".join(lines)


@cache
def _tables(tile: Tile, count: int) -> Tables:
    return tile.side_by_side(count).tables
