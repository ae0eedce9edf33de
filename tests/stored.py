"""Checkpoints of given arrays, and those that other people's tools wrote: a few in tests/data, more in a zoo.

The zoo is the folder that WARPTILE_ZOO names, else ``../shared/zoo`` beside the repository. Each of its folders holds a
checkpoint and ``expected.npz``: {module: float32 weights by the writing tool's own code}.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from warptile.formats.canonical import QuantTensor, dequantize, same
from warptile.formats.container import Checkpoint, dtype_name, open_checkpoint
from warptile.formats.options import Options
from warptile.kernels import marlin

ROOT = Path(__file__).parent.parent


def checkpoint(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    quantization: Mapping[str, Any] | None = None,
    options: Options | None = None,
    metadata: Mapping[str, str] | None = None,
    **config: Any,
) -> Checkpoint:
    """Write arrays under their numpy dtypes, with a config.json, and open the folder."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in arrays.items():
        stored = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": dtype_name(array.dtype), "shape": list(array.shape), "data_offsets": offsets}
        data += stored
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization or {})}))
    return open_checkpoint(folder, options)


def zoo(name: str) -> Path:
    """A folder of the zoo; skips the test when it is not here."""
    elsewhere = Path(os.environ.get("WARPTILE_ZOO", ROOT.parent / "shared" / "zoo"))
    for folder in (ROOT / "tests" / "data" / name, elsewhere / name):
        if folder.is_dir():
            return folder
    pytest.skip(f"no {name} in tests/data or in {elsewhere}; WARPTILE_ZOO may name another folder")


def check_source(source: ModuleType, given: Checkpoint, module: str) -> QuantTensor:
    """describe foretells read, and write gives the very bytes back, also from what Marlin tiles keep."""
    q: QuantTensor = source.read(given, module).check()
    assert source.describe(given, module) == q.outline()
    assert_bytes(source.write(module, q), given, source.modules(given)[module])
    tensors, spec = marlin.pack(q)
    back = marlin.unpack(tensors, spec)
    assert same(back, q) is None
    kept = QuantTensor(**{**vars(back), "source": q.source, "residue": q.residue})
    assert_bytes(source.write(module, kept), given, source.modules(given)[module])
    return q


def assert_bytes(written: Mapping[str, np.ndarray], given: Checkpoint, members: tuple[str, ...]) -> None:
    assert sorted(written) == sorted(members)
    for name, array in written.items():
        tensor = given.tensors[name]
        assert (dtype_name(array.dtype), array.shape) == (tensor.dtype, tensor.shape), name
        assert np.ascontiguousarray(array).tobytes() == tensor.raw().tobytes(), name


def check_zoo(source: ModuleType, name: str, modules: int, tolerance: float = 0.0) -> None:
    """All modules of a checkpoint of the zoo: as ``check_source``, and equal to ``expected.npz``.

    ``tolerance``: the largest difference allowed, in units of the largest weight.
    """
    folder = zoo(name)
    given = open_checkpoint(folder)
    found = source.modules(given)
    assert len(found) == modules
    assert not source.orphans(given)
    known = np.load(folder / "expected.npz") if (folder / "expected.npz").exists() else {}
    for module in found:
        q = check_source(source, given, module)
        if module in known:
            want = known[module]
            assert want.shape == q.codes.shape
            off = np.abs(dequantize(q).astype(np.float64) - want).max()
            assert off <= tolerance * np.abs(want).max(), module
    assert not known or set(known) & set(found)
