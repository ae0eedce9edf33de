"""Files made by hand, byte by byte: what is refused and in which words, and that what is sound is read exactly."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from warptile.formats import output
from warptile.formats.container import DTYPES, Entry, dtype_name, open_checkpoint, write_safetensors
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.formats.safetensors_file import read_header

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)

# Bits of every type the safetensors package knows, from its documentation.
BITS = {
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
}


def raw(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def row(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def save(path: Path, *names: str, **metadata: str) -> Path:
    """A file of four-byte tensors."""
    header = {name: row(offsets=(4 * i, 4 * i + 4)) for i, name in enumerate(names)}
    return raw(path, json.dumps({**({"__metadata__": metadata} if metadata else {}), **header}), bytes(4 * len(names)))


def index(directory: Path, **weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


GOOD = json.dumps({"a": row()})
# name: (header, data, what the message says, exit code)
HEADERS: dict[str, tuple[str | bytes, bytes, str, int]] = {
    "not an object": ("[1, 2]  ", b"", "not a JSON object", 4),
    "a space before the object": (" " + GOOD, bytes(4), "{ at byte 8", 4),
    "two objects": (GOOD + GOOD, bytes(4), "not JSON", 4),
    "cut off": (GOOD[:-3], bytes(4), "not JSON", 4),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8", 4),
    "NaN": ('{"a": NaN}', b"", "NaN", 4),
    "a tensor twice": (f"{GOOD[:-1]}, {GOOD[1:]}", bytes(4), "'a'", 4),
    "a key twice within": (GOOD.replace('"dtype"', '"dtype": "U8", "dtype"'), bytes(4), "'dtype'", 4),
    "a metadata key twice": ('{"__metadata__": {"x": "1", "x": "2"}}', b"", "'x'", 4),
    "metadata of numbers": ('{"__metadata__": {"x": 1}}', b"", "a number under 'x'", 4),
    "metadata that is a tensor": (json.dumps({"__metadata__": row()}), bytes(4), "__metadata__", 4),
    "metadata that is a list": ('{"__metadata__": []}', b"", "an array", 4),
    "a tensor that is null": ('{"a": null}', b"", "null", 4),
    "no dtype": ('{"a": {"shape": [4], "data_offsets": [0, 4]}}', bytes(4), "dtype, shape and data_offsets", 4),
    "a key too many": (json.dumps({"a": row() | {"strides": [1]}}), bytes(4), "strides", 4),
    "an unknown dtype": (json.dumps({"a": row("I3")}), bytes(4), "I3", 3),
    "a dtype that is a number": (json.dumps({"a": row(8)}), bytes(4), "a number", 4),
    "a boolean in a shape": (json.dumps({"a": row(shape=[4, True])}), bytes(4), "True", 4),
    "a float in a shape": (json.dumps({"a": row(shape=[4.0])}), bytes(4), "4.0", 4),
    "a shape that is a number": (json.dumps({"a": row(shape=4)}), bytes(4), "shape", 4),
    "a negative dimension": (json.dumps({"a": row(shape=[-4])}), bytes(4), "-4", 4),
    "two negative dimensions": (json.dumps({"a": row(shape=[-2, -2])}), bytes(4), "-2", 4),
    "a dimension of 2^63": (json.dumps({"a": row(shape=[2**63, 0])}), bytes(4), "2^63 - 1", 4),
    "a product that wraps to 4": (json.dumps({"a": row(shape=[2**62, 4, 4])}), bytes(4), "overflows", 4),
    "zero times what wraps": (json.dumps({"a": row(shape=[0, 2**40, 2**40], offsets=[0, 0])}), b"", "overflows", 4),
    "a number of 5000 digits": (GOOD.replace("[4]", f"[{'9' * 5000}]"), bytes(4), "not JSON", 4),
    "half a surrogate pair": ('{"__metadata__": {"x": "\\ud800"}}', b"", "half a surrogate pair", 4),
    "65 dimensions": (json.dumps({"a": row(shape=[1] * 65, offsets=[0, 1])}), b"\0", "65", 3),
    "three offsets": (json.dumps({"a": row(offsets=[0, 2, 4])}), bytes(4), "[begin, end]", 4),
    "offsets that run backwards": (json.dumps({"a": row(offsets=[4, 0])}), bytes(4), "[4, 0]", 4),
    "a boolean offset": (json.dumps({"a": row(shape=[1], offsets=[False, True])}), b"\0", "False", 4),
    "a shape of other size": (json.dumps({"a": row(shape=[5])}), bytes(4), "4 bytes; need 5 for U8 [5]", 4),
    "half a byte": (json.dumps({"a": row("F4", [3], [0, 2])}), bytes(2), "1.5 for F4 [3]", 4),
    "a hole": (json.dumps({"a": row(), "b": row(offsets=[5, 9])}), bytes(9), "belong to no tensor", 4),
    "a hole in front": (json.dumps({"a": row(offsets=[1, 5])}), bytes(5), "belong to no tensor", 4),
    "an overlap": (json.dumps({"a": row(), "b": row(offsets=[3, 7])}), bytes(7), "overlap", 4),
    "two at one place": (json.dumps({"a": row(), "b": row()}), bytes(4), "overlap", 4),
    "too little data": (GOOD, bytes(3), "truncated", 4),
    "too much data": (GOOD, bytes(5), "bytes after the last tensor", 4),
    "deep nesting": ('{"a": ' + "[" * 200_000, b"", "nested too deeply", 4),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused_by_name(tmp_path, case):
    header, data, says, code = HEADERS[case]
    path = raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(WarptileError) as e:
        open_checkpoint(path)
    assert (e.value.exit_code, says in str(e.value), str(path) in str(e.value)) == (code, True, True), e.value
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 700


BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not safetensors but an empty file; download"),
    "nine bytes": (bytes(9), "too short"),
    "a header of 2^64 - 1": (b"\xff" * 8 + GOOD.encode(), "absurd"),
    "a header over 100 MB": (struct.pack("<Q", 100_000_001) + GOOD.encode(), "absurd"),
    "a header longer than the file": (struct.pack("<Q", 500) + GOOD.encode(), "truncated"),
    "a header of no length": (struct.pack("<Q", 0) + GOOD.encode(), "not a JSON object"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "a pickle in a zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + bytes(24), "GGUF"),
    "a web page": (b"<!DOCTYPE html><html></html>", "web page"),
    "text": (b"# A model\n\nof mine, of many lines\n", "not safetensors but text; found '# A model"),
    "JSON": (b'{"weight_map": {"a": "b"}}', "not safetensors but text"),
    "a pickle": (b"\x80\x04\x95" + bytes(100), "a pickle; pickle is code"),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "compressed with gzip; decompress it"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
}


@pytest.mark.parametrize("case", BYTES)
def test_what_is_no_safetensors_is_named(tmp_path, case):
    content, says = BYTES[case]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CorruptError, match=says):
        open_checkpoint(tmp_path / "a.safetensors")


def test_pipes_devices_and_sparse_giants_are_answered_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    with open(tmp_path / "giant.safetensors", "wb") as f:
        f.write(struct.pack("<Q", 90_000_000))
        f.truncate(1 << 40)
    raw(tmp_path / "long.safetensors", GOOD, length=len(GOOD))
    os.truncate(tmp_path / "long.safetensors", 1 << 40)
    start = time.monotonic()
    for name, kind in (
        ("pipe", UnsupportedError),
        ("device", UnsupportedError),
        ("giant", CorruptError),
        ("long", CorruptError),
    ):
        with pytest.raises(kind):
            open_checkpoint(tmp_path / f"{name}.safetensors")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "U8", "data_offsets": [0, 1], "shape": [' + "1," * 10**7 + "1]}}",
        json.dumps({"a": row()}) + " " * 10**7,
        "{" + '"": 1,' * 4 * 10**6 + '"a": 1}',
    ],
    ids=["ten million dimensions", "ten million spaces", "four million keys"],
)
def test_a_long_header_that_says_little_is_answered_quickly(tmp_path, header):
    path = raw(tmp_path / "a.safetensors", header, bytes(1 if "shape" in header and "1,1" in header else 4))
    start = time.process_time()
    with pytest.raises(CorruptError):
        open_checkpoint(path)
    assert time.process_time() - start < 2


def test_a_source_that_is_missing_or_a_pickle(tmp_path):
    with pytest.raises(WarptileError) as e:
        open_checkpoint(tmp_path / "none.safetensors")
    assert e.value.exit_code == 1
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    for path in (tmp_path / "model.bin", tmp_path):
        with pytest.raises(UnsupportedError, match="pickle is code"):
            open_checkpoint(path)


def test_every_dtype_has_the_bits_of_its_documentation(tmp_path):
    assert {name: bits for name, (_, bits) in DTYPES.items()} == {n: b for b, ns in BITS.items() for n in ns.split()}
    for name, (dtype, bits) in DTYPES.items():
        assert dtype is None or (dtype.itemsize * 8, dtype_name(dtype)) == (bits, name)
        header = json.dumps({"x": row(name, [4], [0, bits // 2])})
        tensor = open_checkpoint(raw(tmp_path / "a.safetensors", header, bytes(range(bits // 2)))).tensors["x"]
        assert tensor.raw().tobytes() == tensor.array().tobytes() == bytes(range(bits // 2))
        assert tensor.array().dtype == (np.uint8 if dtype is None else dtype)


def test_the_packages_own_file_is_read_identically(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 7), np.float16),
        "ints": rng.integers(-9, 9, (3, 5), dtype=np.int32),
        "bytes": rng.integers(0, 255, 3, dtype=np.uint8),
        "late": np.zeros((2, 0), np.int64),
    }
    save_file(arrays, tmp_path / "a.safetensors", {"format": "np"})
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    assert checkpoint.metadata == {"format": "np"}
    assert set(checkpoint.tensors) == set(arrays)
    for name, need in arrays.items():
        found = checkpoint.tensors[name].array()
        assert (found.dtype, found.shape, found.tobytes()) == (need.dtype, need.shape, need.tobytes())
        assert not found.flags.writeable


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    header = {"late": row(offsets=(4, 8)), "none": row(shape=[0], offsets=(4, 4)), "early": row()}
    path = raw(tmp_path / "a.safetensors", json.dumps(header), b"earllate")
    tensors = open_checkpoint(path).tensors
    assert list(tensors) == ["early", "none", "late"]
    assert [t.raw().tobytes() for t in tensors.values()] == [b"earl", b"", b"late"]


def test_values_come_from_bytes_at_any_alignment(tmp_path):
    text = json.dumps({"a": row("U8", [1], [0, 1]), "b": row("BF16", [2, 1], [1, 5]), "c": row("F8_E8M0", [3], [5, 8])})
    path = raw(tmp_path / "a.safetensors", text + " " * (len(text) % 2), b"\0\x80\x3f\x00\xc0\x78\x7f\x80")
    tensors = open_checkpoint(path).tensors
    assert tensors["b"].array().astype(np.float32).tolist() == [[1.0], [-2.0]]
    assert tensors["c"].array().view(np.uint8).tolist() == [120, 127, 128]


def shrink(path):
    os.truncate(path, path.stat().st_size - 4)


def grow(path):
    path.write_bytes(path.read_bytes() + bytes(4))


def rewrite(path):
    os.utime(path, ns=(0, 0))


def put_another_in_its_place(path):
    other = save(path.with_name("b.safetensors"), "x", "z")
    os.utime(other, ns=(0, 0))
    other.replace(path)


@pytest.mark.parametrize("change", [shrink, grow, rewrite, put_another_in_its_place])
def test_a_file_that_changes_after_it_was_opened_is_an_error_and_no_crash(tmp_path, change):
    path = save(tmp_path / "a.safetensors", "x", "y")
    tensors = open_checkpoint(path).tensors
    view = tensors["x"].array()
    change(path)
    for name in "xy":
        with pytest.raises(CorruptError, match="changed after it was opened"):
            tensors[name].array()
    assert view.shape == (4,)


def test_views_of_one_file_share_one_descriptor(tmp_path):
    path = save(tmp_path / "a.safetensors", *(f"t{i}" for i in range(50)))
    before = len(os.listdir("/proc/self/fd"))
    views = [t.array() for t in open_checkpoint(path).tensors.values()]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del views
    assert len(os.listdir("/proc/self/fd")) == before


# Writing


def entries(arrays: dict[str, np.ndarray]) -> list[Entry]:
    return [Entry(n, dtype_name(a.dtype), a.shape, lambda a=a: [a]) for n, a in arrays.items()]


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), unique=True, max_size=6))
    out = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        bits = DTYPES[dtype][1]
        if int(np.prod(shape)) * bits % 8:
            shape = (*shape, 4)
        size = int(np.prod(shape)) * bits // 8
        out.append((name, dtype, shape, draw(st.binary(min_size=size, max_size=size))))
    return [plan for plan in out if plan[0] != "__metadata__"]


@SETTINGS
@given(
    plans(),
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=4), st.text(st.characters(codec="utf-8")), max_size=3
    ),
)
def test_what_is_written_reads_back_by_both_parsers(tmp_path, plan, metadata):  # fmt: skip
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [Entry(n, d, s, lambda b=b: [b[:1], b[1:]]) for n, d, s, b in plan], metadata)
    with safe_open(path, "np") as f:
        assert (f.metadata() or {}) == metadata
        assert {n: (f.get_slice(n).get_dtype(), f.get_slice(n).get_shape()) for n in f.keys()} == {  # noqa: SIM118
            n: (d, list(s)) for n, d, s, _ in plan
        }
    tensors, found = read_header(path)
    assert found == metadata
    assert [(n, t.dtype, t.shape, t.raw().tobytes()) for n, t in tensors.items()] == sorted_by_bytes(plan)


def sorted_by_bytes(plan):
    """As written; of tensors that begin at one byte, the empty ones first."""
    at, keyed = 0, []
    for n, d, s, b in plan:
        keyed.append(((at, len(b)), (n, d, s, b)))
        at += len(b)
    return [item for _, item in sorted(keyed, key=lambda pair: pair[0])]


def test_bytes_depend_on_the_arguments_alone_and_data_is_aligned(tmp_path):
    arrays = {name: np.arange(6, dtype=np.int32) for name in ("z", "a", "m")}
    for name in ("1", "2"):
        write_safetensors(tmp_path / name, entries(arrays), {"b": "1", "a": "2"})
    written = (tmp_path / "1").read_bytes()
    assert written == (tmp_path / "2").read_bytes()
    length = int.from_bytes(written[:8], "little")
    assert length % 8 == 0
    assert list(json.loads(written[8 : 8 + length])) == ["__metadata__", "z", "a", "m"]
    assert written[8 : 8 + length].decode().rstrip(" ").endswith("}")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_])
def test_strided_arrays_are_written_in_c_order(tmp_path, dtype):
    base = np.arange(24).reshape(4, 6).astype(dtype)
    arrays = {"f": np.asfortranarray(base), "t": base.T, "s": base[::2, ::-3], "0d": base[0, 1]}
    write_safetensors(tmp_path / "a", entries(arrays), {})
    tensors, _ = read_header(tmp_path / "a")
    for name, array in arrays.items():
        assert tensors[name].raw().tobytes() == array.tobytes(order="C")


def test_permissions_are_those_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_safetensors(tmp_path / "a", [], {})
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_tensors_are_produced_one_at_a_time_and_in_order(tmp_path):
    log = []

    def data(name):
        log.append((name, (tmp_path / "a").stat().st_size >= output.BUFFER))
        yield bytes(output.BUFFER)

    write_safetensors(tmp_path / "a", [Entry(n, "U8", (output.BUFFER,), lambda n=n: data(n)) for n in "xyz"], {})
    assert [name for name, _ in log] == ["x", "y", "z"]
    assert log[2] == ("z", True)


def test_a_full_disk_leaves_nothing_and_says_what_to_do(tmp_path):
    path = tmp_path / "a.safetensors"
    path.symlink_to("/dev/full")
    with pytest.raises(
        WarptileError, match=r"a\.safetensors: cannot be written; found No space left.*free some room"
    ) as e:
        write_safetensors(path, entries({"x": np.zeros(4)}), {})
    assert (e.value.exit_code, list(tmp_path.iterdir())) == (1, [])
    with pytest.raises(WarptileError, match="cannot be written"):
        write_safetensors(tmp_path / "none" / "a", [], {})


def test_an_error_of_the_data_is_passed_on_and_leaves_nothing(tmp_path):
    def data():
        yield bytes(4)
        raise OSError(5, "of the source")

    with pytest.raises(OSError, match="of the source"):
        write_safetensors(tmp_path / "a", [Entry("x", "U8", (8,), data)], {})
    assert list(tmp_path.iterdir()) == []


# Directories


def test_an_index_and_its_shards(tmp_path):
    for shard, names in {"two": ["b"], "one": ["a", "c"], "stray": ["z"]}.items():
        save(tmp_path / f"{shard}.safetensors", *names, shard=shard)
    index(tmp_path, b="two.safetensors", a="one.safetensors", c="one.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [(n, t.file.name) for n, t in checkpoint.tensors.items()] == [
        ("a", "one.safetensors"),
        ("c", "one.safetensors"),
        ("b", "two.safetensors"),
    ]
    assert [metadata["shard"] for metadata in checkpoint.file_metadata.values()] == ["one", "two"]
    assert checkpoint.notes == [("", "not listed in model.safetensors.index.json, left out: stray.safetensors")]


INDEXES: dict[str, tuple[dict[str, object], str]] = {
    "a missing shard": ({"a": "one.safetensors", "b": "gone.safetensors"}, "gone.safetensors: a shard is missing"),
    "a missing tensor": ({"a": "one.safetensors", "q": "one.safetensors"}, "q: the tensor is missing"),
    "a tensor it does not list": ({"a": "one.safetensors", "b": "two.safetensors"}, "c: a tensor the index does not"),
    "a tensor in another shard": (
        {"a": "two.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
        "a: the tensor is missing",
    ),
    "a path upwards": ({"a": "../one.safetensors"}, "not a shard's name"),
    "an absolute path": ({"a": "/etc/x.safetensors"}, "not a shard's name"),
    "a path downwards": ({"a": "sub/one.safetensors"}, "not a shard's name"),
    "a path of Windows": ({"a": "..\\one.safetensors"}, "not a shard's name"),
    "a name with a zero byte": ({"a": "one\0.safetensors"}, "not a shard's name"),
    "a pickle": ({"a": "one.bin"}, "not a shard's name"),
    "an empty name": ({"a": ""}, "not a shard's name"),
    "a number": ({"a": 7}, "not a string"),
    "nothing": ({}, "no weight_map"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_lies_is_refused_by_name(tmp_path, case):
    weight_map, says = INDEXES[case]
    save(tmp_path / "one.safetensors", "a", "c")
    save(tmp_path / "two.safetensors", "b")
    index(tmp_path, **weight_map)
    with pytest.raises(CorruptError, match=says):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    save(tmp_path / "one.safetensors", "a", "b")
    save(tmp_path / "two.safetensors", "b")
    index(tmp_path, a="one.safetensors", b="two.safetensors")
    with pytest.raises(CorruptError, match="b: "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}', "[" * 9999]
)
def test_an_index_that_is_none(tmp_path, content):
    save(tmp_path / "one.safetensors", "a")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CorruptError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_links_may_not_leave_the_directory(tmp_path):
    model, outside = tmp_path / "model", tmp_path / "outside"
    model.mkdir()
    outside.mkdir()
    save(outside / "secret.safetensors", "a")
    (model / "one.safetensors").symlink_to(outside / "secret.safetensors")
    with pytest.raises(CorruptError, match="leads out of its directory"):
        open_checkpoint(model)
    index(model, a="one.safetensors")
    with pytest.raises(CorruptError, match="leads out of its directory"):
        open_checkpoint(model)
    (model / "one.safetensors").unlink()
    (model / "one.safetensors").symlink_to(model / "real" / "x.safetensors")
    with pytest.raises(CorruptError, match="link to nothing"):
        open_checkpoint(model)
    (model / "real").mkdir()
    save(model / "real" / "x.safetensors", "a")
    assert list(open_checkpoint(model).tensors) == ["a"]


def test_a_snapshot_of_the_hugging_face_cache_is_links_to_its_blobs(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save(blobs / "aa", "a")
    (blobs / "bb").write_text('{"quantization_config": {"bits": 4}}')
    (blobs / "cc").write_text("words")
    for name, blob in {"model.safetensors": "aa", "config.json": "bb", "vocab.txt": "cc"}.items():
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    for path in (snapshot, snapshot / "model.safetensors"):
        checkpoint = open_checkpoint(path)
        assert (list(checkpoint.tensors), checkpoint.quantization) == (["a"], {"bits": 4})
    assert [f.name for f in open_checkpoint(snapshot).side_files] == ["vocab.txt"]
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    save(other / "aa", "a")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "aa")
    with pytest.raises(CorruptError, match="leads out"):
        open_checkpoint(snapshot)


def test_several_files_without_an_index(tmp_path):
    save(tmp_path / "one.safetensors", "a")
    save(tmp_path / "two.safetensors", "b")
    (tmp_path / "._two.safetensors").write_bytes(b"hidden")
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]
    save(tmp_path / "three.safetensors", "a", "d")
    with pytest.raises(UnsupportedError, match="name one of the files"):
        open_checkpoint(tmp_path)


def test_a_shard_that_is_a_directory_or_a_pipe(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(UnsupportedError, match="not a regular file"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.safetensors").rmdir()
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(UnsupportedError, match="not a regular file"):
        open_checkpoint(tmp_path)


def test_a_product_beside_its_source_is_left_out(tmp_path):
    save(tmp_path / "model.safetensors", "a")
    save(tmp_path / "model-marlin.safetensors", "a", warptile="{}")
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["a"].file.name == "model.safetensors"
    assert ("", "already converted, left out: model-marlin.safetensors") in checkpoint.notes
    assert open_checkpoint(tmp_path / "model.safetensors").quantization == {"bits": 4}


# Configurations


def test_the_quantisation_config_and_where_it_was(tmp_path):
    save(tmp_path / "model.safetensors", "a")
    assert (open_checkpoint(tmp_path).quantization, open_checkpoint(tmp_path).quantization_file) == ({}, None)
    assert open_checkpoint(tmp_path).stated_in == str(tmp_path)
    (tmp_path / "config.json").write_text('{"x": Infinity, "quantization_config": {"bits": 4, "group_size": 32}}')
    assert open_checkpoint(tmp_path).quantization_file == "config.json"
    assert open_checkpoint(tmp_path).stated_in == str(tmp_path / "config.json")
    (file,) = tmp_path.glob("*.safetensors")
    assert open_checkpoint(file).stated_in == str(tmp_path / "config.json")
    (tmp_path / "quant_config.json").write_text('{"bits": 4, "group_size": 64}')
    (tmp_path / "quantize_config.json").write_text('{"bits": 8}')
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.quantization, checkpoint.quantization_file) == ({"bits": 8}, "quantize_config.json")
    assert checkpoint.config["x"] == float("inf")
    assert sorted(text for _, text in checkpoint.notes) == [
        "bits is 8 in quantize_config.json and 4 in config.json: quantize_config.json is believed",
        "bits is 8 in quantize_config.json and 4 in quant_config.json: quantize_config.json is believed",
    ]


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "quant_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"{", b"\xff{}", b'{"a": 1, "a": 2}', b"[" * 99999])
def test_a_config_that_is_none_is_refused_by_name(tmp_path, name, content):
    save(tmp_path / "model.safetensors", "a")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptError, match=name):
        open_checkpoint(tmp_path)


def test_a_quantization_config_of_another_type_and_a_config_too_long(tmp_path):
    save(tmp_path / "model.safetensors", "a")
    (tmp_path / "config.json").write_text('{"quantization_config": "gptq"}')
    with pytest.raises(CorruptError, match="a string"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert open_checkpoint(tmp_path).quantization == {}
    os.truncate(tmp_path / "config.json", 1 << 30)
    with pytest.raises(CorruptError, match="too long"):
        open_checkpoint(tmp_path)


def test_configs_beside_a_lone_file_count_only_when_it_is_the_directorys_model(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    path = save(tmp_path / "one.safetensors", "a")
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization == {"bits": 4}
    assert checkpoint.notes == [("", "read beside the file: config.json")]
    assert checkpoint.side_files == ()
    save(tmp_path / "two.safetensors", "b")
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config, checkpoint.quantization) == ({}, {})
    assert "not read: config.json" in checkpoint.notes[0][1]
    index(tmp_path, b="two.safetensors")
    assert open_checkpoint(path).quantization == {}
    assert open_checkpoint(tmp_path / "two.safetensors").quantization == {"bits": 4}


def test_side_files_are_the_plain_files_that_are_no_weights(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    save(model / "model.safetensors", "a")
    for name in ("config.json", "generation_config.json"):
        (model / name).write_text("{}")
    for name in ("tokenizer.model", "README.md", "pytorch_model.bin", "w.gguf", ".hidden", "a.onnx"):
        (model / name).write_bytes(b"x")
    (model / "onnx").mkdir()
    (tmp_path / "passwords").write_bytes(b"x")
    (model / "vocab.txt").symlink_to(tmp_path / "passwords")
    (model / "merges.txt").symlink_to(model / "README.md")
    checkpoint = open_checkpoint(model)
    assert {f.name for f in checkpoint.side_files} == {
        "README.md",
        "generation_config.json",
        "merges.txt",
        "tokenizer.model",
    }
    [(_, text)] = checkpoint.notes
    assert text.endswith(": a.onnx, onnx, pytorch_model.bin, vocab.txt, w.gguf")


def test_a_note_is_kept_once(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", "x"))
    checkpoint.note("m", "assumed")
    checkpoint.note("m", "assumed")
    checkpoint.note("", "assumed")
    assert checkpoint.notes == [("m", "assumed"), ("", "assumed")]
