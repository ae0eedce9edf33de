"""A compiled kernel, and what the compiler made of it: registers, shared memory, spills, instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Cubin:
    image: bytes
    entry: str
    """The entry's name inside the image."""
    log: str
    """What the compiler said; ptxas's resource report among it."""


class Resources(NamedTuple):
    """ptxas's report on one kernel. Spills are bytes; ``notes`` are its C75xx remarks (serialised or unsafe wgmma)."""

    registers: int
    shared: int
    spills: int
    """Bytes in all; a few, once for each output tile, cost nothing."""
    notes: tuple[str, ...]


def resources(cubin: Cubin) -> Resources:
    """What ptxas reported of the entry itself."""
    number = {
        what: max((int(v) for v in re.findall(pattern, cubin.log)), default=0)
        for what, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("shared", r"(\d+) bytes smem"),
            ("stores", r"(\d+) bytes spill stores"),
            ("loads", r"(\d+) bytes spill loads"),
        )
    }
    notes = tuple(sorted(set(re.findall(r"C75\d\d[^\n]*", cubin.log))))
    return Resources(number["registers"], number["shared"], number["stores"] + number["loads"], notes)


def disassembler() -> str | None:
    """nvdisasm, from the path or from its wheel (nvidia-cuda-nvdisasm)."""
    spec = find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    wheels = [str(p) for root in roots for p in sorted(root.glob("*/bin/nvdisasm"))]
    return shutil.which("nvdisasm") or next(iter(wheels), None)


def disassemble(image: bytes, tool: str) -> list[str]:
    """The instructions of a cubin, in order, without predicates: ``["LDG.E.128.CONSTANT", ...]``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)


def spills_in_loop(cubin: Cubin, tool: str | None) -> int:
    """Local-memory instructions among the matrix instructions; any spill counts when there is no disassembler."""
    if resources(cubin).spills == 0 or tool is None:
        return resources(cubin).spills
    sass = disassemble(cubin.image, tool)
    multiplies = [i for i, op in enumerate(sass) if op.startswith(("HMMA", "HGMMA", "IMMA", "QMMA", "QGMMA"))]
    loop = sass[multiplies[0] : multiplies[-1]] if multiplies else sass
    return sum(op.startswith(("LDL", "STL")) for op in loop)
