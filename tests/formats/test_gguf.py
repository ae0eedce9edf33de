"""GGUF modules: values by the gguf package's arithmetic, very bytes back, what is refused, the order of rope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
from gguf_files import TYPES, Stored, model, write
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import zoo
from warptile.convert import convert, unpack, verify
from warptile.formats import gguf, gguf_blocks
from warptile.formats.canonical import QuantTensor, dequantize
from warptile.formats.container import Checkpoint, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.formats.gguf_blocks import BLOCK_TYPES
from warptile.formats.options import Options
from warptile.formats.tensor import Tensor
from warptile.kernels import layouts, marlin, mmq
from warptile.runtime import Session

# Type -> (bytes of a block's scales that cannot be any byte: at, count, last legal one)
LEGAL = {"MXFP4": (0, 1, 254), "NVFP4": (0, 4, 0x7E)}
# Type -> where its f16 factors are
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_S": (0,)},
    **{"MXFP4": (), "NVFP4": ()},
}


def type_id(name: str) -> package.GGMLQuantizationType:
    return package.GGMLQuantizationType[name]


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """uint8 [.., n, blocks * bytes]: any bits, but legal factors (f16 of all finite sizes and both signs)."""
    size = package.GGML_QUANT_SIZES[type_id(name)][1]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    for at in HALVES[name]:
        half = rng.integers(0, 0x7C00, shape, dtype=np.uint16) | rng.choice(np.array([0, 0x8000], np.uint16), shape)
        blocks[..., at : at + 2] = half[..., None].view(np.uint8)
    if name in LEGAL:
        at, count, last = LEGAL[name]
        blocks[..., at : at + count] = rng.integers(0, last + 1, (*shape, count))
    return blocks.reshape(*shape[:-1], -1)


def quant(name: str, data: np.ndarray) -> QuantTensor:
    kind = BLOCK_TYPES[name]
    codes, (scales, offsets) = gguf_blocks.unpack_codes(kind, data), gguf_blocks.unpack_factors(kind, data)
    return QuantTensor(gguf_blocks.element(kind), codes, scales, offsets=offsets).check()


def bits(name: str, values: np.ndarray) -> np.ndarray:
    """float32 as integers. ggml's table has plain 0 for code 8 of e2m1, which is minus zero: there signs of zero go."""
    return (values + np.float32(0) if name in LEGAL else values).astype(np.float32).view(np.uint32)


def test_there_is_a_row_for_every_type_in_the_documents() -> None:
    wanted = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S MXFP4 NVFP4"
    assert set(BLOCK_TYPES) == set(wanted.split())
    for name, kind in BLOCK_TYPES.items():
        assert (kind.size, kind.nbytes) == package.GGML_QUANT_SIZES[type_id(name)]


@pytest.mark.parametrize("name", BLOCK_TYPES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_are_ggmls_bit_for_bit(name: str, seed: int) -> None:
    data = random_blocks(name, (8, 24), seed)
    with np.errstate(over="ignore"):
        theirs = package.quants.dequantize(data, type_id(name))
    np.testing.assert_array_equal(bits(name, dequantize(quant(name, data))), bits(name, theirs))


def test_every_scale_of_mxfp4_and_nvfp4() -> None:
    for name, (at, count, last) in LEGAL.items():
        data = random_blocks(name, (last + 1, 1)).reshape(last + 1, -1)
        data[:, at : at + count] = np.arange(last + 1, dtype=np.uint8)[:, None]
        with np.errstate(over="ignore"):
            theirs = package.quants.dequantize(data, type_id(name))
        np.testing.assert_array_equal(bits(name, dequantize(quant(name, data))), bits(name, theirs))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_bytes_come_back(name: str) -> None:
    """NaN payloads and illegal scales too: the two directions are inverse whatever a file holds."""
    kind = BLOCK_TYPES[name]
    for shape in ((5, 3 * kind.nbytes), (2, 3, kind.nbytes)):
        data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        q = quant(name, data)
        assert int(q.codes.max()) < 2**q.element.bits
        np.testing.assert_array_equal(gguf_blocks.pack(kind, q.codes, q.scales, q.offsets), data)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_many_rows_are_read_like_few(name: str) -> None:
    """Enough of them for compiled loops, when there are some."""
    data = random_blocks(name, (1536, 1024 // BLOCK_TYPES[name].size))
    many, few = quant(name, data), quant(name, data[700:703])
    np.testing.assert_array_equal(many.codes[700:703], few.codes)
    for a, b in zip((*many.scales, *many.offsets), (*few.scales, *few.offsets), strict=True):
        assert a.data[700:703].tobytes() == b.data.tobytes()


def checkpoint(
    folder: Path, *tensors: Stored, options: Options | None = None, pairs: dict[str, tuple[str, Any]] | None = None
) -> Checkpoint:
    return open_checkpoint(write(folder / "model.gguf", tensors, model() if pairs is None else pairs), options)


def stored(
    name: str, kind: str, n: int = 4, k: int = 512, lead: tuple[int, ...] = (), seed: int = 0
) -> tuple[Stored, np.ndarray]:
    number = type_id(kind)
    size, _ = package.GGML_QUANT_SIZES[number]
    data = random_blocks(kind, (*lead, n, k // size), seed)
    base = kind if kind in TYPES else "F32"
    return Stored(name, base, (k, n, *reversed(lead)), data.tobytes(), id=int(number)), data


def check(given: Checkpoint, module: str) -> QuantTensor:
    """describe foretells read; write gives the bytes back, also through every layout that takes the module."""
    outline = gguf.describe(given, module)
    q = gguf.read(given, module).check()
    assert q.outline() == outline
    members = gguf.modules(given)[module]
    tensors = [gguf.write(module, q)]
    for layout in (marlin, mmq):
        if layout.accepts(outline) is None:
            back = layout.unpack(*layout.pack(q))
            tensors.append(gguf.write(module, QuantTensor(**{**vars(back), "source": q.source})))
    for written in tensors:
        assert set(written) == set(members)
        for name, array in written.items():
            assert array.shape == given.tensors[name].shape
            assert np.ascontiguousarray(array).tobytes() == given.tensors[name].raw().tobytes()
    return q


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "experts"])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_modules_of_every_type(tmp_path: Path, kind: str, lead: tuple[int, ...]) -> None:
    tensor, data = stored("blk.0.ffn_up_exps.weight", kind, n=5, lead=lead)
    q = check(checkpoint(tmp_path, tensor), "blk.0.ffn_up_exps")
    assert (q.experts, q.n, q.k) == (lead[0] if lead else None, 5, 512)
    assert q.source == {"format": "gguf", "type": kind}
    with np.errstate(over="ignore"):
        theirs = package.quants.dequantize(data, type_id(kind))
    np.testing.assert_array_equal(bits(kind, dequantize(q)), bits(kind, theirs))


@pytest.mark.parametrize(
    ("kind", "mmq_kind", "element"),
    [("Q4_0", "q4_0", "u4b8"), ("Q8_0", "q8_0", "u8b128"), ("Q6_K", "q6_k", None), ("Q4_K", "q4_k", None)],
)
def test_what_each_layout_makes_of_it(tmp_path: Path, kind: str, mmq_kind: str, element: str | None) -> None:
    tensor, _ = stored("a.weight", kind)
    outline = gguf.describe(checkpoint(tmp_path, tensor), "a")
    assert mmq.spec(outline)["kind"] == mmq_kind
    if element is None:
        assert marlin.accepts(outline) is not None
    else:
        spec = marlin.spec(outline)
        assert (spec["element"], spec["group"], spec["scale"]) == (element, 32, "f16")


def test_describe_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, _ = stored("blk.0.ffn_up.weight", "Q6_K")
    scale = Stored("blk.0.ffn_up.scale", "F32", (1,), np.float32(2).tobytes())
    given = checkpoint(tmp_path, tensor, scale)
    monkeypatch.setattr(Tensor, "raw", lambda _: pytest.fail("data was read"))
    outline = gguf.describe(given, "blk.0.ffn_up")
    assert outline.scales == (("s8", (1, 16)), ("f16", (1, 256)), ("f32", (4, 512)))


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "experts"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q2_K", "Q4_K", "Q5_K", "IQ4_XS", "NVFP4"])
def test_a_scale_of_its_own_beside_any_type(tmp_path: Path, kind: str, lead: tuple[int, ...]) -> None:
    tensor, data = stored("blk.1.w.weight", kind, lead=lead)
    factors = np.arange(1, 1 + (lead[0] if lead else 1), dtype=np.float32) / 4
    scale = Stored("blk.1.w.scale", "F32", (len(factors),), factors.tobytes())
    q = check(checkpoint(tmp_path, tensor, scale), "blk.1.w")
    np.testing.assert_array_equal(q.scales[-1].data.reshape(-1), factors)
    with np.errstate(over="ignore"):
        plain = package.quants.dequantize(data, type_id(kind)).astype(np.float64)
    exact = dequantize(quant(kind, data), np.float64)
    np.testing.assert_array_equal(bits(kind, exact.astype(np.float32)), bits(kind, plain.astype(np.float32)))
    each = factors.astype(np.float64).reshape(-1, *(1,) * 2 if lead else ())
    np.testing.assert_array_equal(dequantize(q, np.float64), exact * each)


def test_one_scale_for_all_experts(tmp_path: Path) -> None:
    tensor, _ = stored("e.weight", "NVFP4", lead=(3,))
    q = check(checkpoint(tmp_path, tensor, Stored("e.scale", "F32", (1,), np.float32(3).tobytes())), "e")
    assert q.scales[-1].data.tolist() == [[[3.0]]] * 3


@pytest.mark.parametrize(("dtype", "lead"), [("F32", ()), ("F16", ()), ("F32", (2,))])
def test_biases_belong_to_their_module(tmp_path: Path, dtype: str, lead: tuple[int, ...]) -> None:
    tensor, _ = stored("blk.0.ffn_up.weight", "Q4_0", n=6, lead=lead)
    count = 6 * (lead[0] if lead else 1)
    data = np.arange(count, dtype={"F32": np.float32, "F16": np.float16}[dtype])
    given = checkpoint(tmp_path, tensor, Stored("blk.0.ffn_up.bias", dtype, (6, *lead), data.tobytes()))
    q = check(given, "blk.0.ffn_up")
    assert q.bias is not None
    assert q.bias.shape == (*lead, 6)


@pytest.mark.parametrize(
    ("beside", "error", "words"),
    [
        (Stored("w.scale", "F32", (2,), bytes(8)), CorruptError, r"w\.scale: shapes disagree; found \[2\]"),
        (Stored("w.scale", "F16", (1,), bytes(2)), UnsupportedError, r"w\.scale: unexpected dtype; found F16"),
        (Stored("w.bias", "F32", (5,), bytes(20)), CorruptError, r"w\.bias: shapes disagree; found \[5\]; need \[4\]"),
        (Stored("w.bias", "I32", (4,), bytes(16)), UnsupportedError, r"w\.bias: unexpected dtype; found I32"),
        (Stored("w.bias", "Q4_0", (32, 4)), UnsupportedError, r"w\.bias: unexpected dtype; found U8"),
    ],
)
def test_what_stands_beside_must_fit(tmp_path: Path, beside: Stored, error: type[WarptileError], words: str) -> None:
    given = checkpoint(tmp_path, stored("w.weight", "Q4_0")[0], beside)
    with pytest.raises(error, match=words):
        gguf.describe(given, "w")


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    scale = Stored("w.scale", "F32", (1,), np.float32(np.nan).tobytes())
    given = checkpoint(tmp_path, stored("w.weight", "Q4_0")[0], scale)
    with pytest.raises(CorruptError, match=r"w\.scale: scales are NaN or infinite"):
        gguf.read(given, "w")


@pytest.mark.parametrize(
    ("kind", "at", "value", "words"),
    [
        *(
            (kind, at + 1, 0x7C, r"NaN or infinite; found 1 of \d+, the first at \[1, \d\]")
            for kind in HALVES
            for at in HALVES[kind]
        ),
        ("Q4_1", 3, 0xFE, "NaN or infinite"),
        ("MXFP4", 0, 255, r"scales of 255 are NaN; found 1 of 64, the first at \[1, 0\]; need 0 to 254"),
        ("NVFP4", 1, 0x7F, r"NaN or negative; found 1 of 128, the first at \[1, 1\], is nan; need bytes 0x00 to 0x7E"),
        ("NVFP4", 3, 0x80, r"NaN or negative; found 1 of 128, the first at \[1, 3\]"),
    ],
)  # fmt: skip
def test_factors_that_are_no_numbers_are_refused(tmp_path: Path, kind: str, at: int, value: int, words: str) -> None:
    tensor, data = stored("w.weight", kind)
    data = data.copy()
    data[1, at] = value
    if kind in HALVES and value == 0x7C:
        data[1, at - 1] = 0
    given = checkpoint(tmp_path, Stored(tensor.name, tensor.type, tensor.ne, data.tobytes(), id=tensor.id))
    with pytest.raises(CorruptError, match=r"w\.weight: .*" + words):
        gguf.read(given, "w")


def test_what_no_one_reads_passes_through_and_is_named(tmp_path: Path) -> None:
    given = checkpoint(
        tmp_path,
        Stored("a.weight", "TQ1_0", (256, 2), bytes(108)),
        Stored("flat.weight", "Q4_0", (64,), bytes(36)),
        Stored("four.weight", "Q4_0", (32, 1, 2, 2), bytes(72)),
        Stored("odd_name", "Q4_0", (32, 2), bytes(36)),
        Stored("half.weight", "F16", (4, 2), bytes(16)),
        stored("w.weight", "Q4_0")[0],
    )
    assert gguf.modules(given) == {"w": ("w.weight",)}
    assert given.notes == [
        ("a", "TQ1_0 passes through as bytes"),
        *((name, "Q4_0 passes through as bytes") for name in ("flat", "four", "odd_name")),
    ]


def test_other_checkpoints_have_no_gguf_modules() -> None:
    given = open_checkpoint(zoo("ct_nvfp4"))
    assert gguf.modules(given) == {}
    given.quantization = {"quant_method": "gguf", "types": ["not", "a", "table"]}
    assert gguf.modules(given) == {}


def test_types_that_do_not_fit_their_bytes_are_refused(tmp_path: Path) -> None:
    """As an artifact with damaged metadata would have them."""
    given = checkpoint(tmp_path, stored("w.weight", "Q4_0")[0])
    given.quantization["types"]["w.weight"] = "Q6_K"
    with pytest.raises(CorruptError, match=r"w\.weight: rows are not whole blocks of Q6_K; found rows of 288 bytes"):
        gguf.describe(given, "w")


@pytest.mark.parametrize("name", ["gg_kitchen", "gg_q8_0", "gg_odd_q4_k_m", "gg_mxfp4", "gg_nvfp4", "gg_split_q4_k_m"])
def test_the_zoo_is_exact(name: str) -> None:
    files = sorted(zoo(name).glob("*.gguf"))
    given = open_checkpoint(files[0])
    expected = np.load(zoo(name) / "expected.npz")
    theirs = {t.name: t for file in files for t in package.GGUFReader(file).tensors}
    compared = 0
    for module in gguf.modules(given):
        q = check(given, module)
        tensor = theirs[f"{module}.weight"]
        dense = dequantize(q)
        want = package.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(bits(q.source["type"], dense), bits(q.source["type"], want))
        if tensor.name in expected:
            np.testing.assert_array_equal(dense, expected[tensor.name])
            compared += 1
    assert compared == len(expected.files)


def hugging_face(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's rows as Hugging Face has them: of each head first the even rows, then the odd ones."""
    out = []
    for head in np.split(w, heads):
        out += [head[0::2], head[1::2]]
    return np.concatenate(out)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_1", "NVFP4", "Q3_K"])
@pytest.mark.parametrize(("role", "heads"), [("q", 4), ("k", 2)])
def test_the_order_of_rope_is_said_and_undone(tmp_path: Path, kind: str, role: str, heads: int) -> None:
    name = f"blk.7.attn_{role}"
    tensor, _ = stored(f"{name}.weight", kind, n=48)
    bias = Stored(f"{name}.bias", "F32", (48,), np.arange(48, dtype=np.float32).tobytes())
    scale = Stored(f"{name}.scale", "F32", (1,), np.float32(0.5).tobytes())
    pairs = model(head_count=4, head_count_kv=2)
    as_is = check(checkpoint(tmp_path, tensor, bias, scale, pairs=pairs), name)
    assert as_is.source["row_order"] == "ggml_rope"
    undone = check(checkpoint(tmp_path, tensor, bias, scale, options=Options(undo_rope_order=True), pairs=pairs), name)
    assert (undone.source["row_order"], undone.source["heads"]) == ("undone", heads)
    np.testing.assert_array_equal(dequantize(undone), hugging_face(dequantize(as_is), heads))
    assert as_is.bias is not None
    assert undone.bias is not None
    np.testing.assert_array_equal(undone.bias, hugging_face(as_is.bias, heads))


def test_heads_may_differ_by_layer(tmp_path: Path) -> None:
    tensors = [stored(f"blk.{i}.attn_k.weight", "Q4_0", n=24)[0] for i in (0, 1)]
    pairs = model("deci", head_count=[4, 4], head_count_kv=[2, 3])
    given = checkpoint(tmp_path, *tensors, options=Options(undo_rope_order=True), pairs=pairs)
    assert [gguf.describe(given, f"blk.{i}.attn_k").source["heads"] for i in (0, 1)] == [2, 3]


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (model(), "no number of heads for 24 rows"),
        (model(head_count=5), "5 heads for 24 rows"),
        (model(head_count=0), "0 heads for 24 rows"),
        (model(head_count=24), "24 heads for 24 rows"),
        (model(head_count=[4]), "no number of heads for 24 rows"),
    ],
)
def test_an_order_that_cannot_be_undone_is_refused(
    tmp_path: Path, pairs: dict[str, tuple[str, Any]], words: str
) -> None:
    tensor = stored("blk.3.attn_q.weight", "Q4_0", n=24)[0]
    given = checkpoint(tmp_path, tensor, options=Options(undo_rope_order=True), pairs=pairs)
    with pytest.raises(UnsupportedError, match=rf"attn_q\.weight: .*{words}.*without --undo-rope-order"):
        gguf.describe(given, "blk.3.attn_q")
    assert gguf.describe(checkpoint(tmp_path, tensor, pairs=pairs), "blk.3.attn_q").source["row_order"] == "ggml_rope"


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen3", "blk.0.attn_q"), ("llama4", "blk.0.attn_k"), ("llama", "blk.0.attn_v"), ("llama", "blk.0.attn_q_norm")],
)
def test_other_rows_are_in_order(tmp_path: Path, architecture: str, name: str) -> None:
    pairs = model(architecture, head_count=2)
    tensor = stored(f"{name}.weight", "Q4_0", n=8)[0]
    given = checkpoint(tmp_path, tensor, options=Options(undo_rope_order=True), pairs=pairs)
    assert "row_order" not in gguf.describe(given, name).source


def test_plain_q_and_k_say_that_they_keep_the_order(tmp_path: Path) -> None:
    half = Stored("blk.0.attn_q.weight", "F16", (4, 8), bytes(64))
    given = checkpoint(tmp_path, half, options=Options(undo_rope_order=True), pairs=model(head_count=2))
    gguf.modules(given)
    assert given.notes == [("blk.0.attn_q", "passes through with its rows in the order of ggml's rope")]


def test_undone_artifacts_verify_unpack_and_run_in_one_order(tmp_path: Path) -> None:
    """Modules that pass through are read in the same order as those that are converted."""
    (path,) = zoo("gg_kitchen").glob("*.gguf")
    artifact = convert(path, tmp_path / "a.safetensors", to="mmq", undo_rope_order=True).dst
    verify(artifact)
    verify(artifact, path)
    unpack(artifact, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == path.read_bytes()
    theirs = {t.name: t for t in package.GGUFReader(path).tensors}
    with Session(artifact, device="cpu") as session:
        for module, heads in (("blk.0.attn_q", 4), ("blk.0.attn_k", 2)):
            tensor = theirs[f"{module}.weight"]
            want = hugging_face(package.quants.dequantize(tensor.data, tensor.tensor_type), heads)
            np.testing.assert_array_equal(session.dequantize(module), want)


@pytest.mark.parametrize("to", layouts())
def test_a_session_decodes_every_type_converted_or_not(tmp_path: Path, to: str) -> None:
    (path,) = zoo("gg_kitchen").glob("*.gguf")
    artifact = convert(path, tmp_path / "a", to=to).dst
    decoded = set()
    with Session(artifact, device="cpu") as session:
        for tensor in package.GGUFReader(path).tensors:
            kind = tensor.tensor_type.name
            if kind in BLOCK_TYPES:
                w = session.dequantize(tensor.name)
                np.testing.assert_array_equal(w, package.quants.dequantize(tensor.data, tensor.tensor_type))
                decoded.add(kind)
    assert {"Q2_K", "Q3_K", "IQ3_S", "Q6_K", "MXFP4", "NVFP4", "Q4_1"} <= decoded


def test_a_q4_0_file_with_a_q6_k_output_converts_to_marlin(tmp_path: Path) -> None:
    output = stored("output.weight", "Q6_K", n=9)[0]
    path = write(tmp_path / "m.gguf", [output, stored("blk.0.ffn_up.weight", "Q4_0", n=100, k=2880)[0]], model())
    result = convert(path, tmp_path / "a.safetensors", to="marlin")
    assert [m.name for m in result.plan.converted] == ["blk.0.ffn_up"]
    (refused,) = result.plan.refused
    assert refused.name == "output"
    assert refused.refusal == "no Marlin tile for element u6b32; gguf-to-mmq converts it"
    verify(result.dst, path)
    unpack(result.dst, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == path.read_bytes()


def test_the_codebook_has_no_entry_twice() -> None:
    book = gguf_blocks._codebook()
    assert book.shape == (512, 4)
    assert len(np.unique(book, axis=0)) == 512


def test_a_level_is_negated_without_a_change_of_value() -> None:
    """Q4_1's minimum: every finite f16, both zeros among them, comes back through minus itself."""
    every = np.arange(0x10000, dtype=np.uint16)
    data = np.zeros((1, 0x10000, 20), np.uint8)
    data[..., 2:4] = every[:, None].view(np.uint8)
    q = quant("Q4_1", data.reshape(1, -1))
    np.testing.assert_array_equal(q.offsets[0].data.view(np.uint16)[0], every ^ 0x8000)
    assert q.offsets[0].dtype == "f16"
    back = gguf_blocks.pack(BLOCK_TYPES["Q4_1"], q.codes, q.scales, q.offsets)
    np.testing.assert_array_equal(back, data.reshape(1, -1))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "IQ3_S"])
@pytest.mark.parametrize("undo", [False, True])
def test_any_rectangle_of_codes(tmp_path: Path, kind: str, undo: bool) -> None:
    tensor, _ = stored("blk.0.attn_q.weight", kind, n=24)
    given = checkpoint(tmp_path, tensor, options=Options(undo_rope_order=undo), pairs=model(head_count=3))
    whole, stream = gguf.read(given, "blk.0.attn_q").codes, gguf.stream(given, "blk.0.attn_q")
    for rows, columns in (
        (slice(0, 24), slice(0, 512)),
        (slice(3, 9), slice(37, 300)),
        (slice(23, 24), slice(256, 257)),
    ):
        np.testing.assert_array_equal(stream.slab(0, rows, columns), whole[rows, columns])
