"""ONNX models as named byte views: where the bytes lie, what else is kept, and files that lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError

onnx = pytest.importorskip("onnx")


def model(*initializers: Any, nodes: Any = (), **graph: Any) -> Any:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])
    nodes = nodes or [onnx.helper.make_node("Identity", ["x"], ["y"])]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [value], [value], list(initializers), **graph))


def saved(folder: Path, proto: Any) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


ARRAYS = [
    *(np.arange(6).reshape(2, 3).astype(t) for t in (*np.typecodes["AllInteger"], "e", "f", "d", "F", "?")),
    *(
        np.arange(6).reshape(3, 2).astype(t)
        for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    ),
    np.float32(3.5).reshape(()),
    np.zeros((0, 4), np.float32),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_initializers_are_views_of_the_file(array: np.ndarray, tmp_path: Path) -> None:
    path = saved(
        tmp_path, model(onnx.numpy_helper.from_array(array, "before"), onnx.numpy_helper.from_array(array, "t"))
    )
    tensor = open_checkpoint(path).tensors["t"]
    assert (tensor.array().dtype, tensor.shape) == (array.dtype, array.shape)
    assert tensor.raw().tobytes() == array.tobytes()
    data = path.read_bytes()
    assert data[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


@pytest.mark.parametrize(
    ("kind", "values"), [("FLOAT", [1.5, -2.0]), ("INT64", [-1, 2**40]), ("UINT8", [0, 255]), ("FLOAT16", [0.5, 2.0])]
)
def test_values_that_are_numbers_of_the_protobuf(kind: str, values: list[Any], tmp_path: Path) -> None:
    proto = onnx.helper.make_tensor("t", getattr(onnx.TensorProto, kind), [2], values)
    assert not proto.raw_data
    tensor = open_checkpoint(saved(tmp_path, model(proto))).tensors["t"]
    assert tensor.array().tolist() == values
    assert tensor.nbytes == tensor.raw().nbytes


def test_four_bit_initializers_pass_as_bytes(tmp_path: Path) -> None:
    proto = onnx.TensorProto(name="t", data_type=onnx.TensorProto.UINT4, dims=[3, 3], raw_data=bytes(range(5)))
    given = open_checkpoint(saved(tmp_path, model(proto)))
    assert (given.tensors["t"].dtype, given.tensors["t"].shape) == ("U8", (5,))
    assert given.tensors["t"].raw().tolist() == [0, 1, 2, 3, 4]
    assert given.notes == [("", "t has 4-bit values, shape [3, 3]: it passes through as bytes")]


def test_nodes_and_operator_sets_are_kept(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones(3, np.float32), "w")
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["z"])],
        "i",
        [],
        [],
        [onnx.numpy_helper.from_array(np.ones(1), "own")],
    )
    nodes = [
        onnx.helper.make_node("Mul", ["x", "w"], ["m"], domain="d", n=3, text="t", f=0.5),
        onnx.helper.make_node("Relu", ["m"], ["r"]),
        onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner),
    ]
    given = open_checkpoint(saved(tmp_path, model(weight, nodes=nodes)))
    assert given.quantization["nodes"] == [
        {"op": "Mul", "domain": "d", "inputs": ["x", "w"], "attributes": {"n": 3, "text": "t"}},
        {"op": "Add", "domain": "", "inputs": ["x", "w"], "attributes": {}},
    ]
    assert list(given.quantization["opsets"]) == [""]
    assert given.notes == [("", "1 initializers inside If belong to its graph")]
    assert list(given.tensors) == ["w"]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, model())
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(WarptileError, match=r"needs the onnx package; pip install 'warptile\[onnx\]'"):
        open_checkpoint(path)


def external(location: str, **entries: object) -> Any:
    proto = onnx.TensorProto(name="t", data_type=onnx.TensorProto.FLOAT, dims=[4], data_location=1)
    for key, value in {"location": location, **entries}.items():
        proto.external_data.add(key=key, value=str(value))
    return model(proto)


@pytest.mark.parametrize("entries", [{}, {"length": 16}, {"offset": 8}, {"offset": 16, "length": 16}])
def test_places_in_external_data(entries: dict[str, int], tmp_path: Path) -> None:
    data = np.arange(8, dtype=np.float32)
    (tmp_path / "d.bin").write_bytes(data.tobytes())
    tensor = open_checkpoint(saved(tmp_path, external("d.bin", **entries))).tensors["t"]
    start = entries.get("offset", 0) // 4
    assert np.array_equal(tensor.array(), data[start : start + 4])


ESCAPES = ["../d.bin", "/etc/passwd", "a/../../d.bin", "", "..", "c:\\d.bin", "a\\..\\d.bin"]


@pytest.mark.parametrize("location", ESCAPES)
def test_external_data_stays_in_its_directory(location: str, tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(bytes(64))
    (tmp_path / "in").mkdir()
    with pytest.raises(CorruptError, match=r"t: external data outside the model's directory"):
        open_checkpoint(saved(tmp_path / "in", external(location)))


def test_links_to_external_data_stay_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(bytes(64))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "d.bin")
    with pytest.raises(CorruptError, match="leads out of its directory"):
        open_checkpoint(saved(tmp_path / "in", external("link")))


def test_external_data_of_a_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "rev"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    saved(blobs, external("d.bin"))
    (blobs / "data").write_bytes(bytes(16))
    (snapshot / "model.onnx").symlink_to(os.path.relpath(blobs / "model.onnx", snapshot))
    (snapshot / "d.bin").symlink_to(os.path.relpath(blobs / "data", snapshot))
    assert open_checkpoint(snapshot / "model.onnx").tensors["t"].raw().tolist() == [0] * 16


def strings() -> Any:
    return model(onnx.helper.make_tensor("t", onnx.TensorProto.STRING, [1], [b"a"]))


def wrong_length() -> Any:
    return model(onnx.TensorProto(name="t", data_type=onnx.TensorProto.FLOAT, dims=[3], raw_data=bytes(8)))


def twice() -> Any:
    one = onnx.numpy_helper.from_array(np.ones(1), "t")
    return model(one, one)


BAD: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("missing", lambda: external("d.bin"), CorruptError, "t: external data is missing; need d.bin"),
    ("directory", lambda: external("folder"), CorruptError, "external data is not a regular file; found folder"),
    (
        "short",
        lambda: external("short.bin"),
        CorruptError,
        "external data is truncated; found 12 bytes in short.bin; need 16",
    ),
    ("past", lambda: external("short.bin", offset=2**70), CorruptError, "external data is truncated"),
    (
        "negative",
        lambda: external("short.bin", offset=-4),
        CorruptError,
        "external data without a place; found offset '-4'",
    ),
    ("wrong length", lambda: external("short.bin", length=8), CorruptError, "found 8 bytes; need 16 for F32 [4]"),
    ("strings", strings, UnsupportedError, "t: an initializer without bytes; found STRING"),
    ("raw length", wrong_length, CorruptError, "found 8 bytes; need 12 for F32 [3]"),
    ("twice", twice, CorruptError, "t: an initializer needs a name of its own"),
    ("no name", lambda: model(onnx.numpy_helper.from_array(np.ones(1))), CorruptError, "needs a name of its own"),
]


@pytest.mark.parametrize(("make", "error", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_one_clear_line(
    make: Callable[[], Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    (tmp_path / "short.bin").write_bytes(bytes(12))
    (tmp_path / "folder").mkdir()
    path = saved(tmp_path, make())
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_prefix_of_a_model_is_a_model(tmp_path: Path) -> None:
    whole = model(onnx.numpy_helper.from_array(np.arange(16, dtype=np.float32), "t")).SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WarptileError):
            open_checkpoint(path)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff" * 64, bytes(64), b"GGUF" + bytes(60), b"\x3a\x80\x80\x80\x80\x10"]
)
def test_other_files_are_no_models(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(WarptileError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(UnsupportedError, match="not a regular file"):
        open_checkpoint(tmp_path / "model.onnx")
