"""What fuzzing and reading found, each with the smallest input that showed it; and every seed of every target."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.targets import TARGETS, Bounded, _artifacts, check_module
from numba import njit
from tiny import NOWHERE, TINY, Tiny, f32, in_memory
from warptile.convert import origin, plan
from warptile.formats import artifact, bits, gptq_zeros, matmulnbits, patterns, sources
from warptile.formats.canonical import ELEMENTS, QuantTensor, from_shards
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.formats.rows import pack_rows
from warptile.kernels import layouts


def beside(base: str, **tensors: tuple[str, tuple[int, ...], bytes]) -> Tiny:
    named = {name.replace("__", "."): stored for name, stored in tensors.items()}
    return replace(TINY[base], tensors={**TINY[base].tensors, **named})


FOUND: dict[str, Tiny] = {
    "text_config that is null": replace(TINY["fp8 shards"], config={"text_config": []}),
    "config_groups that is a list": TINY["fp8 blocks"].said(config_groups=[1]),
    "nodes that are a number": TINY["gguf Q4_0"].said(quant_method="onnx", nodes=3),
    "nodes without inputs": TINY["matmulnbits"].said(nodes=[{"op": "MatMulNBits"}]),
    "a packing_format that is a list": TINY["gptq sym"].said(
        quant_method="auto-round", checkpoint_format=None, packing_format=[]
    ),
    "codes twice, integers": beside("compressed_tensors", a__weight=("I8", (16, 64), bytes(1024))),
    "codes twice, mxfp4": beside("mxfp4", a__weight=("U8", (8, 32), bytes(256))),
    "a name that begins with a dot": replace(
        TINY["awq"], tensors={name[1:]: stored for name, stored in TINY["awq"].tensors.items()}
    ),
    "a kept tensor of half bytes": TINY["nvfp4"].with_(input_scale=("F6_E2M3", (8,), bytes(6))),
    "weight_shape of floats": beside("mxfp4", a__weight_shape=f32(float("nan"), 64.0)),
    "zero points that are complex": beside("fp8 blocks", a__weight_zero_point=("C64", (1,), bytes(8))),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_read_exactly_or_refused(name: str) -> None:
    checkpoint = FOUND[name].checkpoint()
    with suppress(CorruptError, UnsupportedError):
        for module, (reader, members) in plan.claims(checkpoint, None).items():
            check_module(checkpoint, module, reader, members)


@pytest.mark.parametrize("pattern", ["(?x)(a+) +$", "(a+)(?#x)+$", "(?x:(a|aa) +$)", "(?i)(?x)(a+) +$"])
def test_what_hides_a_nested_repetition_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match="in reasonable time"):
        patterns.matcher(pattern, 60, "config.json")


def test_rules_that_are_quick_one_by_one_are_not_waited_for_together() -> None:
    def match_all() -> None:
        for _ in range(100_000):
            patterns.matcher(".*a.*a.*a.*b", 58, "config.json").match("a" * 58)

    start = time.process_time()
    with pytest.raises(UnsupportedError, match="in reasonable time"):
        match_all()
    assert time.process_time() - start < 4


def test_zeros_that_a_source_entry_promises_and_an_artifact_lacks() -> None:
    with pytest.raises(ValueError, match="there are none"):
        gptq_zeros.store(None, {"convention": "gptq"}, 1, 8, 4)


def test_an_initializer_of_no_bytes_and_endless_extents(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.ModelProto()
    model.opset_import.add(version=21)
    model.graph.name = "g"
    model.graph.initializer.add(name="a", data_type=1, dims=[0, 2**40, 2**40], raw_data=b"")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CorruptError, match="overflows"):
        open_checkpoint(tmp_path / "m.onnx")


def source_entries() -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(tensors, metadata, an entry of it that tells of a source) of every artifact the fuzzer begins from."""
    for tensors, said in _artifacts():
        for spec in said["modules"].values():
            for entry in (spec, *spec.get("parts", ())):
                if "source" in entry:
                    yield tensors, said, entry


def restore(tensors: dict[str, Any], said: dict[str, Any]) -> None:
    """Give back what an artifact was made of, or have it refused."""
    metadata = {"warptile": json.dumps(said)}
    opened = replace(in_memory(tensors, {}, {}), metadata=metadata, file_metadata={NOWHERE: metadata})
    with suppress(CorruptError, UnsupportedError):
        found = artifact.check_artifact(opened, layouts())
        for part in found.parts:
            with suppress(CorruptError, UnsupportedError):
                origin.restored(found, part, {})


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, True, 2**70, [None], {"": 1}, "removed"], ids=repr)
def test_an_artifacts_account_of_its_source_may_be_anything(value: Any) -> None:
    """Every key of every source, replaced or removed: given back as it says, or refused."""
    for tensors, said, entry in source_entries():
        true = entry["source"]
        for key in true:
            kept = {k: v for k, v in true.items() if k != key}
            entry["source"] = kept if value == "removed" else {**kept, key: value}
            restore(tensors, said)
        entry["source"] = true


@cache
def checking(name: str) -> Any:
    """A compiled loop, compiled once more so that it looks at every index."""
    return njit(boundscheck=True)(getattr(import_module("warptile.formats._compiled"), name).py_func)


class Checking:
    def __getattr__(self, name: str) -> Any:
        return checking(name)


def numbers(said: Any) -> Iterator[tuple[Any, Any]]:
    """(a dictionary or list, the key of an integer in it) for all of them, however deep."""
    for key, value in said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ():
        if type(value) is int:
            yield said, key
        yield from numbers(value)


@pytest.mark.parametrize("value", [0, 2, 3, 7, 31, 1 << 34])
def test_a_number_of_a_source_entry_takes_no_loop_beyond_its_arrays(
    value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact that called 4-bit codes 7-bit ones had their words written behind the end of an array."""
    loops = Bounded(Checking())
    monkeypatch.setattr(bits, "LARGE", 1)
    monkeypatch.setattr(bits, "_compiled", lambda: loops)
    for tensors, said, entry in source_entries():
        for holder, key in numbers(entry["source"]):
            true, holder[key] = holder[key], value
            restore(tensors, said)
            holder[key] = true


@pytest.mark.parametrize(("rows", "width"), [(3, 4), (9, 7), (20, 3)])
def test_codes_that_are_no_whole_words_are_not_packed(rows: int, width: int) -> None:
    with pytest.raises(ValueError, match="no whole words"):
        pack_rows(np.zeros((rows, 8), np.uint8), width, np.arange(rows))


@pytest.mark.parametrize(
    ("block", "k", "sound"), [(256, 64, True), (512, 64, False), (512, 400, True), (24, 64, False)]
)
def test_blocks_are_not_as_long_as_a_file_likes(block: int, k: int, sound: bool) -> None:
    assert matmulnbits._sound(block, k) is sound


def test_factors_of_parts_may_be_nan() -> None:
    """As an artifact may have them that was edited: they are what they are."""
    level = from_shards(np.full((2, 1), np.nan, np.float32), (16, 32), 64)
    q = QuantTensor(ELEMENTS["e4m3"], np.zeros((48, 64), np.uint8), (level,))
    assert q.check() is q


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_read_or_refused(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TINY)
def test_a_flipped_byte_is_given_back_or_refused(name: str) -> None:
    tiny = TINY[name]
    reader = sources()[tiny.source]
    for tensor, (dtype, shape, data) in tiny.tensors.items():
        for at in range(0, len(data), max(1, len(data) // 6)):
            flipped = data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :]
            checkpoint = replace(tiny, tensors={**tiny.tensors, tensor: (dtype, shape, flipped)}).checkpoint()
            with suppress(CorruptError, UnsupportedError):
                ((module, members),) = reader.modules(checkpoint).items()
                check_module(checkpoint, module, tiny.source, members)
