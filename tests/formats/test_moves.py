"""Bits that move: each against a loop over the bits of Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warptile.formats import bits
from warptile.formats.moves import BYTES, NIBBLES, Fields, extraction, move, moves

WORDS, LANES, LENGTH = 6, 3, 12


def bit(data: bytes, place: int) -> int:
    return data[place // 8] >> place % 8 & 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["any", "runs", "apart"]))
def test_every_bit_is_where_it_was_sent(seed: int, kind: str) -> None:
    """Bits at random; runs that keep their distance; four in a row that go to four bytes. Many lie at an edge."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(WORDS * 32)[: rng.integers(1, WORDS * 32)]
    word, at = chosen // 32, chosen % 32
    lane = rng.integers(0, LANES, WORDS)[word]
    base = rng.integers(0, LENGTH * 8 - 32, WORDS)[word]
    source = {"any": rng.integers(0, LENGTH * 8, len(chosen)), "runs": base + at, "apart": base + at // 8}[kind]
    flips = int(rng.integers(0, 2**32))
    table = moves(WORDS, word, at, lane, source, LENGTH, flips)

    rows = rng.integers(0, 256, (2, 2, 3, LANES, LENGTH), dtype=np.uint8)
    out = np.zeros((2, 2, 3, 1, WORDS), np.uint32)
    steps = [LANES * LENGTH * count for count in (6, 3, 1)]
    fast = bits.loops(bits.LARGE)
    assert fast is not None
    move(fast, table, rows, np.arange(LANES) * LENGTH, steps, out)

    for cell in np.ndindex(2, 2, 3):
        want = [flips] * WORDS
        for w, b, row, place in zip(word, at, lane, source, strict=True):
            want[w] ^= bit(rows[cell][row].tobytes(), int(place)) << int(b)
        assert out[cell][0].tolist() == want


def test_bits_that_go_together_are_one_term() -> None:
    plain = moves(2, np.zeros(8, int), np.arange(8) + 24, 0, np.arange(8) + 5, 8)
    apart = moves(2, np.ones(4, int), np.arange(0, 32, 8) + 3, 0, np.arange(4) + 61, 9)
    assert (plain.masks.shape, plain.spread) == ((1, 2), False)
    assert (apart.masks.shape, apart.spread) == ((1, 2), True)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [NIBBLES, BYTES, Fields(4, tuple(tuple(range(3 * i, 3 * i + 3)) for i in range(8))), Fields(2, ((0, 15), (7, 8)))],
)
def test_fields_become_numbers(fields: Fields, itemsize: int) -> None:
    blocks = 8
    data = np.random.default_rng(0).integers(0, 256, (5, blocks * fields.nbytes), dtype=np.uint8)
    out = np.zeros((5, 1, 1, 1, blocks * fields.size * itemsize // 4), np.uint32)
    fast = bits.loops(bits.LARGE)
    assert fast is not None
    move(fast, extraction(fields, itemsize, blocks), data, np.zeros(1, int), (data.shape[1], 0, 0), out)
    found = out.reshape(5, -1).view(f"u{itemsize}")
    for row in range(5):
        for block in range(blocks):
            held = data[row, block * fields.nbytes : (block + 1) * fields.nbytes].tobytes()
            for i, places in enumerate(fields.bits):
                want = sum(bit(held, place) << j for j, place in enumerate(places))
                assert found[row, block * fields.size + i] == want
