"""What README.md shows is what the program prints."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner
from warptile.convert.cli import app
from warptile.formats.fragment import TILES

README = Path(__file__).parents[1] / "README.md"


def test_the_matrix_is_the_output_of_convert_formats() -> None:
    printed = CliRunner().invoke(app, ["formats"]).stdout
    assert f"```\n{printed.strip()}\n```" in README.read_text()


def test_the_picture_is_the_index_map() -> None:
    assert TILES[4].picture(4, 10) in README.read_text()
