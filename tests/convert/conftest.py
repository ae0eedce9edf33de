"""A small GPTQ checkpoint written byte by byte, without the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NAMES = {"float16": "F16", "float32": "F32", "int32": "I32", "uint16": "BF16", "uint8": "U8", "int64": "I64"}
Tensors = dict[str, np.ndarray]


def safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Arrays in the order given; uint16 arrays are bf16 bits, ``dtypes`` names others."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, array in tensors.items():
        end = start + array.nbytes
        dtype = (dtypes or {}).get(name) or NAMES[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def linear(rng: np.random.Generator, k: int, n: int, bits: int = 4, group: int = 32, **replaced: Any) -> Tensors:
    """The tensors of one symmetric v1 module by suffix; ``replaced`` swaps some, None leaves one out."""
    groups = -(-k // group)
    constant = {2: 0x55555555, 4: 0x77777777, 8: 0x7F7F7F7F}[bits]
    tensors = {
        "qweight": rng.integers(-(2**31), 2**31, (k * bits // 32, n), dtype=np.int32),
        "qzeros": np.full((groups, n * bits // 32), constant, np.int32),
        "scales": rng.normal(0, 0.01, (groups, n)).astype(np.float16),
        "g_idx": (np.arange(k) // group).astype(np.int32),
    }
    return {s: a for s, a in {**tensors, **replaced}.items() if a is not None}


def checkpoint(seed: int = 0, bits: int = 4) -> Tensors:
    """Two quantised linears, one with act-order and a bias, among plain tensors of three types."""
    rng = np.random.default_rng(seed)
    act_order = rng.permutation(np.arange(96) // 32).astype(np.int32)
    modules = {
        "model.layers.0.mlp.down_proj": linear(rng, 96, 64, bits, g_idx=act_order),
        "model.layers.0.self_attn.k_proj": linear(rng, 64, 128, bits),
    }
    modules["model.layers.0.mlp.down_proj"]["bias"] = np.arange(64, dtype=np.float16)
    tensors = {"model.embed_tokens.weight": rng.integers(0, 2**16, (50, 64), dtype=np.uint16)}
    tensors |= {f"{name}.{suffix}": a for name, parts in modules.items() for suffix, a in parts.items()}
    tensors["model.norm.weight"] = np.ones(64, np.float32)
    tensors["model.rotary.inv_freq"] = np.arange(8, dtype=np.float16)
    return tensors


QUANTIZATION = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}


@pytest.fixture
def make_directory(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint directory as a trainer saves it: ``shards`` weight files, config, tokenizer."""

    def make(
        name: str = "model", tensors: Tensors | None = None, shards: int = 1, bits: int = 4, label: Any = ()
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        tensors = checkpoint(bits=bits) if tensors is None else tensors
        pieces = np.array_split(np.array(list(tensors), object), shards)
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        files = ["model.safetensors"] if shards == 1 else files
        for file, names in zip(files, pieces, strict=True):
            safetensors(directory / file, {n: tensors[n] for n in names}, {"format": "pt"})
        if shards > 1:
            total = sum(a.nbytes for a in tensors.values())
            weight_map = {n: file for file, names in zip(files, pieces, strict=True) for n in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        quantization = {**QUANTIZATION, "bits": bits, **dict(label)}
        config = {"model_type": "llama", "rms_norm_eps": 1e-06, "quantization_config": quantization, "vocab_size": 50}
        (directory / "config.json").write_text(json.dumps(config, indent=4))
        (directory / "quantize_config.json").write_text(json.dumps(quantization))
        (directory / "tokenizer.json").write_bytes(b'{"a": "\xc3\xa9"}')
        return directory

    return make


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[..., Path]:
    """A lone .safetensors."""

    def make(name: str = "model.safetensors", tensors: Tensors | None = None, **parts: Any) -> Path:
        safetensors(tmp_path / name, checkpoint(**parts) if tensors is None else tensors, {"format": "pt"})
        return tmp_path / name

    return make


@pytest.fixture
def write_safetensors() -> Callable[..., None]:
    """``safetensors``."""
    return safetensors


@pytest.fixture
def read_tensors() -> Callable[[Path], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Read a .safetensors or a directory of them: {name: (dtype, shape, bytes)}, each name once."""

    def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            raw = file.read_bytes()
            length = struct.unpack("<Q", raw[:8])[0]
            for name, t in json.loads(raw[8 : 8 + length]).items():
                if name != "__metadata__":
                    assert name not in found, name
                    start, end = t["data_offsets"]
                    found[name] = t["dtype"], tuple(t["shape"]), raw[8 + length :][start:end]
        return found

    return read


@pytest.fixture
def module_tensors() -> Callable[..., Tensors]:
    """``linear`` with its own generator."""
    return lambda k=64, n=64, **parts: linear(np.random.default_rng(1), k, n, **parts)


@pytest.fixture
def plain_tensors() -> Callable[..., Tensors]:
    """``checkpoint``."""
    return checkpoint
