"""mmq_wgmma's own source, run thread by thread: every kind of strip, whole and cut tiles."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_cases import ROWS, assert_multiplies, device, multiplied, spread
from host_kernels import COMPILER, sources
from host_products import TYPES
from linears import ACTIVATION, random_x
from strip_linears import random_strips
from warptile.kernels import mmq
from warptile.kernels.mmq_hopper_plan import TILES, refuse, refuse_tile
from warptile.kernels.mmq_strips import KINDS
from warptile.kernels.wgmma_plan import Wgmma

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

Kind = tuple[tuple[str, tuple[tuple[str, Any], ...]], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("host"))


# n ends inside a tile, 300 inside a block of strips; k is padded to 256.
CASES = [
    *((kind, (("bias", "f32"),)) for kind in KINDS),
    ("nvfp4", (("n", 500), ("shards", (100, 60, 340)), ("whole", True))),
    ("q4_k", (("n", 300), ("experts", 3), ("bias", "bf16"))),
    ("q6_k", (("n", 500), ("whole", True))),
]


def _every() -> list[tuple[Kind, Wgmma]]:
    """Each kind, type of x and tile that takes them."""
    pairs = []
    for c, dtype, w in product(CASES, ACTIVATION, TILES):
        spec = mmq.spec(made(c).outline())
        if refuse(spec, device(), TYPES[dtype]) is None and refuse_tile(spec, device(), w) is None:
            pairs.append(((c, dtype), w))
    return pairs


def made(case: tuple[str, tuple[tuple[str, Any], ...]], k: int = 300) -> Any:
    kind, more = case
    return random_strips(kind, **{"n": 400, "k": k, **dict(more)})


EVERY = _every()


def check(kind: Kind, tile: Wgmma, folder: Path) -> None:
    case, dtype = kind
    assert_multiplies(mmq, made(case), tile, dtype, folder, 2 if "experts" in dict(case[1]) else 0)


@pytest.mark.parametrize(("kind", "tile"), spread(EVERY, 25))
def test_one_hot_rows_return_the_weights_and_random_ones_their_products(kind: Kind, tile: Wgmma, folder: Path) -> None:
    check(kind, tile, folder)


def test_a_batch_invariant_row_has_the_same_bits_in_every_tile_that_may_be_chosen(folder: Path) -> None:
    q, x = made(("q5_k", ())), random_x((261, 300), "bfloat16")
    spec = mmq.spec(q.outline())
    tiles = [w for w in TILES if refuse_tile(spec, device(), w) is None]
    assert len(tiles) > 4
    ys = [multiplied(mmq, q, x[: ROWS[w.tokens]], w, folder).view(np.uint16) for w in tiles]
    for y in ys:
        np.testing.assert_array_equal(y, max(ys, key=len)[: len(y)])
