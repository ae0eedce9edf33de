"""Files beside the weights: ``unpack`` gives back their very bytes, and none that the source did not have."""

from __future__ import annotations

import json

import pytest
from warptile.convert import convert, unpack, verify
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, VerifyError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def odd(make_directory):
    """A directory whose JSON is written as no tool of ours would: line ends, indents, order, NaN, the index's name."""
    src = make_directory(shards=3)
    config = (src / "config.json").read_text().replace('"vocab_size"', '"cut": NaN, "vocab_size"')
    (src / "config.json").write_bytes(config.replace("\n", "\r\n").encode())
    index = json.loads((src / INDEX).read_text())
    odd = {"weight_map": dict(reversed(index["weight_map"].items())), "metadata": {"total_size": 1.0, "by": "é"}}
    (src / INDEX).unlink()
    (src / "weights.safetensors.index.json").write_bytes(json.dumps(odd, separators=(" ,", "\t:\r\n")).encode())
    return src


@pytest.mark.parametrize("size", ["5GB", "5KB"])
def test_config_and_index_come_back_to_the_byte(odd, size):
    dst = convert(odd, to="marlin", max_shard_size=size).dst
    assert verify(dst, odd).files == 4
    back = unpack(dst, odd.with_name("back")).dst
    assert {f.name for f in back.iterdir()} == {f.name for f in odd.iterdir()}
    for file in odd.iterdir():
        if file.suffix == ".json":
            assert (back / file.name).read_bytes() == file.read_bytes(), file.name


def test_shards_without_an_index_come_back_without_one(odd):
    (odd / "weights.safetensors.index.json").unlink()
    dst = convert(odd, to="marlin", max_shard_size="5KB").dst
    assert (dst / INDEX).exists()
    back = unpack(dst, odd.with_name("back")).dst
    assert {f.name for f in back.iterdir()} == {f.name for f in odd.iterdir()}
    assert open_checkpoint(back).tensors.keys() == open_checkpoint(odd).tensors.keys()


def test_an_index_that_changed_since_is_a_difference(odd):
    dst = convert(odd, to="marlin").dst
    index = odd / "weights.safetensors.index.json"
    index.write_bytes(index.read_bytes() + b"\n")
    with pytest.raises(VerifyError, match=r"weights\.safetensors\.index\.json: unpack would not give"):
        verify(dst, odd)


@pytest.mark.parametrize("name", ["../model.safetensors.index.json", "config.json", "a/b.safetensors.index.json"])
def test_an_index_is_written_nowhere_else(odd, name):
    dst = convert(odd, odd.with_name("one.safetensors"), to="marlin").dst
    raw = dst.read_bytes()
    was, now = b"weights.safetensors.index.json", name.encode()
    assert raw.count(was) == 1
    length = int.from_bytes(raw[:8], "little") + len(now) - len(was)
    dst.write_bytes(length.to_bytes(8, "little") + raw[8:].replace(was, now))
    with pytest.raises(CorruptError, match="source_index in its metadata is damaged"):
        unpack(dst, odd.with_name("back"))
