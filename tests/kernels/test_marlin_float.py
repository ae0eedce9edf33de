"""Marlin tiles of e4m3 and e2m1 codes: scales where the layout's description puts them, and an exact inverse."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warptile.formats.bits import split_nibbles
from warptile.formats.canonical import (
    ELEMENTS,
    SCALE_DTYPES,
    Level,
    Outline,
    QuantTensor,
    dequantize,
    from_shards,
    same,
)
from warptile.formats.errors import UnsupportedError
from warptile.kernels import marlin
from warptile.kernels.launch import Device

NUMPY = {**SCALE_DTYPES, "i32": np.dtype(np.int32), "u8": np.dtype(np.uint8)}
H200 = Device(arch=90, sms=132, shared=232448)


def factors(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype in ("e8m0", "e4m3"):
        return rng.integers(100, 126, shape, dtype=np.uint8).view(SCALE_DTYPES[dtype])
    return rng.uniform(1e-4, 1e-2, shape).astype(SCALE_DTYPES[dtype])


def tensor(
    element: str, n: int, k: int, scale: str, block: tuple[int, int], *, whole: bool = False,
    shards: tuple[int, ...] = (), experts: int | None = None, perm: bool = False, bias: bool = False, seed: int = 0,
) -> QuantTensor:  # fmt: skip
    """``block`` extents of 0 mean all; ``shards`` cut the global when there is one, else the only level."""
    rng = np.random.default_rng(seed)
    lead, (bn, bk) = () if experts is None else (experts,), (block[0] or n, block[1] or k)
    parts = (*lead, len(shards) or 1, 1)
    if shards and not whole:
        levels = [from_shards(factors(rng, scale, parts), shards, k)]
    else:
        levels = [Level(factors(rng, scale, (*lead, -(-n // bn), -(-k // bk))), (bn, bk))]
    if whole:
        data = factors(rng, "f32", parts)
        levels.append(from_shards(data, shards, k) if shards else Level(data, (n, k)))
    return QuantTensor(
        ELEMENTS[element],
        rng.integers(0, 2 ** ELEMENTS[element].bits, (*lead, n, k), dtype=np.uint8),
        tuple(levels),
        perm=rng.permutation(k).astype(np.int32) if perm else None,
        bias=rng.standard_normal((*lead, n)).astype(np.float16) if bias else None,
    ).check()


def test_a_scale_a_column_is_permuted_as_bytes() -> None:
    q = tensor("e2m1", 128, 96, "e8m0", (1, 32))
    stored = marlin.pack(q)[0]["scales"]
    assert (stored.dtype, stored.shape) == (np.uint8, (4, 128))
    source = q.scales[0].data.view(np.uint8)
    for g in range(3):
        for n in range(128):
            assert stored[g, 64 * (n // 64) + 8 * (n % 8) + n % 64 // 8] == source[n, g]


def test_block_scales_are_the_grid_transposed() -> None:
    q = tensor("e4m3", 576, 320, "f32", (128, 128))
    tensors, spec = marlin.pack(q)
    np.testing.assert_array_equal(tensors["scales"], q.scales[0].data.T)
    assert tensors["scales"].shape == (3, 5)
    assert (spec["scale_block"], spec["group"], spec["k_padded"]) == ([128, 128], 128, 384)
    assert "global" not in spec
    assert "shards" not in spec


def test_one_scale_for_the_whole_is_a_grid_of_one() -> None:
    tensors, spec = marlin.pack(tensor("e4m3", 100, 80, "bf16", (0, 0)))
    assert tensors["scales"].shape == (1, 1)
    assert (spec["group"], spec["scale_block"], spec["k_padded"]) == (-1, [100, 80], 128)


@pytest.mark.parametrize(
    ("experts", "shards", "shape"),
    [(None, (), (1,)), (3, (), (3,)), (None, (60, 20, 20), (3,)), (2, (50, 50), (2, 2))],
)
def test_globals_are_one_f32_a_shard_or_expert(
    experts: int | None, shards: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    q = tensor("e2m1", 100, 64, "e4m3", (1, 16), whole=True, experts=experts, shards=shards)
    tensors, spec = marlin.pack(q)
    assert (tensors["global_scale"].dtype, tensors["global_scale"].shape) == (np.float32, shape)
    assert spec["global"] == "f32"
    assert spec.get("shards", []) == list(shards)
    dense = dequantize(q, np.float64)[..., -1, :]
    last = tensors["global_scale"].reshape(-1)[-1].astype(np.float64)
    fine = q.scales[0].data[..., -1, :].astype(np.float64).repeat(16, axis=-1)
    want = (ELEMENTS["e2m1"].values()[q.codes][..., -1, :] * fine).reshape(-1, 64)[-1] * last
    np.testing.assert_array_equal(dense.reshape(-1, 64)[-1], want)


def test_a_scale_a_shard_needs_no_global() -> None:
    tensors, spec = marlin.pack(tensor("e4m3", 100, 64, "f32", (0, 0), shards=(60, 20, 20)))
    assert set(tensors) == {"qweight", "scales"}
    assert tensors["scales"].shape == (1, 3)
    assert (spec["shards"], spec["scale_block"]) == ([60, 20, 20], [20, 64])


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_codes_are_stored_raw(element: str) -> None:
    """Minus zero, NaN and all others, in the fields that the layout's description gives (k, n)."""
    bits = ELEMENTS[element].bits
    q = replace(
        tensor(element, 64, 64, "f32", (1, 0)), codes=(np.arange(64 * 64) % 2**bits).astype(np.uint8).reshape(64, 64)
    )
    stored = marlin.pack(q)[0]["qweight"].view(np.uint8).reshape(-1)
    fields = split_nibbles(stored) if bits == 4 else stored
    for k in range(64):
        for n in range(64):
            kr, j, b, col = k % 16, n // 16, n % 16 // 8, n % 8
            t, r = kr % 8 // 2, 2 * (kr // 8) + kr % 2
            lane, tile, v = 4 * col + t, k // 16 * 1024, 4 * b + r
            if bits == 4:
                at = tile + 8 * (4 * lane + j) + (v >> 1 | (v & 1) << 2)
            else:
                at = tile + 4 * (8 * lane + 2 * j + b) + [0, 2, 1, 3][r]
            assert fields[at] == q.codes[n, k]


CASES = st.tuples(
    st.sampled_from(
        [
            ("e4m3", "f32", (128, 128), False),
            ("e4m3", "bf16", (128, 128), False),
            ("e4m3", "e8m0", (64, 32), False),
            ("e4m3", "f64", (128, 48), False),
            ("e4m3", "f16", (1, 0), False),
            ("e4m3", "f32", (1, 64), False),
            ("e4m3", "f32", (0, 0), False),
            ("e2m1", "e8m0", (1, 32), False),
            ("e2m1", "e4m3", (1, 16), True),
            ("e2m1", "f16", (1, 128), False),
        ]
    ),
    st.integers(1, 200),
    st.integers(1, 300),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)


@settings(deadline=None, max_examples=120)
@given(CASES)
def test_unpack_inverts_pack_and_outline_inverts_spec(case: tuple) -> None:  # type: ignore[type-arg]
    (element, scale, block, whole), n, k, experts, perm, bias, fused, seed = case
    shards = (n - n // 3, n // 3) if fused and n > 2 and (whole or block == (0, 0)) else ()
    q = tensor(
        element, n, k, scale, block, whole=whole, shards=shards, experts=experts, perm=perm, bias=bias, seed=seed
    )
    assert marlin.accepts(q.outline()) is None
    tensors, spec = marlin.pack(q)
    assert spec == marlin.spec(q.outline()) == marlin.spec(marlin.outline(spec))
    assert {s: (a.dtype, a.shape) for s, a in tensors.items()} == {
        s: (NUMPY[d], shape) for s, (d, shape) in marlin.expected(spec).items()
    }
    assert set(tensors) <= set(marlin.MEMBERS)
    assert same(marlin.unpack(tensors, spec), q) is None


@pytest.mark.parametrize("q", [
    tensor("e4m3", 70, 100, "f32", (128, 128)),
    tensor("e4m3", 70, 100, "bf16", (1, 48)),
    tensor("e2m1", 70, 100, "e8m0", (1, 32)),
    tensor("e2m1", 70, 100, "e4m3", (1, 16), whole=True),
], ids=lambda q: f"{q.element.name}-{q.scales[0].dtype}")  # fmt: skip
def test_padding_decodes_to_zero(q: QuantTensor) -> None:
    tensors, spec = marlin.pack(q)
    codes = marlin.TILES[q.element.bits].unpack(tensors["qweight"])
    assert codes.shape == (spec["k_padded"], spec["n_padded"])
    assert not codes[q.k :].any()
    assert not codes[:, q.n :].any()
    if q.scales[0].block[0] == 1:
        columns = marlin.restore(tensors["scales"], marlin.SCALE_COLUMNS)
        assert not columns[:, q.n :].view(np.uint8).any()
        assert not columns[-(-q.k // q.scales[0].block[1]) :].view(np.uint8).any()


NVFP4 = tensor("e2m1", 96, 64, "e4m3", (1, 16), whole=True).outline()
FP8 = tensor("e4m3", 96, 256, "f32", (64, 64)).outline()


@pytest.mark.parametrize(
    ("outline", "words"),
    [
        (replace(NVFP4, scales=(*NVFP4.scales, ("f32", (96, 64)))), "one level of scales, this has 3"),
        (replace(NVFP4, scales=(NVFP4.scales[0], ("f16", (96, 64)))), "one level of scales, this has 2"),
        (replace(NVFP4, scales=(NVFP4.scales[0], ("f32", (1, 64)))), "one level of scales, this has 2"),
        (replace(NVFP4, element=ELEMENTS["u4b8"]), "one level of scales, this has 2"),
        (replace(NVFP4, shards=(48, 40), scales=(NVFP4.scales[0], ("f32", (8, 64)))), "do not make up 96"),
        (replace(NVFP4, shards=(48, 48), scales=(NVFP4.scales[0], ("f32", (32, 64)))), "do not make up 96"),
        (replace(FP8, scales=(("e4m3", (64, 64)),)), "scales of e4m3 are f16, bf16, f32, e8m0, f64, not e4m3"),
        (replace(FP8, scales=(("f32", (64, 24)),)), "group size 24 is not a multiple of 16"),
        (replace(FP8, element=ELEMENTS["u8b128"]), "one output row, these to 64"),
        (replace(FP8, zero_max=0), "already carries a fixed zero point"),
        (replace(FP8, element=ELEMENTS["iq4"]), "no Marlin tile for element iq4"),
    ],
)
def test_refusals_say_why(outline: Outline, words: str) -> None:
    assert words in (marlin.accepts(outline) or "accepted")
    assert marlin.accepts(NVFP4) is None
    assert marlin.accepts(FP8) is None


def test_shards_are_cut_where_they_are_told() -> None:
    level = from_shards(np.array([[2.0], [3.0], [5.0]], np.float32), (12, 4, 8), 16)
    assert level.block == (gcd(12, 4, 8), 16)
    np.testing.assert_array_equal(level.data[:, 0], [2, 2, 2, 3, 5, 5])


def test_plan_names_what_has_no_kernel() -> None:
    spec = marlin.spec(replace(FP8, scales=(("f64", (64, 64)),)))
    for m in (1, 64):
        with pytest.raises(
            UnsupportedError,
            match=r"no Marlin kernel.*found e4m3 with f64 .1 / .*need .*e8m0 scales",
        ):
            marlin.plan(spec, m, H200, "bf16")


@pytest.mark.parametrize("outline", [FP8, NVFP4], ids=lambda q: q.element.name)
def test_plan_takes_what_the_layout_packs(outline: Outline) -> None:
    for m in (1, 64):
        assert marlin.plan(marlin.spec(outline), m, H200, "bf16").stages
