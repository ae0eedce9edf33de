"""Every file of the corpus is refused: exit code, one plain line, the same as JSON, nothing left, in time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hostile import CORPUS, Hostile
from warptile.convert.cli import main
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.runtime import Session

SECONDS, BYTES = 2.0, 200 << 20
DISK = 64 << 10


def peak() -> int:
    """The most memory this process has had since ``forget``, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("row", CORPUS, ids=[row.name for row in CORPUS])
def test_it_is_refused(row: Hostile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = row.build(tmp_path)
    files = [src] if src.is_file() else [p for p in src.rglob("*") if p.is_file() and not p.is_symlink()]
    assert sum(512 * p.stat().st_blocks for p in files) <= DISK
    before = sorted(tmp_path.rglob("*"))
    forget()
    most, start = peak(), time.process_time()
    code = main([*row.command, "--json", str(src), *([str(tmp_path / row.product)] if row.writes else [])])
    took, grown = time.process_time() - start, peak() - most
    out, err = capsys.readouterr()
    assert code == row.code, err
    assert out.isascii()
    said = json.loads(out)["error"]
    assert said["do"], err
    assert (said["exit_code"], f"error: {said['line']}\n") == (code, err)
    assert (err.count("\n"), err[-1]) == (1, "\n")
    assert err[:-1].isprintable(), err
    assert all(word in err for word in row.words), err
    assert len(err) < 2000
    assert sorted(tmp_path.rglob("*")) == before
    assert took < SECONDS
    assert grown < BYTES


def test_the_corpus_is_large_and_its_names_are_its_own() -> None:
    assert len({row.name for row in CORPUS}) == len(CORPUS) >= 120


@pytest.mark.parametrize("row", [row for row in CORPUS if row.name.startswith("artifact: ")], ids=lambda row: row.name)
def test_the_runtime_refuses_an_artifact_that_lies(row: Hostile, tmp_path: Path) -> None:
    with pytest.raises((CorruptError, UnsupportedError)) as error:
        Session(row.build(tmp_path), device="cpu")
    assert error.value.exit_code == row.code
