"""Headers of GGUF files: what is read, what is refused and in which words; split sets; the way back to a file."""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_files import Stored, content, model, text, write
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import zoo
from warptile.convert import convert, unpack, verify
from warptile.formats.container import companion, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, UsageError, VerifyError, WarptileError
from warptile.formats.gguf_header import read_header, type_sizes
from warptile.kernels import layouts

Q4 = Stored("blk.0.ffn_up.weight", "Q4_0", (64, 3), bytes(range(54)) * 2)
NORM = Stored("blk.0.norm.weight", "F32", (5,), bytes(range(20)))
HALF = Stored("token_embd.weight", "F16", (4, 2), bytes(range(16)))


@pytest.mark.parametrize("name", ["gg_kitchen", "gg_q8_0", "gg_odd_q4_k_m", "gg_mxfp4", "gg_nvfp4"])
def test_tensors_are_those_of_the_gguf_package(name: str) -> None:
    (path,) = zoo(name).glob("*.gguf")
    checkpoint = open_checkpoint(path)
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    assert list(checkpoint.tensors) == list(theirs)
    for tensor in checkpoint.tensors.values():
        their = theirs[tensor.name]
        assert tensor.raw().tobytes() == their.data.tobytes(), tensor.name
        stored = checkpoint.quantization["types"].get(tensor.name, tensor.dtype)
        assert stored == their.tensor_type.name
        if tensor.dtype == "U8":
            assert tensor.shape == their.data.shape
        else:
            assert tensor.shape == tuple(reversed(their.shape.tolist()))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    pairs = {"general.alignment": ("u32", alignment)}
    path = write(tmp_path / "m.gguf", [Q4, NORM, HALF], pairs, version=version, alignment=alignment)
    tensors = open_checkpoint(path).tensors
    assert [(t.name, t.dtype, t.shape) for t in tensors.values()] == [
        (Q4.name, "U8", (3, 36)),
        (NORM.name, "F32", (5,)),
        (HALF.name, "F16", (2, 4)),
    ]
    assert [t.raw().tobytes() for t in tensors.values()] == [Q4.data, NORM.data, HALF.data]


def test_every_type_of_the_package_is_a_tensor_of_bytes(tmp_path: Path) -> None:
    native = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
    for number, (name, size, nbytes) in type_sizes().items():
        rows = Stored("w.weight", "F32", (2 * size, 3), bytes(6 * nbytes), id=number)
        tensor = open_checkpoint(write(tmp_path / "m.gguf", [rows])).tensors["w.weight"]
        assert tensor.nbytes == 6 * nbytes
        assert (tensor.dtype, tensor.shape) == ((name, (3, 2)) if name in native else ("U8", (3, 2 * nbytes)))


def test_scalars_have_no_dimensions(tmp_path: Path) -> None:
    tensor = open_checkpoint(write(tmp_path / "m.gguf", [Stored("s", "F32", (), b"\0\0\x80?")])).tensors["s"]
    assert tensor.shape == ()
    assert float(tensor.array()) == 1.0


TWO_TO_63 = b"GGUF" + struct.pack("<Iqq", 3, 0, 1) + text("a") + struct.pack("<iiQ", 9, 0, 2**63)
NO_TENSOR = {"general.architecture": ("string", "llama")}

BAD: dict[str, tuple[bytes, type[WarptileError], tuple[str, ...]]] = {
    "array of 2^63": (
        TWO_TO_63,
        CorruptError,
        ("array a is longer than the file", "found 9223372036854775808 entries at byte 49; need at most 0 in 49 bytes"),
    ),
    "2^40 tensors": (
        b"GGUF" + struct.pack("<Iqq", 3, 2**40, 0),
        CorruptError,
        ("a count of tensors that is not true; found 1099511627776; need at most 1 in 24 bytes; download or copy it",),
    ),
    "array of 2^63 strings": (
        TWO_TO_63.replace(struct.pack("<iiQ", 9, 0, 2**63), struct.pack("<iiQ", 9, 8, 2**63)),
        CorruptError,
        ("longer than the file",),
    ),
    "a long string in an array": (
        content(pairs={"a": ("raw", struct.pack("<iiQQ", 9, 8, 2, 2**64 - 1) + bytes(64))}),
        CorruptError,
        ("truncated", "the array a"),
    ),
    "a string of 2^63": (content(pairs={"a": ("raw", struct.pack("<iQ", 8, 2**63))}), CorruptError, ("truncated",)),
    "a long key": (content(pairs=[("k" * 70000, ("u8", 1))]), CorruptError, ("key is too long",)),
    "n_dims 10^6": (content([replace(NORM, dims=10**6)]), CorruptError, (NORM.name, "dimensions", "1000000")),
    "a product that wraps to 0": (content([replace(NORM, ne=(2**32, 2**32))]), CorruptError, (NORM.name, "extents")),
    "a product that wraps to 4": (
        content([replace(NORM, ne=(2**62 + 1, 4))]),
        CorruptError,
        (NORM.name, "4611686018427387905"),
    ),
    "more than the file": (content([replace(NORM, ne=(2**40,))]), CorruptError, (NORM.name, "ends after the file")),
    "a negative dimension": (content([replace(NORM, ne=(-5,))]), CorruptError, (NORM.name, "-5")),
    "a dimension of 0": (content([replace(NORM, ne=(0, 4))]), CorruptError, (NORM.name, "[0, 4]")),
    "overlap": (content([NORM, replace(HALF, offset=0)]), CorruptError, (HALF.name, "overlap", "need 32")),
    "gap": (content([NORM, replace(HALF, offset=64)]), CorruptError, (HALF.name, "no tensor", "need 32")),
    "offset 2^63": (content([replace(NORM, offset=2**63)]), CorruptError, (NORM.name, "9223372036854775808")),
    "alignment 0": (content([NORM], {"general.alignment": ("u32", 0)}), CorruptError, ("alignment", "power of two")),
    "alignment 24": (content([NORM], {"general.alignment": ("u32", 24)}), CorruptError, ("alignment", "24")),
    "alignment u64": (content([NORM], {"general.alignment": ("u64", 32)}), CorruptError, ("general.alignment", "u32")),
    "alignment as text": (content([NORM], {"general.alignment": ("string", "32")}), CorruptError, ("another type",)),
    "a name twice": (content([NORM, replace(NORM)]), CorruptError, (NORM.name, "one name")),
    "a key twice": (content(pairs=[("a", ("u8", 1)), ("a", ("u8", 1))]), CorruptError, ("a key twice", "'a'")),
    "an unknown type": (content([replace(Q4, id=99)]), UnsupportedError, (Q4.name, "type id 99")),
    "a removed type": (content([replace(Q4, id=4)]), UnsupportedError, (Q4.name, "type id 4")),
    "a negative type": (content([replace(Q4, id=-1)]), UnsupportedError, (Q4.name, "type id -1")),
    "half a block": (content([replace(Q4, ne=(48, 3))]), CorruptError, (Q4.name, "Q4_0", "48", "multiple of 32")),
    "64 bytes of name": (content([replace(NORM, name="n" * 64)]), CorruptError, ("tensor's name is too long", "63")),
    "no name": (content([replace(NORM, name="")]), CorruptError, ("name",)),
    "big endian": (
        b"GGUF" + struct.pack(">Iqq", 3, 1, 0) + bytes(32),
        UnsupportedError,
        ("big-endian", "gguf-convert-endian"),
    ),
    "version 1": (content([NORM], version=1), UnsupportedError, ("version", "found 1")),
    "version 4": (content([NORM], version=4), UnsupportedError, ("version", "found 4")),
    "version 0": (content([NORM], version=0), UnsupportedError, ("version", "found 0")),
    "2^62 tensors": (content([NORM], counts=(2**62, 0)), CorruptError, ("tensors", str(2**62))),
    "-1 tensors": (content([NORM], counts=(-1, 0)), CorruptError, ("tensors", "-1")),
    "2^62 key-values": (content([NORM], counts=(1, 2**62)), CorruptError, ("key-values",)),
    "an array of arrays": (
        content(pairs={"a": ("raw", struct.pack("<iiQiQ", 9, 9, 1, 0, 0) + bytes(16))}),
        UnsupportedError,
        ("array of arrays",),
    ),
    "an unknown value": (content(pairs={"a": ("raw", struct.pack("<ii", 13, 0))}), CorruptError, ("13 for a",)),
    "an array of unknowns": (
        content(pairs={"a": ("raw", struct.pack("<iiQ", 9, 77, 1) + bytes(16))}),
        CorruptError,
        ("77 for a",),
    ),
    "empty": (b"", CorruptError, ("not a GGUF file but an empty file",)),
    "a stump": (b"GGUF\3\0\0\0", CorruptError, ("truncated", "8 bytes")),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", CorruptError, ("git-lfs",)),
    "another format": (b"ggjt" + bytes(60), UnsupportedError, ("not a GGUF file", "ggjt")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_headers_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    data, error, words = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert time.perf_counter() - start < 1
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    assert all(word in line for word in words), line


def test_the_file_of_49_bytes() -> None:
    assert len(TWO_TO_63) == 49


def test_names_and_keys_that_are_not_utf8(tmp_path: Path) -> None:
    for data in (content([replace(NORM, name="\xff")]).replace("\xff".encode(), b"\xff\xfe"),):
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(CorruptError, match="not UTF-8"):
            open_checkpoint(tmp_path / "m.gguf")


WHOLE = content([Q4, NORM, HALF], {**model(head_count=2), "t": ("strings", ["a", "bc"]), "f": ("f32s", [1.0, 2.0])})


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    end = len(WHOLE) - 16  # the padding after the last tensor may be missing
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        if length < end:
            with pytest.raises(WarptileError):
                read_header(path)
        else:
            assert len(read_header(path).tensors) == 3


@settings(max_examples=300, deadline=500)
@given(st.lists(st.tuples(st.integers(4, 460), st.integers(0, 255)), min_size=1, max_size=6))
def test_random_damage_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(WHOLE)
    for at, byte in damage:
        data[at % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        checkpoint = open_checkpoint(path)
    except WarptileError:
        return
    for tensor in checkpoint.tensors.values():
        assert tensor.raw().size == tensor.nbytes


def test_bytes_after_the_last_tensor_are_said(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content([NORM]) + bytes(7))
    assert any("7 bytes after the last tensor" in note for _, note in open_checkpoint(path).notes)


def test_a_vocabulary_of_150_thousand_is_quick(tmp_path: Path) -> None:
    tokens = [f"tok{i}" for i in range(150_000)]
    pairs = {
        "tokenizer.ggml.tokens": ("strings", tokens),
        "tokenizer.ggml.merges": ("strings", [f"{t} {t}" for t in tokens]),
        "tokenizer.ggml.scores": ("f32s", [0.0] * 150_000),
        "tokenizer.ggml.token_type": ("i32s", [1] * 150_000),
    }
    path = write(tmp_path / "m.gguf", [NORM], pairs)
    open_checkpoint(path)
    start = time.perf_counter()
    open_checkpoint(path)
    assert time.perf_counter() - start < 0.5


def split(
    folder: Path, *parts: list[Stored], total: int | None = None, names: dict[int, str] | None = None
) -> list[Path]:
    """A split set as llama-gguf-split writes it."""
    total = sum(map(len, parts)) if total is None else total
    paths = []
    for i, tensors in enumerate(parts):
        pairs: dict[str, Any] = model(head_count=2) if i == 0 else {}
        pairs |= {"split.no": ("u16", i), "split.count": ("u16", len(parts)), "split.tensors.count": ("i32", total)}
        name = (names or {}).get(i, f"m-{i + 1:05d}-of-{len(parts):05d}.gguf")
        paths.append(write(folder / name, tensors, pairs))
    return paths


@pytest.mark.parametrize("given_part", [0, 1, 2])
def test_any_part_opens_the_whole_set(tmp_path: Path, given_part: int) -> None:
    paths = split(tmp_path, [], [Q4], [NORM, HALF])
    checkpoint = open_checkpoint(paths[given_part])
    assert [(t.name, t.file) for t in checkpoint.tensors.values()] == [
        (Q4.name, paths[1]),
        (NORM.name, paths[2]),
        (HALF.name, paths[2]),
    ]
    assert checkpoint.quantization["architecture"] == "llama"


def test_split_sets_of_the_zoo_are_whole() -> None:
    first, second = sorted(zoo("gg_split_q4_k_m").glob("*.gguf"))
    theirs = [t.name for file in (first, second) for t in GGUFReader(file).tensors]
    assert list(open_checkpoint(second).tensors) == theirs


def test_broken_split_sets(tmp_path: Path) -> None:
    paths = split(tmp_path, [Q4], [NORM])
    paths[1].rename(tmp_path / "kept")
    with pytest.raises(CorruptError, match=r"m-00002-of-00002.gguf: a part of the split set is missing"):
        open_checkpoint(paths[0])
    paths[0].rename(paths[1])
    (tmp_path / "kept").rename(paths[0])
    with pytest.raises(CorruptError, match=r"split.no 1, split.count 2; need 0 and 2"):
        open_checkpoint(paths[0])
    for file in paths:
        file.unlink()
    with pytest.raises(CorruptError, match=r"found 2; need 3"):
        open_checkpoint(split(tmp_path, [Q4], [NORM], total=3)[0])
    with pytest.raises(CorruptError, match=rf"{NORM.name}: the tensor is in two parts"):
        open_checkpoint(split(tmp_path, [NORM], [NORM])[0])
    with pytest.raises(UnsupportedError, match=r"under another name.*<name>-00001-of-00002.gguf"):
        open_checkpoint(split(tmp_path, [Q4], [NORM], names={0: "part1.gguf"})[0])


@pytest.mark.parametrize("to", layouts())
def test_a_file_comes_back_byte_for_byte(tmp_path: Path, to: str) -> None:
    (path,) = zoo("gg_kitchen").glob("*.gguf")
    artifact = convert(path, tmp_path / "a.safetensors", to=to).dst
    assert companion(artifact, ".gguf-kv").name == "a.safetensors.gguf-kv"
    verify(artifact)
    verify(artifact, path)
    unpack(artifact, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == path.read_bytes()


def test_a_split_set_comes_back_as_one_file_that_the_package_reads(tmp_path: Path) -> None:
    files = sorted(zoo("gg_split_q4_k_m").glob("*.gguf"))
    artifact = convert(files[0], tmp_path / "directory", to="mmq").dst
    verify(artifact, files[0])
    unpack(artifact, tmp_path / "back.gguf")
    back = GGUFReader(tmp_path / "back.gguf")
    theirs = [t for file in files for t in GGUFReader(file).tensors]
    assert [(t.name, t.tensor_type, t.shape.tolist()) for t in back.tensors] == [
        (t.name, t.tensor_type, t.shape.tolist()) for t in theirs
    ]
    for a, b in zip(back.tensors, theirs, strict=True):
        np.testing.assert_array_equal(a.data, b.data)
    first = GGUFReader(files[0])
    kept = [key for key in first.fields if not key.startswith(("split.", "GGUF."))]
    assert [key for key in back.fields if not key.startswith("GGUF.")] == kept
    for key in kept:
        assert back.fields[key].contents() == first.fields[key].contents()


@pytest.mark.parametrize("alignment", [8, 64])
def test_dimensions_types_and_alignment_come_back(tmp_path: Path, alignment: int) -> None:
    tensors = [
        Stored("s", "F32", (), b"\0\0\x80?"),
        Stored("e.weight", "Q8_0", (32, 2, 3), bytes(34 * 6)),
        Stored("t.weight", "TQ1_0", (512, 2), bytes(range(216))),
        Stored("i", "I32", (3, 1, 2, 1), bytes(24)),
        Stored("one.weight", "Q4_0", (64,), bytes(36)),
        NORM,
    ]
    pairs = {**model("qwen3"), "general.alignment": ("u32", alignment), "x": ("strings", ["\n", ""])}
    path = write(tmp_path / "m.gguf", tensors, pairs, version=2, alignment=alignment)
    artifact = convert(path, to="mmq").dst
    assert artifact == tmp_path / "m-mmq.safetensors"
    unpack(artifact, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == path.read_bytes()


def test_key_values_of_another_model_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", [Q4], model())
    artifact = convert(path, to="mmq").dst
    kept = companion(artifact, ".gguf-kv")
    good = kept.read_bytes()
    assert hashlib.sha256(good).hexdigest() == open_checkpoint(path).quantization["key_values"]
    kept.write_bytes(good.replace(b"llama", b"lamma"))
    with pytest.raises(CorruptError, match="not the key-values that the artifact was made with"):
        unpack(artifact, tmp_path / "back.gguf")
    with pytest.raises(VerifyError, match=r"gguf-kv: all of it: differs"):
        verify(artifact, path)
    kept.unlink()
    with pytest.raises(CorruptError, match="key-values of the model are missing"):
        unpack(artifact, tmp_path / "back.gguf")
    with pytest.raises(VerifyError, match="the artifact lost a file"):
        verify(artifact, path)
    assert not (tmp_path / "back.gguf").exists()
    kept.write_bytes(good)
    unpack(artifact, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == path.read_bytes()


def test_file_and_key_values_are_replaced_together(tmp_path: Path) -> None:
    one = write(tmp_path / "one.gguf", [Q4], model("llama"))
    two = write(tmp_path / "two.gguf", [Q4, NORM], model("qwen3"))
    artifact = convert(one, tmp_path / "a.safetensors", to="mmq").dst
    with pytest.raises(WarptileError, match="already exists"):
        convert(two, artifact, to="mmq")
    verify(artifact, one)
    convert(two, artifact, to="mmq", overwrite=True)
    verify(artifact, two)
    unpack(artifact, tmp_path / "back.gguf")
    with pytest.raises(WarptileError, match="already exists"):
        unpack(artifact, tmp_path / "back.gguf")
    unpack(artifact, tmp_path / "back.gguf", overwrite=True)
    assert (tmp_path / "back.gguf").read_bytes() == two.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("a.safetensors", "a.safetensors.gguf-kv", "back.gguf", "one.gguf", "two.gguf")
    ]


def test_an_error_leaves_neither(tmp_path: Path) -> None:
    wrong = replace(Q4, data=b"\x00\x7c" + bytes(106))
    path = write(tmp_path / "m.gguf", [wrong], model())
    with pytest.raises(CorruptError, match="NaN or infinite"):
        convert(path, tmp_path / "a.safetensors", to="mmq")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_only_artifacts_of_gguf_become_gguf(tmp_path: Path) -> None:
    artifact = convert(zoo("gq_gptq_dynamic"), tmp_path / "a", to="marlin").dst
    with pytest.raises(UnsupportedError, match="not made from a GGUF file"):
        unpack(artifact, tmp_path / "back.gguf")


def test_an_artifact_is_no_gguf(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", [Q4], model())
    with pytest.raises(UsageError, match="an artifact is a "):
        convert(path, tmp_path / "out.gguf", to="mmq")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda raw: raw, None),
        (lambda raw: raw[:-1], "not padded with zeros"),
        (lambda raw: raw[:-1] + b"x", "not padded with zeros"),
        (lambda raw: raw + b"more", "4 bytes after the last tensor of m.gguf belong to no tensor: not kept"),
    ],
)
def test_what_unpack_will_not_give_back_is_noted(tmp_path, change, note):
    path = tmp_path / "m.gguf"
    path.write_bytes(change(content([Stored("blk.0.attn_q.weight", "Q8_0", (32, 1))], model(head_count=1))))
    texts = [text for _, text in open_checkpoint(path).notes]
    assert any(note in text for text in texts) if note else not texts
