"""MXFP4: e2m1 codes with a power of two (e8m0) for every 32 of them along k (OCP Microscaling 1.0).

    w[n, k] = e2m1(code[n, k]) * 2^(scale[n, k / 32] - 127)

| module | tensors | written by |
| --- | --- | --- |
| `P` | `P_blocks` U8 [E, N, K/32, 16], `P_scales` U8 [E, N, K/32], `P_bias` | gpt-oss in Hugging Face form |
| `block.0.mlp.mlp1` | `.._weight.blocks`, `.._weight.scales`, `.._bias` | gpt-oss in OpenAI's form |
| `P` | `P.weight_packed` U8 [N, K/2], `P.weight_scale` U8 [N, K/32], `P.bias` | compressed-tensors |
| `P` | `P.weight`, `P.weight_scale`, as above | ModelOpt, Quark |

The low nibble is the even k. Scales are U8 or F8_E8M0 of the same bytes: viewed, never cast. gpt-oss interleaves
gate (even) and up (odd) rows: they stay so, and ``source`` says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks, nibbles
from .bits import join_nibbles
from .canonical import ELEMENTS, SCALE_DTYPES, Level, Outline, QuantTensor, grid_shape
from .container import Checkpoint, Tensor
from .errors import CorruptError, UnsupportedError
from .nibbles import Parts
from .stream import Stream, whole

Array = NDArray[Any]

OPTIONS = ("nan",)

GROUP = 32
E8M0 = SCALE_DTYPES["e8m0"]
BYTES = ("U8", "F8_E8M0")
NAN, ONE = 255, 127
NAN_SCALES, NAN_CODES = "nan_scales", "nan_codes"
"""Residue of ``--nan zero``: int64 [count] flat positions of NaN scales, uint8 [count, 32] the codes under them."""


@dataclass(frozen=True)
class Names:
    """Suffixes of a module's tensors."""

    packed: str
    scale: str
    bias: str
    blocked: bool = False
    """Packed codes are [E, N, K/32, 16], not [.., N, K/2]."""
    interleaved: tuple[str, ...] = ()
    """Modules whose rows alternate between gate and up."""


NAMES = (
    Names("_blocks", "_scales", "_bias", True, ("gate_up_proj",)),
    Names("_weight.blocks", "_weight.scales", "_bias", True, ("mlp1",)),
    Names(".weight_packed", ".weight_scale", ".bias"),
    Names(".weight", ".weight_scale", ".bias"),
)
# ModelOpt's own export of stacked experts: bytes and blocks run along the output dimension of [E, in, out].
ALONG_OUT = Names("", "_weight_scale", "_bias")
GLOBALS = (".weight_scale_2", ".weight_global_scale")  # with one of these it is not MXFP4


def _module(checkpoint: Checkpoint, tensor: Tensor) -> tuple[str, Names] | None:
    """(module, its names) of packed codes whose scales are there."""
    if tensor.dtype != "U8":
        return None
    for names in (*NAMES, *((ALONG_OUT,) if len(tensor.shape) == 3 else ())):
        module = tensor.name.removesuffix(names.packed)
        scale = checkpoint.tensors.get(module + names.scale)
        if tensor.name.endswith(names.packed) and scale is not None:
            whole = any(module + suffix in checkpoint.tensors for suffix in GLOBALS)
            ours = names.blocked or (scale.dtype in BYTES and not whole)
            return (module, names) if ours else None
    return None


def modules(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """{P: its tensors}."""
    found: dict[str, tuple[str, ...]] = {}
    for tensor in checkpoint.tensors.values():
        if (named := _module(checkpoint, tensor)) is not None:
            module, names = named
            suffixes = (names.packed, names.scale, names.bias, ".weight_shape")
            members = tuple(module + s for s in suffixes if module + s in checkpoint.tensors)
            checks.claim(found, module, members, tensor)
    return found


def orphans(checkpoint: Checkpoint) -> dict[str, str]:
    """{codes without scales, or scales without codes: what is missing}."""
    missing = {}
    for tensor in checkpoint.tensors.values():
        for names in NAMES[:3] if tensor.dtype == "U8" else ():
            for mine, other in ((names.packed, names.scale), (names.scale, names.packed)):
                if tensor.name.endswith(mine) and (names.blocked or mine == names.packed):
                    partner = tensor.name.removesuffix(mine) + other
                    if partner not in checkpoint.tensors:
                        missing[tensor.name] = partner
    return missing


def describe(checkpoint: Checkpoint, module: str) -> Outline:
    """What the headers say; with ``--nan zero`` also how many scales are NaN.

    Raises:
        UnsupportedError: bytes along the output dimension, or reordered; another dtype.
        CorruptError: shapes that disagree.
        UsageError: a switch with a value it does not know.
    """
    p = _parts(checkpoint, module)
    residue = p.residue()
    if checkpoint.options.nan and (count := int(_is_nan(p.scale).sum())):
        residue += (NAN_SCALES, np.dtype(np.int64), (count,)), (NAN_CODES, np.dtype(np.uint8), (count, GROUP))
    return Outline(
        element=ELEMENTS["e2m1"],
        n=p.n,
        k=p.k,
        experts=p.experts,
        scales=(("e8m0", (1, GROUP)),),
        bias=p.bias_dtype,
        source=p.source,
        residue=residue,
    )


def read(checkpoint: Checkpoint, module: str) -> QuantTensor:
    """Codes and scales as they are stored. Raises as ``describe``, and CorruptError for scales of 255 (NaN)."""
    return whole(stream(checkpoint, module))


def stream(checkpoint: Checkpoint, module: str) -> Stream:
    """``read``, its codes by the slab."""
    p = _parts(checkpoint, module)
    scales, nan = p.scale.array().view(np.uint8), _is_nan(p.scale)
    if not nan.any():
        return p.stream(Level(scales.view(E8M0), (1, GROUP)))
    if not checkpoint.options.nan:
        checks.refuse_any(
            p.scale, nan, "scales of 255 are NaN", "0 to 254", "--nan zero reads the weights under them as zeros"
        )
    checkpoint.note(module, f"the weights under {int(nan.sum())} NaN scales are read as zeros")
    positions = np.flatnonzero(nan).astype(np.int64)
    residue = {NAN_SCALES: positions, NAN_CODES: p.codes_at(_under(positions, p.k))}
    q = p.tensor(Level(np.where(nan, np.uint8(ONE), scales).view(E8M0), (1, GROUP)), residue=residue)
    grid = nan.reshape(-1, *nan.shape[-2:])

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        group = np.arange(columns.start, columns.stop) // GROUP
        return np.where(grid[expert, rows][:, group], np.uint8(0), p.slab(expert, rows, columns))

    return Stream(q, slab, along=0)


def write(module: str, q: QuantTensor) -> dict[str, Array]:
    """The module's tensors as they were stored, by full name."""
    (names,) = (names for names in NAMES if names.packed == q.source["packed"])
    codes, scales = np.ascontiguousarray(q.codes), np.ascontiguousarray(q.scales[0].data).view(np.uint8)
    residue = dict(q.residue)
    if NAN_SCALES in residue:
        positions = residue.pop(NAN_SCALES)
        codes, scales = codes.copy(), scales.copy()
        codes.reshape(-1)[_under(positions, q.k)] = residue.pop(NAN_CODES)
        scales.reshape(-1)[positions] = NAN
    packed = join_nibbles(codes)
    tensors = {
        module + names.packed: packed.reshape(*scales.shape, GROUP // 2) if names.blocked else packed,
        module + names.scale: scales.view(E8M0 if q.source["scale_dtype"] == "F8_E8M0" else np.uint8),
    }
    if q.bias is not None:
        tensors[module + names.bias] = q.bias
    return tensors | {f"{module}.{suffix}": array for suffix, array in residue.items()}


def _is_nan(scale: Tensor) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = scale.array().view(np.uint8) == NAN
    return found


def _under(scales: Array, k: int) -> Array:
    """int64 [count, 32]: flat positions of the codes under flat positions of scales; the last repeats past k."""
    row, group = np.divmod(scales, -(-k // GROUP))
    column = np.minimum(group[:, None] * GROUP + np.arange(GROUP), k - 1)
    positions: Array = row[:, None] * k + column
    return positions


def _parts(checkpoint: Checkpoint, module: str) -> Parts:
    tensors = checkpoint.tensors
    named = ((tensors.get(module + names.packed), names) for names in (*NAMES, ALONG_OUT))
    packed, names = next(
        (t, names) for t, names in named if t is not None and _module(checkpoint, t) == (module, names)
    )
    checks.as_published(checkpoint, packed)
    if names is ALONG_OUT:
        raise UnsupportedError(
            "two output rows share a byte and 32 a scale, which no product along k can use",
            file=packed.file,
            tensor=packed.name,
            found=f"ModelOpt's export of stacked experts, {list(packed.shape)}",
            need="_blocks and _scales as gpt-oss publishes them",
            do="export one module an expert",
        )
    plain = tensors.get(packed.name[: -len("_blocks")])
    if names.blocked and plain is not None:
        raise UnsupportedError(
            "two weights for one module",
            file=plain.file,
            tensor=plain.name,
            found=f"it beside {packed.name}",
            do="remove the one that does not count",
        )
    scale, bias = tensors[module + names.scale], tensors.get(module + names.bias)
    checks.dtype(scale, *BYTES)
    logical = tensors.get(module + ".weight_shape")
    if names.blocked:
        if len(packed.shape) not in (3, 4) or packed.shape[-1] != GROUP // 2 or 0 in packed.shape:
            raise CorruptError(
                "blocks are 16 bytes of 32 codes",
                file=packed.file,
                tensor=packed.name,
                found=list(packed.shape),
                need="[experts, n, k / 32, 16]",
            )
        lead, n, k = list(packed.shape[:-3]), packed.shape[-3], GROUP * packed.shape[-2]
    else:
        lead, n, k = nibbles.extents(packed, logical)
    checks.shape(scale, (*lead, *grid_shape(n, k, (1, GROUP))), why=f"for {n} x {k} weights in groups of {GROUP}")
    checks.bias(bias, packed, lead, n)
    source: dict[str, Any] = {"format": "mxfp4", "packed": names.packed, "scale_dtype": scale.dtype}
    if names.interleaved and module.endswith(names.interleaved):
        source["rows"] = "gate and up interleaved"
    kept = checks.kept({} if logical is None else {"weight_shape": logical})
    return Parts(packed, scale, bias, kept, lead, n, k, source)
