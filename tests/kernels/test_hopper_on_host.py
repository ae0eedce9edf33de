"""marlin_wgmma's own source, run thread by thread: clusters, copies, barriers and wgmma as late as they may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hopper_cases import assert_multiplies, device, spread
from host_kernels import COMPILER, sources
from host_products import TYPES
from linears import ACTIVATION, Case, random_quant
from warptile.kernels import marlin
from warptile.kernels.marlin_hopper_plan import TILES, refuse, refuse_tile
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


@pytest.mark.parametrize(("kind", "tile"), spread(EVERY, 60))
def test_one_hot_rows_return_the_weights_and_random_ones_their_products(
    kind: tuple[Case, str], tile: Wgmma, folder: Path
) -> None:
    check(kind, tile, folder)
