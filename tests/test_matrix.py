"""Every source times every layout: what a layout accepts comes back from it unchanged, what it refuses has a reason.

A source is known here by its checkpoints: functions ``<source>_case`` or ``<source>_.._case`` in cases.py, and folders
of tests/data and the zoo in which its reader finds modules. New sources and layouts join by themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import cases
import numpy as np
import pytest
import stored
from warptile.convert import convert, unpack, verify
from warptile.formats import artifact, sources
from warptile.formats.canonical import recode, same, widened
from warptile.formats.container import Checkpoint, dtype_name, open_checkpoint
from warptile.formats.errors import UnsupportedError, WarptileError
from warptile.kernels import layouts

MODULES = 4  # of each checkpoint, enough for its shapes
ZOO = Path(os.environ.get("WARPTILE_ZOO", stored.ROOT.parent / "shared" / "zoo"))
FOLDERS = [folder for root in (stored.ROOT / "tests" / "data", ZOO) for folder in sorted(root.glob("*/"))]
DATA = [folder for folder in FOLDERS if folder.parent.name == "data" and any(folder.glob("*.safetensors"))]


@cache
def opened(folder: Path) -> Checkpoint | None:
    """The directory, or the one file that is the model; None for what no one reads yet."""
    models = sorted(file for file in folder.iterdir() if file.suffix in (".gguf", ".onnx"))
    try:
        return open_checkpoint(models[0] if models else folder)
    except WarptileError:
        return None


def found(source: str, scratch: Path) -> Iterator[tuple[Checkpoint, str]]:
    """(checkpoint, module) of everything there is to try a source with."""
    reader = sources()[source]
    builders = [b for name, b in vars(cases).items() if name.startswith(f"{source}_") and name.endswith("_case")]
    for i, build in enumerate(builders):
        (scratch / str(i)).mkdir()
        checkpoint = open_checkpoint(build().save(scratch / str(i)))
        yield from ((checkpoint, module) for module in reader.modules(checkpoint))
    for folder in FOLDERS:
        checkpoint = opened(folder)
        if checkpoint is None:
            continue
        try:
            names = list(islice(reader.modules(checkpoint), MODULES))
            for module in names:
                reader.describe(checkpoint, module)
        except UnsupportedError:  # a variant it refuses by name
            continue
        yield from ((checkpoint, module) for module in names)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("source", sources())
def test_what_is_accepted_comes_back(source, layout, tmp_path):
    reader, kernel, tried = sources()[source], layouts()[layout], 0
    for checkpoint, module in found(source, tmp_path):
        outline = reader.describe(checkpoint, module)
        q = reader.read(checkpoint, module)
        assert q.outline() == outline
        if kernel.accepts(outline) is not None:
            outline = replace(outline, element=widened(outline.element))
            q = recode(q, outline.element)
        reason = kernel.accepts(outline)
        tried += 1
        if reason is not None:
            assert reason.strip()
            continue
        tensors, spec = kernel.pack(q)
        assert spec == kernel.spec(outline)
        assert json.loads(json.dumps(artifact.module_spec(spec, outline.source, outline.residue)))
        shapes = {suffix: (dtype_name(a.dtype), a.shape) for suffix, a in tensors.items()}
        assert shapes == artifact.stored(spec, kernel)
        assert same(kernel.unpack(tensors, spec), q) is None
    assert tried, f"no {source} checkpoint to try: add one to tests/data, or a {source}_case to tests/cases.py"


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("folder", DATA, ids=lambda folder: folder.name)
def test_a_checkpoint_of_another_tool_makes_the_round_trip(folder, layout, tmp_path):
    try:
        result = convert(folder, tmp_path / "artifact", to=layout, widen=True)
    except UnsupportedError as refused:
        if "modules cannot become" not in str(refused):
            raise
        pytest.skip(str(refused))
    verify(result.dst)
    verify(result.dst, folder)
    unpack(result.dst, tmp_path / "back")
    for file in folder.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("source", sources())
def test_a_stream_gives_any_rectangle_of_the_codes(source, tmp_path):
    for checkpoint, module in found(source, tmp_path):
        stream = sources()[source].stream(checkpoint, module)
        q = sources()[source].read(checkpoint, module)
        assert same(replace(stream.tensor, codes=q.codes), q) is None
        n, k = q.n, q.k
        for expert in {0, (q.experts or 1) - 1}:
            codes = q.codes if q.experts is None else q.codes[expert]
            for rows, columns in ((slice(0, n), slice(0, k)), (slice(n // 3, n - 1), slice(k // 2 - 1, k - 5))):
                np.testing.assert_array_equal(stream.slab(expert, rows, columns), codes[rows, columns])
