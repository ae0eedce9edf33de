"""Rectangles of a stream are those of the whole, by compiled loops and without: of every source and every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY
from warptile.formats import bits, sources
from warptile.formats.container import Checkpoint, open_checkpoint
from warptile.formats.stream import Stream, whole
from warptile.kernels import layouts

Codes = np.ndarray
FILES = [name for name, t in TINY.items() if t.source not in ("gguf", "matmulnbits") and name != "fp8 nan"]


def check_parts(stream: Stream, codes: Codes) -> None:
    """Codes [e, n, k] against the whole stream and rectangles anywhere in it."""
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(whole(stream).codes.reshape(codes.shape), codes)
    for _ in range(30):
        expert = int(rng.integers(codes.shape[0]))
        (top, bottom), (left, right) = (np.sort(rng.choice(extent + 1, 2, replace=False)) for extent in codes.shape[1:])
        rows, columns = slice(int(top), int(bottom)), slice(int(left), int(right))
        np.testing.assert_array_equal(stream.slab(expert, rows, columns), codes[expert, rows, columns])


@pytest.mark.parametrize("large", [1, 1 << 40], ids=["compiled", "numpy"])
@pytest.mark.parametrize("name", TINY)
def test_a_slab_is_a_part_of_the_whole(name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TINY[name]
    checkpoint, reader = tiny.checkpoint(), sources()[tiny.source]
    (module,) = reader.modules(checkpoint)
    q = reader.read(checkpoint, module)
    codes = q.codes.reshape(-1, q.n, q.k)
    packed = [(layout, *layout.pack(q)) for layout in layouts().values() if layout.accepts(q.outline()) is None]
    monkeypatch.setattr(bits, "LARGE", large)
    check_parts(reader.stream(checkpoint, module), codes)
    for layout, tensors, spec in packed:
        check_parts(layout.view(tensors, spec), codes)


@pytest.mark.parametrize("large", [1, 1 << 40], ids=["compiled", "numpy"])
@pytest.mark.parametrize("name", FILES)
def test_tensors_begin_anywhere_in_a_file(
    name: str, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TINY[name]
    want = whole(_stream(tiny.checkpoint(), tiny.source)).codes
    monkeypatch.setattr(bits, "LARGE", large)
    odd = replace(tiny, tensors={"0": ("U8", (1,), b"\0"), **tiny.tensors})
    checkpoint = open_checkpoint(odd.save(tmp_path / "model"))
    assert any(tensor.offset % 2 for tensor in checkpoint.tensors.values())
    np.testing.assert_array_equal(whole(_stream(checkpoint, tiny.source)).codes, want)


def _stream(checkpoint: Checkpoint, source: str) -> Stream:
    (module,) = sources()[source].modules(checkpoint)
    stream: Stream = sources()[source].stream(checkpoint, module)
    return stream
