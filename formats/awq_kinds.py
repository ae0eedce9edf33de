"""Whose a module with AWQ's tensor names is, and in which version: shapes and dtypes decide, labels must agree.

| version | qweight | scales |
| --- | --- | --- |
| gemm | int32 [K, N/8] | [G, N] |
| gemv | int32 [N, K/8] | [N, 8 * ceil(G/8)] |
| gemv_fast | int16 [N/4, K] | [G, N] |
| llm-awq | the same, or as gemv | and ``scaled_zeros`` beside them |
| codes packed along k, not AWQ | int32 [K/8, N] | [G, N] |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import checks
from .errors import UnsupportedError

if TYPE_CHECKING:
    from .container import Checkpoint, Tensor

FLOATS = ("F16", "BF16", "F32")

LABELS = ("awq", "auto_round:auto_awq", "auto_round:awq")
KEYS = ("w_bit", "q_group_size", "zero_point", "version")
"""A configuration without a name is ours if it has one of these."""
# ``exllama`` and ``ipex`` name kernels that take the gemm version.
VERSIONS = ("gemm", "exllama", "ipex")

# What betrays the other versions.
OTHERS = {
    "llm-awq": "int16 codes, or scaled_zeros beside them",
    "gemv_fast": "int16 codes",
    "gemv": "one row of codes for each row of scales",
    "8 bit": "four codes a word",
}


def method(config: Mapping[str, Any]) -> str | None:
    """What a configuration says it is of; None when there is none."""
    if not config:
        return None
    named = config.get("quant_method") or config.get("method")
    if named is None:
        return LABELS[0] if any(key in config for key in KEYS) else "unnamed"
    packing = config.get("packing_format")
    return str(packing if packing in LABELS else named).lower()


def kind(checkpoint: Checkpoint, module: str, qweight: Tensor) -> str | None:
    """What the shapes and dtypes of a module's tensors say its packing is; None when they agree with nothing."""
    scales = checkpoint.tensors.get(checks.full_name(module, "scales"))
    if checks.full_name(module, "scaled_zeros") in checkpoint.tensors:
        return "llm-awq"
    if scales is None or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    (rows, words), (groups, n) = qweight.shape, scales.shape
    ours = method(checkpoint.quantization) in LABELS
    if qweight.dtype == "I16":
        return "gemv_fast" if ours or words != n else None
    if words == n:
        return "packed along k"
    if words * 8 == n:
        return "gemm"
    if rows == groups:
        return "gemv"
    return "8 bit" if words * 4 == n and ours else None


def mislabelled(tensor: Tensor, found: str) -> UnsupportedError:
    """The error for tensors of one kind under the label of another."""
    return UnsupportedError(
        "the label contradicts the shapes",
        file=tensor.file,
        tensor=tensor.name,
        found=found,
        need="a quant_method that says what the tensors are",
        do="correct quant_method, or get the configuration that belongs to this file",
    )


def refuse_paired_rows(weight: Tensor, scale: Tensor | None) -> None:
    """Refuse ModelOpt's W4A16_AWQ: a byte holds two output rows, so scales have twice the rows of the weight."""
    if (
        scale is not None
        and weight.dtype == "U8"
        and scale.dtype in FLOATS
        and len(weight.shape) == len(scale.shape) == 2
        and scale.shape[0] == 2 * weight.shape[0]
    ):
        raise UnsupportedError(
            "ModelOpt's W4A16_AWQ, two output rows in a byte",
            file=weight.file,
            tensor=weight.name,
            found=f"U8 {list(weight.shape)} with scales {list(scale.shape)}",
            need="AWQ of version gemm",
            do="export the model with another quantiser",
        )


def check_version(checkpoint: Checkpoint) -> None:
    """Refuse a label of another version. GPTQModel calls it format, transformers knows a backend as well."""
    config = checkpoint.quantization
    for key in ("version", "checkpoint_format", "format", "backend"):
        said = config.get(key)
        if said is None or (key == "backend" and said != "llm-awq"):
            continue
        if str(said).lower() not in VERSIONS:
            raise UnsupportedError(
                "the label names a version of AWQ with another order of bits, its shapes are those of gemm",
                file=checkpoint.stated_in,
                found=f"{key} {said!r}",
                need="gemm",
                do="correct the label if the file is gemm",
            )
