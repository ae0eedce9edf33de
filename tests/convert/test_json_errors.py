"""``--json`` on failure: one object on stdout that says what the line on stderr says, under the same exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from warptile.convert import cli
from warptile.convert.cli import main
from warptile.formats.errors import CorruptError

K_PROJ = "model.layers.0.self_attn.k_proj"
FIELDS = ["exit_code", "line", "file", "tensor", "what", "found", "need", "do"]


def failed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any]]:
    """(exit code, the object); it agrees with the line and with the same command without ``--json``."""
    plain = main([str(a) for a in args])
    assert capsys.readouterr().out == ""
    code = main([*(str(a) for a in args), "--json"])
    out, err = capsys.readouterr()
    error = json.loads(out)
    assert list(error) == ["error"]
    assert list(error["error"]) == FIELDS
    assert (code, error["error"]["exit_code"]) == (plain, code)
    assert err == f"error: {error['error']['line']}\n"
    assert out.isascii()
    return code, error["error"]


def test_a_refused_checkpoint(capsys, make_directory, plain_tensors):
    tensors = plain_tensors()
    tensors[f"{K_PROJ}.g_idx"][5] = 10**6
    code, error = failed(capsys, "gptq-to-marlin", make_directory(tensors=tensors))
    assert (code, error["tensor"]) == (4, f"{K_PROJ}.g_idx")
    assert Path(error["file"]).name == "model.safetensors"
    assert (error["what"], error["found"]) == ("a channel's group is out of range", "1000000 at [5]")
    assert (error["need"], error["do"]) == ("0 to 1", CorruptError.advice)


COMMANDS = {
    "SRC is missing": (["gptq-to-marlin", "none"], 1, "no such file or directory"),
    "inspect of nothing": (["inspect", "none"], 1, "cannot be read"),
    "verify of nothing": (["verify", "none"], 1, "cannot be read"),
    "unpack of nothing": (["unpack", "none", "there"], 1, "no such file or directory"),
    "a layout that is not there": (["auto", "none", "--to", "nothing"], 2, "unknown layout 'nothing'"),
    "no such command": (["gptq-to-nothing", "none"], 2, "No such command"),
    "a missing argument": (["gptq-to-marlin"], 2, "Missing argument"),
    "an option that is not there": (["inspect", "none", "--no"], 2, "No such option"),
    "a value that is no number": (["gptq-to-marlin", "none", "--workers", "x"], 2, "Invalid value"),
    "an impossible switch": (["gptq-to-marlin", "{src}", "--bits", "0"], 2, "no such width"),
    "an impossible size": (["gptq-to-marlin", "{src}", "--max-shard-size", "0"], 2, "leaves no room"),
    "fewer workers than none": (["verify", "{src}", "--workers", "-3"], 2, "no worker, no work"),
    "SRC as DST": (["gptq-to-marlin", "{src}", "{src}"], 2, "the destination is the source"),
    "another source": (["awq-to-marlin", "{src}"], 3, "no awq modules in it"),
    "unpack of a checkpoint": (["unpack", "{src}", "there"], 3, "not converted yet"),
    "verify of a checkpoint": (["verify", "{src}"], 3, "not converted yet"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_every_kind_of_failure(capsys, make_directory, tmp_path, monkeypatch, case):
    args, code, what = COMMANDS[case]
    src = make_directory()
    monkeypatch.chdir(tmp_path)
    found, error = failed(capsys, *(str(a).format(src=src) for a in args))
    assert (found, what in error["what"]) == (code, True), error
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("command", sorted(typer.main.get_command(cli.app).commands))
def test_every_command_prints_its_failure(capsys, monkeypatch, tmp_path, command):
    def fail(*_: object, **__: object) -> None:
        raise CorruptError("it lies", file="a.safetensors", tensor="t", found=1, need=2, do="do this")

    monkeypatch.chdir(tmp_path)
    for name in ("convert", "inspect", "verify", "unpack", "formats"):
        monkeypatch.setattr(cli, name, fail)
    needs = {"formats": [], "unpack": ["a", "b"], "auto": ["a", "--to", "mmq"]}
    code, error = failed(capsys, command, *needs.get(command, ["a"]))
    values = [str(code), "a.safetensors: t: it lies; found 1; need 2; do this", "a.safetensors", "t", "it lies"]
    assert [str(error[key]) for key in FIELDS] == [*values, "1", "2", "do this"]
    code, error = failed(capsys, command, "--no-such-flag")
    assert (code, "No such option" in error["what"]) == (2, True)


def test_verify_that_finds_a_difference(capsys, make_file, plain_tensors):
    src, other = make_file(), plain_tensors()
    other[f"{K_PROJ}.qweight"][0, 0] ^= 1
    changed = make_file("other.safetensors", tensors=other)
    assert main(["gptq-to-marlin", str(src), str(src.with_name("out.safetensors"))]) == 0
    capsys.readouterr()
    code, error = failed(capsys, "verify", src.with_name("out.safetensors"), "--against", changed)
    assert (code, "differs at [" in error["line"]) == (5, True)


def test_quiet_leaves_the_object(capsys, tmp_path):
    assert main(["gptq-to-marlin", str(tmp_path / "none"), "--quiet", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 1


@pytest.mark.parametrize(
    ("error", "code", "what"),
    [
        (OSError(errno.EIO, "Input/output error", "disk"), 1, "Input/output error"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "Broken pipe"),
        (MemoryError(), 1, "MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_system_refuses(capsys, monkeypatch, error, code, what):
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "formats", fail)
    found, said = failed(capsys, "formats")
    assert (found, said["what"]) == (code, what)
    assert said["file"] == getattr(error, "filename", None)


def test_names_that_drive_a_terminal_or_are_not_utf8_are_escaped(capsys, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J.safetensors"))
    path.write_bytes(b"")
    code, error = failed(capsys, "gptq-to-marlin", path)
    assert (code, error["file"]) == (4, str(path))


def test_a_reader_that_has_left_is_no_second_error():
    run = subprocess.run(
        f"{sys.executable} -m warptile.convert inspect none --json | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
