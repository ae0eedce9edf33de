"""What is fuzzed: functions of bytes that raise nothing, or have found something. ``run.py`` drives them.

A file is read, or refused with a WarptileError; what is read gives its very bytes back, and fits the layouts that
accept it. Anything else is a finding.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import numpy as np
from cases import gptq_case
from tiny import NOWHERE, TINY, Tiny, in_memory
from warptile.convert import convert, origin, plan
from warptile.formats import artifact, bits, gguf_header, onnx_file, patterns, safetensors_file, sources, strict_json
from warptile.formats.canonical import QuantTensor, same
from warptile.formats.container import Checkpoint, beside, companion, dtype_name, open_checkpoint
from warptile.formats.errors import UnsupportedError, WarptileError
from warptile.formats.onnx_table import File, parse, table
from warptile.formats.spec import stored
from warptile.kernels import layouts
from warptile.kernels.launch import Device
from warptile.runtime.catalog import Catalog

from .conversion import families, held, quietly
from .edits import Choices, edited, retell

DATA = Path(__file__).parent.parent / "data"
SLOW = 2.0
"""Seconds after which an answer is a finding."""
DEVICES = (Device(80, 108, 166912), Device(90, 132, 232448, (13, 3)), Device(120, 170, 101376))
PRODUCTS = tuple(product(DEVICES, ("f16", "bf16")))
"""An input tries one of them, one layout, and loops compiled or not, by its last byte."""


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    max_len: int = 64


def safetensors_header(data: bytes) -> None:
    """The header's JSON and eight bytes that say how long the file is."""
    size, text = int.from_bytes(data[:4], "little"), data[4:]
    try:
        tensors, _ = safetensors_file.parse_header(NOWHERE, text, size)
    except WarptileError:
        return
    assert sum(t.nbytes for t in tensors.values()) == size - 8 - len(text)
    assert all(8 + len(text) <= t.offset <= t.offset + t.nbytes <= size for t in tensors.values())


def gguf(data: bytes) -> None:
    try:
        header = gguf_header.parse_header(NOWHERE, data)
    except WarptileError:
        return
    end = 0
    for t in header.tensors:
        assert end <= t.offset <= t.offset + t.nbytes <= len(data), t
        end = t.offset + t.nbytes


def config_json(data: bytes) -> None:
    """A configuration beside a module of every kind in turn."""
    base = list(TINY.values())[data[0] % len(TINY)] if data else TINY["awq"]
    try:
        config = strict_json.parse(data[1:], NOWHERE, "it", constants=True)
        found = plan.claims(replace(base, quantization=config, config=config).checkpoint(), None)
    except WarptileError:
        return
    checkpoint = replace(base, quantization=config, config=config).checkpoint()
    for module, (source, _) in found.items():
        try:
            sources()[source].describe(checkpoint, module)
        except WarptileError:
            continue


def rules(data: bytes) -> None:
    """A regular expression of a configuration against a module's name."""
    name, text = "model.layers.0.self_attn.q_proj" + "a" * 24, data.decode("utf-8", "replace")

    def run() -> None:
        with suppress(WarptileError):
            patterns.matcher(text, len(name), "config.json").match(name)
            patterns.matcher(text, len(name), "config.json", anywhere=True).search(name)

    timely(run)


def timely(run: Callable[[], None]) -> None:
    """Fails what takes long, and the next time too: the first may have compiled a loop."""
    for _ in range(2):
        start = time.process_time()
        run()
        took = time.process_time() - start
        if took < SLOW:
            return
    raise AssertionError(f"{took:.1f} s")


class Bounded:
    """The compiled loops, where an index beyond an array's end is a finding and no refusal.

    ``run.py`` has numba check bounds; nothing does when a conversion runs.
    """

    def __init__(self, loops: ModuleType) -> None:
        self._loops = loops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            try:
                return getattr(self._loops, name)(*args)
            except IndexError as error:
                raise AssertionError(f"{name} went beyond its arrays") from error

        return run


@contextmanager
def loops_compiled(wanted: bool) -> Iterator[None]:
    """Arrays of any size go through the compiled loops, or none does."""
    before, bits.LARGE = bits.LARGE, 1 if wanted else 1 << 40
    try:
        yield
    finally:
        bits.LARGE = before


def source(name: str, data: bytes) -> None:
    """Edits of a module of one source."""
    bases = _bases(name)
    choices = Choices(data)
    checkpoint = edited(choices.one(bases), choices).checkpoint()
    turn = data[-1] if data else 0
    layout = list(layouts())[turn // 2 % len(layouts())]

    def run() -> None:
        found: dict[str, tuple[str, tuple[str, ...]]] = {}
        with suppress(WarptileError):
            found = plan.claims(checkpoint, None)
        for module, (reader, members) in found.items():
            with suppress(WarptileError), loops_compiled(turn % 2 == 0):
                check_module(checkpoint, module, reader, members, [layout])

    timely(run)


@cache
def _bases(name: str) -> list[Any]:
    return [tiny for tiny in TINY.values() if tiny.source == name]


def check_module(
    checkpoint: Checkpoint, module: str, reader: str, members: tuple[str, ...], to: Iterable[str] | None = None
) -> None:
    """describe foretells read, write gives the very bytes, and layouts (``to``: all) hold what they accept."""
    format_ = sources()[reader]
    outline = format_.describe(checkpoint, module)
    q: QuantTensor = format_.read(checkpoint, module).check()
    assert q.outline() == outline, (q.outline(), outline)
    json.dumps(q.source)
    check_written(checkpoint, format_.write(module, q), members)
    for layout in (layouts()[name] for name in (layouts() if to is None else to)):
        if layout.accepts(outline) is None:
            tensors, spec = layout.pack(q)
            assert spec == layout.spec(outline)
            found = {suffix: (dtype_name(a.dtype), a.shape) for suffix, a in tensors.items()}
            assert found == {s: need for s, need in stored(spec, layout).items() if s in found}, found
            back = replace(layout.unpack(tensors, spec), source=q.source, residue=q.residue)
            assert same(back, q) is None, same(back, q)
            check_written(checkpoint, format_.write(module, back), members)


def check_written(checkpoint: Checkpoint, written: dict[str, Any], members: tuple[str, ...]) -> None:
    assert sorted(written) == sorted(members), (sorted(written), members)
    for name, array in written.items():
        tensor = checkpoint.tensors[name]
        assert (dtype_name(array.dtype), array.shape) == (tensor.dtype, tensor.shape), name
        assert np.ascontiguousarray(array).tobytes() == tensor.raw().tobytes(), name


def spec(data: bytes) -> None:
    """Edits of an artifact: what its metadata says and what its tensors are."""
    choices = Choices(data)
    tensors, said = choices.one(_artifacts())
    tiny = Tiny("", tensors, said["modules"])
    if choices.below(3) == 0:
        tiny = edited(tiny, choices)
    else:
        while choices.left:
            tiny = replace(tiny, quantization=retell(tiny.quantization, choices))
    said = {**said, "modules": tiny.quantization}
    metadata = {"warptile": json.dumps(said), "source_quantization": '{"quant_method": "gptq"}'}
    checkpoint = replace(in_memory(tiny.tensors, {}, tiny.config), metadata=metadata, file_metadata={NOWHERE: metadata})
    try:
        found = artifact.check_artifact(checkpoint, layouts())
        catalog = Catalog(found)
    except WarptileError:
        return
    turn = data[-1] if data else 0
    for name, module in found.modules.items():
        layout = layouts()[module["layout"]]
        device, x_dtype = PRODUCTS[turn // 2 % len(PRODUCTS)]
        with suppress(UnsupportedError):
            layout.plan(module, 1 << (len(data) % 8), device, x_dtype)
        with suppress(WarptileError), loops_compiled(turn % 2 == 0):
            q = found.quant(name).check()
            catalog.decoded(catalog.module(name))
            if name not in found.parts or "narrow" not in found.parts[name].source:
                again, _ = layout.pack(q)
                assert {s: a.shape for s, a in again.items()} == {s: a.shape for s, a in found.tensors(name).items()}
    for name in found.parts:
        with suppress(WarptileError), loops_compiled(turn % 2 == 0):
            found.quant(name).check()
            catalog.decoded(catalog.module(name))
            origin.restored(found, name, {})


@cache
def _artifacts() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    out = []
    for tiny in TINY.values():
        checkpoint, reader = tiny.checkpoint(), sources()[tiny.source]
        (module,) = reader.modules(checkpoint)
        q = reader.read(checkpoint, module)
        for layout in layouts().values():
            if layout.accepts(q.outline()) is None:
                packed, layout_spec = layout.pack(q)
                kept = artifact.as_stored(packed, q.residue)
                modules = {module: artifact.module_spec(layout_spec, q.source, q.outline().residue)}
                tensors = {f"{module}.{s}": (dtype_name(a.dtype), a.shape, a.tobytes()) for s, a in kept.items()}
                out.append((tensors, {"version": 1, "modules": modules}))
    return [*out, *_grouped()]


def _grouped() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Fused, stacked and widened modules, as a conversion writes them."""
    attention = {f"a.{name}_proj": {} for name in "qkv"}
    experts = {f"mlp.experts.{i}.{name}_proj": {"sym": i == 0} for i in range(2) for name in ("gate", "up")}
    for names, more in ((attention, {"bits": 3}), (attention, {"g_idx": "act"}), (experts, {})):
        tensors: dict[str, Any] = {}
        for name, facts in names.items():
            case = gptq_case(n=32, k=64, module=name, convention="gptq_v2", **more, **facts)
            tensors |= case.tensors
        label = {key: value for key, value in case.config.items() if key != "sym"}
        with tempfile.TemporaryDirectory() as folder:
            src = Tiny("gptq", tensors, label).save(Path(folder) / "model")
            dst = Path(folder) / "out.safetensors"
            convert(src, dst, to="marlin", widen=True, fuse=True, stack_experts=True)
            opened = open_checkpoint(dst)
            held = {t.name: (t.dtype, t.shape, t.raw().tobytes()) for t in opened.tensors.values()}
            yield held, json.loads(opened.metadata["warptile"])


def onnx_model(data: bytes) -> None:
    path = _scratch() / "m.onnx"
    path.write_bytes(data)
    path.with_name("d").write_bytes(bytes(range(64)))
    try:
        checkpoint = open_checkpoint(path)
        found = plan.claims(checkpoint, None)
    except WarptileError:
        return
    for tensor in checkpoint.tensors.values():
        assert tensor.raw().size == tensor.nbytes
    for module, (reader, members) in found.items():
        try:
            check_module(checkpoint, module, reader, members)
        except WarptileError:
            continue

    check_rebuilt(checkpoint)


def check_rebuilt(checkpoint: Checkpoint) -> None:
    """A model that leaves a companion comes back byte for byte."""
    if not checkpoint.companions:
        return
    folder = _scratch() / "back"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made = Checkpoint(folder / "a", {}, quantization={"source": checkpoint.quantization})
    for suffix, content in checkpoint.companions.items():
        companion(made.path, suffix).write_bytes(content)
    entries = [
        safetensors_file.Entry(t.name, t.dtype, t.shape, lambda t=t: (t.raw(),)) for t in checkpoint.tensors.values()
    ]
    onnx_file.rebuild(folder / checkpoint.path.name, made, entries)
    assert (folder / checkpoint.path.name).read_bytes() == checkpoint.path.read_bytes()
    for name in onnx_file.names_beside(made):
        assert (beside(folder / "a") / name).read_bytes() == (checkpoint.path.parent / name).read_bytes()


def onnx_table(data: bytes) -> None:
    try:
        files, start = parse(data, NOWHERE)
    except WarptileError:
        return
    assert sum(sum(file.kept) for file in files) == len(data) - start
    assert table(NOWHERE, files) == data[:start]
    inside = [PurePosixPath(file.name) for file in files[1:]]
    assert all(name.parts and not name.is_absolute() and ".." not in name.parts for name in inside)


def conversion(data: bytes) -> None:
    """Edits of a few linears that belong together."""
    choices = Choices(data)
    checkpoint = held(edited(choices.one(families()), choices))
    turn = data[-1] if data else 0

    def run() -> None:
        with loops_compiled(turn % 2 == 0):
            quietly(checkpoint, turn >> 1)

    timely(run)


with suppress(ImportError):
    bits._compiled = partial(Bounded, import_module("warptile.formats._compiled"))


@cache
def _scratch() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))


def _headers() -> Iterator[bytes]:
    """Of real files, cut to a few tensors; then small ones of every dtype."""
    for file in sorted(DATA.glob("*/*.safetensors")):
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        kept = sorted((v["data_offsets"], k) for k, v in header.items() if k != "__metadata__")[:3]
        text = json.dumps({k: v for k, v in header.items() if k == "__metadata__" or k in {name for _, name in kept}})
        yield (8 + len(text) + kept[-1][0][1]).to_bytes(4, "little") + text.encode()
    for dtype, (_, size) in safetensors_file.DTYPES.items():
        text = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}})
        yield (8 + len(text) + size).to_bytes(4, "little") + text.encode()


def _ggufs() -> Iterator[bytes]:
    """Small files of every kind of value, and the heads of real ones."""
    from gguf_files import Stored, content, model

    some = [Stored("blk.0.attn_q.weight", "Q4_0", (32, 3)), Stored("a", "F32", (4,)), Stored("b", "F16", (3, 2))]
    yield content(some, {**model(head_count=2), "t": ("strings", ["a", "bc"]), "f": ("f32s", [1.0, 2.0])})
    yield content(
        some[:2], {"general.alignment": ("u32", 64), "split.count": ("u16", 1), "u": ("u64", 7)}, alignment=64
    )
    yield content(version=2)
    for file in sorted(DATA.glob("*/*.gguf")):
        yield file.read_bytes()[:600]


def _configs() -> Iterator[bytes]:
    for i, tiny in enumerate(TINY.values()):
        yield bytes([i]) + json.dumps(tiny.quantization).encode()
    for file in sorted(DATA.glob("*/*.json")):
        text = json.loads(file.read_text())
        yield b"\0" + json.dumps(text.get("quantization_config", text)).encode()


def _rules() -> Iterator[bytes]:
    yield from (
        b"(a+)+$",
        rb".*\.0\..*down_proj.*",
        b"re:.*(q|k|v)_proj$",
        b"(?:a|a)*b",
        b"(.*)*",
        b"[^.]+?x{1,9}",
    )
    yield from (rb"(a|aa)+$", b"(?=(a+))\\1b", b"a?" * 20 + b"a" * 20, b".*" * 6 + b"x")


def _models() -> Iterator[bytes]:
    import onnx

    for file in sorted(DATA.glob("*/*.onnx")):
        model = onnx.load(file)
        del model.graph.initializer[:]
        yield model.SerializeToString()
    tiny = TINY["matmulnbits"]
    arrays = {name: t.array() for name, t in tiny.checkpoint().tensors.items()}
    (node,) = tiny.quantization["nodes"]
    proto = onnx.helper.make_node(node["op"], node["inputs"], ["y"], domain=node["domain"], **node["attributes"])
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])
    initializers = [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()]
    graph = onnx.helper.make_graph([proto], "g", [value], [value], initializers)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in tiny.quantization["opsets"].items()]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    yield model.SerializeToString()
    for i in range(3):
        outside = model.graph.initializer.add(name=f"d{i}", data_type=onnx.TensorProto.FLOAT, dims=[4], data_location=1)
        for key, value in (("location", "d"), ("offset", str(i * 20)), ("length", "16")):
            outside.external_data.add(key=key, value=value)
    yield model.SerializeToString()


def _tables() -> Iterator[bytes]:
    for files in (
        [File("", (), 0)],
        [File("", ((3, "a"), (0, "b")), 1)],
        [File("", ((1, "a"),), 0), File("d", ((0, "b"), (2, "c")), 0), File("s/e", (), 1)],
    ):
        yield table(NOWHERE, files) + bytes(sum(sum(file.kept) for file in files))


def _edits(count: int) -> Iterator[bytes]:
    """Every base as it is, then each kind of edit once."""
    for base in range(count):
        yield bytes([base])
    for edit in range(12):
        yield bytes([0, edit, *range(edit, edit + 6)])


TARGETS = {
    "safetensors_header": Target(safetensors_header, _headers, 1024),
    "gguf_header": Target(gguf, _ggufs, 768),
    "config_json": Target(config_json, _configs, 2048),
    "rules": Target(rules, _rules, 128),
    "artifact": Target(spec, lambda: _edits(len(_artifacts()))),
    "conversion": Target(conversion, lambda: _edits(len(families()))),
    "onnx_model": Target(onnx_model, _models, 2048),
    "onnx_table": Target(onnx_table, _tables, 256),
    **{f"read_{name}": Target(partial(source, name), partial(_edits, len(_bases(name)))) for name in sources()},
}
