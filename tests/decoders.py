"""Weights from stored bytes by the formats' descriptions alone: an oracle that shares nothing with the readers.

``DECODERS[source](tiny)`` -> float64 [(E,) n, k], exact. Only for modules that are whole; ``modules.py`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny import Tiny

Array = NDArray[Any]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PLAIN = {"F16": "<f2", "F32": "<f4", "I8": "i1", "U8": "u1", "I32": "<i4", "U32": "<u4", "I64": "<i8"}


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    size = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = np.array([e4m3(code) for code in range(256)])
E8M0 = 2.0 ** (np.arange(255) - 127.0)


def array(tiny: Tiny, name: str) -> Array:
    """A stored tensor as numbers: integers as they are, floats as float64, 8-bit floats as their bytes."""
    dtype, shape, data = tiny.tensors[name]
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64).reshape(shape)
    found = np.frombuffer(data, PLAIN.get(dtype, "u1")).reshape(shape)
    with np.errstate(invalid="ignore"):
        return found.astype(np.float64) if dtype in ("F16", "F32") else found


def member(tiny: Tiny, suffix: str) -> str | None:
    return next((name for name in tiny.tensors if name.endswith(suffix)), None)


def fields(rows: Array, bits: int, count: int) -> Array:
    """Bytes [r, b] as little-endian streams: the first ``count`` fields of each, int64 [r, count]."""
    each = np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=1, bitorder="little")[:, : bits * count]
    return each.reshape(len(rows), count, bits).astype(np.int64) @ (1 << np.arange(bits))


def words(table: Array) -> Array:
    """int32 [r, w] -> uint8 [r, 4w]."""
    return np.ascontiguousarray(table.astype(table.dtype.newbyteorder("<"))).view(np.uint8).reshape(len(table), -1)


def groups_of(k: int, group: int, g_idx: Array | None) -> Array:
    group = k if group == -1 else group
    return np.arange(k) // group if g_idx is None else g_idx.astype(np.int64)


def gptq(tiny: Tiny) -> Array:
    said, options = tiny.quantization, tiny.options
    bits = said["bits"]
    if member(tiny, "layer.B"):
        return _tiles(tiny)
    packed, scales = array(tiny, "layer.qweight"), array(tiny, "layer.scales")
    k, n = packed.shape[0] * 32 // bits, packed.shape[1]
    codes = fields(words(packed.T), bits, k)
    half = 2 ** (bits - 1)
    zero = np.full(scales.shape, half)
    if not said["sym"]:
        stored = fields(words(array(tiny, "layer.qzeros")), bits, n)
        zero = stored if said["checkpoint_format"] == "gptq_v2" else (stored + 1) % 2**bits
        assert said["checkpoint_format"] == "gptq_v2" or options.zero_wrap == "lane"
    g_idx = array(tiny, "layer.g_idx") if "layer.g_idx" in tiny.tensors else None
    of = groups_of(k, said["group_size"], None if g_idx is None or not g_idx.any() else g_idx)
    return scales.T[:, of] * (codes - zero.T[:, of])


def _tiles(tiny: Tiny) -> Array:
    """Marlin tiles: a word's nibbles belong to rows and columns as the tensor cores' fragments have them."""
    packed, scales = array(tiny, "layer.B").view(np.uint32), array(tiny, "layer.s")
    k, n = 16 * packed.shape[0], packed.shape[1] // 2
    order = [i + 8 * v for i in range(8) for v in range(8)]
    if len(scales) == 1:
        order = [2 * i + 8 * u + v for i in range(4) for u in range(4) for v in (0, 1)]
    natural = np.empty_like(scales)
    natural.reshape(len(scales), -1, len(order))[:, :, order] = scales.reshape(len(scales), -1, len(order))
    channel, row = np.meshgrid(np.arange(k), np.arange(n))
    kr, nc = channel % 16, row % 64
    j, b, column = nc // 16, nc % 16 // 8, nc % 8
    t, r = kr % 8 // 2, 2 * (kr // 8) + kr % 2
    v = 4 * b + r
    word = packed[channel // 16, row // 64 * 128 + 4 * (4 * column + t) + j]
    codes = (word >> (4 * (v >> 1 | (v & 1) << 2)) & 15).astype(np.int64)
    of = groups_of(k, tiny.quantization["group_size"], None)
    return natural.T[:, of] * (codes - 8)


def awq(tiny: Tiny) -> Array:
    packed, scales = array(tiny, "a.qweight"), array(tiny, "a.scales")
    k, n = packed.shape[0], 8 * packed.shape[1]
    places = np.array([8 * (p // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[p % 8] for p in range(n)])

    def natural(table: Array) -> Array:
        out = np.empty((len(table), n), np.int64)
        out[:, places] = fields(words(table), 4, n)
        return out

    of = groups_of(k, tiny.quantization["group_size"], None)
    return (scales[of] * (natural(packed) - natural(array(tiny, "a.qzeros"))[of])).T


def compressed_tensors(tiny: Tiny) -> Array:
    weights = tiny.quantization["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    half = 2 ** (bits - 1)
    wordwise = tiny.quantization["version"].startswith("0.12")

    def unpacked(table: Array, count: int) -> Array:
        if not wordwise:
            return fields(words(table), bits, count)
        per = 32 // bits
        rows = words(table.reshape(-1, 1))
        return fields(rows, bits, per).reshape(len(table), -1)[:, :count]

    if "a.weight_packed" in tiny.tensors:
        n, k = (int(extent) for extent in array(tiny, "a.weight_shape"))
        q = unpacked(array(tiny, "a.weight_packed"), k) - half
    else:
        q = array(tiny, "a.weight").astype(np.int64)
        n, k = q.shape

    def grid_of(values: Array) -> Array:
        return values.reshape(n, -1) if values.size > 1 or n == 1 else np.broadcast_to(values.reshape(1, 1), (n, 1))

    grid = grid_of(array(tiny, "a.weight_scale"))
    zero = np.zeros(grid.shape, np.int64)
    if "a.weight_zero_point" in tiny.tensors:
        stored = array(tiny, "a.weight_zero_point")
        zero = grid_of(stored.astype(np.int64)) if stored.dtype == np.int8 else unpacked(stored.T, n).T - half
    g_idx = array(tiny, "a.weight_g_idx") if "a.weight_g_idx" in tiny.tensors else None
    size = k if grid.shape[1] == 1 else weights["group_size"]
    of = groups_of(k, size, None if g_idx is None or (g_idx == -1).all() else g_idx)
    return grid[:, of] * (q - zero[:, of])


def _spread(grid: Array, block: tuple[int, int], n: int, k: int) -> Array:
    """Each value over the rows and columns of its block."""
    return grid.repeat(block[0], -2)[..., :n, :].repeat(block[1], -1)[..., :k]


def _by_rows(values: Array, config: dict[str, Any], n: int) -> Array:
    """One value for each row, from one for each part of a fused q, k, v or of gate and up."""
    if len(values) == 3:
        head = n // (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
        return values.repeat([head * config[f"num_{what}_heads"] for what in ("attention", "key_value", "key_value")])
    return values.repeat(n // len(values))


def fp8(tiny: Tiny) -> Array:
    said = tiny.quantization
    scale_name = next(name for name in tiny.tensors if "scale" in name and "input" not in name)
    weight = next(name for name in tiny.tensors if tiny.tensors[name][0] == "F8_E4M3")
    codes = array(tiny, weight)
    *lead, n, k = codes.shape
    stored = array(tiny, scale_name)
    scale = E8M0[stored] if tiny.tensors[scale_name][0] == "F8_E8M0" else stored
    if said.get("weight_scale_semantics") == "inverse":
        scale = 1 / scale
    values = E4M3[codes]
    if tiny.options.nan:
        values = np.where(np.isnan(values), 0, values)
    if "weight_block_size" in said:
        bn, bk = said["weight_block_size"]
        return values * _spread(scale.reshape(*lead, -(-n // bn), -(-k // bk)), (bn, bk), n, k)
    rows = scale.reshape(-1) if scale.size == n else _by_rows(scale.reshape(-1), tiny.config, n)
    return values * rows[:, None]


def _nibbles(data: Array) -> Array:
    return np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)


def mxfp4(tiny: Tiny) -> Array:
    packed = next(name for name in tiny.tensors if name.endswith(("blocks", "weight_packed", ".weight")))
    scale = next(name for name in tiny.tensors if name.endswith(("scales", "weight_scale")))
    data, stored = array(tiny, packed), array(tiny, scale)
    codes = _nibbles(data)
    codes = codes.reshape(*stored.shape[:-1], -1)
    spread = stored.repeat(32, -1)[..., : codes.shape[-1]].astype(np.int64)
    return np.where(spread == 255, 0.0, E2M1[codes] * E8M0[np.minimum(spread, 254)])


def nvfp4(tiny: Tiny) -> Array:
    packed = next(name for name in tiny.tensors if name.endswith((".weight", ".weight_packed")))
    codes = _nibbles(array(tiny, packed))
    *lead, n, k = codes.shape
    local = E4M3[array(tiny, "weight_scale" if "weight_scale" in tiny.tensors else _module(packed) + ".weight_scale")]
    divisor = member(tiny, ".weight_global_scale")
    whole = array(tiny, divisor or _module(packed) + ".weight_scale_2").reshape(-1)
    if divisor:
        whole = (1 / whole).astype(np.float32).astype(np.float64)
    experts = math.prod(lead)
    parts = np.broadcast_to(whole, experts * max(1, whole.size // experts)).reshape(experts, -1)
    rows = np.stack([_by_rows(each, tiny.config, n) for each in parts]).reshape(*lead, n, 1)
    return E2M1[codes] * (_spread(local, (1, 16), n, k) * rows)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def gguf(tiny: Tiny) -> Array:
    """By the gguf package, whose arithmetic is ggml's, in float32."""
    import gguf as package

    (name,) = tiny.quantization["types"]
    data = array(tiny, name)
    kind = package.GGMLQuantizationType[tiny.quantization["types"][name]]
    with np.errstate(over="ignore", invalid="ignore"):
        rows = package.quants.dequantize(data.reshape(-1, data.shape[-1]), kind)
    return rows.astype(np.float64).reshape(*data.shape[:-1], -1)


def matmulnbits(tiny: Tiny) -> Array:
    (node,) = tiny.quantization["nodes"]
    said = node["attributes"]
    n, k, block, bits = (said[key] for key in ("N", "K", "block_size", "bits"))
    _, b, scales, zeros, g_idx, *_ = [*node["inputs"], "", "", ""]
    blocks = -(-k // block)
    codes = fields(array(tiny, b).reshape(n, -1), bits, blocks * block)[:, :k]
    zero = np.full((n, blocks), 2 ** (bits - 1))
    if zeros:
        zero = fields(array(tiny, zeros).reshape(n, -1), bits, blocks)
    of = groups_of(k, block, array(tiny, g_idx)[:k] if g_idx else None)
    return array(tiny, scales).reshape(n, blocks)[:, of] * (codes - zero[:, of])


DECODERS: dict[str, Callable[[Tiny], Array]] = {
    f.__name__: f for f in (gptq, awq, compressed_tensors, fp8, mxfp4, nvfp4, gguf, matmulnbits)
}
