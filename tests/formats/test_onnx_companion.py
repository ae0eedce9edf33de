"""The way back to an .onnx: models come back byte for byte with their external data, and companions that lie do not."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored import zoo
from warptile.convert import convert, unpack, verify
from warptile.convert.cli import main
from warptile.formats import onnx_companion, onnx_table
from warptile.formats.container import companion, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, UsageError, VerifyError, WarptileError
from warptile.formats.onnx_table import File, parse, table
from warptile.kernels import layouts

onnx = pytest.importorskip("onnx")
from_array = onnx.numpy_helper.from_array


def packed(name: str, seed: int = 0, kind: Any = np.float32) -> tuple[Any, list[Any]]:
    """A MatMulNBits node of 16 rows by 64 inputs, and its initializers."""
    rng = np.random.default_rng(seed)
    b = rng.integers(0, 256, (16, 2, 16)).astype(np.uint8)
    scales = (rng.integers(1, 64, (16, 2)) / 64).astype(kind)
    zeros = rng.integers(0, 256, (16, 1)).astype(np.uint8)
    names = [f"{name}_Q4", f"{name}.scales", f"{name}.zero_points"]
    said = {"K": 64, "N": 16, "bits": 4, "block_size": 32}
    node = onnx.helper.make_node("MatMulNBits", ["x", *names], [f"{name}.y"], domain="com.microsoft", **said)
    return node, [from_array(array, full) for array, full in zip((b, scales, zeros), names, strict=True)]


def model(initializers: Sequence[Any] | None = None, extra: Sequence[Any] = (), nodes: Sequence[Any] = ()) -> Any:
    """Modules a.weight and b.weight."""
    (a, of_a), (b, of_b) = packed("a.weight"), packed("b.weight", 1)
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 64])
    taken = [*of_a, *of_b, *extra] if initializers is None else list(initializers)
    graph = onnx.helper.make_graph([a, *nodes, b], "g", [value], [value], taken)
    sets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)


def saved(folder: Path, proto: Any, name: str = "model.onnx") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(proto.SerializeToString())
    return folder / name


def outside(proto: Any, name: str, files: dict[str, bytes], gap: bytes = b"") -> None:
    """Take the raw data of an initializer to the end of ``files[name]``, with ``gap`` before it."""
    start = len(files.get(name, b"")) + len(gap)
    files[name] = files.get(name, b"") + gap + proto.raw_data
    for key, value in (("location", name), ("offset", start), ("length", len(proto.raw_data))):
        proto.external_data.add(key=key, value=str(value))
    proto.ClearField("raw_data")
    proto.data_location = onnx.TensorProto.EXTERNAL


def with_files(folder: Path, proto: Any, files: dict[str, bytes]) -> Path:
    path = saved(folder, proto)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def check_comes_back(path: Path, scratch: Path, to: str = "marlin") -> None:
    """Through a file and a directory: the same bytes under the same names, and nothing else."""
    for artifact in (scratch / "artifact.safetensors", scratch / "artifact"):
        assert convert(path, artifact, to=to).notes == [], artifact
        verify(artifact)
        assert verify(artifact, path).files == 1
        back = scratch / f"back-{artifact.name}"
        back.mkdir()
        done = unpack(artifact, back / path.name)
        assert contents(back) == contents(path.parent)
        assert sorted(done.files) == sorted(contents(back))


@pytest.mark.parametrize("name", ["ort_b32_asym", "ort_b128_sym"])
def test_files_of_the_runtimes_quantiser_come_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = Path(shutil.copy(zoo(name) / "model.onnx", tmp_path / "src"))
    check_comes_back(path, tmp_path)


@pytest.mark.parametrize("to", layouts())
def test_models_come_back_from_every_layout(to: str, tmp_path: Path) -> None:
    """Scales f16 without zero points, which all layouts hold."""
    made = model([p for i in range(2) for p in packed("ab"[i] + ".weight", i, np.float16)[1][:2]])
    for node in made.graph.node:
        del node.input[3:]
    check_comes_back(saved(tmp_path / "src", made), tmp_path, to)


def typed() -> Any:
    """Values that are numbers of the protobuf, those of a module and of others."""
    _, of_a = packed("a.weight")
    for proto in of_a:
        array = onnx.numpy_helper.to_array(proto)
        field = proto.float_data if array.dtype == np.float32 else proto.int32_data
        proto.ClearField("raw_data")
        field.extend(array.reshape(-1).tolist())
    kinds = onnx.TensorProto
    more = [onnx.helper.make_tensor("shape", kinds.INT64, [2], [-1, 2**40])]
    more.append(onnx.helper.make_tensor("flag", kinds.BOOL, [2], [True, False]))
    return model([*of_a, *more, *packed("b.weight", 1)[1]])


def constant() -> Any:
    node = onnx.helper.make_node("Constant", [], ["c"], value=from_array(np.arange(40, dtype=np.float32), "inner"))
    return model(nodes=[node])


def half() -> Any:
    (a, of_a), (b, of_b) = (packed(name, 2, ml_dtypes.bfloat16) for name in ("a.weight", "b.weight"))
    made = model([*of_a, *of_b, from_array(np.arange(6).astype(ml_dtypes.bfloat16), "bf")])
    del made.graph.node[:]
    made.graph.node.extend([b, a])
    return made


def mixed_up() -> Any:
    made = model(extra=[from_array(np.ones((0, 3), np.float32), "empty"), from_array(np.float32(3), "one")])
    kept = list(made.graph.initializer)[::-1]
    del made.graph.initializer[:]
    made.graph.initializer.extend([*kept[1::2], *kept[::2]])
    return made


def narrow() -> Any:
    return model(extra=[onnx.TensorProto(name="t", data_type=onnx.TensorProto.UINT4, dims=[8], raw_data=bytes(4))])


MODELS = {"typed": typed, "constant": constant, "bf16": half, "mixed up": mixed_up, "plain": model}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_of_one_file_come_back(make: Callable[[], Any], tmp_path: Path) -> None:
    check_comes_back(saved(tmp_path / "src", make()), tmp_path)


def test_four_bit_initializers_come_back(tmp_path: Path) -> None:
    path = saved(tmp_path / "src", narrow())
    unpack(convert(path, tmp_path / "a", to="marlin").dst, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


def test_bytes_that_no_writer_of_protobuf_would_choose_come_back(tmp_path: Path) -> None:
    """Unknown fields, a graph in two parts, the name after the data, a length of needless bytes."""
    proto = model()
    one = proto.graph.initializer.pop()
    raw = struct.pack("<BBB", 0x4A, 0x80 | len(one.raw_data), 0) + one.raw_data
    one.ClearField("raw_data")
    inner = raw + one.SerializeToString() + b"\xfa\x7f\x03xyz"
    field = b"\x2a" + bytes([len(inner)]) + inner
    path = saved(tmp_path / "src", proto)
    path.write_bytes(path.read_bytes() + b"\x3a" + bytes([len(field)]) + field + b"\xf8\x7f\x05")
    assert len(field) < 128
    check_comes_back(path, tmp_path)


def in_files(files: dict[str, bytes], *names: str, gap: bytes = b"", made: Any = None) -> Any:
    """All initializers outside, in turn in the files called."""
    made = made or model(extra=[from_array(np.arange(100, dtype=np.int64), "rest")])
    for i, proto in enumerate(made.graph.initializer):
        outside(proto, names[i % len(names)], files, gap)
    return made


@pytest.mark.parametrize("gap", [b"", bytes(5), b"padding!"], ids=["close", "zeros", "junk"])
@pytest.mark.parametrize("names", [["model.onnx.data"], ["a.bin", "sub/b c.bin"], [f"f{i}" for i in range(7)]], ids=len)
def test_external_data_comes_back(names: list[str], gap: bytes, tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    made = in_files(files, *names, gap=gap)
    files[names[0]] += gap
    check_comes_back(with_files(tmp_path / "src", made, files), tmp_path)


def test_some_initializers_outside_and_out_of_order(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    made = model()
    for i in (5, 0, 3):
        outside(made.graph.initializer[i], "data", files, b"\1\2\3")
    check_comes_back(with_files(tmp_path / "src", made, files), tmp_path)


def test_what_the_package_saves_comes_back(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = tmp_path / "src" / "m.onnx"
    onnx.save(model(), path, save_as_external_data=True, location="m.onnx.data", size_threshold=100)
    assert 0 < sum(p.data_location for p in onnx.load(path, load_external_data=False).graph.initializer) < 6
    check_comes_back(path, tmp_path)


def test_tensors_that_share_bytes_come_back(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    array = from_array(np.arange(64, dtype=np.float32), "t")
    outside(array, "data", files)
    made = model(extra=[array])
    for name, offset, length in (("same", 0, 64), ("inside", 16, 8), ("across", 128, 48), ("after", 240, 4)):
        other = onnx.TensorProto(name=name, data_type=1, dims=[length], data_location=1)
        for key, value in (("location", "data"), ("offset", offset), ("length", 4 * length)):
            other.external_data.add(key=key, value=str(value))
        made.graph.initializer.append(other)
    files["data"] += bytes(range(64))
    check_comes_back(with_files(tmp_path / "src", made, files), tmp_path)


def branch(location: str) -> Any:
    """A model with external data of an inner graph, and of a node's attribute."""
    files: dict[str, bytes] = {}
    inner, value = (from_array(np.arange(8, dtype=np.float32), name) for name in ("inner", "value"))
    for proto in (inner, value):
        outside(proto, location, files)
    add = onnx.helper.make_node("Add", ["x", "inner"], ["z"])
    graph = onnx.helper.make_graph([add], "i", [], [], [inner])
    nodes = [onnx.helper.make_node("If", ["x"], ["y"], then_branch=graph)]
    return model(nodes=[*nodes, onnx.helper.make_node("Constant", [], ["c"], value=value)]), files


def test_external_data_of_the_graph_alone_comes_back(tmp_path: Path) -> None:
    made, files = branch("of the graph")
    path = with_files(tmp_path / "src", made, files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    (tmp_path / "back").mkdir()
    unpack(artifact, tmp_path / "back" / "model.onnx")
    assert contents(tmp_path / "back") == contents(tmp_path / "src")


UNKEPT = {
    "missing": ("gone", "external data is missing"),
    "elsewhere": ("../data", "external data outside the model's directory"),
    "hidden": (".profile", "external data in a hidden file"),
}


@pytest.mark.parametrize(("location", "says"), UNKEPT.values(), ids=UNKEPT)
def test_a_model_that_cannot_come_back_is_converted_with_a_note(location: str, says: str, tmp_path: Path) -> None:
    made, files = branch(location)
    path = with_files(tmp_path / "src", made, {} if location == "gone" else files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin")
    assert any(says in text and "no .onnx can be made" in text for _, text in artifact.notes)
    assert not companion(artifact.dst, ".onnx-graph").exists()
    with pytest.raises(UnsupportedError, match="made without its model's graph; name a"):
        unpack(artifact.dst, tmp_path / "back.onnx")
    unpack(artifact.dst, tmp_path / "back.safetensors")
    verify(artifact.dst, path)


def test_too_much_beside_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "data"), files)
    with open(tmp_path / "src" / "data", "ab") as f:
        f.truncate(1 << 40)
    (note,) = open_checkpoint(path).notes
    assert "too many bytes beside its tensors" in note[1]
    with open(tmp_path / "src" / "data", "ab") as f:
        f.truncate(len(files["data"]))
    for name, says in (("MAX_TENSORS", "too many tensors (7)"), ("MAX_FILES", "too many files (2)")):
        monkeypatch.setattr(onnx_table, name, 1)
        assert says in open_checkpoint(path).notes[0][1]
        monkeypatch.undo()
    assert open_checkpoint(path).notes == []


def test_external_data_in_the_model_itself_comes_back_under_its_own_name_only(tmp_path: Path) -> None:
    proto = onnx.TensorProto(name="t", data_type=onnx.TensorProto.UINT8, dims=[4], data_location=1)
    for key, value in (("location", "model.onnx"), ("offset", "0"), ("length", "4")):
        proto.external_data.add(key=key, value=value)
    path = saved(tmp_path / "src", model(extra=[proto]))
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    with pytest.raises(CorruptError, match="make no model; found external data is missing"):
        unpack(artifact, tmp_path / "other.onnx")
    unpack(artifact, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
def test_other_destinations_hold_initializers_and_no_graph(name: str, tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "data"), files)
    artifact = convert(path, tmp_path / name, to="marlin").dst
    unpack(artifact, tmp_path / "back.safetensors")
    unpack(artifact, tmp_path / "back")
    assert sorted(file.name for file in (tmp_path / "back").iterdir()) == ["data.safetensors", "model.safetensors"]
    for back in (tmp_path / "back.safetensors", tmp_path / "back"):
        theirs, ours = open_checkpoint(path).tensors, open_checkpoint(back).tensors
        assert {n: t.raw().tobytes() for n, t in theirs.items()} == {n: t.raw().tobytes() for n, t in ours.items()}


def test_the_graph_is_replaced_with_its_artifact(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", model()), saved(tmp_path / "two", constant())
    artifact = convert(one, tmp_path / "a.safetensors", to="marlin").dst
    convert(two, artifact, to="marlin", overwrite=True)
    verify(artifact, two)
    unpack(artifact, tmp_path / "back.onnx")
    with pytest.raises(WarptileError, match="already exists"):
        unpack(artifact, tmp_path / "back.onnx")
    unpack(artifact, tmp_path / "back.onnx", overwrite=True)
    assert (tmp_path / "back.onnx").read_bytes() == two.read_bytes()
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["a.safetensors", "a.safetensors.onnx-graph", "back.onnx", "one", "two"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_external_data_replaces_no_file(overwrite: bool, tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "a", "sub/b"), files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    back = tmp_path / "back"
    for place in ("a", "sub/b"):
        (back / place).parent.mkdir(parents=True)
        (back / place).write_bytes(b"mine")
        with pytest.raises(WarptileError, match="external data already exists and is not replaced"):
            unpack(artifact, back / "model.onnx", overwrite=overwrite)
        assert contents(back) == {place: b"mine"}
        shutil.rmtree(back)


def test_external_data_of_the_same_bytes_is_left_there_when_the_model_is_replaced(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "a", "sub/b"), files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    (tmp_path / "back").mkdir()
    back = unpack(artifact, tmp_path / "back" / "model.onnx").dst
    back.write_bytes(saved(tmp_path, model()).read_bytes())
    times = [(tmp_path / "back" / name).stat().st_mtime_ns for name in files]
    unpack(artifact, back, overwrite=True)
    assert contents(tmp_path / "back") == contents(tmp_path / "src")
    assert times == [(tmp_path / "back" / name).stat().st_mtime_ns for name in files]
    (tmp_path / "back" / "sub" / "b").rename(tmp_path / "back" / "kept")
    (tmp_path / "back" / "sub" / "b").symlink_to("../kept")
    with pytest.raises(
        WarptileError, match=r"sub/b: external data already exists .*need a plain file of the same bytes"
    ):
        unpack(artifact, back, overwrite=True)


def test_a_run_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "a", "sub/b"), files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    (tmp_path / "back").mkdir()
    left = tmp_path / "back" / "model.onnx.partial" / ".beside" / "sub"
    left.mkdir(parents=True)
    for file in (left / "b", left / "c", left.parent / "model.onnx"):
        file.write_bytes(b"half")
    unpack(artifact, tmp_path / "back" / "model.onnx")
    assert contents(tmp_path / "back") == contents(tmp_path / "src")


def test_without_the_package_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = convert(saved(tmp_path / "src", model()), tmp_path / "a.safetensors", to="marlin").dst
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(artifact, WarptileError, "needs the onnx package")


def test_a_file_of_the_graph_alone_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, files = branch("of the graph")
    path = with_files(tmp_path / "src", made, files)

    def denied(file: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(onnx_companion, "_state", denied)
    given = open_checkpoint(path)
    assert any("of the graph cannot be read (Permission denied)" in text for _, text in given.notes)
    assert not given.companions


def test_external_data_below_what_is_a_file(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "a", "sub/b"), files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "sub").write_bytes(b"mine")
    with pytest.raises(WarptileError, match="sub/b: cannot be written"):
        unpack(artifact, tmp_path / "back" / "model.onnx")
    assert contents(tmp_path / "back") == {"sub": b"mine"}
    assert len(list((tmp_path / "back").iterdir())) == 1


def test_external_data_that_appears_meanwhile_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "a", "b"), files)
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    back, check = tmp_path / "back", onnx_companion._check_written
    back.mkdir()

    def appears(*args: Any) -> None:
        check(*args)
        (back / "b").write_bytes(b"mine")

    monkeypatch.setattr(onnx_companion, "_check_written", appears)
    with pytest.raises(WarptileError, match="not replaced"):
        unpack(artifact, back / "model.onnx")
    assert contents(back) == {"b": b"mine"}
    assert [file.name for file in back.iterdir()] == ["b"]


def test_external_data_has_no_place_in_the_artifact_under_the_models_name_or_through_a_link(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "sub/data"), files)
    artifact = convert(path, tmp_path / "sub", to="marlin").dst
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="no place there"):
        unpack(artifact, tmp_path / "model.onnx")
    (tmp_path / "back").mkdir()
    (tmp_path / "away").mkdir()
    (tmp_path / "back" / "sub").symlink_to(tmp_path / "away")
    with pytest.raises(UsageError, match="no place there"):
        unpack(artifact, tmp_path / "back" / "model.onnx")
    assert contents(tmp_path) == before
    (tmp_path / "back" / "sub").unlink()
    for name in ("m.onnx", "m.onnx.partial/data"):
        files = {}
        same = with_files(tmp_path / "same", in_files(files, name), files)
        artifact = convert(same, tmp_path / "b.safetensors", to="marlin", overwrite=True).dst
        with pytest.raises(UsageError, match=f"{name}: the model's external data has no place there"):
            unpack(artifact, tmp_path / "back" / "m.onnx")
        shutil.rmtree(tmp_path / "same")
    assert not list((tmp_path / "back").iterdir())


def rebound(artifact: Path, data: bytes) -> None:
    """Put another companion beside an artifact of one file, and its hash into it."""
    kept = companion(artifact, ".onnx-graph")
    old = hashlib.sha256(kept.read_bytes()).hexdigest().encode()
    kept.write_bytes(data)
    whole = artifact.read_bytes()
    assert whole.count(old) == 1
    artifact.write_bytes(whole.replace(old, hashlib.sha256(data).hexdigest().encode()))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "data", gap=b"gap"), files)
    return convert(path, tmp_path / "a.safetensors", to="marlin").dst


def refused(artifact: Path, error: type[WarptileError], says: str) -> None:
    back = artifact.parent / "back"
    back.mkdir()
    with pytest.raises(error, match=says) as caught:
        unpack(artifact, back / "model.onnx")
    assert "\n" not in str(caught.value)
    assert not list(back.iterdir())
    back.rmdir()


def test_companions_that_were_swapped_or_cut_are_refused(artifact: Path, tmp_path: Path) -> None:
    kept = companion(artifact, ".onnx-graph")
    good = kept.read_bytes()
    assert hashlib.sha256(good).hexdigest() == open_checkpoint(tmp_path / "src" / "model.onnx").quantization["graph"]
    other = convert(saved(tmp_path / "two", constant()), tmp_path / "b.safetensors", to="marlin").dst
    swapped = companion(other, ".onnx-graph").read_bytes()
    for data in (swapped, good[:-1], good + b"\0", b"", good.replace(b"gap", b"pag", 1)):
        kept.write_bytes(data)
        refused(artifact, CorruptError, "onnx-graph: not the graph that the artifact was made with")
        with pytest.raises(VerifyError, match=r"onnx-graph: (all of it: )?differs"):
            verify(artifact, tmp_path / "src" / "model.onnx")
    kept.unlink()
    refused(artifact, CorruptError, "the graph of the model is missing; put it back there")
    with pytest.raises(VerifyError, match="the artifact lost a file"):
        verify(artifact, tmp_path / "src" / "model.onnx")
    kept.write_bytes(good)
    verify(artifact, tmp_path / "src" / "model.onnx")


def test_companions_that_lie_under_a_true_hash_are_refused(artifact: Path) -> None:
    good = companion(artifact, ".onnx-graph").read_bytes()
    files, start = parse(good, artifact)
    first, data = files
    rest = good[start:]
    names = [name for _, name in data.tensors]
    swap = tuple((size, name) for (size, _), name in zip(data.tensors, names[::-1], strict=True))
    wrong = {
        "no model": (table(artifact, files) + bytes(len(rest)), "graph and tensors make no model"),
        "other names": (table(artifact, (first, File("data2", data.tensors, data.rest))) + rest, "data is missing"),
        "a tensor less": (table(artifact, (first, File("data", data.tensors[:-1], data.rest))) + rest, "other bytes"),
        "other order": (table(artifact, (first, File("data", swap, data.rest))) + rest, "make another model|no model"),
        "unknown": (
            table(artifact, (first, File("data", ((3, "none"), *data.tensors[1:]), data.rest))) + rest,
            "none: the artifact lacks a tensor of the graph",
        ),
        "moved": (
            table(artifact, (first, File("data", ((6, names[0]), *data.tensors[1:]), data.rest))) + rest + b"gap",
            "make another model|no model",
        ),
    }
    for content, says in wrong.values():
        rebound(artifact, content)
        refused(artifact, CorruptError, says)
    rebound(artifact, good)
    unpack(artifact, artifact.parent / "model.onnx")


def test_other_values_than_those_of_the_graph_are_refused(tmp_path: Path) -> None:
    """A tensor that the graph has as numbers was changed in the artifact: it would not come back."""
    path = saved(tmp_path / "src", typed())
    artifact = convert(path, tmp_path / "a.safetensors", to="marlin").dst
    whole, value = artifact.read_bytes(), struct.pack("<qq", -1, 2**40)
    assert whole.count(value) == 1
    artifact.write_bytes(whole.replace(value, struct.pack("<qq", -1, 2**41)))
    refused(artifact, CorruptError, "shape: the graph has other values of it")


def test_an_artifact_that_says_no_hash_or_another_source(artifact: Path, tmp_path: Path) -> None:
    whole = artifact.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    said = json.loads(header["__metadata__"]["source_quantization"])
    for edit, error, says in (
        ({"graph": None}, CorruptError, "not the graph"),
        ({"graph": [1]}, CorruptError, "not the graph"),
        ({"quant_method": "gguf"}, UnsupportedError, "not made from an ONNX model; name a .safetensors or a directory"),
    ):
        header["__metadata__"]["source_quantization"] = json.dumps({**said, **edit})
        text = json.dumps(header).encode()
        artifact.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        refused(artifact, error, says)


def test_only_artifacts_of_onnx_become_onnx(tmp_path: Path) -> None:
    artifact = convert(zoo("gq_gptq_dynamic"), tmp_path / "a", to="marlin").dst
    with pytest.raises(UnsupportedError, match="not made from an ONNX model"):
        unpack(artifact, tmp_path / "back.onnx")
    with pytest.raises(UsageError, match="an artifact is a "):
        convert(zoo("gq_gptq_dynamic"), tmp_path / "a.onnx", to="marlin")


HOSTILE_NAMES = ["../x", "/etc/x", "a/../../x", ".", "..", "c:\\x", "a\0", ".bashrc", "a/.ssh", "./a", "a//b", "a/", ""]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_that_lead_out_are_refused(name: str, artifact: Path) -> None:
    good = companion(artifact, ".onnx-graph").read_bytes()
    (first, data), start = parse(good, artifact)
    rebound(artifact, table(artifact, (first, File(name, data.tensors, data.rest))) + good[start:])
    refused(artifact, CorruptError, "table is damaged: no name of external data")


MODEL = File("", ((2, "t"),), 3)
TABLES: dict[str, tuple[bytes, str]] = {
    "no file": (table(Path(), []), "the model is not its first file"),
    "another first": (table(Path(), [File("a", (), 0)]), "the model is not its first file"),
    "twice": (table(Path(), [MODEL, *[File("a", (), 0)] * 2]), "a file is in it twice"),
    "inside a file": (
        table(Path(), [MODEL, File("a", (), 0), File("a/b", (), 0)]) + bytes(5),
        "no name of external data",
    ),
    "a tensor twice": (table(Path(), [MODEL, File("a", ((0, "t"),), 0)]) + bytes(5), "a tensor is in two places"),
    "short": (table(Path(), [MODEL]) + bytes(4), "found 4 bytes where it has 5"),
    "long": (table(Path(), [MODEL]) + bytes(6), "found 6 bytes where it has 5"),
    "endless": (struct.pack("<IIIQ", 1, 0, 0, 2**64 - 1), "other bytes than it says"),
    "many files": (b"\xff" * 4, "a number is absurd"),
    "many tensors": (struct.pack("<III", 1, 0, 2**32 - 1), "a number is absurd"),
    "a long name": (struct.pack("<II", 1, 2**32 - 1), "a number is absurd"),
    "no text": (struct.pack("<II", 1, 1) + b"\xff" + bytes(12), "a name is not UTF-8"),
}


@pytest.mark.parametrize(("data", "says"), TABLES.values(), ids=TABLES)
def test_tables_that_lie(data: bytes, says: str) -> None:
    with pytest.raises(CorruptError, match=says):
        parse(data, Path("f"))


def test_a_table_is_what_was_written_and_no_prefix_of_it_is_one() -> None:
    files = (File("", ((0, "t"), (7, "ü")), 1), File("a/b", ((2**20, ""),), 0), File("c", (), 4))
    start = table(Path(), files)
    whole = start + bytes(sum(sum(file.kept) for file in files))
    assert parse(whole, Path()) == (files, len(start))
    for length in (*range(len(start) + 1), len(whole) - 1):
        with pytest.raises(CorruptError):
            parse(whole[:length], Path())


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes] = {}
    path = with_files(tmp_path / "src", in_files(files, "data"), files)
    assert main(["matmulnbits-to-marlin", str(path), str(tmp_path / "a.safetensors"), "--quiet"]) == 0
    (tmp_path / "back").mkdir()
    unpacking = ["unpack", str(tmp_path / "a.safetensors"), str(tmp_path / "back" / "model.onnx")]
    assert main(unpacking) == 0
    assert "in 2 files" in capsys.readouterr().out
    assert contents(tmp_path / "back") == contents(tmp_path / "src")
    (tmp_path / "back" / "model.onnx").unlink()
    assert main(unpacking) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/back/data: external data already exists")
