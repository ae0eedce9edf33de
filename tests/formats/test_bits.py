"""Bit streams against Python integers; tiles invert and place every code exactly once."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from warptile.formats import bits as module
from warptile.formats import fragment
from warptile.formats.bits import (
    Tile,
    contiguous,
    has_masked,
    pack_ragged,
    pack_stream,
    split_words,
    unpack_ragged,
    unpack_stream,
)
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


def _striped(k: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order in which a word takes codes of two rows: 2-bit fields, 8 x 16."""
    return 4 * (k // 4) + n // 4, 4 * (k % 4) + n % 4


@pytest.mark.parametrize("tile", [*TILES.values(), Tile(8, 16, 2, _striped)])
@pytest.mark.parametrize("beside", [1, 3, 12, 32])
def test_compiled_tiles_are_those_of_numpy(tile: Tile, beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(1).integers(0, 2**tile.bits, (2, 3 * tile.k, beside * tile.n), dtype=np.uint8)
    want = tile.pack(codes)
    monkeypatch.setattr(module, "LARGE", 1)
    assert module.loops(1) is not None
    np.testing.assert_array_equal(tile.pack(codes), want)
    np.testing.assert_array_equal(tile.pack(np.asfortranarray(codes[0])), want[0])
    np.testing.assert_array_equal(tile.unpack(want), codes)
    want.setflags(write=False)
    np.testing.assert_array_equal(tile.unpack(want), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compiled_streams_are_those_of_numpy(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(2).integers(0, 2**bits, (3, 2080), dtype=np.uint8)
    want = pack_stream(codes, bits)
    monkeypatch.setattr(module, "LARGE", 1)
    np.testing.assert_array_equal(pack_stream(codes, bits), want)
    np.testing.assert_array_equal(pack_stream(np.asfortranarray(codes), bits), want)
    np.testing.assert_array_equal(unpack_stream(want.view(np.int32), bits), codes)


@pytest.mark.parametrize("large", [1, 1 << 60])
def test_words_in_any_order_of_nibbles(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", large)
    words = np.array([[0x76543210, 0xFEDCBA98], [0x00000000, 0xF0000001]], np.uint32)
    order = np.array([4, 0, 28, 8, 12, 16, 20, 24])
    want = [[1, 0, 7, 2, 3, 4, 5, 6, 9, 8, 15, 10, 11, 12, 13, 14], [0] * 8 + [0, 1, 15, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(split_words(words, order), want)


@pytest.mark.parametrize("shape", [(8, 8), (72, 136), (9, 8)])
def test_turned_matrices_are_copied_in_order(shape: tuple[int, int], compiled: None) -> None:
    codes = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    copied = contiguous(codes.T)
    assert copied.flags.c_contiguous
    np.testing.assert_array_equal(copied, codes.T)


@pytest.mark.parametrize("size", [1, 8, 24, 1000, 1001])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_code_with_all_bits_of_a_mask_is_seen_wherever_it_is(size: int, byte: int, compiled: None) -> None:
    codes = np.resize(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), size)
    assert not has_masked(codes, 0x7F)
    for at in {0, size // 2, size - 1}:
        changed = codes.copy()
        changed[at] = byte
        assert has_masked(changed, 0x7F)
        assert has_masked(np.repeat(changed, 2)[::2], 0x7F)


def test_without_numba_numpy_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", lambda: None)
    monkeypatch.setattr(module, "LARGE", 1)
    test_tile_round_trip(4, ())
