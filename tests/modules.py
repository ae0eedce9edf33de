"""Hypothesis strategies: whole modules of every source, of any legal extents, groups and dtypes, with any legal bytes.

``MODULES[source]`` -> Strategy[Tiny]. Codes are random bytes; what a format forbids (NaN codes, scales that are NaN,
infinite or of the wrong sign, set bits that mean nothing) is left out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import Stored
from hypothesis import strategies as st
from tiny import Tiny
from warptile.formats.options import Options

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = st.sampled_from(["F16", "BF16", "F32"])
LARGEST = 2048
"""Weights of a module; examples stay small and quick."""


def extents(draw: Draw, n_unit: int = 1, k_unit: int = 1, most: int = LARGEST) -> tuple[int, int]:
    """Multiples of the units: minimum sizes, ragged ones, and some that fill tiles."""
    n = n_unit * draw(st.integers(1, max(1, 72 // n_unit)))
    k = k_unit * draw(st.integers(1, max(1, most // n // k_unit)))
    return n, k


def junk(draw: Draw, dtype: str, *shape: int, below: int = 256) -> Stored:
    size = math.prod(shape) * {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "U32": 4}[dtype]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return dtype, shape, rng.integers(0, below, size, dtype=np.uint8).tobytes()


def floats(draw: Draw, dtype: str, *shape: int, signed: bool = True) -> Stored:
    """Any finite numbers of a dtype, subnormal ones and zeros of both signs too; without ``signed`` none below zero."""
    size = math.prod(shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width, top = (np.uint32, 0x7F80_0000) if dtype == "F32" else (np.uint16, {"F16": 0x7C00, "BF16": 0x7F80}[dtype])
    values = rng.integers(0, top, size, dtype=width)
    values[rng.random(size) < 0.1] %= 64
    if signed:
        values |= rng.integers(0, 2, size, dtype=width) << width(8 * width().itemsize - 1)
    return dtype, shape, values.tobytes()


def between(draw: Draw, dtype: str, low: float, high: float, *shape: int) -> Stored:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.uniform(low, high, math.prod(shape)).astype(np.float32)
    if dtype == "BF16":
        return dtype, shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return dtype, shape, values.tobytes()


def maybe_bias(draw: Draw, name: str, *shape: int) -> dict[str, Stored]:
    return {name: floats(draw, draw(FLOATS), *shape)} if draw(st.booleans()) else {}


def order(draw: Draw, k: int, group: int, dtype: str = "I32") -> Stored:
    """g_idx of shuffled channels, every group as full as it can be."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    g_idx = rng.permutation(np.arange(k) // group).astype(np.int64 if dtype == "I64" else np.int32)
    return dtype, (k,), g_idx.tobytes()


def divided(draw: Draw, k: int) -> tuple[int, int]:
    """(what a label says of the group, its size): -1 or any size up to k."""
    said = draw(st.one_of(st.just(-1), st.sampled_from([g for g in (8, 16, 32, 64, 128) if g <= k] or [k]),
                          st.integers(1, k)))  # fmt: skip
    return said, k if said == -1 else said


@st.composite
def gptq(draw: Draw) -> Tiny:
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    if bits == 4 and draw(st.integers(0, 4)) == 0:
        return _tiles(draw)
    n, k = extents(draw, k_unit=32 // math.gcd(32, bits))
    said, group = divided(draw, k)
    groups, dtype = -(-k // group), draw(st.sampled_from(["I32", "U32"]))
    sym = draw(st.booleans())
    convention = draw(st.sampled_from(["gptq", "gptq_v2"]))
    tensors = {"layer.qweight": junk(draw, dtype, k * bits // 32, n)}
    width = -(-n * bits // 32)
    if not sym or draw(st.booleans()):
        tensors["layer.qzeros"] = junk(draw, dtype, groups, width)
    tensors["layer.scales"] = floats(draw, draw(FLOATS), groups, n)
    g_idx = draw(st.sampled_from(["absent", "zeros", "act"]))
    if g_idx == "zeros":
        tensors["layer.g_idx"] = "I32", (k,), bytes(4 * k)
    if g_idx == "act":
        tensors["layer.g_idx"] = order(draw, k, group, draw(st.sampled_from(["I32", "I64"])))
    tensors |= maybe_bias(draw, "layer.bias", n)
    label = {"quant_method": "gptq", "bits": bits, "group_size": said, "sym": sym, "checkpoint_format": convention}
    # Zeros that are all one number can be read in two ways: the switches say which is meant.
    options = Options(checkpoint_format=convention, zero_wrap=None if sym or convention == "gptq_v2" else "lane")
    return Tiny("gptq", tensors, label, options=options)


def _tiles(draw: Draw) -> Tiny:
    n, k = extents(draw, 64, 16)
    group = draw(st.sampled_from([-1, 128]))
    tensors = {
        "layer.B": junk(draw, "I32", k // 16, 2 * n),
        "layer.s": floats(draw, "F16", 1 if group == -1 else -(-k // group), n),
    } | maybe_bias(draw, "layer.bias", n)
    label = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "checkpoint_format": "marlin"}
    return Tiny("gptq", tensors, label)


@st.composite
def awq(draw: Draw) -> Tiny:
    n, k = extents(draw, 8)
    said, group = divided(draw, k)
    dtype = draw(st.sampled_from(["I32", "U32"]))
    groups, asymmetric = -(-k // group), draw(st.booleans())
    zeros = junk(draw, dtype, groups, n // 8) if asymmetric else (dtype, (groups, n // 8), b"\x88" * (groups * n // 2))
    tensors = {
        "a.qweight": junk(draw, dtype, k, n // 8),
        "a.qzeros": zeros,
        "a.scales": floats(draw, draw(FLOATS), groups, n),
    } | maybe_bias(draw, "a.bias", n)
    label = {"quant_method": "awq", "bits": 4, "group_size": said, "zero_point": asymmetric, "version": "gemm"}
    return Tiny("awq", tensors, label)


@st.composite
def compressed_tensors(draw: Draw) -> Tiny:
    packed = draw(st.booleans())
    bits = draw(st.sampled_from([2, 3, 4, 5, 8])) if packed else 8
    wordwise = packed and draw(st.booleans())
    per = 32 // bits
    n, k = extents(draw)

    def table(rows: int, count: int) -> Stored:
        width = -(-count // per) if wordwise else -(-count * bits // 32)
        _, shape, data = junk(draw, "I32", rows, width)
        if wordwise:
            data = (np.frombuffer(data, "<u4") & np.uint32(2 ** (per * bits) - 1)).tobytes()
        return "I32", shape, data

    strategy = draw(st.sampled_from(["group", "channel", "tensor"]))
    said, group = divided(draw, k) if strategy == "group" else (None, k)
    groups = -(-k // group)
    grid = (n, groups) if strategy == "group" else (n, 1) if strategy == "channel" else (1,)
    zeros = draw(st.booleans())
    tensors = {"a.weight_packed": table(n, k)} if packed else {"a.weight": junk(draw, "I8", n, k)}
    tensors["a.weight_scale"] = floats(draw, draw(FLOATS), *grid)
    if packed:
        tensors["a.weight_shape"] = "I64", (2,), struct.pack("<2q", n, k)
    if zeros and not packed:
        tensors["a.weight_zero_point"] = junk(draw, "I8", *grid)
    elif zeros and strategy != "tensor":
        dtype, shape, data = table(groups, n)
        turned = np.frombuffer(data, "<u4").reshape(shape).T
        tensors["a.weight_zero_point"] = dtype, turned.shape, np.ascontiguousarray(turned).tobytes()
    if strategy == "group" and draw(st.booleans()):
        tensors["a.weight_g_idx"] = draw(st.sampled_from([("I32", (k,), b"\xff" * (4 * k)), order(draw, k, group)]))
    tensors |= maybe_bias(draw, "a.bias", n)
    symmetric = "a.weight_zero_point" not in tensors
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": said}
    groups_said = {"group_0": {"targets": ["Linear"], "weights": weights}}
    form = "pack-quantized" if packed else "int-quantized"
    version = "0.12.2" if wordwise else "0.19.0"
    label = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups_said, "version": version}
    return Tiny("compressed_tensors", tensors, label)


@st.composite
def fp8(draw: Draw) -> Tiny:
    form = draw(st.sampled_from(["blocks", "rows", "whole", "shards", "experts", "powers", "divisors"]))
    n, k = extents(draw)
    nan = draw(st.booleans())
    label: dict[str, Any] = {"quant_method": "fp8"}
    config, name, scale = {}, "a", "weight_scale_inv"
    dtype = draw(st.sampled_from(["F32", "BF16"]))
    lead: tuple[int, ...] = ()
    if form in ("blocks", "experts", "powers", "divisors"):
        block = [draw(st.integers(1, 128)), draw(st.integers(1, 128))]
        label["weight_block_size"] = block
        lead = (draw(st.integers(1, 3)),) if form == "experts" else ()
        shape: tuple[int, ...] = (*lead, -(-n // block[0]), -(-k // block[1]))
    elif form == "rows":
        shape, scale = draw(st.sampled_from([(n,), (n, 1)])), "weight_scale"
    elif form == "whole":
        shape, scale = draw(st.sampled_from([(), (1,)])), "weight_scale"
    else:
        heads = {"num_attention_heads": draw(st.integers(1, 4)), "num_key_value_heads": draw(st.integers(1, 2))}
        n = (heads["num_attention_heads"] + 2 * heads["num_key_value_heads"]) * draw(st.integers(2, 9))
        k = draw(st.integers(1, LARGEST // n))
        config, name, scale, shape = heads, "a.qkv_proj", "weight_scale", (3,)
    weight = junk(draw, "F8_E4M3", *lead, n, k)
    if not nan:
        codes = np.frombuffer(weight[2], np.uint8)
        weight = *weight[:2], np.where(codes & 127 == 127, codes ^ 1, codes).tobytes()
    if form == "powers":
        scale, factors = "scale", junk(draw, "F8_E8M0", *shape, below=126)
    elif form == "divisors":
        label["weight_scale_semantics"] = "inverse"
        factors = between(draw, dtype, 1.5, 400, *shape)
    else:
        factors = between(draw, dtype, 0.001, 0.9, *shape)
    tensors = {f"{name}.weight": weight, f"{name}.{scale}": factors} | maybe_bias(draw, f"{name}.bias", *lead, n)
    if draw(st.booleans()):
        tensors[f"{name}.input_scale"] = floats(draw, "F32", 1)
    return Tiny("fp8", tensors, label, config, Options(nan="zero") if nan else Options())


# Suffixes of codes, scales and bias.
MXFP4 = (
    ("_blocks", "_scales", "_bias"),
    ("_weight.blocks", "_weight.scales", "_bias"),
    (".weight_packed", ".weight_scale", ".bias"),
    (".weight", ".weight_scale", ".bias"),
)


@st.composite
def mxfp4(draw: Draw) -> Tiny:
    form = draw(st.sampled_from(MXFP4))
    blocked = form[2] == "_bias"
    n, k = extents(draw, k_unit=32 if blocked else 2)
    lead = (draw(st.integers(1, 3)),) if blocked else ()
    nan = draw(st.booleans())
    groups = -(-k // 32)
    dtype = draw(st.sampled_from(["U8", "F8_E8M0"]))
    shape = (*lead, n, groups, 16) if blocked else (n, k // 2)
    tensors = {
        f"a{form[0]}": junk(draw, "U8", *shape),
        f"a{form[1]}": junk(draw, dtype, *lead, n, groups, below=256 if nan else 255),
    } | maybe_bias(draw, f"a{form[2]}", *lead, n)
    return Tiny("mxfp4", tensors, {}, options=Options(nan="zero") if nan else Options())


@st.composite
def nvfp4(draw: Draw) -> Tiny:
    divisor = draw(st.booleans())
    shards = draw(st.booleans())
    lead = (draw(st.integers(1, 3)),) if draw(st.booleans()) else ()
    n, k = extents(draw, 2 if shards else 1, 2)
    name = "a.gate_up_proj" if shards else "a"
    experts = math.prod(lead)
    counts = [1, experts, *([2 * experts] if shards else [])]
    whole = draw(st.sampled_from(counts))
    globals_ = between(draw, "F32", *((1, 5000) if divisor else (1e-4, 2)), whole)
    suffix = draw(st.sampled_from(["weight", "weight_packed"]))
    tensors = {
        f"{name}.{suffix}": junk(draw, "U8", *lead, n, k // 2),
        f"{name}.weight_scale": junk(draw, "F8_E4M3", *lead, n, -(-k // 16), below=127),
        f"{name}.{'weight_global_scale' if divisor else 'weight_scale_2'}": globals_,
    } | maybe_bias(draw, f"{name}.bias", *lead, n)
    if draw(st.booleans()):
        tensors[f"{name}.input_scale"] = floats(draw, "F32", 1)
    return Tiny("nvfp4", tensors, {})


@st.composite
def gguf(draw: Draw) -> Tiny:
    from warptile.formats.gguf_blocks import BLOCK_TYPES

    kind = draw(st.sampled_from(sorted(BLOCK_TYPES)))
    row = BLOCK_TYPES[kind]
    n = draw(st.integers(1, 40))
    blocks = draw(st.integers(1, max(1, 4 * LARGEST // n // row.size)))
    lead = (draw(st.integers(1, 3)),) if draw(st.integers(0, 3)) == 0 else ()
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    data = rng.integers(0, 256, (*lead, n, blocks, row.nbytes), dtype=np.uint8)
    for factor in (*row.scales, *row.offsets):
        if not factor.bits and factor.dtype == "f16":
            data[..., factor.at + 1] &= 0xBF  # no exponent of all ones: of either sign, zeros and subnormal ones too
        elif not factor.bits and factor.dtype in ("e8m0", "e4m3"):
            data[..., factor.at : factor.at + row.size // factor.block] &= 0x77
    name = "blk.0.ffn_up"
    tensors: dict[str, Stored] = {f"{name}.weight": ("U8", (*lead, n, blocks * row.nbytes), data.tobytes())}
    tensors |= maybe_bias(draw, f"{name}.bias", *lead, n)
    label = {"quant_method": "gguf", "types": {f"{name}.weight": kind}, "architecture": "qwen3", "heads": [4, 2]}
    return Tiny("gguf", tensors, label)


@st.composite
def matmulnbits(draw: Draw) -> Tiny:
    bits = draw(st.sampled_from([2, 4, 8]))
    block = draw(st.sampled_from([16, 32, 64, 128, 256]))
    n, k = extents(draw)
    blocks = -(-k // block)
    flat = draw(st.booleans())
    width = -(-blocks * bits // 8)
    zeros, act = draw(st.booleans()), bits != 2 and draw(st.booleans())
    tensors = {
        "fc.weight_Q4": junk(draw, "U8", n, blocks, block * bits // 8),
        "fc.scales": floats(draw, draw(FLOATS), *((n * blocks,) if flat else (n, blocks))),
    }
    if zeros:
        tensors["fc.zeros"] = junk(draw, "U8", *((n * width,) if flat else (n, width)))
    if act:
        _, _, g_idx = order(draw, k, block)
        padded = draw(st.booleans())
        tail = struct.pack(f"<{blocks * block - k}i", *[0] * (blocks * block - k)) if padded else b""
        tensors["fc.g_idx"] = "I32", (blocks * block if padded else k,), g_idx + tail
    biased = draw(st.booleans())
    if biased:
        tensors["fc.bias"] = floats(draw, draw(FLOATS), n)
    there = ("fc.weight_Q4", "fc.scales", "fc.zeros" * zeros, "fc.g_idx" * act, "fc.bias" * biased)
    attributes = {"N": n, "K": k, "block_size": block, "bits": bits}
    node = {"op": "MatMulNBits", "domain": "com.microsoft", "inputs": ["x", *there], "attributes": attributes}
    label = {"quant_method": "onnx", "opsets": {"": 21, "com.microsoft": 1}, "nodes": [node]}
    return Tiny("matmulnbits", tensors, label)


MODULES: dict[str, st.SearchStrategy[Tiny]] = {
    f.__name__: f() for f in (gptq, awq, compressed_tensors, fp8, mxfp4, nvfp4, gguf, matmulnbits)
}
