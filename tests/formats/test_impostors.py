"""Files under the name of another kind are named for what they are, whichever name they have."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf_files import content
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError

HEADER = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
NAMES = {".safetensors": "safetensors", ".gguf": "a GGUF file", ".onnx": "an ONNX model"}
FILES: dict[str, tuple[bytes, str, str, str]] = {
    "text": (b"# A model\n\nof mine\n", "text; found '# A model", "check what it is", ""),
    "nothing": (b"", "an empty file", "download or copy it again", ""),
    "one letter": (b"x", "text; found 'x'", "check what it is", ""),
    "JSON": (b'{"weight_map": {}}', "text; found", "check what it is", ""),
    "a page": (b"<!DOCTYPE html><html></html>", "a web page", "download it again", ""),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer", "git lfs pull", ""),
    "a zip": (b"PK\x03\x04" + bytes(100), "a zip archive", "convert it to safetensors", ""),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "compressed with gzip", "decompress it", ""),
    "xz": (b"\xfd7zXZ\0" + bytes(100), "compressed with xz", "decompress it", ""),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file", "convert it to safetensors", ""),
    "a pickle of protocol 2": (b"\x80\x02}" + bytes(100), "a pickle", "pickle is code", ""),
    "a pickle of protocol 5": (b"\x80\x05\x95" + bytes(100), "a pickle", "pickle is code", ""),
    "GGUF": (content([]), "a GGUF file", "ending in .gguf", ".gguf"),
    "safetensors": (struct.pack("<Q", len(HEADER)) + HEADER + b"\0", "safetensors", "in .safetensors", ".safetensors"),
    "ONNX": (b"\x08\x0a\x12\x07pytorch" + bytes(100), "an ONNX model", "ending in .onnx", ".onnx"),
}


@pytest.mark.parametrize(("case", "ending"), [(c, e) for c, row in FILES.items() for e in NAMES if e != row[3]])
def test_it_is_named_for_what_it_is(case: str, ending: str, tmp_path: Path) -> None:
    data, what, do, _ = FILES[case]
    path = tmp_path / f"m{ending}"
    path.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: not {NAMES[ending]} but {what}"), caught.value
    assert do in (caught.value.do or "")
