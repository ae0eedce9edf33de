"""What may stand at DST and beside it, what is said of it beforehand, and how much room it needs."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from gguf_files import Stored, content, model
from warptile.convert import convert, staging, unpack
from warptile.convert.cli import main
from warptile.convert.shards import parse_size
from warptile.formats.errors import UnsupportedError, UsageError, WarptileError

Usage = namedtuple("Usage", "total used free")


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


PRECIOUS = {
    "text called .safetensors": ("out.safetensors", lambda p, src: p.write_text("my thesis")),
    "an empty file": ("out.safetensors", lambda p, src: p.write_bytes(b"")),
    "somebody's weights": ("out.safetensors", lambda p, src: shutil.copy(src / "model.safetensors", p)),
    "a directory of somebody's weights": ("out", lambda p, src: shutil.copytree(src, p)),
    "a directory of text": ("out", lambda p, src: (p.mkdir(), (p / "a.safetensors").write_text("x"))),
    "a directory with pickles": ("out", lambda p, src: (p.mkdir(), (p / "a.bin").write_text("x"))),
    "a link to a text": ("out.safetensors", lambda p, src: ((p.parent / "text").write_text("x"), p.symlink_to("text"))),
}  # fmt: skip


@pytest.mark.parametrize("case", PRECIOUS)
def test_what_is_not_ours_is_not_replaced(make_directory, tmp_path, case):
    name, make = PRECIOUS[case]
    src, dst = make_directory(), tmp_path / name
    make(dst, src)
    before = snapshot(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(WarptileError, match="what is there is not an artifact, so it is not replaced") as error:
            convert(src, dst, to="marlin", overwrite=True, dry_run=dry_run)
        assert error.value.exit_code == 1
    assert snapshot(tmp_path) == before


def test_a_link_to_an_artifact_is_not_replaced(make_directory, tmp_path):
    src, real, link = make_directory(), tmp_path / "real", tmp_path / "link"
    convert(src, real, to="marlin")
    link.symlink_to(real)
    before = snapshot(tmp_path)
    with pytest.raises(WarptileError, match="is a symbolic link, which is not replaced"):
        convert(src, link, to="marlin", overwrite=True)
    assert link.is_symlink()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("extra", ["weights", "directory"])
def test_an_artifact_among_other_things_is_not_replaced(make_directory, tmp_path, extra):
    src, dst = make_directory(), tmp_path / "out"
    convert(src, dst, to="marlin")
    if extra == "weights":
        shutil.copy(src / "model.safetensors", dst / "mine.safetensors")
    else:
        (dst / "notes").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(WarptileError, match="not an artifact"):
        convert(src, dst, to="marlin", overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_an_artifact_is_replaced(make_directory, tmp_path, name):
    src = make_directory()
    convert(src, tmp_path / name, to="mmq")
    convert(src, tmp_path / name, to="marlin", overwrite=True)
    (tmp_path / "again").mkdir()
    convert(src, tmp_path / "again" / name, to="marlin")
    if name == "out":
        assert snapshot(tmp_path / "out") == snapshot(tmp_path / "again" / "out")
    else:
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_an_empty_directory_is_replaced(make_directory, tmp_path):
    (tmp_path / "out").mkdir()
    assert convert(make_directory(), tmp_path / "out", to="marlin", overwrite=True).written


@pytest.mark.parametrize("name", ["back", "back.safetensors"])
def test_unpack_replaces_a_model_and_nothing_else(make_directory, tmp_path, name):
    src, dst = make_directory(), tmp_path / name
    convert(src, tmp_path / "out", to="marlin")
    unpack(tmp_path / "out", dst)
    first = snapshot(tmp_path)
    unpack(tmp_path / "out", dst, overwrite=True)
    assert snapshot(tmp_path) == first
    file = dst if dst.is_file() else dst / "model.safetensors"
    file.write_text("my thesis")
    with pytest.raises(WarptileError, match="what is there is not a model"):
        unpack(tmp_path / "out", dst, overwrite=True)
    assert file.read_text() == "my thesis"


def test_unpack_replaces_a_gguf_and_no_text_of_that_name(gguf, tmp_path):
    dst = tmp_path / "back.gguf"
    convert(gguf, tmp_path / "out", to="marlin")
    for _ in range(2):
        unpack(tmp_path / "out", dst, overwrite=True)
        assert dst.read_bytes() == gguf.read_bytes()
    dst.write_text("my thesis")
    with pytest.raises(WarptileError, match="not a model"):
        unpack(tmp_path / "out", dst, overwrite=True)
    assert dst.read_text() == "my thesis"


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content([Stored("blk.0.ffn_up.weight", "Q4_0", (64, 32), b"\0\x2c" * 576)], model(head_count=2)))
    return path


STRAYS = {
    "a text": lambda p: p.write_text("my thesis"),
    "as long as what would be written": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "a directory": lambda p: (p.unlink(), p.mkdir()),
    "a link to nothing": lambda p: (p.unlink(), p.symlink_to("nothing")),
}  # fmt: skip


@pytest.mark.parametrize("case", STRAYS)
def test_a_companion_replaces_nothing_unasked(gguf, tmp_path, capsys, case):
    dst, kept = tmp_path / "out.safetensors", tmp_path / "out.safetensors.gguf-kv"
    convert(gguf, dst, to="mmq")
    good, _ = kept.read_bytes(), dst.unlink()
    STRAYS[case](kept)
    before, plain = snapshot(tmp_path), kept.is_file()
    code = main(["gguf-to-mmq", str(gguf), str(dst), "--json"])
    said = json.loads(capsys.readouterr().out)["error"]
    assert (code, said["what"], said["file"]) == (1, "already exists", str(kept))
    assert said["do"] == "name another destination, or give --overwrite"
    assert snapshot(tmp_path) == before
    again = ["gguf-to-mmq", str(gguf), str(dst), "--overwrite"]
    dry, wet = main([*again, "--dry-run"]), main(again)
    out, err = capsys.readouterr()
    assert (dry, wet) == ((0, 0) if plain else (1, 1))
    if plain:
        assert f"{kept} exists: --overwrite would replace it, and without it is an error" in out
        assert kept.read_bytes() == good
    else:
        assert err.count("is no plain file, so it is not replaced") == 2
        assert snapshot(tmp_path) == before


def test_a_companion_that_a_killed_run_left_is_no_stranger(gguf, tmp_path):
    dst = tmp_path / "out.safetensors"
    convert(gguf, dst, to="mmq")
    whole = snapshot(tmp_path)
    dst.unlink()
    assert convert(gguf, dst, to="mmq").replaces == ()
    assert snapshot(tmp_path) == whole


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_companion_that_appears_meanwhile_is_spared(tmp_path, overwrite):
    dst, kept = tmp_path / "out.safetensors", tmp_path / "out.safetensors.beside"

    def write():
        with staging.staged(dst, overwrite=overwrite) as product:
            product.write_text("weights")
            product.with_name(kept.name).write_text("ours")
            kept.write_text("somebody's")

    if overwrite:
        write()
        assert (dst.read_text(), kept.read_text()) == ("weights", "ours")
        return
    with pytest.raises(WarptileError, match=r"out\.safetensors\.beside: already exists"):
        write()
    assert snapshot(tmp_path) == {kept.name: b"somebody's"}


def test_a_directory_that_has_the_name_of_the_staging_is_spared(make_directory, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("precious")
    with pytest.raises(WarptileError, match=r"not a directory that this program made.*found thesis.txt") as error:
        convert(make_directory(), tmp_path / "out", to="marlin", overwrite=True)
    assert (error.value.exit_code, (tmp_path / "out.partial" / "thesis.txt").read_text()) == (1, "precious")
    assert not (tmp_path / "out.partial" / ".lock").exists()


def test_a_dry_run_tells_of_what_stands_there_and_of_side_files(capsys, make_directory, tmp_path):
    src = make_directory()

    def dry(dst: Path) -> tuple[str, dict]:
        for flags in ([], ["--json"]):
            assert main(["gptq-to-marlin", str(src), str(dst), "--dry-run", *flags]) == 0
        text, _, said = capsys.readouterr().out.partition("{")
        return text, json.loads("{" + said)

    text, said = dry(tmp_path / "out")
    assert "exists" not in text
    assert "2 side files would be copied as they are" in text
    beside = sum((src / name).stat().st_size for name in ("quantize_config.json", "tokenizer.json"))
    assert (said["replaces"], said["side_files"]) == (False, ["quantize_config.json", "tokenizer.json"])
    assert said["nbytes_beside"] == beside
    convert(src, tmp_path / "out", to="marlin")
    text, said = dry(tmp_path / "out")
    assert f"{tmp_path / 'out'} exists: --overwrite would replace it, and without it is an error" in text
    assert said["replaces"] is True
    text, said = dry(tmp_path / "out.safetensors")
    assert "one file has no place for 2 side files: not copied" in text
    assert (said["side_files"], said["nbytes_beside"]) == ([], 0)


@pytest.mark.parametrize(("name", "counted"), [("out", True), ("out.safetensors", False)])
def test_room_is_needed_for_what_is_written_and_no_more(make_directory, tmp_path, monkeypatch, name, counted):
    src = make_directory()
    (src / "tokenizer.model").write_bytes(bytes(100_000))
    plan = convert(src, tmp_path / name, to="marlin", dry_run=True).plan
    side = sum(p.stat().st_size for p in src.iterdir() if p.name not in ("model.safetensors", "config.json"))
    need = plan.nbytes + (side if counted else 0)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: Usage(0, 0, need - 1))
    with pytest.raises(WarptileError, match=f"not enough room on the disk.*need {need} bytes"):
        convert(src, tmp_path / name, to="marlin")
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: Usage(0, 0, need))
    assert convert(src, tmp_path / name, to="marlin").written


@pytest.mark.parametrize(("name", "counted"), [("back", True), ("back.safetensors", False)])
def test_unpack_needs_room_for_side_files_where_it_copies_them(make_directory, tmp_path, monkeypatch, name, counted):
    src = make_directory()
    convert(src, tmp_path / "out", to="marlin")
    whole = unpack(tmp_path / "out", tmp_path / "once").nbytes
    side = sum((src / f).stat().st_size for f in ("quantize_config.json", "tokenizer.json")) if counted else 0
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: Usage(0, 0, whole + side - 1))
    with pytest.raises(WarptileError, match=f"need {whole + side} bytes"):
        unpack(tmp_path / "out", tmp_path / name)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: Usage(0, 0, whole + side))
    assert unpack(tmp_path / "out", tmp_path / name).restored == 2


SIZES = {"1": 1, "1000": 1000, "5GB": 5 * 10**9, "200MiB": 200 << 20, "0.5 kb": 500, "1.5KiB": 1536, "0.000001MB": 1}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_what_they_say(text):
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(
            (t, "--max-shard-size '?[^ ]*.* is not a size; need bytes, or")
            for t in ("", "GB", "5 parsecs", "-1", "1e9")
        ),
        *((t, "is not a size") for t in ("9" * 400, "٣GB", "1.5.5", "inf", "nan")),
        *((t, f"--max-shard-size {t} leaves no room for a byte; need 1 byte or more") for t in ("0", "0.1", "0GB", 0)),
    ],
)
def test_sizes_that_are_none_are_told_apart(text, says):
    with pytest.raises(UsageError, match=says):
        parse_size(text)


NO_MODELS = {
    "README.md": (b"# A model\n\nof mine\n", "no model; need a file of .safetensors, .onnx, .gguf, or a directory of"),
    "notes": (b"hello", "no model"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "no model"),
    "vocab.npz": (b"PK\x03\x04" + bytes(100), "no model"),
    "archive.tar.gz": (b"\x1f\x8b" + bytes(100), "no model"),
    "model.pt": (b"PK\x03\x04", "pickle is code"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_a_source_that_is_no_model_is_told_so(tmp_path, name):
    data, says = NO_MODELS[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnsupportedError, match=says):
        convert(tmp_path / name, to="marlin")


def test_a_model_under_another_name_is_read(make_file, tmp_path):
    make_file("model.safetensors").rename(tmp_path / "blob")
    assert convert(tmp_path / "blob", tmp_path / "out.safetensors", to="marlin").written


@pytest.mark.parametrize("name", ["results.csv", ".env", "train.py"])
def test_overwrite_removes_no_file_that_is_not_written_anew(make_directory, tmp_path, name):
    src = make_directory()
    dst = convert(src, tmp_path / "out", to="marlin").dst
    (dst / name).write_text("precious")
    with pytest.raises(WarptileError, match=rf"would remove 1 files.*found {re.escape(name)}; move them away"):
        convert(src, dst, to="marlin", overwrite=True)
    with pytest.raises(WarptileError, match=r"would remove 1 files"):
        convert(src, dst, to="marlin", overwrite=True, dry_run=True)
    model = tmp_path / "model-again"
    (dst / name).unlink()
    unpack(dst, model)
    (model / name).write_text("precious")
    with pytest.raises(WarptileError, match=r"would remove 1 files"):
        unpack(dst, model, overwrite=True)
    assert (model / name).read_text() == "precious"
    (model / name).unlink()
    unpack(dst, model, overwrite=True)
    convert(src, dst, to="marlin", overwrite=True)


def test_a_file_with_the_name_of_the_staging_is_named(make_directory, tmp_path):
    (tmp_path / "out.partial").touch()
    with pytest.raises(WarptileError, match=r"out\.partial: not a directory that this program made.*move it"):
        convert(make_directory(), tmp_path / "out", to="marlin")
