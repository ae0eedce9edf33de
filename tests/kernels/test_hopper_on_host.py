"""marlin_wgmma's own source, run thread by thread: clusters, copies, barriers and wgmma as late as they may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hopper_cases import ROWS, assert_multiplies, device, multiplied, spread
from host_kernels import COMPILER, sources
from host_products import TYPES
from linears import ACTIVATION, Case, random_quant, random_x
from warptile.formats.canonical import dequantize
from warptile.kernels import marlin
from warptile.kernels.epilogue import ROUNDINGS, finish
from warptile.kernels.marlin_hopper_plan import TILES, one_order, refuse, refuse_tile
from warptile.kernels.wgmma_plan import Wgmma

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


def case(*kind: object, **more: object) -> Case:
    return Case(*kind, **{"n": 500, "k": 320, **more})  # type: ignore[arg-type]


NVFP4 = case("e2m1", scale="e4m3", group=16, whole=True, low=1, high=60)
POWERS = {"low": 115, "high": 123}
# k: 320 and 192 are no multiples of 128, padded k may be one. n: 500 and 740 end inside a tile that clusters take too.
CASES = [
    case(group=128),
    case(group=128, k=384, bias="f16"),
    case(group=64, n=328),
    case(group=32, k=200, bias="f32"),
    case(group=16, k=256, n=740),
    case(group=-1, k=203),
    case(group=192, k=384),
    case("u4", True, group=64, order=True),
    case("u4", True, group=32, k=192, n=328),
    case("u4", True, group=16),
    case("u4", True, group=128, k=256, bias="bf16"),
    case("u4", True, group=-1),
    case("u4", True, scale="f32", group=128, k=256),
    case("u4", True, scale="bf16", group=64),
    case("u8b128", group=128),
    case("u8b128", scale="bf16", group=32, k=256),
    case("u8b128", scale="f32", group=-1, n=740),
    case("u8", True, group=64, n=328),
    case("u8", True, scale="f32", group=128, order=True),
    case("u8", True, scale="bf16", group=16, k=192),
    case("u8", True, group=-1, k=256),
    case("e4m3", scale="f32", group=128, rows=128),
    case("e4m3", scale="bf16", group=128, rows=64, k=384, bias="f32"),
    case("e4m3", scale="f16", group=64, rows=192, n=740),
    case("e4m3", scale="f32", group=128, k=256),
    case("e4m3", scale="f16", group=64),
    case("e4m3", scale="f32", group=-1, bias="f16"),
    case("e4m3", scale="bf16", group=-1, rows=0),
    case("e4m3", scale="f16", group=-1, rows=48, k=256),
    case("e4m3", scale="f32", group=-1, shards=(100, 60, 340)),
    case("e4m3", scale="e8m0", group=128, rows=128, **POWERS),
    case("e4m3", scale="e8m0", group=-1, k=200, **POWERS),
    case("e2m1", scale="e8m0", **POWERS),
    case("e2m1", scale="e8m0", group=16, k=192, bias="bf16", **POWERS),
    case("e2m1", scale="e8m0", group=64, **POWERS),
    case("e2m1", scale="e8m0", group=128, k=256, **POWERS),
    case("e2m1", scale="e8m0", group=-1, **POWERS),
    NVFP4,
    replace(NVFP4, shards=(100, 60, 340), k=256, bias="f32"),
    replace(NVFP4, shards=(40, 60, 100, 300), n=500, order=True),
    replace(NVFP4, group=32, n=328, k=200),
    replace(NVFP4, group=128, whole=False, k=384),
    replace(NVFP4, experts=3, n=256, bias="f32"),
]


def _every() -> list[tuple[tuple[Case, str], Wgmma]]:
    """Each case, type of x and tile that takes them."""
    pairs = []
    for c, dtype, w in product(CASES, ACTIVATION, TILES):
        spec, x_dtype = marlin.spec(random_quant(c).outline()), TYPES[dtype]
        if refuse(spec, device(), x_dtype) is None and refuse_tile(spec, device(), x_dtype, w) is None:
            pairs.append(((c, dtype), w))
    return pairs


EVERY = _every()


def check(kind: tuple[Case, str], tile: Wgmma, folder: Path) -> None:
    c, dtype = kind
    assert_multiplies(marlin, random_quant(c), tile, dtype, folder, 2 if c.experts else 0)


@pytest.mark.parametrize(("kind", "tile"), spread(EVERY, 47))
def test_one_hot_rows_return_the_weights_and_random_ones_their_products(
    kind: tuple[Case, str], tile: Wgmma, folder: Path
) -> None:
    check(kind, tile, folder)


SHAPES = (
    Wgmma(128, 32, 2),
    Wgmma(256, 64, 1),
    Wgmma(128, 128, 1, cluster=2),
    Wgmma(128, 256, 1, cluster=2),
    Wgmma(128, 64, 1, deep=3),
    Wgmma(128, 128, 1, deep=2),
)
"""One of each kind: ways, whole warps' rows, clusters that share x, and k."""
EXACT = case("u4b8", group=32, low=0.25, high=0.25, k=192)
"""Small whole numbers times a quarter: fp32 sums are exact in any order."""


@pytest.mark.parametrize("bias", [None, "f16", "f32"])
@pytest.mark.parametrize("dtype", ACTIVATION)
@pytest.mark.parametrize("tile", SHAPES[1:], ids=str)
def test_bias_and_residual_are_rounded_as_the_reference_rounds_them(
    tile: Wgmma, dtype: str, bias: str | None, folder: Path
) -> None:
    """In rows of y of any stride, from any place on, in which nothing else is written."""
    q, to, m = random_quant(replace(EXACT, bias=bias)), ACTIVATION[dtype], tile.tokens + 3
    rng = np.random.default_rng(3)
    x = rng.integers(-30, 31, (m, q.k)).astype(to)
    sums = np.float32(np.float64(x) @ dequantize(q, np.float64).T)
    residual = (rng.standard_normal((m, q.n)) * 100).astype(to)
    places = ((0, 0), (504, 8), (504, 3), (517, 0))
    for (ldy, shift), added, rounding in zip(places, (None, residual, None, residual), ROUNDINGS * 2, strict=True):
        w = replace(tile, cut=shift == 0 and tile.deep == 1)
        y = multiplied(marlin, q, x, w, folder, residual=added, rounding=rounding, ldy=ldy, shift=shift, seed=shift)
        np.testing.assert_array_equal(y.view(np.uint16), finish(sums, to, q.bias, added, rounding).view(np.uint16))


@pytest.mark.parametrize("tile", SHAPES, ids=str)
def test_tiles_of_tokens_end_anywhere(tile: Wgmma, folder: Path) -> None:
    """Columns too: within eight of a tile's, and within the first block of 128."""
    for m, n in ((1, 500), (7, 257), (tile.tokens, 384), (tile.tokens - 1, 511), (2 * tile.tokens + 1, 497)):
        if tile.cluster > 1 and n in (257, 384):
            continue
        q = random_quant(replace(EXACT, n=n))
        x = np.random.default_rng(m).integers(-4, 5, (m, q.k)).astype(np.float16)
        for seed in range(3):
            y = multiplied(marlin, q, x, tile, folder, seed=seed)
            np.testing.assert_array_equal(y, np.float64(x) @ dequantize(q, np.float64).T)


INVARIANT = [
    (case(group=128), "float16"),
    (case("e4m3", scale="f32", group=128, rows=128), "bfloat16"),
    (NVFP4, "float16"),
]


@pytest.mark.parametrize(("c", "dtype"), INVARIANT, ids=str)
def test_a_batch_invariant_row_has_the_same_bits_in_every_tile_that_may_be_chosen(
    c: Case, dtype: str, folder: Path
) -> None:
    q, x = random_quant(c), random_x((261, c.k), dtype)
    spec, x_dtype = marlin.spec(q.outline()), TYPES[dtype]
    tiles = [w for w in TILES if refuse_tile(spec, device(), x_dtype, w) is None and one_order(spec, x_dtype, w)]
    assert len({w.tokens for w in tiles}) > 1
    ys = [multiplied(marlin, q, x[: ROWS[w.tokens]], w, folder).view(np.uint16) for w in tiles]
    for y in ys:
        np.testing.assert_array_equal(y, max(ys, key=len)[: len(y)])
