"""Files that change under the reader, pipes where a file should be, names that are not UTF-8, values without end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import gptq_case
from gguf_files import Stored, content, model, write
from tiny import TINY, f32, in_memory, junk
from warptile.convert import convert, inspect, plan, unpack, verify
from warptile.convert.cli import main
from warptile.formats import gguf_file, gguf_header
from warptile.formats.container import companion, open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError

Q4 = Stored("blk.0.ffn_up.weight", "Q4_0", (64, 32), b"\0\x2c" * 576)
NORM = Stored("output_norm.weight", "F32", (64,), struct.pack("<64f", *range(64)))


@contextmanager
def at_once(seconds: int = 30) -> Iterator[None]:
    """Fails what waits: for a pipe nobody writes to, for the end of a device that has none."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("none"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@pytest.mark.parametrize("kind", ["gguf", "onnx"])
def test_a_companion_of_an_artifact_is_a_file_or_refused(tmp_path: Path, place: str, name: str, kind: str) -> None:
    gguf = kind == "gguf"
    src = write(tmp_path / "m.gguf", [Q4, NORM], model()) if gguf else onnx_model(tmp_path, external=True)
    artifact = convert(src, tmp_path / name, to="mmq" if gguf else "marlin").dst
    kept = companion(artifact, ".gguf-kv" if gguf else ".onnx-graph")
    kept.unlink()
    PLACES[place](kept)
    back = tmp_path / "back"
    back.mkdir()
    with at_once(), pytest.raises(WarptileError, match=rf"{kept.name}: (not a regular file|.* missing)"):
        unpack(artifact, back / f"m.{kind}")
    assert not list(back.iterdir())
    with at_once(), pytest.raises(WarptileError):
        verify(artifact, src)
    with at_once():
        verify(artifact)


NOT_UTF8 = os.fsdecode(b"m\xff\xfe")


def test_names_of_files_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Source directory, weights, side files and destination."""
    (tmp_path / f"{NOT_UTF8}-src").mkdir()
    src = gptq_case().save(tmp_path / f"{NOT_UTF8}-src")
    (src / "model.safetensors").rename(src / f"{NOT_UTF8}.safetensors")
    (src / f"{NOT_UTF8}.txt").write_bytes(b"side")
    dst = tmp_path / f"{NOT_UTF8}-dst"
    for flags in (["--dry-run", "--json"], ["--json"], ["--overwrite"]):
        assert main(["gptq-to-marlin", str(src), str(dst), *flags]) == 0
        out, err = capsys.readouterr()
        assert out.encode()
        assert not err
        if "--json" in flags:
            assert json.loads(out)["destination"] == str(dst)
    assert (dst / f"{NOT_UTF8}.txt").read_bytes() == b"side"
    assert main(["verify", str(dst), "--against", str(src)]) == 0
    assert main(["inspect", str(dst)]) == 0
    assert main(["inspect", str(src)]) == 0
    assert main(["unpack", str(dst), str(tmp_path / f"{NOT_UTF8}-back")]) == 0
    assert capsys.readouterr().out.encode()
    back = tmp_path / f"{NOT_UTF8}-back"
    assert (back / "m\ufffd\ufffd.safetensors").is_file()
    assert (back / f"{NOT_UTF8}.txt").read_bytes() == b"side"
    assert (back / "config.json").read_bytes() == (src / "config.json").read_bytes()
    a, b = open_checkpoint(src).tensors, open_checkpoint(back).tensors
    assert {n: t.raw().tobytes() for n, t in a.items()} == {n: t.raw().tobytes() for n, t in b.items()}


@pytest.mark.parametrize("ending", [".gguf", ".safetensors"])
def test_a_lone_file_whose_name_is_not_utf8(tmp_path: Path, ending: str) -> None:
    src = tmp_path / f"{NOT_UTF8}{ending}"
    if ending == ".gguf":
        write(src, [Q4, NORM], model())
    else:
        gptq_case().save_lone(tmp_path).rename(src)
    artifact = convert(src, to="marlin").dst
    assert artifact == tmp_path / f"{NOT_UTF8}-marlin.safetensors"
    verify(artifact, src)
    unpack(artifact, tmp_path / f"{NOT_UTF8}-back{ending}")
    if ending == ".gguf":
        assert (tmp_path / f"{NOT_UTF8}-back{ending}").read_bytes() == src.read_bytes()


def test_an_error_about_a_name_that_is_not_utf8_is_one_plain_line(tmp_path: Path, capsys) -> None:
    (tmp_path / f"{NOT_UTF8}.safetensors").write_bytes(bytes(9))
    assert main(["gptq-to-marlin", str(tmp_path / f"{NOT_UTF8}.safetensors")]) == 4
    err = capsys.readouterr().err
    assert err[:-1].isprintable()
    assert err.encode()


@pytest.mark.parametrize("count", [gguf_header.MAX_LIST, gguf_header.MAX_LIST + 1])
def test_lists_of_numbers_are_kept_up_to_a_length(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "m.gguf", [NORM], {"a": ("u8s", list(bytes(count))), "b": ("u32", 7)})
    header = gguf_header.read_header(path)
    assert header.values["b"] == 7
    assert header.values["a"] == (list(bytes(count)) if count <= gguf_header.MAX_LIST else None)
    assert gguf_file._key_values(path, header).count(bytes(count)) == 1


@pytest.mark.parametrize("length", [gguf_header.MAX_TEXT, gguf_header.MAX_TEXT + 1])
def test_texts_are_kept_up_to_a_length(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "m.gguf", [NORM], {"a": ("string", "x" * length), "b": ("u32", 7)})
    values = gguf_header.read_header(path).values
    assert (values["a"], values["b"]) == ("x" * length if length <= gguf_header.MAX_TEXT else None, 7)


@pytest.mark.parametrize("kind", ["string", "strings", "u8s", "u32"])
def test_key_values_in_all_are_kept_up_to_a_length(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is long, and many that are short."""
    values = {"string": "x" * 900, "strings": ["x"] * 100, "u8s": list(bytes(900)), "u32": 7}
    pairs = {f"k{i:04}": (kind, values[kind]) for i in range(60 if kind == "u32" else 1)}
    data = content([NORM], pairs)
    end = max(end for _, end in gguf_header.parse_header(tmp_path, data).spans.values())
    monkeypatch.setattr(gguf_header, "MAX_PAIRS", end)
    assert len(gguf_header.parse_header(tmp_path, data).values) == len(pairs)
    monkeypatch.setattr(gguf_header, "MAX_PAIRS", end - 1)
    with pytest.raises(UnsupportedError, match="too many key-values"):
        gguf_header.parse_header(tmp_path, data)


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def grow(path: Path) -> None:
    with open(path, "ab") as f:
        f.write(bytes(4))


def rewrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def another(path: Path) -> None:
    """One of the same length is renamed into its place."""
    beside = path.with_name("beside")
    shutil.copy(path, beside)
    os.utime(beside, ns=(1, 1))
    beside.replace(path)


CHANGES = (shrink, grow, rewrite, another)


def onnx_model(folder: Path, external: bool) -> Path:
    onnx = pytest.importorskip("onnx")
    attributes = {"N": 64, "K": 64, "block_size": 32, "bits": 4}
    arrays = {"fc_Q4": np.arange(64 * 32, dtype=np.uint16).astype(np.uint8).reshape(64, 2, 16),
              "fc.scales": np.full((64, 2), 0.5, np.float32)}  # fmt: skip
    node = onnx.helper.make_node("MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", **attributes)
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])
    initializers = [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()]
    graph = onnx.helper.make_graph([node], "g", [value], [value], initializers)
    sets = [onnx.helper.make_opsetid(domain, 1 if domain else 17) for domain in ("", "com.microsoft")]
    proto = onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)
    if external:
        onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    else:
        onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def split_set(folder: Path) -> Path:
    for i, tensors in enumerate(([Q4], [NORM])):
        said = {"split.no": ("u16", i), "split.count": ("u16", 2), "split.tensors.count": ("i32", 2)}
        write(folder / f"m-0000{i + 1}-of-00002.gguf", tensors, said | (model() if i == 0 else {}))
    return folder / "m-00001-of-00002.gguf"


# Name -> (what makes the model, the file of it that changes, a tensor in it)
MODELS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "gguf": (lambda f: write(f / "m.gguf", [Q4, NORM], model()), "m.gguf", Q4.name),
    "a part of a split gguf": (split_set, "m-00002-of-00002.gguf", NORM.name),
    "onnx": (lambda f: onnx_model(f, external=False), "m.onnx", "fc_Q4"),
    "external data of an onnx model": (lambda f: onnx_model(f, external=True), "m.data", "fc_Q4"),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_changes_after_it_was_opened_is_refused(tmp_path: Path, name: str, change) -> None:
    make, file, tensor = MODELS[name]
    checkpoint = open_checkpoint(make(tmp_path))
    assert checkpoint.tensors[tensor].array().size
    change(tmp_path / file)
    with pytest.raises(CorruptError, match="changed after it was opened") as error:
        checkpoint.tensors[tensor].array()
    assert error.value.file == tmp_path / file


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_changes_while_it_is_converted_leaves_nothing(
    tmp_path: Path, name: str, change, monkeypatch
) -> None:
    make, file, _ = MODELS[name]
    src = make(tmp_path)
    made = plan.make

    def changing(*args: object, **kwargs: object) -> plan.Plan:
        planned = made(*args, **kwargs)
        change(tmp_path / file)
        return planned

    monkeypatch.setattr(plan, "make", changing)
    with pytest.raises(CorruptError, match="changed after it was opened"):
        convert(src, tmp_path / "out", to="marlin")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_key_values_are_those_of_the_file_that_was_opened(tmp_path: Path, change, monkeypatch) -> None:
    src = write(tmp_path / "m.gguf", [Q4, NORM], model())
    read = gguf_file.read_header

    def changing(path: Path) -> gguf_header.Header:
        header = read(path)
        change(path)
        return header

    monkeypatch.setattr(gguf_file, "read_header", changing)
    with pytest.raises(CorruptError, match="changed after it was opened"):
        open_checkpoint(src)


@pytest.mark.parametrize("dtype", ["I8", "I32", "F16", "F8_E4M3", "BOOL"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 divisor"])
def test_a_weight_of_nvfp4_that_is_not_bytes_is_told_by_name(name: str, dtype: str) -> None:
    tiny = TINY[name]
    weight = next(iter(tiny.tensors))
    size = {"I32": 4, "F16": 2}.get(dtype, 1)
    retyped = replace(tiny, tensors={**tiny.tensors, weight: (dtype, (8, 32), bytes(8 * 32 * size))})
    checkpoint = retyped.checkpoint()
    assert "nvfp4" in {reader for reader, _ in plan.claims(tiny.checkpoint(), None).values()}
    with pytest.raises((CorruptError, UnsupportedError)) as error:
        plan.make(checkpoint, None, "marlin")
    assert error.value.tensor in (*tiny.tensors, "a")
    for labels in ({}, {"quant_method": "fp8"}):
        with pytest.raises((CorruptError, UnsupportedError)):
            plan.make(replace(retyped, quantization=labels).checkpoint(), None, "marlin")


def test_a_global_without_a_weight_and_a_weight_without_a_global() -> None:
    for tensors in (
        {"a.weight_scale_2": f32(0.5)},
        {"a.weight": junk(1, "U8", 8, 32), "a.weight_scale": junk(2, "F8_E4M3", 8, 4, below=127)},
    ):
        with pytest.raises(CorruptError, match="part of a quantised module that is not whole"):
            plan.claims(in_memory(tensors, {}, {}), None)


def test_inspect_of_a_pipe_beside_a_model(tmp_path: Path) -> None:
    src = gptq_case().save(tmp_path)
    os.mkfifo(src / "tokenizer.json")
    with at_once():
        contents = inspect(src)
    assert any("tokenizer.json" in text for _, text in contents.notes)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("suffix", [".safetensors", ".gguf", ".onnx", "", ".txt"])
def test_every_command_answers_for_what_is_no_file(tmp_path: Path, capsys, place: str, suffix: str) -> None:
    path, good = tmp_path / f"m{suffix}", tmp_path / "good.safetensors"
    convert(gptq_case().save_lone(tmp_path), good, to="marlin")
    PLACES[place](path)
    for command in (
        ["inspect", path],
        ["verify", path],
        ["verify", good, "--against", path],
        ["unpack", path, tmp_path / "back"],
        ["auto", path, tmp_path / "out", "--to", "marlin"],
        ["gptq-to-marlin", path, tmp_path / "out", "--dry-run"],
    ):
        with at_once():
            code = main([str(word) for word in command])
        out, err = capsys.readouterr()
        assert (code in (1, 3, 4), out, err.count("\n")) == (True, "", 1), (command, code, err)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["good.safetensors", path.name, "weights.safetensors"])
