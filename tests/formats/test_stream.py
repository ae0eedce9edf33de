"""Rectangles of a stream are those of the whole, by compiled loops and without: of every source and every layout."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import TINY
from warptile.formats import bits, sources
from warptile.formats.stream import Stream, whole
from warptile.kernels import layouts

Codes = np.ndarray


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
