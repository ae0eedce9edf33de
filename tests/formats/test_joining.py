"""Linears side by side and in stacks: rows come back as they were, and what cannot be one says why."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linears import Case, random_quant
from warptile.formats.canonical import ELEMENTS, Outline, QuantTensor, dequantize, same
from warptile.formats.joining import along_n, asymmetric, cut, join, stacked, with_zeros, without_zeros
from warptile.formats.parts import Part, packed, unpacked
from warptile.formats.stream import rectangles, streamed, whole
from warptile.kernels import layouts

# What every part is, and what its rows must be multiples of.
KINDS = {
    "u4b8": (Case("u4b8", group=32), 1),
    "u4b8 one group": (Case("u4b8", group=-1), 1),
    "u4 zeros, act-order, bias": (Case("u4", zero=True, group=48, order=True, bias="bf16"), 1),
    "s8": (Case("s8", group=32), 1),
    "u8 zeros": (Case("u8", zero=True, scale="f32", group=16), 1),
    "e4m3 blocks": (Case("e4m3", scale="f32", group=64, rows=16), 16),
    "e4m3 rows": (Case("e4m3", scale="bf16", group=-1), 1),
    "e4m3 one scale": (Case("e4m3", scale="f32", group=-1, rows=0), 1),
    "e2m1 e8m0": (Case("e2m1", scale="e8m0", group=32, low=115, high=123, bias="f32"), 1),
    "e2m1 e4m3 global": (Case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=60), 1),
}
ROWS = ((64, 64), (16, 48, 80), (7, 1, 66), (130, 2, 64), (1, 1, 1, 1))


def members(kind: str, rows: tuple[int, ...], experts: int | None = None, k: int = 96) -> list[QuantTensor]:
    """Random linears of one kind and one order of inputs; the last may be cut short of a block."""
    case, step = KINDS[kind]
    heights = [-(-n // step) * step for n in rows[:-1]] + [rows[-1]]
    made = [random_quant(replace(case, n=n, k=k, seed=i, experts=experts)) for i, n in enumerate(heights)]
    return [replace(q, perm=made[0].perm) for q in made]


def named(qs: list[QuantTensor]) -> dict[str, Outline]:
    return {f"part{i}": q.outline() for i, q in enumerate(qs)}


def check_side_by_side(qs: list[QuantTensor]) -> None:
    """They are the rows of one, and come out of every layout that takes them alone again."""
    outline = along_n(named(qs))
    assert isinstance(outline, Outline), outline
    joined = join([streamed(q) for q in qs])
    q = whole(joined).check()
    assert q.outline() == outline
    np.testing.assert_array_equal(dequantize(q), np.concatenate([dequantize(part) for part in qs], axis=-2))
    for layout in layouts().values():
        if layout.accepts(outline) is not None:
            assert layout.accepts(qs[0].outline()) is not None
            continue
        tensors, spec = layout.pack(q)
        stored, start = layout.view(tensors, spec), 0
        for part in qs:
            back = whole(cut(stored, slice(start, start + part.n))).check()
            assert same(back, part) is None
            start += part.n


@pytest.mark.parametrize("experts", [None, 2])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_side_by_side_are_the_rows_of_one_and_come_back(kind, rows, experts):
    check_side_by_side(members(kind, rows, experts))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    rows=st.lists(st.integers(1, 150), min_size=2, max_size=5),
    experts=st.sampled_from([None, 1, 3]),
    k=st.integers(1, 130),
)
def test_parts_of_any_size_come_back(kind, rows, experts, k):
    check_side_by_side(members(kind, tuple(rows), experts, k))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_of_any_rows_is_that_of_the_whole(kind):
    qs = members(kind, (16, 48, 80))
    joined = join([streamed(q) for q in qs])
    codes = whole(joined).codes
    for start, stop in ((0, 16), (5, 17), (15, 100), (64, 65), (0, codes.shape[0])):
        found = joined.slab(0, slice(start, stop), slice(16, 80))
        np.testing.assert_array_equal(found, codes[start:stop, 16:80])
    pieces = {(rows.start, columns.start): joined.slab(e, rows, columns) for e, rows, columns in rectangles(joined)}
    assert sum(piece.size for piece in pieces.values()) == codes.size


def changed(case: Case, **parts: object) -> list[QuantTensor]:
    """Two linears that differ in ``parts`` of their case."""
    return [random_quant(replace(case, n=64, k=96)), random_quant(replace(case, **{"n": 64, "k": 96, **parts}))]


INT, BLOCKS = Case("u4b8", group=32), Case("e4m3", scale="f32", group=32, rows=48)
APART = {
    "inputs": (changed(INT, k=128), "inputs differ: part0 96, part1 128"),
    "act-order in one": (changed(INT, order=True), r"act-order differs: part0 none, part1 order \w{8}"),
    "two orders": (changed(replace(INT, order=True), seed=5), r"act-order differs: part0 order \w+, part1 order \w+"),
    "bias in one": (changed(INT, bias="f16"), "biases differ: part0 none, part1 f16"),
    "bias of another type": (changed(replace(INT, bias="f16"), bias="f32"), "biases differ: part0 f16, part1 f32"),
    "scales": (changed(INT, scale="bf16"), "scales differ: part0 f16 per 32, part1 bf16 per 32"),
    "groups": (changed(INT, group=48), "scales differ: part0 f16 per 32, part1 f16 per 48"),
    "levels": (
        changed(Case("e2m1", scale="e4m3", group=16, low=1, high=60), whole=True),
        "scales differ: part0 e4m3 per 16, part1 e4m3 per 16 x f32 per 96",
    ),
    "blocks at the seam": (changed(BLOCKS), "blocks of 48 rows would straddle the seam: part0 has 64 rows"),
    "blocks": (changed(BLOCKS, rows=32), "blocks differ: part0 48 x 32, part1 32 x 32"),
    "elements": (changed(INT, element="u8b128"), "elements differ: part0 u4b8, part1 u8b128"),
    "zero points in one": (changed(INT, element="u4", zero=True), "zero points are not in all: part0 none, part1 some"),
    "shards": (
        changed(Case("e4m3", scale="f32", group=-1, shards=(32, 32))),
        "its parts have factors of their own",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_cannot_be_side_by_side_has_a_reason(name):
    qs, words = APART[name]
    reason = along_n(named(qs))
    assert isinstance(reason, str)
    assert re.fullmatch(words, reason), reason


@pytest.mark.parametrize(
    ("qs", "words"),
    [
        (changed(INT, n=65), "outputs differ: part0 64, part1 65"),
        (changed(replace(INT, order=True), seed=5), "act-order differs"),
        (changed(INT, group=48), "scales differ: part0 f16 per 1 x 32, part1 f16 per 1 x 48"),
        (changed(INT, element="u8b128"), "elements differ"),
        (changed(replace(INT, experts=2)), "they are stacks already"),
        (changed(INT, bias="f16"), "biases differ"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_a_stack_has_a_reason(qs, words):
    reason = stacked(named(qs))
    assert isinstance(reason, str)
    assert reason.startswith(words)


@pytest.mark.parametrize("name", [name for name, e in ELEMENTS.items() if asymmetric(e)])
def test_a_constant_zero_point_means_the_same_and_goes_away_again(name):
    q = random_quant(Case(name, group=32, n=48, k=96))
    given = with_zeros(streamed(q))
    np.testing.assert_array_equal(dequantize(whole(given)), dequantize(q))
    back = without_zeros(given, q.element)
    assert back is not None
    assert same(whole(back), q) is None
    other = np.array(given.tensor.zero)
    other[3, 1] -= 1
    assert without_zeros(replace(given, tensor=replace(given.tensor, zero=other)), q.element) is None


def test_a_stack_has_zero_points_where_one_expert_has(tmp_path: Path):
    symmetric, other = random_quant(Case("u4b8", n=48, k=96)), random_quant(Case("u4", zero=True, n=48, k=96))
    outline = stacked(named([symmetric, other]))
    assert isinstance(outline, Outline)
    assert (outline.element.name, outline.experts) == ("u4", 2)
    part = Part("a", "m", {"format": "x"}, slice(0, 48), 0, 0, "u4b8")
    held = packed(streamed(symmetric), part)
    assert replace(held.tensor.outline(), experts=2, zero_max=outline.zero_max) == outline
    assert same(whole(unpacked(held, part, tmp_path, {})), symmetric) is None
