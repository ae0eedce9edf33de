"""Bad input through the command line: the exit code, exactly one line on stderr, and nothing left behind."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from warptile.convert.cli import main

K_PROJ = "model.layers.0.self_attn.k_proj"


def change(suffix: str, edit: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[dict[str, np.ndarray]], None]:
    """Replace one tensor of a module; None removes it."""

    def apply(tensors: dict[str, np.ndarray]) -> None:
        name = f"{K_PROJ}.{suffix}"
        new = edit(tensors[name].copy())
        if new is None:
            del tensors[name]
        else:
            tensors[name] = new

    return apply


def put(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def edit(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return edit


TENSORS = {
    "qweight of floats": (change("qweight", lambda a: a.astype(np.float32)), 3),
    "scales of integers": (change("scales", lambda a: a.astype(np.int32)), 3),
    "scales for other columns": (change("scales", lambda a: a[:, :-8]), 4),
    "qzeros of other groups": (change("qzeros", lambda a: a[:-1]), 4),
    "g_idx past the last group": (change("g_idx", put((5,), 10**6)), 4),
    "g_idx below zero": (change("g_idx", put((5,), -1)), 4),
    "k not divisible by the pack factor": (change("g_idx", lambda a: a[:-3]), 4),
    "scales without qweight": (change("qweight", lambda a: None), 4),
    "qweight without scales": (change("scales", lambda a: None), 4),
    "a scale that is NaN": (change("scales", put((1, 3), np.nan)), 4),
    "a scale that is infinite": (change("scales", put((0, 0), np.inf)), 4),
}
LABELS = {
    "unknown bits": ({"bits": 5}, 3),
    "another width than the tensors": ({"bits": 8}, 3),
    "another group size than the tensors": ({"group_size": 16}, 3),
}


def refused(capsys: pytest.CaptureFixture[str], directory: Path, *args: object) -> tuple[int, str]:
    """Run a command that must fail: (exit code, its line); the directory's names stay as they were."""
    before = sorted(p.name for p in directory.iterdir())
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert sorted(p.name for p in directory.iterdir()) == before
    return code, err


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_lie(capsys, make_directory, plain_tensors, case):
    damage, need = TENSORS[case]
    tensors = plain_tensors()
    damage(tensors)
    src = make_directory(tensors=tensors)
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src)
    assert (code, K_PROJ in line) == (need, True), line


def test_an_fp8_weight_without_its_scale_is_not_plain_data(capsys, tmp_path, plain_tensors, write_safetensors):
    tensors = plain_tensors() | {"extra.weight": np.zeros((4, 4), np.int8)}
    write_safetensors(tmp_path / "m.safetensors", tensors, dtypes={"extra.weight": "F8_E4M3"})
    code, line = refused(capsys, tmp_path, "gptq-to-marlin", tmp_path / "m.safetensors")
    assert (code, "extra.weight" in line, "scale" in line) == (4, True, True)


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_lie(capsys, make_directory, case):
    label, need = LABELS[case]
    src = make_directory(label=label)
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src)
    assert code == need, line


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_truncated_file(capsys, make_file, kept):
    src = make_file()
    src.write_bytes(src.read_bytes()[:kept])
    assert refused(capsys, src.parent, "gptq-to-marlin", src)[0] == 4


def test_an_index_that_names_a_missing_shard(capsys, make_directory):
    src = make_directory(shards=3)
    (src / "model-00002-of-00003.safetensors").unlink()
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src)
    assert (code, "model-00002-of-00003.safetensors" in line) == (4, True)


def test_an_index_that_leads_out_of_the_directory(capsys, make_directory, make_file):
    src, outside = make_directory(shards=2), make_file("outside.safetensors")
    index = src / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00002.safetensors", f"../{outside.name}"))
    assert refused(capsys, src.parent, "gptq-to-marlin", src)[0] == 4


def test_a_source_that_is_not_there(capsys, tmp_path):
    assert refused(capsys, tmp_path, "gptq-to-marlin", tmp_path / "none")[0] == 1


def test_a_destination_that_is(capsys, make_directory):
    src = make_directory()
    src.with_name("out").mkdir()
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src, src.with_name("out"))
    assert (code, "--overwrite" in line) == (1, True)


def test_a_destination_whose_directory_is_missing(capsys, make_directory, tmp_path):
    assert refused(capsys, tmp_path, "gptq-to-marlin", make_directory(), tmp_path / "a" / "b")[0] == 1


def test_source_as_destination(capsys, make_directory, tmp_path):
    src = make_directory()
    assert refused(capsys, tmp_path, "gptq-to-marlin", src, src)[0] == 2


@pytest.mark.parametrize(
    "args", [["gptq-to-nothing", "x"], ["auto", "x"], ["gptq-to-marlin"], ["inspect", "x", "--no"]]
)
def test_a_command_line_that_is_none(capsys, tmp_path, args):
    assert refused(capsys, tmp_path, *args)[0] == 2


def test_a_tensor_name_cannot_drive_the_terminal(capsys, make_directory, module_tensors):
    tensors = {f"\x1b[2Jevil.{s}": a for s, a in module_tensors(g_idx=np.full(64, 99, np.int32)).items()}
    src = make_directory(tensors=tensors)
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src)
    assert (code, "\x1b" in line, "evil" in line) == (4, False, True)


def test_a_disk_with_too_little_room(capsys, make_directory, monkeypatch):
    src = make_directory()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src)
    assert (code, "100 bytes free" in line) == (1, True)


def test_a_disk_that_fills_while_writing(capsys, make_directory, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    src = make_directory()
    monkeypatch.setattr("os.fsync", full)
    code, line = refused(capsys, src.parent, "gptq-to-marlin", src)
    assert (code, "No space left on device" in line) == (1, True)


def test_a_file_size_limit_met_while_writing(make_directory):
    src = make_directory()
    run = subprocess.run(
        [sys.executable, "-m", "warptile.convert", "gptq-to-marlin", str(src)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1), run.stderr
    assert run.stderr.startswith("error: ")
    assert [p.name for p in src.parent.iterdir()] == ["model"]


def test_an_artifact_that_was_damaged_is_told_by_verify(capsys, make_file):
    src = make_file()
    dst = src.with_name("out.safetensors")
    assert main(["gptq-to-marlin", str(src), str(dst)]) == 0
    capsys.readouterr()
    raw = bytearray(dst.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    at = json.loads(raw[8 : 8 + length])[f"{K_PROJ}.qweight"]["data_offsets"][0]
    raw[8 + length + at] ^= 1
    dst.write_bytes(raw)
    assert main(["verify", str(dst)]) == 0  # other codes, but a sound artifact
    capsys.readouterr()
    code, line = refused(capsys, src.parent, "verify", dst, "--against", src)
    assert (code, f"{K_PROJ} codes: differs at [" in line) == (5, True)


def test_an_artifact_whose_padding_was_written_to_is_told_by_verify_alone(capsys, make_file, module_tensors):
    parts = module_tensors(k=64, n=40, qzeros=None)
    src = make_file(tensors={f"m.{s}": a for s, a in parts.items()})
    dst = src.with_name("out.safetensors")
    assert main(["gptq-to-marlin", str(src), str(dst)]) == 0
    capsys.readouterr()
    raw = bytearray(dst.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8 : 8 + length])["m.scales"]["data_offsets"]
    body = np.frombuffer(raw, np.float16, (end - start) // 2, 8 + length + start)
    empty = 8 + length + start + 2 * int(np.flatnonzero(body == 0)[0])
    raw[empty] = 1
    dst.write_bytes(raw)
    code, line = refused(capsys, src.parent, "verify", dst)
    assert (code, "m.scales" in line) == (5, True)


def rewritten(path: Path, key: str, edit: Callable[[str], str]) -> None:
    """Change one text of a file's metadata."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"][key] = edit(header["__metadata__"][key])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("key", "old", "new", "need"),
    [
        ("source_files", "{", "[", 4),
        ("source_files", '"model.safetensors"', '"../model.safetensors"', 4),
        ("source_files", '["model.norm.weight"]', '["model.norm.weight"],["model.norm.weight"]', 4),
        ("source_files", '["model.norm.weight"],', "", 4),
        ("source_files", '["model.norm.weight"]', '["model.nothing.weight"]', 4),
        ("source_files", f'"I32",[8,128],"{K_PROJ}"', f'"I32",[128,8],"{K_PROJ}"', 4),
        ("source_files", f'"{K_PROJ}"]', '"elsewhere"]', 4),
        ("warptile", '"format":"gptq"', '"format":"unheard"', 3),
        ("warptile", '"dtypes"', '"types"', 4),
    ],
)
def test_an_artifact_that_lies_about_its_source_is_not_unpacked(capsys, make_file, key, old, new, need):
    src = make_file()
    dst = src.with_name("out.safetensors")
    assert main(["gptq-to-marlin", str(src), str(dst)]) == 0
    capsys.readouterr()

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    rewritten(dst, key, edit)
    code, line = refused(capsys, src.parent, "unpack", dst, src.with_name("back"))
    assert code == need, line
