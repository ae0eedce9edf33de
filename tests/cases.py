"""Synthetic checkpoints with their exact weights, written from the formats' descriptions alone: plain loops over Python
integers, nothing of the code under test. Every test may build on them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stored = tuple[str, tuple[int, ...], bytes]
"""(safetensors dtype, shape, bytes)"""


@dataclass(frozen=True)
class Case:
    tensors: dict[str, Stored]
    config: dict[str, Any]
    """The quantisation configuration."""
    dense: NDArray[np.float64]
    """[n, k], exact."""

    def save(self, folder: Path, **config: Any) -> Path:
        """A checkpoint directory; ``config`` replaces entries of the configuration, None removes one."""
        merged = {key: value for key, value in {**self.config, **config}.items() if value is not None}
        write_file(folder / "model.safetensors", self.tensors)
        (folder / "config.json").write_text(json.dumps({"quantization_config": merged}))
        return folder

    def save_lone(self, folder: Path) -> Path:
        """The weights in a file of their own, without a configuration."""
        return write_file(folder / "weights.safetensors", self.tensors)


def write_file(path: Path, tensors: Mapping[str, Stored]) -> Path:
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def stream(codes: Sequence[int], bits: int) -> list[int]:
    """Codes one after another from bit 0 up, cut into 32-bit words; the last word is filled with zero bits."""
    number = 0
    for i, code in enumerate(codes):
        number |= code << (bits * i)
    return [number >> (32 * w) & 0xFFFFFFFF for w in range(-(-len(codes) * bits // 32))]


def ints(rows: Sequence[Sequence[int]], dtype: str = "I32") -> Stored:
    data = b"".join(struct.pack("<I", word) for row in rows for word in row)
    return dtype, (len(rows), len(rows[0])), data


def floats(values: Sequence[float], shape: tuple[int, ...], dtype: str) -> Stored:
    """Values that the dtype holds exactly."""
    if dtype == "BF16":
        return dtype, shape, b"".join(struct.pack("<f", v)[2:] for v in values)
    return dtype, shape, b"".join(struct.pack({"F16": "<e", "F32": "<f"}[dtype], v) for v in values)


def stored_zeros(zeros: Sequence[int], bits: int, convention: str, wrap: str) -> list[int]:
    """One row of qzeros: as they are (gptq_v2), or minus one with the wrap of zero 0 (gptq)."""
    if convention == "gptq_v2":
        return stream(zeros, bits)
    if wrap == "word":
        lanes = -(-len(zeros) * bits // 32) * 32 // bits + 1
        ones = stream([1] * lanes, bits)
        return [(word - ones[i]) & 0xFFFFFFFF for i, word in enumerate(stream(zeros, bits))]
    return stream([(zero - 1) % 2**bits for zero in zeros], bits)


def gptq_case(
    bits: int = 4,
    sym: bool = True,
    group: int = 32,
    n: int = 64,
    k: int = 128,
    *,
    g_idx: str = "groups",
    qzeros: bool = True,
    zeros: Sequence[int] | None = None,
    convention: str = "gptq",
    wrap: str = "lane",
    scale: str = "F16",
    bias: str | None = None,
    words: str = "I32",
    module: str = "layer",
    seed: int = 0,
) -> Case:
    """A GPTQ linear. ``g_idx``: groups (k // group), act (shuffled), zeros, absent. ``zeros``: a row of n zero
    points to use for every group; random in 1 .. 2**bits - 1 without it. Scales of both signs, subnormal ones too."""
    rng = random.Random(seed)
    width = k if group == -1 else group
    groups = -(-k // width)
    order = list(range(k))
    if g_idx == "act":
        rng.shuffle(order)
    group_of = [0] * k
    for position, channel in enumerate(order):
        group_of[channel] = position // width

    codes = [[rng.randrange(2**bits) for _ in range(k)] for _ in range(n)]
    half = 2 ** (bits - 1)
    zero = [[half] * n if sym else list(zeros or [rng.randrange(1, 2**bits) for _ in range(n)]) for _ in range(groups)]
    scales = [[rng.choice((-1, 1)) * rng.randrange(1, 128) * 2.0 ** rng.choice((-9, -12, -20)) for _ in range(n)]
              for _ in range(groups)]  # fmt: skip
    dense = np.empty((n, k))
    for row in range(n):
        for channel in range(k):
            g = group_of[channel]
            dense[row, channel] = scales[g][row] * (codes[row][channel] - zero[g][row])

    columns = [stream(row, bits) for row in codes]
    tensors = {"qweight": ints([[column[r] for column in columns] for r in range(len(columns[0]))], words)}
    if qzeros:
        tensors["qzeros"] = ints([stored_zeros(row, bits, convention, wrap) for row in zero], words)
    tensors["scales"] = floats([s for row in scales for s in row], (groups, n), scale)
    if g_idx != "absent":
        stored = [0] * k if g_idx == "zeros" else group_of
        tensors["g_idx"] = ("I32", (k,), struct.pack(f"<{k}i", *stored))
    if bias is not None:
        tensors["bias"] = floats([rng.randrange(-64, 64) / 64 for _ in range(n)], (n,), bias)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": g_idx == "act",
        "checkpoint_format": convention,
    }
    return Case({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, config, dense)


def gptq_marlin_case(
    group: int = 128, n: int = 128, k: int = 256, *, bias: str | None = None, module: str = "layer", seed: int = 0
) -> Case:
    """A checkpoint of Marlin tiles as AutoGPTQ saves it: ``B`` and ``s``, symmetric 4 bit."""
    rng = random.Random(seed)
    width = k if group == -1 else group
    groups = -(-k // width)
    codes = [[rng.randrange(16) for _ in range(n)] for _ in range(k)]
    scales = [[rng.randrange(1, 1024) / 1024 for _ in range(n)] for _ in range(groups)]
    dense = np.empty((n, k))
    words = [[0] * (2 * n) for _ in range(k // 16)]
    for channel in range(k):
        for row in range(n):
            dense[row, channel] = scales[channel // width][row] * (codes[channel][row] - 8)
            kr, nc = channel % 16, row % 64
            j, b, col = nc // 16, nc % 16 // 8, nc % 8
            t, r = kr % 8 // 2, 2 * (kr // 8) + kr % 2
            v = 4 * b + r
            word = row // 64 * 128 + 4 * (4 * col + t) + j
            words[channel // 16][word] |= codes[channel][row] << 4 * (v >> 1 | (v & 1) << 2)
    order = []
    if groups > 1:
        order = [i + 8 * v for i in range(8) for v in range(8)]
    else:
        order = [2 * i + 8 * u + v for i in range(4) for u in range(4) for v in (0, 1)]
    permuted = [row[base + c] for row in scales for base in range(0, n, len(order)) for c in order]
    tensors = {"B": ints(words), "s": floats(permuted, (groups, n), "F16")}
    if bias is not None:
        tensors["bias"] = floats([rng.randrange(-64, 64) / 64 for _ in range(n)], (n,), bias)
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "checkpoint_format": "marlin"}
    return Case({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, config, dense)
