"""NVFP4: e2m1 codes, an e4m3 scale for every 16 of them along k, and a float32 for the whole.

    w[n, k] = e2m1(code[n, k]) * scale[n, k / 16] * global

| tensor | dtype, shape | |
| --- | --- | --- |
| `P.weight` or `P.weight_packed` | U8 [(E,) N, K/2] | the low nibble is the even k |
| `P.weight_scale` | F8_E4M3 [(E,) N, K/16] | row major, never negative |
| `P.weight_scale_2` | F32, one value, or one an expert or fused shard | ModelOpt: the global, a multiplier |
| `P.weight_global_scale` | the same | compressed-tensors: a divisor |
| `P.input_scale`, `P.input_global_scale` | F32 | for quantised activations: kept for ``write`` |

The canonical global is a multiplier: float32(1 / divisor), with the divisor's bits kept in ``source``, because
1 / (1 / x) is another float32 than x for one x in seven.
"""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import checks, nibbles
from .bits import join_nibbles
from .canonical import ELEMENTS, Level, Outline, QuantTensor, from_shards, grid_shape, per_shard
from .container import Checkpoint, Tensor
from .errors import CorruptError, UnsupportedError
from .nibbles import Parts
from .stream import Stream, whole

Array = NDArray[Any]

OPTIONS = ("scale_convention",)

GROUP = 16
LARGEST = 0x7E  # e4m3 bytes above are NaN (0x7F) or negative
PACKED = (".weight", ".weight_packed")
SCALE, BIAS = ".weight_scale", ".bias"
# The global's suffix -> whether it is a divisor.
GLOBALS = {".weight_scale_2": False, ".weight_global_scale": True}
KEPT = (".input_scale", ".input_global_scale", ".weight_shape")
# ModelOpt's own export of stacked experts: [E, in / 2, out], two input channels a byte, blocks along in.
ALONG_IN = "_weight_scale"


def _packed(checkpoint: Checkpoint, module: str) -> list[Tensor]:
    names = (module + suffix for suffix in PACKED)
    return [checkpoint.tensors[name] for name in names if name in checkpoint.tensors and _is(checkpoint, name, "U8")]


def _is(checkpoint: Checkpoint, name: str, dtype: str) -> bool:
    return name in checkpoint.tensors and checkpoint.tensors[name].dtype == dtype


def _globals(checkpoint: Checkpoint, module: str) -> list[str]:
    return [suffix for suffix in GLOBALS if module + suffix in checkpoint.tensors]


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """{P: its tensors}. Packed codes, a scale and a global; what lacks one of them is an orphan."""
    found = {}
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(SCALE)
        if name.endswith(SCALE) and _packed(checkpoint, module) and _globals(checkpoint, module):
            codes = (tensor.name for tensor in _packed(checkpoint, module))
            beside = (module + s for s in (SCALE, *GLOBALS, BIAS, *KEPT))
            found[module] = (*codes, *(n for n in beside if n in checkpoint.tensors))
        module = name.removesuffix(ALONG_IN)
        if name.endswith(ALONG_IN) and tensor.dtype == "F8_E4M3" and _is(checkpoint, module, "U8"):
            found[module] = (module, name)
    return found


def orphans(checkpoint: Checkpoint) -> dict[str, str]:
    """{a global, a scale or packed codes: what is missing beside them}."""
    missing = {}
    for name, tensor in checkpoint.tensors.items():
        for suffix in GLOBALS:
            module = name.removesuffix(suffix)
            if name.endswith(suffix) and not (_packed(checkpoint, module) and module + SCALE in checkpoint.tensors):
                missing[name] = "weight or weight_packed (U8), and weight_scale"
        module = name.removesuffix(SCALE)
        if name.endswith(SCALE) and tensor.dtype == "F8_E4M3":
            packed = _packed(checkpoint, module)
            if packed and not _globals(checkpoint, module):
                missing[packed[0].name] = "its global scale, weight_scale_2 or weight_global_scale"
            elif not packed:
                missing[name] = "weight or weight_packed (U8)"
    return missing


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """What the headers and the globals say.

    Raises:
        UnsupportedError: both conventions, both packed names, reordered or transposed bytes, another dtype.
        CorruptError: shapes that disagree; a global that is zero, negative, infinite, NaN, or has no reciprocal.
        UsageError: a switch with a value it does not know.
    """
    p, factor = _parts(checkpoint, module)
    return Outline(
        element=ELEMENTS["e2m1"],
        n=p.n,
        k=p.k,
        experts=p.experts,
        scales=(("e4m3", (1, GROUP)), ("f32", factor.block)),
        bias=p.bias_dtype,
        source=p.source,
        residue=p.residue(),
        shards=factor.shards,
    )


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """Codes and scales as they are stored. Raises as ``describe``, and CorruptError for a NaN or negative scale."""
    return whole(stream(checkpoint, module))


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    p, factor = _parts(checkpoint, module)
    scales = p.scale.array()
    wrong = scales.view(np.uint8) > LARGEST
    checks.refuse_any(p.scale, wrong, "block scales are NaN or negative", "bytes 0x00 to 0x7E", values=scales)
    return p.stream(Level(scales, (1, GROUP)), factor)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The module's tensors as they were stored, by full name."""
    source, (scale, factor) = q.source, q.scales
    if "divisors" in source:
        stored = np.array(source["divisors"], np.uint32).view(np.float32)
    else:
        stored = (per_shard(factor) if factor.shards else factor.data).reshape(-1)[: prod(source["global_shape"])]
    tensors = {
        module + source["packed"]: join_nibbles(q.codes),
        module + SCALE: np.ascontiguousarray(scale.data).view(ml_dtypes.float8_e4m3fn),
        module + source["global"]: stored.reshape(source["global_shape"]),
    }
    if q.bias is not None:
        tensors[module + BIAS] = q.bias
    return tensors | {f"{module}.{suffix}": array for suffix, array in q.residue.items()}


def _parts(checkpoint: Checkpoint, module: str) -> tuple[Parts, Level]:
    """The module, and its globals as multipliers."""
    tensors = checkpoint.tensors
    if module in tensors:
        raise UnsupportedError(
            "experts whose bytes run along the input dimension",
            file=tensors[module].file,
            tensor=module,
            found=f"ModelOpt's export of stacked experts, {list(tensors[module].shape)}",
            need="one module an expert, or [E, n, k / 2]",
            do="export the model so",
        )
    packed, *rest = _packed(checkpoint, module)
    kind, *both = _globals(checkpoint, module)
    checks.as_published(checkpoint, packed)
    if rest or both:
        raise UnsupportedError(
            "two readings of one module",
            file=packed.file,
            tensor=module,
            found=" and ".join(t.name for t in (packed, *rest)) if rest else " and ".join((kind, *both)),
            need="weight_scale_2 (a multiplier) or weight_global_scale (a divisor), and one packed weight",
            do="remove what does not count",
        )
    kept = checks.kept({s[1:]: tensors[module + s] for s in KEPT if module + s in tensors})
    lead, n, k = nibbles.extents(packed, kept.get("weight_shape"))
    scale, bias = tensors[module + SCALE], tensors.get(module + BIAS)
    checks.dtype(scale, "F8_E4M3")
    checks.shape(scale, (*lead, *grid_shape(n, k, (1, GROUP))), why=f"for {n} x {k} weights in groups of {GROUP}")
    checks.bias(bias, packed, lead, n)
    factor, source = _whole(checkpoint, module, kind, lead, n, k)
    suffix = packed.name.removeprefix(module)
    return Parts(packed, scale, bias, kept, lead, n, k, {"format": "nvfp4", "packed": suffix, **source}), factor


def _whole(
    checkpoint: Checkpoint, module: str, kind: str, lead: list[int], n: int, k: int
) -> tuple[Level, dict[str, Any]]:
    """The globals as multipliers, and what gives their stored bits back."""
    tensor, said = checkpoint.tensors[module + kind], checkpoint.options.scale_convention
    checks.dtype(tensor, "F32")
    stored = tensor.array().reshape(-1)
    shards = checks.rows_of_shards(checkpoint.config, module, n)
    experts, parts = prod(lead), len(shards) or 1
    if stored.size not in (1, experts, experts * parts):
        each = " or ".join(dict.fromkeys(str(c) for c in (1, experts, experts * parts)))
        raise CorruptError(
            "wrong number of global scales", file=tensor.file, tensor=tensor.name, found=stored.size, need=each
        )
    with np.errstate(invalid="ignore"):
        wrong = ~(np.isfinite(stored) & (stored > 0))
    wrong, what = wrong.reshape(tensor.shape), "a global scale is zero, negative, infinite or NaN"
    checks.refuse_any(tensor, wrong, what, "finite numbers above 0", values=stored)
    source: dict[str, Any] = {"global": kind, "global_shape": list(tensor.shape)}
    factors = stored
    if said == "divide" or (said is None and GLOBALS[kind]):
        source["divisors"] = [int(bits) for bits in stored.view(np.uint32)]
        limits = np.finfo(np.float32)
        exact = 1 / stored.astype(np.float64)
        none = (exact < limits.tiny) | (exact > limits.max)
        none, what = none.reshape(tensor.shape), "a divisor has no float32 reciprocal"
        do = "--scale-convention multiply, if it is none"
        checks.refuse_any(tensor, none, what, "2^-127 to 2^126", do, values=stored)
        factors = exact.astype(np.float32)
    if stored.size == experts * parts and parts > 1:
        return from_shards(factors.reshape(*lead, parts, 1), shards, k), source
    return Level(np.broadcast_to(factors.reshape(-1, 1, 1), (experts, 1, 1)).reshape(*lead, 1, 1), (n, k)), source
