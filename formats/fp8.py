"""FP8 weights: e4m3fn codes with one scale per block, output channel, tensor, or part of a fused weight.

    w[n, k] = e4m3(weight[n, k]) * scale        (/ scale where scales are divisors)

| tensor | dtype, shape | |
| --- | --- | --- |
| `P.weight` | F8_E4M3 [N, K] or [E, N, K] | |
| `P.weight_scale_inv` | F32, BF16, F8_E8M0 | DeepSeek, Qwen, transformers: a multiplier in spite of its name; GPTQModel: a divisor (`weight_scale_semantics: inverse`) |
| `P.weight_scale` | F32, BF16 | llm-compressor, ModelOpt: a multiplier |
| `P.scale` | F8_E8M0 | newer DeepSeek |
| `P`, `P_scale_inv` | F8_E4M3 [E, N, K] | transformers' stacked experts; or their weights apart: ``fp8_weights.py`` |

Scale shapes: the grid [ceil(N / bn), ceil(K / bk)], also squeezed when it is one block wide and as ModelOpt's
[a, 1, b, 1]; [N] or [N, 1]; one value; one value for each part of a fused `qkv_proj` or `gate_up_proj`.
Divisors become float64 reciprocals (``Level``): a float32 reciprocal gives other weights than the tool's division.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import checks, fp8_scales, fp8_weights
from .bits import has_masked
from .canonical import ELEMENTS, SCALE_DTYPES, Level, Outline, QuantTensor, from_shards, grid_shape, per_shard
from .container import Checkpoint, Tensor
from .errors import AS_WRITTEN, RIGHT_LABELS, CorruptError, UnsupportedError
from .fp8_weights import Weights
from .moves import BYTES
from .stream import STEP, Blocks, Stream, hollow, whole

Array = NDArray[Any]

OPTIONS = ("scale_convention", "nan")

E4M3 = "F8_E4M3"
OTHERS = {
    "F8_E4M3FNUZ": "F8_E4M3FNUZ has the bytes of F8_E4M3 and other values",
    "F8_E5M2": "F8_E5M2 is not a weight format here",
    "F8_E5M2FNUZ": "F8_E5M2FNUZ is not a weight format here",
}
PLAIN = ("F16", "BF16", "F32")
# Stored dtype -> type of the scales. U8 only under the label ``scale_fmt: ue8m0``.
SCALES = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F8_E8M0": "e8m0", "U8": "e8m0"}
NAN = 0x7F  # and 0xFF
NAN_CODES = "nan_codes"
"""Residue of ``--nan zero``: int64 [2, count], the flat positions and the codes that were there."""


@dataclass(frozen=True)
class Names:
    """Suffixes of a module's tensors. ``kept`` ones belong to it and say nothing about its weights."""

    weight: str
    scales: tuple[str, ...]
    bias: str
    kept: tuple[str, ...]


NAMES = (
    Names(
        ".weight",
        fp8_weights.OWN,
        ".bias",
        (".input_scale", ".activation_scale", ".weight_zero_point"),
    ),
    Names("", ("_scale_inv",), "_bias", ("_activation_scale",)),
)


@dataclass(frozen=True)
class Parts:
    """One module as its headers and scales describe it."""

    weights: Weights
    weight: Tensor
    """``weights.whole``"""
    scale: Tensor
    bias: Tensor | None
    kept: Mapping[str, Tensor]
    """By suffix, without its leading . or _."""
    block: tuple[int, int]
    shards: tuple[int, ...]
    source: Mapping[str, Any]

    def level(self) -> Level:
        """The scales on their grid, as multipliers."""
        *lead, n, k = self.weight.shape
        values = self.scale.array().view(SCALE_DTYPES[SCALES[self.scale.dtype]])
        if self.source["divide"]:
            values = 1 / values.astype(np.float64)
        if self.shards:
            return from_shards(values.reshape(*lead, len(self.shards), 1), self.shards, k)
        return Level(values.reshape(*lead, *grid_shape(n, k, self.block)), self.block)


def _members(checkpoint: Checkpoint, weight: Tensor) -> tuple[str, tuple[str, ...]] | None:
    """(module, its tensors: weight, scales, the rest) if there is a scale for what may be a weight."""
    for names in NAMES:
        if weight.name.endswith(names.weight) and (names.weight or len(weight.shape) == 3):
            module = weight.name.removesuffix(names.weight)
            present = [module + s for s in (*names.scales, names.bias, *names.kept) if module + s in checkpoint.tensors]
            if any(module + s in present for s in names.scales):
                return module, (weight.name, *present)
    return None


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """{P: its tensors}. A 16-bit weight beside a scale is no module: both pass through, with a note."""
    found: dict[str, tuple[str, ...]] = {}
    stacks = fp8_weights.stacks(checkpoint)
    stacked = {weight.name for weights in stacks.values() for weight in weights}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in (E4M3, *OTHERS):
            if members := _members(checkpoint, tensor):
                checks.claim(found, *members, tensor)
            elif tensor.name.endswith(".weight") and tensor.dtype in OTHERS and tensor.name not in stacked:
                checks.claim(found, tensor.name.removesuffix(".weight"), (tensor.name,), tensor)
        elif tensor.dtype in PLAIN and tensor.name.endswith(".weight"):
            members = _members(checkpoint, tensor)
            if members and ".weight_scale" in members[1][1]:
                checkpoint.note(members[0], f"the weight is {tensor.dtype}: it and its unused scale pass through")
    for stack, weights in stacks.items():
        beside = (stack + s for s in (*NAMES[1].scales, *NAMES[1].kept) if stack + s in checkpoint.tensors)
        checks.claim(found, stack, (*(weight.name for weight in weights), *beside), weights[0])
    return found


def orphans(checkpoint: Checkpoint) -> dict[str, str]:
    """{FP8 weight without a scale: what is missing}; its bytes alone say nothing."""
    whole = {name for members in modules(checkpoint).values() for name in members}
    return {
        tensor.name: f"its scale ({', '.join(s[1:] for s in NAMES[0].scales)})"
        for tensor in checkpoint.tensors.values()
        if tensor.dtype in (E4M3, *OTHERS) and tensor.name not in whole
        if tensor.name.endswith(".weight") or (len(tensor.shape) == 3 and "scale" not in tensor.name)
    }


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """What the headers and the scales say; with ``--nan zero`` also how many codes are NaN.

    Raises:
        UnsupportedError: another FP8 type, two scales, a scale or its direction that can be read in two ways.
        CorruptError: a scale grid of the wrong shape; a NaN, an infinite, or as a divisor a zero scale.
        UsageError: a switch with a value it does not know.
    """
    parts = _parts(checkpoint, module)
    *lead, n, k = parts.weight.shape
    residue = {suffix: t.array() for suffix, t in parts.kept.items()}
    if checkpoint.options.nan:
        residue |= _nan_codes(parts.weights)
    level = parts.level()
    return Outline(
        element=ELEMENTS["e4m3"],
        n=n,
        k=k,
        experts=lead[0] if lead else None,
        scales=((level.dtype, level.block),),
        bias=None if parts.bias is None else SCALES[parts.bias.dtype],
        source=parts.source,
        residue=tuple((suffix, a.dtype, a.shape) for suffix, a in residue.items()),
        shards=level.shards,
    )


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """Codes and scales as they are stored. Raises as ``describe``, and CorruptError for NaN codes."""
    return whole(stream(checkpoint, module))


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab; slabs raise CorruptError for NaN codes."""
    parts = _parts(checkpoint, module)
    residue = {suffix: t.array() for suffix, t in parts.kept.items()}
    if checkpoint.options.nan:
        nan = _nan_codes(parts.weights)
        for positions, _ in nan.values():
            checkpoint.note(module, f"{positions.size} NaN codes are read as zero")
        residue |= nan

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        codes = parts.weights.slab(expert, rows, columns)
        if has_masked(codes, NAN):
            if not checkpoint.options.nan:
                _refuse_nan(parts.weights)
            codes[(codes & NAN) == NAN] = 0
        return codes

    q = QuantTensor(
        element=ELEMENTS["e4m3"],
        codes=hollow(*parts.weight.shape),
        scales=(parts.level(),),
        bias=checks.bias_values(parts.bias),
        source=parts.source,
        residue=residue,
    )
    everything = slice(0, parts.weight.shape[-1])
    return Stream(q, slab, along=0, blocks=Blocks(BYTES, lambda expert, rows: slab(expert, rows, everything)))


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The module's tensors as they were stored, by full name."""
    source, residue = q.source, dict(q.residue)
    codes = np.ascontiguousarray(q.codes)
    if NAN_CODES in residue:
        positions, was = residue.pop(NAN_CODES)
        codes = codes.copy()
        codes.reshape(-1)[positions] = was
    grid = per_shard(q.scales[0]) if q.scales[0].shards else q.scales[0].data
    stored = SCALE_DTYPES[SCALES[source["scale_dtype"]]]
    grid = (1 / grid).astype(stored) if source["divide"] else np.ascontiguousarray(grid)
    joint = source["scale"][0]
    weights = {module + source["weight"]: codes} if "weight" in source else fp8_weights.split(module, codes)
    tensors = {
        **{name: one.view(ml_dtypes.float8_e4m3fn) for name, one in weights.items()},
        module + source["scale"]: grid.view(np.uint8 if source["scale_dtype"] == "U8" else stored).reshape(
            source["scale_shape"]
        ),
    }
    if q.bias is not None:
        residue["bias"] = q.bias
    return tensors | {f"{module}{joint}{suffix}": array for suffix, array in residue.items()}


def _nan_codes(weights: Weights) -> dict[str, Array]:
    """int64 [2, c], where there are any: positions of NaN codes, and which they are."""
    found = []
    for start, flat in weights.flat():
        for first in range(0, flat.size, STEP):
            run = flat[first : first + STEP]
            at = np.flatnonzero((run & NAN) == NAN)
            found.append(np.stack((start + first + at, run[at])).astype(np.int64))
    nan = np.concatenate(found, axis=1)
    return {NAN_CODES: nan} if nan.size else {}


def _refuse_nan(weights: Weights) -> None:
    for tensor in weights.tensors:
        bad = (tensor.array().view(np.uint8) & NAN) == NAN
        checks.refuse_any(tensor, bad, "codes 0x7F or 0xFF are NaN", "none", "--nan zero reads them as zeros")


def _parts(checkpoint: Checkpoint, module: str) -> Parts:
    tensors, label = checkpoint.tensors, checkpoint.quantization
    names = NAMES[0] if module + NAMES[0].weight in tensors else NAMES[1]
    stored = tensors.get(module + names.weight)
    weights = fp8_weights.apart(checkpoint, module) if stored is None else fp8_weights.single(stored)
    weight = weights.whole
    _check_type(weight, label)
    found = [tensors[module + suffix] for suffix in names.scales if module + suffix in tensors]
    if len(found) != 1:
        raise UnsupportedError(
            "one scale is needed",
            file=weight.file,
            tensor=weight.name,
            found=", ".join(t.name for t in found) or None,
            need=" or ".join(s[1:] for s in names.scales),
            do="remove what does not count" if found else AS_WRITTEN,
        )
    (scale,) = found
    checks.dtype(scale, *(d for d in SCALES if d != "U8" or label.get("scale_fmt") == "ue8m0"))
    if len(weight.shape) not in (2, 3) or 0 in weight.shape:
        raise CorruptError("not a matrix", file=weight.file, tensor=weight.name, found=list(weight.shape))
    *lead, n, _ = weight.shape
    values = scale.array().view(SCALE_DTYPES[SCALES[scale.dtype]]).astype(np.float64)
    checks.finite(scale, values)
    divide = fp8_scales.divides(scale, values, checkpoint)
    bias = tensors.get(module + names.bias)
    checks.bias(bias, weight, lead, n)
    zero = tensors.get(f"{module}.weight_zero_point")
    if zero is not None:
        points = zero.array()
        checks.refuse_any(zero, points != 0, "zero points beside FP8 codes", "all of them 0", values=points)
    block, shards = fp8_scales.block(checkpoint, module, weight, scale)
    return Parts(
        weights=weights,
        weight=weight,
        scale=scale,
        bias=bias,
        kept=checks.kept({s[1:]: tensors[module + s] for s in names.kept if module + s in tensors}),
        block=block,
        shards=shards,
        source={
            "format": "fp8",
            **({} if stored is None else {"weight": names.weight}),
            "scale": scale.name.removeprefix(module),
            "scale_dtype": scale.dtype,
            "scale_shape": list(scale.shape),
            "divide": divide,
        },
    )


def _check_type(weight: Tensor, label: Mapping[str, Any]) -> None:
    if weight.dtype != E4M3:
        do = f"quantise it to {E4M3}"
        raise UnsupportedError(OTHERS[weight.dtype], file=weight.file, tensor=weight.name, need=E4M3, do=do)
    for key in ("fmt", "format", "checkpoint_format"):
        if any(other in str(label.get(key)).lower() for other in ("fnuz", "e5m2")):
            raise UnsupportedError(
                "the label contradicts the tensor",
                file=weight.file,
                tensor=weight.name,
                found=f"{key} {label[key]!r} and dtype {weight.dtype}",
                need="e4m3fn",
                do=RIGHT_LABELS,
            )
