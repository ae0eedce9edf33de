"""Bit streams against Python integers; tiles invert and place every code exactly once."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from warptile.formats import fragment
from warptile.formats.bits import pack_ragged, pack_stream, unpack_ragged, unpack_stream
from warptile.formats.fragment import SCALE_COLUMNS, TILES, reorder, restore


@given(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16]).filter(lambda b: b <= 8), st.integers(1, 3), st.integers(0, 2**32))
def test_stream_is_one_little_endian_integer(bits: int, words32: int, seed: int) -> None:
    count = 32 * words32
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, count), dtype=np.uint8)
    words = pack_stream(codes, bits)
    assert words.dtype == np.uint32
    assert words.shape == (2, count * bits // 32)
    for row in range(2):
        number = sum(int(c) << (bits * i) for i, c in enumerate(codes[row]))
        assert words[row].tobytes() == number.to_bytes(count * bits // 8, "little")
    np.testing.assert_array_equal(unpack_stream(words.view(np.int32), bits), codes)


@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**32))
def test_a_stream_of_any_length_ends_in_zero_bits(bits: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, count), dtype=np.uint8)
    words = pack_ragged(codes, bits)
    for row in range(2):
        number = sum(int(c) << (bits * i) for i, c in enumerate(codes[row]))
        assert words[row].tobytes() == number.to_bytes(-(-count * bits // 32) * 4, "little")
    np.testing.assert_array_equal(unpack_ragged(words.view(np.int32), bits, count), codes)


def test_stream_takes_transposed_views() -> None:
    codes = np.random.default_rng(0).integers(0, 8, (64, 5), dtype=np.uint8)
    for bits in (3, 4):
        np.testing.assert_array_equal(pack_stream(codes.T, bits), pack_stream(codes.T.copy(), bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_tile_places_every_code_once(bits: int) -> None:
    tile = TILES[bits]
    assert sorted(tile.order) == list(range(1024))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_tile_round_trip(bits: int, lead: tuple[int, ...]) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (*lead, 48, 192), dtype=np.uint8)
    words = TILES[bits].pack(codes)
    assert words.shape == (*lead, 3, 192 * bits // 2)
    np.testing.assert_array_equal(TILES[bits].unpack(words), codes)


def test_pictures_in_the_docstring() -> None:
    results = doctest.testmod(fragment)
    assert results.attempted == 2
    assert results.failed == 0


def test_reorder_inverts() -> None:
    grid = np.arange(3 * 128).reshape(3, 128)
    stored = reorder(grid, SCALE_COLUMNS)
    assert [stored[0, 8 * i + v] for i in range(8) for v in range(8)] == [i + 8 * v for i in range(8) for v in range(8)]
    np.testing.assert_array_equal(restore(stored, SCALE_COLUMNS), grid)
