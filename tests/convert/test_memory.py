"""Conversions under a limit of the system on a process's own memory: no source is held whole, whatever its format."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from cases import write_file
from warptile.convert import convert

# The slabs are made small, so that all that is foretold is much less than a byte a weight.
LIMITED = """
import resource, sys
from pathlib import Path
from warptile.convert import convert, modules
from warptile.formats import sources, stream
from warptile.formats.container import open_checkpoint

small, large, source, layout = sys.argv[1:]
stream.STEP = modules.STEP = 1 << 18
convert(small, to=layout, workers=2)  # loops are compiled, libraries loaded
plan = convert(large, to=layout, dry_run=True).plan
status = Path("/proc/self/status").read_text().splitlines()
held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
threads = 40 << 20  # their stacks, and room that malloc keeps
limit = held + plan.peak + threads
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
convert(large, to=layout, workers=2)
print("streamed", flush=True)
try:
    sources()[source].read(open_checkpoint(large), plan.modules[0].name)
except MemoryError:
    print("its codes alone are too much")
"""
Tensors = dict[str, np.ndarray]
NAMES = {"uint8": "U8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def junk(*shape: int, dtype: str = "uint8", below: int = 256) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = np.random.default_rng(0).integers(0, below, 1 << 16, dtype=np.uint8)
    return np.resize(block, size).view(dtype).reshape(shape)


def scales(*shape: int) -> np.ndarray:
    return np.full(shape, 0.01, np.float16)


def gptq(n: int, k: int) -> tuple[Tensors, dict]:
    """Act-order: slabs gather channels from everywhere."""
    order = np.random.default_rng(0).permutation(np.arange(k) // 128).astype(np.int32)
    tensors = {"qweight": junk(k // 8, n, dtype="int32"), "scales": scales(k // 128, n), "g_idx": order}
    return tensors, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}


def awq(n: int, k: int) -> tuple[Tensors, dict]:
    tensors = {"qweight": junk(k, n // 8, dtype="int32"), "scales": scales(k // 128, n)}
    tensors["qzeros"] = junk(k // 128, n // 8, dtype="int32")
    return tensors, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def compressed_tensors(n: int, k: int) -> tuple[Tensors, dict]:
    order = np.random.default_rng(0).permutation(np.arange(k) // 128).astype(np.int32)
    tensors = {"weight_packed": junk(n, k // 8, dtype="int32"), "weight_scale": scales(n, k // 128)}
    tensors |= {"weight_shape": np.array([n, k]), "weight_g_idx": order}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def fp8(n: int, k: int) -> tuple[Tensors, dict]:
    codes = junk(n, k, below=127).view(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale_inv": np.full((n // 128, k // 128), 0.01, np.float32)}
    return tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def mxfp4(n: int, k: int) -> tuple[Tensors, dict]:
    """Stacked experts."""
    blocks, exponents = junk(8, n // 8, k // 32, 16), junk(8, n // 8, k // 32, below=250)
    return {"down_proj_blocks": blocks, "down_proj_scales": exponents}, {"quant_method": "mxfp4"}


def nvfp4(n: int, k: int) -> tuple[Tensors, dict]:
    tensors = {"weight": junk(n, k // 2), "weight_scale_2": np.float32([0.01])}
    tensors["weight_scale"] = junk(n, k // 16, below=120).view(ml_dtypes.float8_e4m3fn)
    return tensors, {"quant_method": "modelopt"}


def directory(path: Path, make: Callable[[int, int], tuple[Tensors, dict]], n: int, k: int) -> Path:
    tensors, label = make(n, k)
    path.mkdir()
    named = {f"experts.{name}" if "proj" in name else f"layer.{name}": array for name, array in tensors.items()}
    stored = {name: (NAMES[array.dtype.name], array.shape, array.tobytes()) for name, array in named.items()}
    write_file(path / "model.safetensors", stored)
    (path / "config.json").write_text(json.dumps({"quantization_config": label}))
    return path


def gguf_file(path: Path, kind: str, n: int, k: int) -> Path:
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = junk(n, k // size, nbytes, below=64)  # no factor is infinite
    writer = gguf.GGUFWriter(path := path.with_suffix(".gguf"), "none")
    writer.add_tensor("blk.0.ffn_up.weight", rows.reshape(n, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def onnx_file(path: Path, n: int, k: int) -> Path:
    onnx = pytest.importorskip("onnx")
    b, attributes = junk(n, k // 128, 64), {"N": n, "K": k, "block_size": 128, "bits": 4}
    node = onnx.helper.make_node("MatMulNBits", ["x", "fc_Q4", "fc_s"], ["y"], domain="com.microsoft", **attributes)
    arrays = [onnx.numpy_helper.from_array(a, name) for name, a in (("fc_Q4", b), ("fc_s", scales(n, k // 128)))]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, None) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], arrays)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    path = path.with_suffix(".onnx")
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return path


CASES: dict[str, tuple[str, str, Callable[[Path, int, int], Path]]] = {
    make.__name__: (make.__name__, "marlin", lambda path, n, k, make=make: directory(path, make, n, k))
    for make in (gptq, awq, compressed_tensors, fp8, mxfp4, nvfp4)
}
CASES["matmulnbits"] = ("matmulnbits", "marlin", onnx_file)
CASES |= {kind: ("gguf", "mmq", lambda path, n, k, kind=kind: gguf_file(path, kind, n, k)) for kind in ("Q4_K", "Q8_0")}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize("case", CASES)
def test_the_memory_foretold_is_enough_for_a_tensor_that_is_larger(tmp_path, case):
    source, layout, make = CASES[case]
    paths = make(tmp_path / "small", 2048, 1024), make(tmp_path / "large", 32768, 4096)
    args = [sys.executable, "-c", LIMITED, *map(str, paths), source, layout]
    out = subprocess.run(args, capture_output=True, text=True)
    assert out.stdout == "streamed\nits codes alone are too much\n", out.stderr[-2000:]


# Biases of every module are in the model's own file, and its codes elsewhere.
REBUILT = """
import resource, sys
from pathlib import Path
from warptile.convert import unpack

small, large, back = sys.argv[1:]
unpack(small, f"{back}/small.onnx")
Path(f"{back}/data").unlink()
status = Path("/proc/self/status").read_text().splitlines()
held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
limit = held + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
unpack(large, f"{back}/model.onnx")
print("streamed", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_model_with_external_data_is_rebuilt_without_being_held(tmp_path):
    """96 MB of codes."""
    onnx = pytest.importorskip("onnx")
    artifacts = []
    for count in (1, 48):
        folder = tmp_path / str(count)
        folder.mkdir()
        nodes, arrays = [], []
        for i in range(count):
            names = ["x", f"{i}_Q4", f"{i}_s", "", "", f"{i}_b"]
            attributes = {"N": 2048, "K": 2048, "block_size": 128, "bits": 4}
            nodes.append(onnx.helper.make_node("MatMulNBits", names, [f"y{i}"], domain="com.microsoft", **attributes))
            made = (junk(2048, 16, 64), scales(2048, 16), scales(2048))
            arrays += [onnx.numpy_helper.from_array(a, n) for a, n in zip(made, filter(len, names[1:]), strict=True)]
        value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, None)
        graph = onnx.helper.make_graph(nodes, "g", [value], [value], arrays)
        sets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
        path = folder / "model.onnx"
        proto = onnx.helper.make_model(graph, opset_imports=sets)
        onnx.save(proto, path, save_as_external_data=True, location="data", size_threshold=10_000)
        artifacts.append(convert(path, tmp_path / f"{count}.safetensors", to="marlin").dst)
    (tmp_path / "back").mkdir()
    args = [sys.executable, "-c", REBUILT, *map(str, artifacts), str(tmp_path / "back")]
    out = subprocess.run(args, capture_output=True, text=True)
    assert out.stdout == "streamed\n", out.stderr[-2000:]
    for name in ("model.onnx", "data"):
        assert filecmp.cmp(tmp_path / "back" / name, tmp_path / "48" / name, shallow=False)
