"""Files that are often met under the name of another kind, told by their first bytes at every door."""

from __future__ import annotations

from pathlib import Path

from .errors import CorruptError

HEAD = 256
"""Bytes that are enough to tell."""
SAVE_AGAIN = "convert it to safetensors with the tool that made it"
NO_PICKLE = "pickle is code and is never opened: save it as safetensors with the tool that made it"
MAGICS = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "fetch it with git lfs pull"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", SAVE_AGAIN),
    (b"\x1f\x8b", "compressed with gzip", "decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it"),
    (b"\xfd7zXZ\0", "compressed with xz", "decompress it"),
    (b"\x89HDF", "an HDF5 file", SAVE_AGAIN),
    (b"\x93NUMPY", "a NumPy array", SAVE_AGAIN),
    *((bytes((0x80, protocol)), "a pickle", NO_PICKLE) for protocol in (2, 3, 4, 5)),
    (b"GGUF", "a GGUF file", "give it its own name, ending in .gguf"),
    (b"<!DOCTYPE", "a web page", "download it again"),
    (b"<html", "a web page", "download it again"),
)
# ModelProto.ir_version, a number of one byte, and a field that comes after it: texts and the graph.
ONNX = tuple(bytes((0x08, version, field)) for version in range(1, 32) for field in (0x12, 0x1A, 0x22, 0x32, 0x3A))


def refuse_impostor(path: Path, head: bytes, kind: str) -> None:
    """Raise CorruptError for a file whose first bytes are those of something else than the ``kind`` that its name says.

    Args:
        head: up to ``HEAD`` bytes, of a file that does not begin as its kind does.
    """
    if not head:
        raise CorruptError(f"not {kind} but an empty file", file=path, do="download or copy it again")
    if head[8:9] == b"{" and head[6:8] == b"\0\0":
        raise CorruptError(f"not {kind} but safetensors", file=path, do="give it its own name, ending in .safetensors")
    for magic, what, do in MAGICS:
        if head.startswith(magic):
            raise CorruptError(f"not {kind} but {what}", file=path, do=do)
    if head.startswith(ONNX):
        raise CorruptError(f"not {kind} but an ONNX model", file=path, do="give it its own name, ending in .onnx")
    if _is_text(head):
        raise CorruptError(f"not {kind} but text", file=path, found=repr(head[:16].decode()), do="check what it is")


def _is_text(head: bytes) -> bool:
    """Whether a file begins with lines of letters."""
    return all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head)
