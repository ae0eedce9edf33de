"""A tiny valid module of every kind that a reader takes, as bytes: what fuzzing, hostile files and flipped bytes begin
from. Few weights, random codes, scales that are plain numbers."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from cases import Stored, gptq_case, gptq_marlin_case, write_file
from warptile.formats.container import DTYPES, Checkpoint, Tensor, nbytes
from warptile.formats.options import Options

NOWHERE = Path("a file")


@dataclass(frozen=True)
class Held(Tensor):
    """A tensor whose bytes are in memory."""

    data: bytes = b""

    def raw(self) -> np.ndarray:
        return np.frombuffer(self.data, np.uint8)


@dataclass(frozen=True)
class Tiny:
    source: str
    tensors: dict[str, Stored]
    quantization: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=Options)

    def checkpoint(self) -> Checkpoint:
        """As the container would open it, without a file."""
        return in_memory(self.tensors, self.quantization, self.config, self.options)

    def save(self, folder: Path) -> Path:
        """A directory of safetensors; not for kinds that are files of their own."""
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "model.safetensors", self.tensors)
        quantization = {"quantization_config": self.quantization} if self.quantization else {}
        (folder / "config.json").write_text(json.dumps({**self.config, **quantization}))
        return folder

    def with_(self, **tensors: Stored | None) -> Tiny:
        """Other tensors, by the end of their names; None removes one."""
        out = dict(self.tensors)
        for suffix, stored in tensors.items():
            (name,) = (n for n in out if n.endswith(f".{suffix}") or n == suffix)
            if stored is None:
                del out[name]
            else:
                out[name] = stored
        return replace(self, tensors=out)

    def said(self, **labels: Any) -> Tiny:
        """Other labels; None removes one."""
        merged = {**self.quantization, **labels}
        return replace(self, quantization={key: value for key, value in merged.items() if value is not None})


def in_memory(
    tensors: Mapping[str, Stored],
    quantization: Mapping[str, Any],
    config: Mapping[str, Any],
    options: Options | None = None,
) -> Checkpoint:
    held, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        assert nbytes(dtype, tuple(shape)) == len(data), (name, dtype, shape, len(data))
        held[name] = Held(name, dtype, tuple(shape), NOWHERE, at, len(data), data=data)
        at += len(data)
    return Checkpoint(
        NOWHERE,
        held,
        dict(config),
        dict(quantization),
        "config.json" if quantization else None,
        options=options or Options(),
        file_metadata={NOWHERE: {}},
    )


def junk(seed: int, dtype: str, *shape: int, below: int = 256) -> Stored:
    rng = random.Random(seed)
    return dtype, shape, bytes(rng.randrange(below) for _ in range(prod(shape) * DTYPES[dtype][1] // 8))


def f32(*values: float, shape: tuple[int, ...] | None = None) -> Stored:
    return "F32", (len(values),) if shape is None else shape, struct.pack(f"<{len(values)}f", *values)


def f16(seed: int, *shape: int) -> Stored:
    rng = random.Random(seed)
    values = (rng.choice((-1, 1)) * rng.randrange(1, 128) * 2.0**-12 for _ in range(prod(shape)))
    return "F16", shape, struct.pack(f"<{prod(shape)}e", *values)


def i64(*values: int) -> Stored:
    return "I64", (len(values),), struct.pack(f"<{len(values)}q", *values)


def _gptq() -> Iterable[tuple[str, Tiny]]:
    for name, options in {
        "sym": {},
        "asym act-order": {"sym": False, "g_idx": "act", "bias": "F16"},
        "3 bit v2": {"bits": 3, "sym": False, "convention": "gptq_v2"},
        "8 bit": {"bits": 8, "scale": "BF16", "words": "U32"},
        "no zeros": {"qzeros": False, "g_idx": "absent", "group": -1},
    }.items():
        case = gptq_case(n=32, k=64, **options)
        yield f"gptq {name}", Tiny("gptq", case.tensors, case.config)
    case = gptq_marlin_case(n=64, k=128, group=-1)
    yield "gptq tiles", Tiny("gptq", case.tensors, case.config)


def _others() -> Iterable[tuple[str, Tiny]]:
    awq = {"a.qweight": junk(1, "I32", 64, 4), "a.qzeros": junk(2, "I32", 2, 4), "a.scales": f16(3, 2, 32)}
    label = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    yield "awq", Tiny("awq", awq, label)

    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear", "re:a.*"], "weights": weights}}
    label = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    packed = {
        "a.weight_packed": junk(4, "I32", 16, 8),
        "a.weight_scale": f16(5, 16, 2),
        "a.weight_zero_point": junk(6, "I32", 2, 2),
        "a.weight_shape": i64(16, 64),
    }
    yield "compressed_tensors", Tiny("compressed_tensors", packed, label)
    order = struct.pack("<64i", *random.Random(7).sample([k // 32 for k in range(64)], 64))
    act = packed | {"a.weight_g_idx": ("I32", (64,), order), "a.bias": f16(8, 16)}
    yield "compressed_tensors act-order", Tiny("compressed_tensors", act, label)
    eight = {"a.weight": junk(9, "I8", 16, 64), "a.weight_scale": f16(10, 16, 1)}
    channel = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    label = {**label, "format": "int-quantized", "config_groups": {"group_0": {"targets": [], "weights": channel}}}
    yield "compressed_tensors int8", Tiny("compressed_tensors", eight, label)

    codes = junk(11, "F8_E4M3", 16, 64, below=127)
    label = {"quant_method": "fp8", "weight_block_size": [8, 32], "fmt": "e4m3"}
    grid = f32(*(0.01 * (i + 1) for i in range(4)), shape=(2, 2))
    yield "fp8 blocks", Tiny("fp8", {"a.weight": codes, "a.weight_scale_inv": grid, "a.bias": f16(12, 16)}, label)
    fused = {"a.qkv_proj.weight": codes, "a.qkv_proj.weight_scale": f32(0.5, 0.25, 0.125)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    yield "fp8 shards", Tiny("fp8", fused, {"quant_method": "modelopt"}, heads)
    stacked = {"e.gate_up_proj": junk(13, "F8_E4M3", 2, 8, 32, below=127)}
    stacked["e.gate_up_proj_scale_inv"] = f32(0.5, 0.25, shape=(2, 1, 1))
    yield "fp8 experts", Tiny("fp8", stacked, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    apart = {
        f"m.experts.{e}.{w}_proj.weight": junk(40 + e, "F8_E4M3", 8, 32, below=127)
        for e in range(2)
        for w in ("gate", "up")
    }
    apart["m.experts.gate_up_proj_scale_inv"] = f32(0.5, 0.25, shape=(2, 1, 1))
    yield "fp8 experts apart", Tiny("fp8", apart, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    nan = {"a.weight": junk(14, "F8_E4M3", 8, 32), "a.weight_scale": f32(0.5)}
    yield "fp8 nan", Tiny("fp8", nan, {}, options=Options(nan="zero"))

    blocked = {
        "e.gate_up_proj_blocks": junk(15, "U8", 2, 8, 2, 16),
        "e.gate_up_proj_scales": junk(16, "U8", 2, 8, 2, below=255),
        "e.gate_up_proj_bias": ("BF16", (2, 8), bytes(32)),
    }
    yield "mxfp4 experts", Tiny("mxfp4", blocked, {"quant_method": "mxfp4"})
    flat = {"a.weight_packed": junk(17, "U8", 8, 32), "a.weight_scale": junk(18, "F8_E8M0", 8, 2, below=255)}
    yield "mxfp4", Tiny("mxfp4", flat, {})

    codes, scale = junk(19, "U8", 8, 32), junk(20, "F8_E4M3", 8, 4, below=127)
    modelopt = {"a.weight": codes, "a.weight_scale": scale, "a.weight_scale_2": f32(0.01, shape=())}
    yield "nvfp4", Tiny("nvfp4", modelopt | {"a.input_scale": f32(1.0)}, {"quant_method": "modelopt"})
    divisor = {"a.weight_packed": codes, "a.weight_scale": scale, "a.weight_global_scale": f32(2832.0)}
    yield "nvfp4 divisor", Tiny("nvfp4", divisor, {"quant_method": "compressed-tensors"})


def blocks(kind: str, n: int = 4, k: int = 256, seed: int = 0) -> Stored:
    """Random blocks of a GGUF type, its floats and exponents made plain numbers."""
    from warptile.formats.gguf_blocks import BLOCK_TYPES

    row = BLOCK_TYPES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, k // row.size, row.nbytes), dtype=np.uint8)
    for factor in (*row.scales, *row.offsets):
        if factor.bits:
            continue
        if factor.dtype == "f16":
            data[..., factor.at + 1] = 0x2C
        elif factor.dtype in ("e8m0", "e4m3"):
            data[..., factor.at : factor.at + row.size // factor.block] &= 0x77
    return "U8", (n, k // row.size * row.nbytes), data.tobytes()


def _gguf() -> Iterable[tuple[str, Tiny]]:
    from warptile.formats.gguf_blocks import BLOCK_TYPES

    for i, kind in enumerate(BLOCK_TYPES):
        tensors = {"blk.0.attn_k.weight": blocks(kind, seed=i)}
        if kind == "Q8_0":
            tensors |= {"blk.0.attn_k.scale": f32(0.5), "blk.0.attn_k.bias": f16(21, 4)}
        model = {"architecture": "llama", "heads": [4, 2]}
        label = {"quant_method": "gguf", "types": {"blk.0.attn_k.weight": kind}, **model, "undo_rope_order": i % 2 == 0}
        yield f"gguf {kind}", Tiny("gguf", tensors, label)


def _matmulnbits() -> Iterable[tuple[str, Tiny]]:
    order = [k // 16 for k in range(40)]
    random.Random(23).shuffle(order)
    tensors = {
        "fc.weight_Q4": junk(22, "U8", 4, 3, 8),
        "fc.scales": f16(24, 12),
        "fc.zeros": junk(25, "U8", 8),
        "fc.g_idx": ("I32", (40,), struct.pack("<40i", *order)),
        "fc.bias": f16(26, 4),
    }
    attributes = {"N": 4, "K": 40, "block_size": 16, "bits": 4}
    node = {"op": "MatMulNBits", "domain": "com.microsoft", "inputs": ["x", *tensors], "attributes": attributes}
    label = {"quant_method": "onnx", "opsets": {"": 21, "com.microsoft": 1}, "nodes": [node]}
    yield "matmulnbits", Tiny("matmulnbits", tensors, label)


TINY: dict[str, Tiny] = {name: tiny for made in (_gptq, _others, _gguf, _matmulnbits) for name, tiny in made()}
