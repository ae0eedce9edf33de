"""A run that is interrupted or killed leaves nothing that looks finished, and the same command then succeeds."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warptile.convert import convert, verify
from warptile.convert.staging import staged
from warptile.formats.errors import WarptileError

# The command line, halted when the weights have been written and config.json has not.
HALTING = """
import signal, sys, time
from warptile.convert import shards
from warptile.convert.cli import main
def halt(*_):
    print("written", flush=True)
    time.sleep(60)
shards.write_json = halt
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
sys.exit(main(sys.argv[1:]))
"""


def start(src: Path) -> subprocess.Popen[str]:
    """A conversion in the middle of its work."""
    args = [sys.executable, "-c", HALTING, "gptq-to-marlin", str(src)]
    run = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "written\n"
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_only_a_partial_and_can_be_repeated(make_directory, number):
    src = make_directory()
    run = start(src)
    run.send_signal(number)
    _, err = run.communicate(timeout=30)
    if number == signal.SIGKILL:
        assert run.returncode == -number
    else:
        assert (run.returncode, err.count("\n")) == (130, 1)
        assert err.startswith("error: interrupted")
    assert sorted(p.name for p in src.parent.iterdir()) == ["model", "model-marlin.partial"]
    verify(convert(src, to="marlin").dst, src)
    assert sorted(p.name for p in src.parent.iterdir()) == ["model", "model-marlin"]


def test_two_runs_on_one_destination_do_not_meet(make_directory):
    src = make_directory()
    run = start(src)
    with pytest.raises(WarptileError, match="another run"):
        convert(src, to="marlin")
    assert sorted(p.name for p in src.parent.iterdir()) == ["model", "model-marlin.partial"]
    run.kill()
    run.communicate(timeout=30)


def test_a_run_killed_between_the_renames_of_an_overwrite_loses_nothing(tmp_path):
    dst, partial = tmp_path / "out.safetensors", tmp_path / "out.safetensors.partial"
    partial.mkdir()
    (partial / ".replaced").write_text("old")
    with pytest.raises(FileNotFoundError), staged(dst) as product:
        (product / "no such directory").touch()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(dst.name, "old")]
