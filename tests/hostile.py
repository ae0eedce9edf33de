"""Files from a stranger, each wrong in one way: (name, how it is built, exit code, words of the answer).

Deterministic, and under 64 KB on disk each: what claims more is sparse.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import gptq_case
from gguf_files import Stored, content, model
from tiny import TINY, Tiny, f32
from warptile.convert import convert

Build = Callable[[Path], Path]


@dataclass(frozen=True)
class Hostile:
    name: str
    build: Build
    code: int
    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ("auto", "--to", "marlin", "--fuse", "--stack-experts", "--widen")
    writes: bool = True
    product: str = "out"


def lone(name: str, data: bytes, sparse: int = 0) -> Build:
    def build(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data)
        if sparse:
            os.truncate(path, sparse)
        return path

    return build


def header(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def row(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = json.dumps({"a": row()})
HEADERS: dict[str, tuple[bytes, int]] = {
    "no bytes": (b"", 4),
    "nine bytes": (bytes(9), 4),
    "header of 2^64 - 1": (b"\xff" * 8 + GOOD.encode(), 4),
    "header over 100 MB": (header(GOOD, length=100_000_001), 4),
    "header past the end": (header(GOOD, length=500), 4),
    "header of 0": (header(GOOD, length=0), 4),
    "not JSON": (header("{]" + " " * 8), 4),
    "an array": (header("[1, 2]  "), 4),
    "two objects": (header(GOOD + GOOD, bytes(4)), 4),
    "not UTF-8": (header(b'{"\xff": 1}'), 4),
    "deep nesting": (header('{"a": ' + "[" * 30_000), 4),
    "deep objects": (header('{"a": ' * 5_000), 4),
    "a huge number": (header(GOOD.replace("[4]", f"[{'9' * 5000}]"), bytes(4)), 4),
    "a long list": (
        header('{"a": {"dtype": "U8", "data_offsets": [0, 1], "shape": [' + "1," * 25_000 + "1]}}", b"\0"),
        4,
    ),
    "a long name": (header(json.dumps({"n" * 50_000: row(shape=[5])}), bytes(4)), 4),
    "a tensor twice": (header(f"{GOOD[:-1]}, {GOOD[1:]}", bytes(4)), 4),
    "metadata of numbers": (header('{"__metadata__": {"x": 1}}'), 4),
    "metadata twice": (header('{"__metadata__": {"x": "1", "x": "2"}}'), 4),
    "half a surrogate": (header('{"__metadata__": {"x": "\\ud800"}}'), 4),
    "an unknown dtype": (header(json.dumps({"a": row("I3")}), bytes(4)), 3),
    "a dtype of control characters": (header(json.dumps({"a": row("\x1b[2J\r\n")}), bytes(4)), 3),
    "a dtype that is a number": (header(json.dumps({"a": row(8)}), bytes(4)), 4),
    "half a byte": (header(json.dumps({"a": row("F4", [3], [0, 2])}), bytes(2)), 4),
    "a negative dimension": (header(json.dumps({"a": row(shape=[-4])}), bytes(4)), 4),
    "a dimension of 2^63": (header(json.dumps({"a": row(shape=[2**63, 0])}), bytes(4)), 4),
    "a product that wraps": (header(json.dumps({"a": row(shape=[2**62, 4, 4])}), bytes(4)), 4),
    "zero times what wraps": (header(json.dumps({"a": row(shape=[0, 2**40, 2**40], offsets=[0, 0])})), 4),
    "65 dimensions": (header(json.dumps({"a": row(shape=[1] * 65, offsets=[0, 1])}), b"\0"), 3),
    "a hole": (header(json.dumps({"a": row(), "b": row(offsets=[5, 9])}), bytes(9)), 4),
    "an overlap": (header(json.dumps({"a": row(), "b": row(offsets=[3, 7])}), bytes(7)), 4),
    "offsets past the end": (header(json.dumps({"a": row(shape=[2**40], offsets=[0, 2**40])}), bytes(4)), 4),
    "truncated": (header(GOOD, bytes(3)), 4),
    "too long": (header(GOOD, bytes(5)), 4),
    "a zip": (b"PK\x03\x04" + bytes(100), 4),
    "a web page": (b"<!DOCTYPE html><html></html>", 4),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", 4),
    "nothing quantised": (header(GOOD, bytes(4)), 3),
}
LIES = [Hostile(f"safetensors: {name}", lone("m.safetensors", data), code) for name, (data, code) in HEADERS.items()]
LIES += [
    Hostile(
        "safetensors: sparse, 90 MB of header", lone("m.safetensors", struct.pack("<Q", 90_000_000) + b"{", 1 << 40), 4
    ),
    Hostile("safetensors: sparse, 1 TB after the data", lone("m.safetensors", header(GOOD), 1 << 40), 4),
    Hostile("a pickle", lone("m.bin", b"\x80\x04"), 3, ("pickle is code",)),
]


def pipe(name: str) -> Build:
    def build(folder: Path) -> Path:
        os.mkfifo(folder / name)
        return folder / name

    return build


def link(name: str, target: str) -> Build:
    def build(folder: Path) -> Path:
        (folder / name).symlink_to(target)
        return folder / name

    return build


for suffix in ("safetensors", "gguf", "onnx"):
    LIES.append(Hostile(f"a pipe called .{suffix}", pipe(f"m.{suffix}"), 3, ("not a regular file",)))
    LIES.append(Hostile(f"a device called .{suffix}", link(f"m.{suffix}", "/dev/zero"), 3, ("not a regular file",)))


def folder_of(edit: Callable[[Path], object], base: str = "gptq sym") -> Build:
    def build(folder: Path) -> Path:
        src = TINY[base].save(folder / "model")
        edit(src)
        return src

    return build


def index(**weight_map: Any) -> Callable[[Path], object]:
    text = json.dumps({"weight_map": {name.replace("_", "."): shard for name, shard in weight_map.items()}})
    return lambda src: (src / "model.safetensors.index.json").write_text(text)


def config(text: str | bytes) -> Callable[[Path], object]:
    return lambda src: (src / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def swap(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def edit(src: Path) -> None:
        (src / name).unlink()
        make(src / name)

    return edit


def outside(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(header(GOOD, bytes(4)))
    path.symlink_to("../outside")


FOLDERS: dict[str, tuple[Callable[[Path], object], int]] = {
    "index: a shard above": (index(a="../x.safetensors"), 4),
    "index: an absolute shard": (index(a="/etc/x.safetensors"), 4),
    "index: a shard with a zero byte": (index(a="x\0.safetensors"), 4),
    "index: a backslash": (index(a="..\\x.safetensors"), 4),
    "index: a hidden shard": (index(a=".x.safetensors"), 4),
    "index: not a shard": (index(a="config.json"), 4),
    "index: a shard that is missing": (index(a="other.safetensors"), 4),
    "index: a shard that is a number": (index(a=7), 4),
    "index: a tensor that is missing": (index(a="model.safetensors"), 4),
    "index: empty": (index(), 4),
    "index: a list": (lambda src: (src / "model.safetensors.index.json").write_text("[]"), 4),
    "index: a shard of control characters": (index(a="\x1b[2J.safetensors"), 4),
    "weights: a link that leads out": (swap("model.safetensors", outside), 4),
    "weights: a link to nothing": (swap("model.safetensors", lambda p: p.symlink_to("none")), 4),
    "weights: a pipe": (swap("model.safetensors", os.mkfifo), 3),
    "weights: a directory": (swap("model.safetensors", lambda p: p.mkdir()), 3),
    "weights: the same twice": (lambda s: (s / "b.safetensors").write_bytes((s / "model.safetensors").read_bytes()), 3),
    "config: a pipe": (swap("config.json", os.mkfifo), 4),
    "config: a link that leads out": (swap("config.json", outside), 4),
    "config: sparse": (lambda src: os.truncate(src / "config.json", 1 << 40), 4),
    "config: not JSON": (config("{"), 4),
    "config: not UTF-8": (config(b'{"a": "\xff"}'), 4),
    "config: deep": (config('{"a": ' + "[" * 50_000), 4),
    "config: a key twice": (config('{"a": 1, "a": 2}'), 4),
    "config: a huge number": (config('{"a": ' + "1" * 10_000 + "}"), 4),
    "config: half a surrogate": (config('{"a": "\\udc00"}'), 4),
    "config: labels that are a list": (config('{"quantization_config": []}'), 4),
    "config: labels that are text": (config('{"quantization_config": "gptq"}'), 4),
}
LIES += [Hostile(name, folder_of(edit), code) for name, (edit, code) in FOLDERS.items()]

# (base, labels that replace its own)
LABELS: list[tuple[str, dict[str, Any]]] = [
    *(("gptq sym", {"bits": value}) for value in ("4", True, 5, -1, 10**30, [4], 0.5)),
    *(("gptq sym", {"group_size": value}) for value in ("32", 0, -2, 2**70, {})),
    *(
        ("gptq sym", {key: value})
        for key, value in (("sym", "yes"), ("pack_dtype", "int8"), ("checkpoint_format", "x"))
    ),
    *(("gptq sym", {"dynamic": value}) for value in ([1], "x", {"(a+)+$": {}}, {"(": {}}, {"(l+)(?#x)+$": {}})),
    *(("gptq sym", {"dynamic": value}) for value in ({"(?x)(l+) +$": {}}, {".*" * 200 + "x": {}}, {"x" * 600: {}})),
    ("gptq sym", {"checkpoint_format": None, "quant_method": "auto-round", "packing_format": []}),
    *(("awq", {key: value}) for key, value in (("bits", 8), ("group_size", []), ("modules_to_not_convert", "a"))),
    *(("compressed_tensors", {"config_groups": value}) for value in ([], {"a": 1}, {"a": {"weights": []}})),
    *(
        ("compressed_tensors", {key: value})
        for key, value in (("format", []), ("ignore", {}), ("ignore", ["re:(a+)+$"]))
    ),
    *(("fp8 blocks", {"weight_block_size": value}) for value in ([0, 0], "x", [[1, 2]], [1, 2, 3], [-8, 32])),
    *(("fp8 blocks", {"config_groups": value}) for value in ([], "x", {"a": {"weights": 1}})),
    *(("fp8 blocks", {key: value}) for key, value in (("weight_scale_semantics", []), ("fmt", "e5m2"))),
    ("mxfp4", {"scales": "swizzled"}),
    *(("awq", {"quant_method": "onnx", key: 1}) for key in ("nodes", "opsets")),
]


def labelled(base: str, said: dict[str, Any]) -> Build:
    return lambda folder: TINY[base].said(**said).save(folder / "model")


for i, (base, said) in enumerate(LABELS):
    name = f"labels {i}: {base}, {json.dumps(said)[:50]}"
    LIES.append(Hostile(name, labelled(base, said), 4 if "weight_block_size" in said else 3))


def scales(tiny: Tiny, suffix: str, value: bytes) -> Tiny:
    (name,) = (n for n in tiny.tensors if n.endswith(suffix))
    dtype, shape, data = tiny.tensors[name]
    return replace(tiny, tensors={**tiny.tensors, name: (dtype, shape, value + data[len(value) :])})


def saved(tiny: Tiny) -> Build:
    return lambda folder: tiny.save(folder / "model")


ENDLESS = {"group_0": {"targets": ["Linear"], "weights": {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "block", "block_structure": [8, 10**30]
}}}  # fmt: skip
NAN, INF = b"\0\x7e", b"\0\x7c"
CONTENTS: dict[str, tuple[Tiny, int]] = {
    "gptq: a scale of NaN": (scales(TINY["gptq sym"], ".scales", NAN), 4),
    "gptq: a scale of infinity": (scales(TINY["gptq sym"], ".scales", INF), 4),
    "gptq: g_idx past the groups": (scales(TINY["gptq sym"], ".g_idx", struct.pack("<i", 10**6)), 4),
    "gptq: g_idx below zero": (scales(TINY["gptq sym"], ".g_idx", struct.pack("<i", -1)), 4),
    "gptq: an empty group": (scales(TINY["gptq sym"], ".g_idx", struct.pack("<64i", *[1] * 64)), 3),
    "gptq: no scales": (TINY["gptq sym"].with_(scales=None), 4),
    "gptq: no qweight": (TINY["gptq sym"].with_(qweight=None), 4),
    "gptq: qweight of no rows": (TINY["gptq sym"].with_(qweight=("I32", (0, 2**40), b"")), 4),
    "gptq: scales of integers": (TINY["gptq sym"].with_(scales=("I16", (2, 32), bytes(128))), 3),
    "awq: a scale of NaN": (scales(TINY["awq"], ".scales", NAN), 4),
    "awq: no zero points": (TINY["awq"].with_(qzeros=None), 4),
    "compressed_tensors: weight_shape that lies": (scales(TINY["compressed_tensors"], ".weight_shape", b"\xff" * 8), 4),
    "compressed_tensors: a scale of infinity": (scales(TINY["compressed_tensors"], ".weight_scale", INF), 4),
    "compressed_tensors: two codings": (
        replace(
            TINY["compressed_tensors"],
            tensors={**TINY["compressed_tensors"].tensors, "a.weight": ("I8", (16, 64), bytes(1024))},
        ),
        3,
    ),
    "fp8: a NaN code": (scales(TINY["fp8 blocks"], ".weight", b"\x7f"), 4),
    "fp8: a scale of NaN": (scales(TINY["fp8 blocks"], ".weight_scale_inv", b"\0\0\xc0\x7f"), 4),
    "fp8: no scale": (TINY["fp8 blocks"].with_(weight_scale_inv=None), 4),
    "fp8: a bias that others claim": (replace(TINY["fp8 blocks"], quantization={}, tensors={
        **TINY["fp8 blocks"].tensors, **{f"a.{s}": TINY["gptq sym"].tensors[f"layer.{s}"] for s in ("qweight", "scales")}  # noqa: E501
    }), 3),
    "fp8: blocks of 10^30 channels": (
        TINY["fp8 blocks"].with_(weight_scale_inv=f32(0.5, 0.25, shape=(2, 1))).said(weight_block_size=[8, 10**30]), 4),
    "fp8: blocks of 2^31 rows": (
        TINY["fp8 blocks"].with_(weight_scale_inv=f32(0.5, 0.25, shape=(1, 2))).said(weight_block_size=[2**31, 32]), 4),
    "compressed_tensors: endless blocks": (
        TINY["compressed_tensors int8"].said(config_groups=ENDLESS).with_(weight_scale=f32(1, 2, shape=(2, 1))), 3),
    "mxfp4: a scale of NaN": (scales(TINY["mxfp4"], ".weight_scale", b"\xff"), 4),
    "nvfp4: a negative scale": (scales(TINY["nvfp4"], ".weight_scale", b"\x80"), 4),
    "nvfp4: a global of zero": (scales(TINY["nvfp4"], ".weight_scale_2", bytes(4)), 4),
    "nvfp4: a kept tensor of half bytes": (TINY["nvfp4"].with_(input_scale=("F4", (2,), b"\0")), 3),
}  # fmt: skip
LIES += [Hostile(name, saved(tiny), code) for name, (tiny, code) in CONTENTS.items()]
evil = replace(TINY["gptq sym"], tensors={
    name.replace("layer", "\x1b]0;x\x07\r\n\u202e"): stored for name, stored in TINY["gptq sym"].with_(qzeros=None).tensors.items()  # noqa: E501
})  # fmt: skip
LIES.append(Hostile("a name of control characters", saved(scales(evil, ".scales", NAN)), 4))

KEY = struct.pack("<Q", 1) + b"a"
START = b"GGUF" + struct.pack("<I", 3)
Q4 = Stored("blk.0.a.weight", "Q4_0", (32, 3))
GGUF: dict[str, tuple[bytes, int, int]] = {
    "an array of 2^63": (START + struct.pack("<qq", 0, 1) + KEY + struct.pack("<iiQ", 9, 0, 2**63), 4, 0),
    "sparse, strings without end": (
        START + struct.pack("<qq", 0, 1) + KEY + struct.pack("<iiQ", 9, 8, 1 << 36),
        3,
        1 << 40,
    ),
    "sparse, a string of 512 GB": (START + struct.pack("<qq", 0, 1) + KEY + struct.pack("<iQ", 8, 1 << 39), 3, 1 << 40),
    "sparse, 2^36 key-values": (START + struct.pack("<qq", 0, 1 << 36), 4, 1 << 40),
    "sparse, 2^35 tensors": (START + struct.pack("<qq", 1 << 35, 0), 3, 1 << 40),
    "a count below zero": (START + struct.pack("<qq", -1, 0), 4, 0),
    "big endian": (b"GGUF" + struct.pack(">Iqq", 3, 1, 0) + bytes(32), 3, 0),
    "another version": (content([Q4], version=9), 3, 0),
    "an overlap": (content([Q4, replace(Q4, name="b.weight", offset=0)]), 4, 0),
    "a gap": (content([Q4, replace(Q4, name="b.weight", offset=640)]), 4, 0),
    "a name twice": (content([Q4, Q4]), 4, 0),
    "a product that wraps": (content([replace(Q4, ne=(2**40, 2**40))]), 4, 0),
    "half a block": (content([replace(Q4, ne=(48, 3))]), 4, 0),
    "an unknown type": (content([replace(Q4, id=99)]), 3, 0),
    "five dimensions": (content([replace(Q4, dims=5)]), 4, 0),
    "alignment 24": (content([Q4], {"general.alignment": ("u32", 24)}), 4, 0),
    "a scale of NaN": (content([replace(Q4, data=b"\0\x7e" * 27)], model(head_count=2)), 4, 0),
    "a part without its set": (content([Q4], {"split.count": ("u16", 2), "split.no": ("u16", 0)}), 3, 0),
    "cut off": (content([Q4])[:-40], 4, 0),
}
LIES += [Hostile(f"gguf: {name}", lone("m.gguf", data, sparse), code) for name, (data, code, sparse) in GGUF.items()]
LIES += [
    Hostile("onnx: no bytes", lone("m.onnx", b""), 4),
    Hostile("onnx: text", lone("m.onnx", b"hello, world"), 4),
    Hostile("onnx: sparse", lone("m.onnx", b"\x08\x07", 1 << 40), 4, ("field 0",)),
    Hostile("onnx: sparse, a field of 512 GB", lone("m.onnx", b"\x12\x80\x80\x80\x80\x80\x10", 1 << 40), 4),
]


def graph(data: bytes, sparse: int = 0) -> Build:
    """An artifact of an ONNX model with a companion whose hash it has."""

    def build(folder: Path) -> Path:
        said = TINY["matmulnbits"].said(graph=hashlib.sha256(data).hexdigest())
        src = said.save(folder / "source")
        path = convert(src, folder / "a.safetensors", to="marlin", quiet=True).dst
        shutil.rmtree(src)
        lone(f"{path.name}.onnx-graph", data, sparse)(folder)
        return path

    return build


def beside(name: bytes) -> bytes:
    """A table of a model of no bytes and a file of external data."""
    return struct.pack("<IIIQ", 2, 0, 0, 0) + struct.pack("<I", len(name)) + name + struct.pack("<IQ", 0, 0)


GRAPHS = {
    "no bytes": (b"", 0),
    "text": (b"hello, world", 0),
    "sparse": (b"", 1 << 40),
    "files without end": (struct.pack("<I", 2**32 - 1), 0),
    "files of nothing": (struct.pack("<I", 3000) + bytes(16 * 3000), 0),
    "tensors of nothing": (struct.pack("<III", 1, 0, 3000) + bytes(12 * 3000 + 8), 0),
    "bytes without end": (struct.pack("<IIIQ", 1, 0, 0, 2**64 - 1), 0),
    "no model": (struct.pack("<IIIQ", 1, 0, 0, 4) + b"onnx", 0),
    "a tensor that is not there": (struct.pack("<IIIQIcQ", 1, 0, 1, 0, 1, b"t", 0), 0),
    **{
        f"a file called {name}": (beside(name), 0)
        for name in (b"../x", b"/tmp/x", b".x", b"a/../x", b"\xff", b"\x1b[2J")
    },
    "a long name": (beside(b"n" * 5000), 0),
}
LIES += [
    Hostile(f"graph: {name}", graph(data, sparse), 4, (), ("unpack",), True, "out.onnx")
    for name, (data, sparse) in GRAPHS.items()
]


def artifact(old: str, new: str, base: Tiny = TINY["gptq asym act-order"]) -> Build:
    """A converted module, one text of its header replaced; lengths follow."""

    def build(folder: Path) -> Path:
        path = folder / "a.safetensors"
        src = base.save(folder / "source")
        convert(src, path, to="marlin", quiet=True, fuse=True, stack_experts=True, widen=True)
        shutil.rmtree(src)
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        text = raw[8:end].decode()
        assert old in text, text
        path.write_bytes(header(text.replace(old, new, 1), raw[end:]))
        return path

    return build


ARTIFACTS = {
    "a newer version": (r"\"version\":1", r"\"version\":2", 3),
    "no version": (r"\"version\":1", r"\"version\":true", 4),
    "another layout": (r"\"layout\":\"marlin\"", r"\"layout\":\"nothing\"", 3),
    "other rows": (r"\"n\":32", r"\"n\":3200", 4),
    "other padding": (r"\"k_padded\":64", r"\"k_padded\":65536", 4),
    "a group that does not fit": (r"\"group\":32", r"\"group\":16", 4),
    "no permutation": (r"\"perm\":true", r"\"perm\":false", 4),
    "2^20 experts": (r"\"experts\":null", r"\"experts\":1048576", 4),
    "a key of its own": (r"\"perm\":true", r"\"perm\":true,\"x\":1", 4),
}
LIES += [
    Hostile(f"artifact: {name}", artifact(old, new), code, (), ("inspect",), False)
    for name, (old, new, code) in ARTIFACTS.items()
]


def linears(*names: str, **facts: Any) -> Tiny:
    """GPTQ linears that belong together; of experts, only the first is symmetric."""
    cases = [
        gptq_case(n=32, k=64, module=name, convention="gptq_v2", sym="experts" not in name or ".0." in name, **facts)
        for name in names
    ]
    label = {key: value for key, value in cases[0].config.items() if key != "sym"}
    return Tiny("gptq", {name: stored for case in cases for name, stored in case.tensors.items()}, label)


FUSED = linears("a.q_proj", "a.k_proj", "a.v_proj", bits=3)
STACK = linears("m.experts.0.up_proj", "m.experts.1.up_proj")
PARTS: dict[str, tuple[Tiny, str, str]] = {
    "a part of more rows": (FUSED, r"\"n\":32,\"name\":\"a.q_proj\"", r"\"n\":33,\"name\":\"a.q_proj\""),
    "a part of no rows": (FUSED, r"\"n\":32,\"name\":\"a.v_proj\"", r"\"n\":0,\"name\":\"a.v_proj\""),
    "a part of 2^64 rows": (FUSED, r"\"n\":32,\"name\":\"a.v_proj\"", rf"\"n\":{2**64},\"name\":\"a.v_proj\""),
    "a part twice": (FUSED, r"\"name\":\"a.k_proj\"", r"\"name\":\"a.q_proj\""),
    "a part of no name": (FUSED, r"\"name\":\"a.k_proj\"", r"\"name\":\"\""),
    "a part called like its module": (FUSED, r"\"name\":\"a.k_proj\"", r"\"name\":\"a.qkv_proj\""),
    "a part of an expert": (FUSED, r"\"n\":32,\"name\":\"a.q_proj\"", r"\"expert\":0,\"n\":32,\"name\":\"a.q_proj\""),
    "a narrow element that is none": (FUSED, r"\"narrow\":\"u3b4\"", r"\"narrow\":\"e2m1\""),
    "a narrow element that is a list": (FUSED, r"\"narrow\":\"u3b4\"", r"\"narrow\":[\"u3b4\"]"),
    "a part without a source": (FUSED, r"\"source\":{", r"\"sources\":{"),
    "source and parts": (FUSED, r"\"parts\":[", r"\"source\":{\"format\":\"gptq\"},\"parts\":["),
    "no parts": (FUSED, r"\"parts\":[", r"\"parts\":[],\"residue\":["),
    "an expert past the stack": (STACK, r"\"expert\":1", r"\"expert\":2"),
    "an expert twice": (STACK, r"\"expert\":1", r"\"expert\":0"),
    "an expert below zero": (STACK, r"\"expert\":1", r"\"expert\":-1"),
    "a symmetric element that is none": (STACK, r"\"symmetric\":\"u4b8\"", r"\"symmetric\":\"u8b128\""),
    "a symmetric element that is a list": (STACK, r"\"symmetric\":\"u4b8\"", r"\"symmetric\":[]"),
    "a symmetric element that is a table": (STACK, r"\"symmetric\":\"u4b8\"", r"\"symmetric\":{}"),
}  # fmt: skip
LIES += [
    Hostile(f"artifact: {name}", artifact(old, new, base), 4, (), ("inspect",), False)
    for name, (base, old, new) in PARTS.items()
]
CORPUS = tuple(LIES)
