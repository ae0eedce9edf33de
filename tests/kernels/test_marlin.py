"""The marlin layout: bytes against loops over the published map, and an exact inverse for all it accepts."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES, Level, QuantTensor, dequantize, same
from warptile.kernels import layouts, marlin

NUMPY = {**SCALE_DTYPES, "i32": np.dtype(np.int32)}


def tensor(
    element: str, n: int, k: int, group: int, *, zero: bool = False, perm: bool = False, bias: bool = False,
    scale: str = "f16", experts: int | None = None, seed: int = 0,
) -> QuantTensor:  # fmt: skip
    rng = np.random.default_rng(seed)
    e, lead = ELEMENTS[element], () if experts is None else (experts,)
    grid = (*lead, n, 1 if group == -1 else -(-k // group))
    return QuantTensor(
        element=e,
        codes=rng.integers(0, 2**e.bits, (*lead, n, k), dtype=np.uint8),
        scales=(Level(rng.standard_normal(grid).astype(SCALE_DTYPES[scale]), (1, k if group == -1 else group)),),
        zero=rng.integers(0, 2**e.bits, grid, dtype=np.uint8) if zero else None,
        perm=rng.permutation(k).astype(np.int32) if perm else None,
        bias=rng.standard_normal((*lead, n)).astype(np.float16) if bias else None,
    ).check()


def nibble(words: np.ndarray, i: int) -> int:
    return int(words.view(np.uint32)[i // 8] >> (4 * (i % 8))) & 15


@pytest.mark.parametrize("bits", [4, 8])
def test_words_follow_the_published_map(bits: int) -> None:
    """Each (k, n) looked up in the packed words by the formula of the layout, coordinate by coordinate."""
    q = tensor("u4b8" if bits == 4 else "u8b128", 128, 128, 64)
    words = marlin.pack(q)[0]["qweight"].reshape(-1).view(np.uint32)
    for k in range(0, 128, 3):
        for n in range(128):
            kr, nc = k % 16, n % 64
            j, b, col = nc // 16, (nc % 16) // 8, nc % 8
            t, r = (kr % 8) // 2, 2 * (kr // 8) + kr % 2
            tile = (k // 16) * 2 + n // 64
            if bits == 4:
                v = 4 * b + r
                code = words[tile * 128 + 4 * (4 * col + t) + j] >> np.uint32(4 * ((v >> 1) | ((v & 1) << 2))) & 15
            else:
                code = words[tile * 256 + 8 * (4 * col + t) + 2 * j + b] >> np.uint32(8 * [0, 2, 1, 3][r]) & 255
            assert code == q.codes[n, k]


def test_a_lane_finds_its_fragment_in_one_load() -> None:
    """Nibbles 0, 4, 1, 5 of lane (col, t) are a0 and a2 of mma.m16n8k16: row col, k = 2t, 2t+1, 2t+8, 2t+9."""
    q = tensor("u4b8", 64, 64, 64)
    words = marlin.pack(q)[0]["qweight"].reshape(4, 32, 4).view(np.uint32)
    for lane in range(32):
        col, t = divmod(lane, 4)
        for j in range(4):
            word = words[1, lane, j]
            low = [int(word >> np.uint32(4 * p)) & 15 for p in (0, 4, 1, 5)]
            high = [int(word >> np.uint32(4 * p)) & 15 for p in (2, 6, 3, 7)]
            columns = [16 + c for c in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
            assert low == list(q.codes[16 * j + col, columns])
            assert high == list(q.codes[16 * j + col + 8, columns])


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_zeros_follow_the_published_map(bits: int) -> None:
    q = tensor(f"u{bits}", 128, 96, 32, zero=True)
    tensors, _ = marlin.pack(q)
    assert q.zero is not None
    zeros = tensors["qzeros"].view(np.uint32)
    for g in range(3):
        for n in range(128):
            c, i, v = n // 64, n % 8, n % 64 // 8
            assert tensors["scales"][g, 64 * c + 8 * i + v] == q.scales[0].data[n, g]
            if bits == 4:
                p = [0, 2, 4, 6, 1, 3, 5, 7].index(v)
                assert zeros[g, 8 * c + i] >> np.uint32(4 * p) & 15 == q.zero[n, g]
            else:
                h, p = v // 4, [0, 2, 1, 3].index(v % 4)
                assert zeros[g, 16 * c + 2 * i + h] >> np.uint32(8 * p) & 255 == q.zero[n, g]


CASES = st.tuples(
    st.sampled_from(["u4b8", "u4", "u8b128", "u8", "s8"]),
    st.integers(1, 200),
    st.integers(1, 300),
    st.sampled_from([16, 32, 48, 64, 128, 256, -1]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["f16", "bf16", "f32"]),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 2**32),
)


@settings(deadline=None, max_examples=150)
@given(CASES)
def test_unpack_inverts_pack_and_expected_names_every_tensor(case: tuple) -> None:  # type: ignore[type-arg]
    element, n, k, group, zero, perm, bias, scale, experts, seed = case
    zero = zero and element in ("u4", "u8")
    q = tensor(element, n, k, group, zero=zero, perm=perm, bias=bias, scale=scale, experts=experts, seed=seed)
    assert marlin.accepts(q.outline()) is None
    tensors, spec = marlin.pack(q)
    assert spec == marlin.spec(q.outline())
    assert {s: (a.dtype, a.shape) for s, a in tensors.items()} == {
        s: (NUMPY[d], shape) for s, (d, shape) in marlin.expected(spec).items()
    }
    assert all(a.flags.c_contiguous or s == "bias" for s, a in tensors.items())
    assert same(marlin.unpack(tensors, spec), q) is None


@pytest.mark.parametrize("group", [32, 48, 128, -1])
@pytest.mark.parametrize("element", ["u4b8", "u4", "u8b128", "u8", "s8"])
def test_padding_decodes_to_zero(element: str, group: int) -> None:
    """Read to the padded extents, the weights outside n x k are zero: a product over padding changes nothing."""
    n, k = 70, 100
    q = tensor(element, n, k, group, zero=element in ("u4", "u8"), perm=True)
    tensors, spec = marlin.pack(q)
    whole = {
        **spec,
        "n": spec["n_padded"],
        "k": spec["k_padded"],
        "scale_block": [1, group if group != -1 else spec["k_padded"]],
    }
    w = dequantize(marlin.unpack(tensors, whole), np.float64)
    np.testing.assert_array_equal(w[:n, :k], dequantize(q, np.float64))
    assert not w[n:].any()
    assert not w[:, k:].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"element": ELEMENTS["u3b4"]}, "--widen"),
        ({"element": ELEMENTS["u6b32"]}, "no Marlin tile for element u6b32"),
        ({"scales": (("f16", (1, 24)),)}, "group size 24 is not a multiple of 16"),
        ({"scales": (("f16", (2, 32)),)}, "one output row"),
        ({"scales": (("u6", (1, 32)), ("f16", (1, 256)))}, "one level of scales"),
        ({"scales": (("e8m0", (1, 32)),)}, "not e8m0"),
        ({"offsets": (("f16", (1, 32)),)}, "scaled minima"),
        ({"element": ELEMENTS["u4"], "zero_max": 16}, "zero point 16 does not fit 4 bits"),
        ({"zero_max": 3}, "already carries a fixed zero point"),
    ],
)
def test_refusals_say_why_and_what_to_do(change: dict, words: str) -> None:  # type: ignore[type-arg]
    outline = tensor("u4b8", 64, 128, 32).outline()
    assert marlin.accepts(outline) is None
    assert words in (marlin.accepts(replace(outline, **change)) or "accepted")


def test_layout_is_listed_by_its_file_name() -> None:
    assert layouts()["marlin"] is marlin


def test_bf16_bias_keeps_its_dtype() -> None:
    q = replace(tensor("u4b8", 8, 64, 32), bias=np.ones(8, ml_dtypes.bfloat16))
    tensors, spec = marlin.pack(q)
    assert spec["bias"] == "bf16"
    assert tensors["bias"].dtype == ml_dtypes.bfloat16
