"""Who may import whom, and that no format or layout is named where it must not be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warptile.formats import sources
from warptile.kernels import layouts

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "formats": {"formats"},
    "kernels": {"formats", "kernels"},
    "convert": {"formats", "kernels", "convert"},
    "runtime": {"formats", "kernels", "runtime"},
}
DEVICE = {"cupy", "cupyx", "cuda", "torch"}
FILES = [file for package in ALLOWED for file in sorted((ROOT / package).glob("**/*.py"))]


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """(dots, dotted name) of every import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.level, name) for name in names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file):
    package = file.relative_to(ROOT).parts[0]
    for dots, name in imported(file):
        first = name.split(".")[0]
        assert first != "warptile", "imports between the packages are relative"
        if dots > len(file.relative_to(ROOT).parts) - 1:
            assert first in ALLOWED[package], f"{package} imports {name}"
        if dots == 0 and package != "runtime":
            assert first not in DEVICE, f"{package} imports {name}"


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name in ("formats", "convert")], ids=lambda f: f.name)
def test_every_refusal_says_what_to_do(file):
    """A file that lies has ``CorruptError.advice``, a request what it needs; what is not ours has a word of its own."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("UnsupportedError", "UsageError"):
            said = {keyword.arg for keyword in node.keywords}
            enough = {"do", "need"} if node.func.id == "UsageError" else {"do"}
            assert said & enough, f"{file}:{node.lineno}: {ast.unparse(node)}"


def test_the_converter_runs_without_any_device_package():
    forbidden = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {DEVICE!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from warptile.convert.cli import main
sys.exit(main(["formats"]))
"""
    run = subprocess.run([sys.executable, "-c", forbidden], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("package", ["convert", "runtime"])
def test_nothing_branches_on_the_name_of_a_format_or_layout(package):
    names = {*sources(), *layouts()}
    for file in sorted((ROOT / package).glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.MatchValue | ast.Dict):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not constants & names, f"{file.relative_to(ROOT)}:{node.lineno}"
