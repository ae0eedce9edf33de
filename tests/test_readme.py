"""What README.md shows is what the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner
from warptile.convert import convert
from warptile.convert.cli import app
from warptile.formats.fragment import TILES

README = Path(__file__).parents[1] / "README.md"
MODEL = README.parent / "examples" / "llama-tiny-gptq-w4g64"


def test_the_matrix_is_the_output_of_convert_formats() -> None:
    printed = CliRunner().invoke(app, ["formats"]).stdout
    assert f"```\n{printed.strip()}\n```" in README.read_text()


def test_the_picture_is_the_index_map() -> None:
    assert TILES[4].picture(4, 10) in README.read_text()


def test_the_example_runs_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(MODEL, tmp_path / "model-marlin", to="marlin")
    _, _, after = README.read_text().partition("```python\n")
    exec(after.partition("```\n")[0].replace("path/to", str(tmp_path)), {})
    assert "y[16, 256] = x[16, 704] @ W.T on " in capsys.readouterr().out
