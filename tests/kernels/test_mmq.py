"""MMQ strips: every byte against loops written from the layout's description, round trips, padding, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from math import gcd
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warptile.formats import bits, gguf_blocks
from warptile.formats import spec as specs
from warptile.formats.canonical import (
    ELEMENTS,
    SCALE_DTYPES,
    Level,
    Outline,
    QuantTensor,
    dequantize,
    from_shards,
    grid_shape,
    same,
)
from warptile.formats.errors import CorruptError
from warptile.formats.stream import Blocks, Pieces, Stream, joined, streamed
from warptile.kernels import layouts, mmq

# kind -> (element, scales, offsets, bytes of a strip); offsets of q4_1 and q5_1 are minus the stored minimum
KINDS: dict[str, tuple[str, tuple[tuple[str, int], ...], tuple[tuple[str, int], ...], int]] = {
    "q8_0": ("s8", (("f16", 32),), (), 4352),
    "q4_0": ("u4b8", (("f16", 32),), (), 2304),
    "q4_k": ("u4", (("u6", 32), ("f16", 256)), (("u6", 32), ("f16", 256)), 2368),
    "q5_k": ("u5", (("u6", 32), ("f16", 256)), (("u6", 32), ("f16", 256)), 2880),
    "q6_k": ("u6b32", (("s8", 16), ("f16", 256)), (), 3360),
    "mxfp4": ("e2m1", (("e8m0", 32),), (), 2176),
    "nvfp4": ("e2m1", (("e4m3", 16),), (), 2304),
    "q4_1": ("u4", (("f16", 32),), (("f16", 32),), 2560),
    "q5_0": ("u5b16", (("f16", 32),), (), 2816),
    "q5_1": ("u5", (("f16", 32),), (("f16", 32),), 3072),
    "iq4_nl": ("iq4", (("f16", 32),), (), 2304),
    "iq4_xs": ("iq4", (("s8", 32), ("f16", 256)), (), 2208),
    "fp8": ("e4m3", (("f32", 128),), (), 4096),
}


def level(rng: np.random.Generator, dtype: str, lead: tuple[int, ...], n: int, k: int, block: tuple[int, int]) -> Level:
    """Random bytes, but for exponents that would make f16, bf16 or f32 no numbers."""
    kind = SCALE_DTYPES[dtype]
    raw = rng.integers(0, 256, (*lead, *grid_shape(n, k, block), kind.itemsize), dtype=np.uint8)
    if kind.kind == "f" or dtype == "bf16":
        raw[..., -1] &= 0xBB
    return Level(raw.view(kind)[..., 0], block)


def tensor(
    kind: str,
    n: int = 100,
    k: int = 2880,
    *,
    experts: int | None = None,
    group: int | None = None,
    whole: bool = False,
    bias: bool = False,
    element: str | None = None,
    seed: int = 0,
) -> QuantTensor:
    name, scales, offsets, _ = KINDS[kind]
    rng = np.random.default_rng(seed)
    lead = () if experts is None else (experts,)
    e = ELEMENTS[element or name]

    def levels(rows: tuple[tuple[str, int], ...]) -> list[Level]:
        made = [
            level(rng, d, lead, n, k, (1, min(bk if group is None or i else group, max(k, 1))))
            for i, (d, bk) in enumerate(rows)
        ]
        return [replace(x, block=(1, rows[i][1])) if group is None else x for i, x in enumerate(made)]

    all_scales = levels(scales)
    minima = levels(offsets)
    if whole:
        factor = Level(rng.random((*lead, 1, 1), np.float32), (n, k))
        all_scales.append(factor)
        minima += [factor] if minima else []
    return QuantTensor(
        element=e,
        codes=rng.integers(0, 2**e.bits, (*lead, n, k), dtype=np.uint8),
        scales=tuple(all_scales),
        offsets=tuple(minima),
        bias=rng.random((*lead, n), np.float32) if bias else None,
    ).check()


def by_hand(kind: str, q: QuantTensor) -> np.ndarray:
    """The strips of a matrix, one code at a time."""
    n, k = q.codes.shape
    strip = KINDS[kind][3]
    np_, kp = -(-n // 128) * 128, -(-k // 256) * 256
    out = np.zeros((np_ // 128, kp // 256, 8, strip), np.uint8)
    flip = {"q4_0": 8, "q6_k": 32}.get(kind, 0x80 if q.element.name == "u8b128" else 0)
    for row in range(n):
        for column in range(k):
            code = int(q.codes[row, column]) ^ flip
            s = out[row // 128, column // 256, row % 128 // 16]
            c, i, unit = column % 32, row % 16, column % 256 // 32
            r, lane = i // 8 + 2 * (c // 16), 4 * (i % 8) + c % 16 // 4
            b = c % 4
            assert (lane // 4 + 8 * (r & 1), 16 * (r >> 1) + 4 * (lane % 4) + b) == (i, c)
            p, slice_ = unit // 2, unit % 2
            if kind in ("q8_0", "fp8"):
                s[512 * unit + 16 * lane + 4 * r + b] = code
                continue
            s[512 * p + 16 * lane + 4 * r + b] |= (code & 15) << 4 * slice_
            if kind in ("q5_0", "q5_1", "q5_k"):
                words = s[2048 : 2048 + 512].view("<u4")
                words[4 * lane + p] |= np.uint32((code >> 4) << (8 * b + 2 * r + slice_))
            if kind == "q6_k":
                words = s[2048 : 2048 + 1024].view("<u4")
                words[64 * p + 2 * lane + slice_] |= np.uint32((code >> 4) << (8 * b + 2 * r))
    base = {"q8_0": 4096, "fp8": 4096, "q5_0": 2560, "q5_1": 2560, "q5_k": 2560, "q6_k": 3072}.get(kind, 2048)

    def put(row: int, step: int, at: int, value: Any) -> None:
        data = np.array([value]).view(np.uint8)
        out[row // 128, step, row % 128 // 16, at : at + len(data)] = data

    def stored(grid: Level, row: int, weight: int) -> Any:
        return grid.data[row, weight // grid.block[1]]

    for row in range(n if kind != "fp8" else 0):
        i = row % 16
        for column in range(0, k, 16):
            step, inner = column // 256, column % 256
            g = inner // 32
            value = stored(q.scales[0], row, column)
            if kind in ("q8_0", "q4_0", "q5_0", "iq4_nl"):
                put(row, step, base + 2 * (8 * i + g), value)
            elif kind in ("q4_1", "q5_1"):
                put(row, step, base + 4 * (8 * i + g), value)
                put(row, step, base + 4 * (8 * i + g) + 2, -stored(q.offsets[0], row, column))
            elif kind in ("q4_k", "q5_k"):
                put(row, step, base + 16 * i + g, value)
                put(row, step, base + 16 * i + 8 + g, stored(q.offsets[0], row, column))
                put(row, step, base + 256 + 4 * i, stored(q.scales[1], row, column))
                put(row, step, base + 256 + 4 * i + 2, stored(q.offsets[1], row, column))
            elif kind == "q6_k":
                put(row, step, base + 16 * i + inner // 16, value)
                put(row, step, base + 256 + 2 * i, stored(q.scales[1], row, column))
            elif kind == "iq4_xs":
                put(row, step, base + 8 * i + g, value)
                put(row, step, base + 128 + 2 * i, stored(q.scales[1], row, column))
            elif kind == "mxfp4":
                put(row, step, base + 8 * i + g, value.view(np.uint8))
            elif kind == "nvfp4":
                put(row, step, base + 16 * i + inner // 16, value.view(np.uint8))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_where_the_layout_says(kind: str) -> None:
    for n, k in ((17, 288), (130, 32)):
        q = tensor(kind, n, k)
        tensors, spec = mmq.pack(q)
        assert spec["kind"] == kind
        assert tensors["strips"].shape[-1] == KINDS[kind][3]
        np.testing.assert_array_equal(tensors["strips"], by_hand(kind, q))


@pytest.mark.parametrize("kind", KINDS)
def test_a_k_of_2880_and_an_n_of_100(kind: str) -> None:
    q = tensor(kind, 100, 2880)
    tensors, spec = mmq.pack(q)
    assert tensors["strips"].shape == (1, 12, 8, KINDS[kind][3])
    assert same(mmq.unpack(tensors, spec), q) is None


@pytest.mark.parametrize("kind", KINDS)
def test_large_ones_take_the_same_map(kind: str) -> None:
    """Enough codes for compiled loops, when there are some."""
    q = tensor(kind, 512, 1024)
    tensors, spec = mmq.pack(q)
    small = replace(
        q,
        codes=q.codes[128:256, 256:512],
        scales=tuple(Level(x.data[128:256, 256 // x.block[1] : 512 // x.block[1]], x.block) for x in q.scales),
        offsets=tuple(Level(x.data[128:256, 256 // x.block[1] : 512 // x.block[1]], x.block) for x in q.offsets),
    )
    np.testing.assert_array_equal(tensors["strips"][1:2, 1:2], by_hand(kind, small))
    assert same(mmq.unpack(tensors, spec), q) is None


@pytest.mark.parametrize("kind", ["q4_0", "q5_k", "fp8"])
def test_any_rectangle_and_any_piece(kind: str) -> None:
    q = tensor(kind, 300, 700, experts=2)
    tensors, spec = mmq.pack(q)
    stored, _ = mmq.stream(streamed(q))
    assert isinstance(stored["strips"], Pieces)
    np.testing.assert_array_equal(joined(stored["strips"]), tensors["strips"])
    stream = mmq.view(tensors, spec)
    for e, rows, columns in (
        (0, slice(0, 300), slice(0, 700)),
        (1, slice(130, 140), slice(250, 600)),
        (1, slice(299, 300), slice(0, 1)),
    ):
        np.testing.assert_array_equal(stream.slab(e, rows, columns), q.codes[e, rows, columns])


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_round_trips(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(KINDS)))
    n, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 700))
    single = len(KINDS[kind][1]) == 1
    native = KINDS[kind][1][0][1]
    group = (
        data.draw(st.sampled_from([None, k, *(native * i for i in (1, 2, 3, 8) if native * i <= k)]))
        if single
        else None
    )
    q = tensor(
        kind,
        n,
        k,
        experts=data.draw(st.sampled_from([None, 1, 3])),
        group=group,
        whole=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    outline = q.outline()
    assert mmq.accepts(outline) is None
    tensors, spec = mmq.pack(q)
    assert same(mmq.unpack(tensors, spec), q) is None
    assert spec == mmq.spec(outline) == mmq.spec(mmq.outline(json.loads(json.dumps(spec))))
    assert {suffix: (a.dtype, a.shape) for suffix, a in tensors.items()} == {
        suffix: (np.dtype(np.uint8) if d == "u8" else SCALE_DTYPES[d], shape)
        for suffix, (d, shape) in mmq.expected(spec).items()
    }
    assert set(tensors) <= set(mmq.MEMBERS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp8"])
def test_groups_of_padding_have_scale_zero(kind: str) -> None:
    """Unpacked to the padded extents, whatever lies past k in a group of its own, or past n, has zero factors."""
    q = tensor(kind, 100, 256 + 32)
    tensors, spec = mmq.pack(q)
    whole = mmq.unpack(tensors, {**spec, "n": 128, "k": 512})
    for i, level in enumerate((*whole.scales, *whole.offsets)):
        raw = np.ascontiguousarray(level.data).view(np.uint8).reshape(128, -1, level.data.dtype.itemsize)
        groups = -(-288 // level.block[1])
        if kind in ("q4_1", "q5_1") and i == 1:  # minus zero as it is stored, plus zero
            raw = raw & np.array([255, 127], np.uint8)
        assert not raw[100:].any()
        assert not raw[:, groups:].any()


@pytest.mark.parametrize(("group", "k"), [(32, 96), (64, 200), (128, 300), (-1, 100), (96, 96)])
def test_coarser_groups_of_other_sources_repeat_their_scale(group: int, k: int) -> None:
    rng = np.random.default_rng(1)
    block = k if group == -1 else group
    data = rng.random((40, -(-k // block))).astype(np.float16)
    for element, kind, flip in (("u4b8", "q4_0", 8), ("u8b128", "q8_0", 128)):
        codes = rng.integers(0, 2 ** ELEMENTS[element].bits, (40, k), dtype=np.uint8)
        q = QuantTensor(ELEMENTS[element], codes, (Level(data, (1, block)),)).check()
        tensors, spec = mmq.pack(q)
        assert (spec["kind"], spec["group"], spec["element"]) == (kind, -1 if block >= k else group, element)
        assert same(mmq.unpack(tensors, spec), q) is None
        fine = np.repeat(data, -(-block // 32) if group != -1 else -(-k // 32), axis=1)[:, : -(-k // 32)]
        native = replace(q, codes=q.codes, scales=(Level(np.ascontiguousarray(fine), (1, 32)),))
        np.testing.assert_array_equal(tensors["strips"], mmq.pack(native)[0]["strips"])
        np.testing.assert_array_equal(tensors["strips"], by_hand(kind, native))
        assert flip == {"q4_0": 8, "q8_0": 128}[kind]


def test_signed_and_biased_bytes_are_the_same_strips() -> None:
    a = tensor("q8_0", 64, 256)
    b = replace(a, element=ELEMENTS["u8b128"], codes=a.codes ^ np.uint8(0x80))
    np.testing.assert_array_equal(dequantize(a), dequantize(b))
    np.testing.assert_array_equal(mmq.pack(a)[0]["strips"], mmq.pack(b)[0]["strips"])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "e8m0", "f64"])
@pytest.mark.parametrize("block", [(128, 128), (1, 300), (200, 300), (1, 64)])
def test_fp8_keeps_its_grid_k_first(dtype: str, block: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (200, 300), dtype=np.uint8)
    q = QuantTensor(ELEMENTS["e4m3"], codes, (level(rng, dtype, (), 200, 300, block),)).check()
    tensors, spec = mmq.pack(q)
    stored = tensors["scales"].view(SCALE_DTYPES[dtype])
    assert stored.tobytes() == np.ascontiguousarray(q.scales[0].data.T).tobytes()
    assert same(mmq.unpack(tensors, spec), q) is None
    assert spec == mmq.spec(mmq.outline(spec))


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize("experts", [None, 2])
def test_one_factor_for_each_shard(kind: str, experts: int | None) -> None:
    shards, k = (96, 32, 32), 256
    q = tensor(kind, sum(shards), k, experts=experts)
    lead = () if experts is None else (experts,)
    factors = np.arange(1, 1 + 3 * (experts or 1), dtype=np.float32).reshape(*lead, 3, 1)
    parts = from_shards(factors, shards, k)
    q = replace(q, scales=(parts,) if kind == "fp8" else (*q.scales, parts)).check()
    tensors, spec = mmq.pack(q)
    suffix, shape = ("scales", (*lead, 1, 3)) if kind == "fp8" else ("global_scale", (*lead, 3))
    assert tensors[suffix].shape == shape
    assert tensors[suffix].reshape(-1).tolist() == factors.reshape(-1).tolist()
    assert same(mmq.unpack(tensors, spec), q) is None
    assert spec == mmq.spec(mmq.outline(spec))
    assert parts.block[0] == gcd(*shards)


BASE = Outline(ELEMENTS["u4b8"], 64, 256, None, (("f16", (1, 32)),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"element": ELEMENTS["u2b2"]}, "2-bit codes have no strip; --widen"),
        ({"element": ELEMENTS["u2"], "scales": (("u6", (1, 16)), ("f16", (1, 256)))}, "no strip for element u2"),
        ({"element": ELEMENTS["iq3"]}, "no strip for element iq3"),
        ({"element": ELEMENTS["u8"]}, "no strip for element u8"),
        ({"zero_max": 3}, "integer zero points"),
        ({"perm": True}, "act-order"),
        ({"scales": (("bf16", (1, 32)),)}, "q4_0 strips hold scales f16 (1, 32); this has scales bf16 (1, 32)"),
        ({"scales": (("f16", (1, 16)),)}, "this has scales f16 (1, 16)"),
        ({"scales": (("f16", (1, 48)),)}, "this has scales f16 (1, 48)"),
        ({"scales": (("f16", (2, 32)),)}, "this has scales f16 (2, 32)"),
        ({"scales": (("f16", (1, 32)), ("f16", (64, 256)))}, "f16 (1, 32) x f16 (64, 256)"),
        ({"scales": (("f16", (1, 32)), ("f32", (32, 256)))}, "f32 (32, 256)"),
        ({"offsets": (("f16", (1, 32)),)}, "this has scales f16 (1, 32) less f16 (1, 32)"),
        (
            {"element": ELEMENTS["u4"]},
            "q4_1 strips hold scales f16 (1, 32) less f16 (1, 32); q4_k strips hold scales u6",
        ),
        (
            {"element": ELEMENTS["u4"], "scales": (("f16", (1, 64)),), "offsets": (("f16", (1, 32)),)},
            "this has scales f16 (1, 64) less f16 (1, 32)",
        ),
        (
            {
                "element": ELEMENTS["u4"],
                "scales": (("f16", (1, 32)), ("f32", (64, 256))),
                "offsets": (("f16", (1, 32)),),
            },
            "this has scales f16 (1, 32) x f32 (64, 256) less f16 (1, 32)",
        ),
        (
            {"element": ELEMENTS["u6b32"], "scales": (("s8", (1, 32)), ("f16", (1, 256)))},
            "q6_k strips hold scales s8 (1, 16) x f16 (1, 256)",
        ),
        ({"element": ELEMENTS["e4m3"], "scales": (("e4m3", (1, 16)),)}, "fp8 strips hold scales f16 or bf16 or f32"),
        (
            {"element": ELEMENTS["e4m3"], "scales": (("f32", (32, 256)),), "shards": (32, 64)},
            "shards of 32, 64 rows do not make up 64",
        ),
        ({"shards": (32, 32)}, "this has"),
    ],
)
def test_refusals_say_what_is_held_and_what_was_found(change: dict[str, Any], words: str) -> None:
    assert mmq.accepts(BASE) is None
    assert words in (mmq.accepts(replace(BASE, **change)) or "accepted")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("kind", kind) for kind in ("q4_1", "q8_0", "q9_9", "")),
        *(("n_padded", 256), ("k_padded", 256), ("group", 64), ("scale", "bf16"), ("scale_block", [1, 48])),
        *(("perm", True), ("zero", "int"), ("element", "u4"), ("element", "s8"), ("shards", [50, 50]), ("n", 129)),
    ],
)
def test_a_spec_that_is_not_the_layouts_own_is_refused(tmp_path: Any, key: str, value: object) -> None:
    spec = {**mmq.spec(tensor("q4_0", 100, 300).outline()), "source": {"format": "gguf"}}
    specs.check_spec(tmp_path / "a", "m", spec, layouts())
    with pytest.raises(CorruptError):
        specs.check_spec(tmp_path / "a", "m", {**spec, key: value}, layouts())


@pytest.mark.parametrize("key", ["kind", "n", "scale", "scale_block", "element", "experts", "bias", "perm"])
def test_a_spec_without_a_key_is_refused(tmp_path: Any, key: str) -> None:
    spec = {**mmq.spec(tensor("q4_k", 100, 512).outline()), "source": {"format": "gguf"}}
    del spec[key]
    with pytest.raises(CorruptError, match=key):
        specs.check_spec(tmp_path / "a", "m", spec, layouts())


def test_the_layout_is_registered() -> None:
    assert layouts()["mmq"] is mmq


def test_bias_keeps_its_dtype_and_order() -> None:
    q = replace(tensor("q5_k", 8, 256), bias=np.arange(8).astype(ml_dtypes.bfloat16))
    tensors, spec = mmq.pack(q)
    assert spec["bias"] == "bf16"
    assert tensors["bias"].tolist() == list(range(8))
    assert same(mmq.unpack(tensors, spec), q) is None


BLOCKS = {
    **{"Q4_0": "q4_0", "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q8_0": "q8_0", "Q4_K": "q4_k", "Q5_K": "q5_k"},
    **{"Q6_K": "q6_k", "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs", "MXFP4": "mxfp4", "NVFP4": "nvfp4"},
}


def blocks_and_codes(name: str, n: int, k: int) -> tuple[Stream, QuantTensor]:
    kind = gguf_blocks.BLOCK_TYPES[name]
    data = np.random.default_rng(n + k).integers(0, 256, (n, k // kind.size * kind.nbytes), dtype=np.uint8)
    scales, offsets = gguf_blocks.unpack_factors(kind, data)
    q = QuantTensor(gguf_blocks.element(kind), gguf_blocks.unpack_codes(kind, data), scales, offsets=offsets)
    fields = gguf_blocks.code_fields(kind)
    assert fields is not None
    return replace(streamed(q), blocks=Blocks(fields, lambda _, rows: data[rows])), q


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (300, 768), (17, 512), (128, 2880)])
def test_blocks_move_to_where_their_codes_are_packed(name, n, k, compiled, monkeypatch) -> None:
    if k % gguf_blocks.BLOCK_TYPES[name].size:
        k = 2816
    stream, _ = blocks_and_codes(name, n, k)
    if n % 128 == k % 256 == 0:
        stream = replace(stream, slab=None)
    stored, spec = mmq.stream(stream)
    assert spec["kind"] == BLOCKS[name]
    strips = joined(stored["strips"])
    monkeypatch.setattr(bits, "_compiled", lambda: None)
    _, q = blocks_and_codes(name, n, k)
    tensors, _ = mmq.pack(q)
    np.testing.assert_array_equal(strips, tensors["strips"])


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loops_read_what_numpy_reads(kind, compiled, monkeypatch) -> None:
    q = tensor(kind, 200, 2880, experts=2)
    tensors, spec = mmq.pack(q)
    again = mmq.unpack(tensors, spec)
    monkeypatch.setattr(bits, "_compiled", lambda: None)
    np.testing.assert_array_equal(mmq.pack(q)[0]["strips"], tensors["strips"])
    assert same(mmq.unpack(tensors, spec), again) is None
    assert same(again, q) is None
