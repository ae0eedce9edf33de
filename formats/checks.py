"""Checks of stored tensors that several readers make. Each raises one line: file, tensor, found, need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .container import DTYPES, Checkpoint, Tensor
from .errors import AS_WRITTEN, RIGHT_LABELS, CorruptError, UnsupportedError

Array = NDArray[Any]

MAX_EXTENT = 2**31 - 1
"""Of a block that a label names, as of a matrix in an artifact's spec."""

EXPONENTS: Mapping[str, np.unsignedinteger[Any]] = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
}
"""The bits that a NaN or an infinite number has all of."""


def refuse_any(
    tensor: Tensor, bad: NDArray[np.bool_], what: str, need: str, do: str | None = None, values: Array | None = None
) -> None:
    """Refuse entries marked ``bad``, with their number, the first one's position and its value. Raises CorruptError."""
    if bad.any():
        first = int(bad.argmax())
        at = [int(i) for i in np.unravel_index(first, bad.shape)]
        value = "" if values is None else f", is {float(values.reshape(-1)[first]):g}"
        raise CorruptError(
            what,
            file=tensor.file,
            tensor=tensor.name,
            found=f"{int(bad.sum())} of {bad.size}, the first at {at}{value}",
            need=need,
            do=do,
        )


def finite(tensor: Tensor, values: Array, what: str = "scales") -> None:
    """Refuse NaN and infinite numbers; ``what`` is what they are. Raises CorruptError."""
    bad: Array
    if (exponent := EXPONENTS.get(values.dtype.name)) is not None:  # NumPy takes 16-bit floats one by one
        bad = values.view(exponent.dtype) & exponent == exponent
    else:
        with np.errstate(invalid="ignore"):
            bad = ~np.isfinite(values)
    refuse_any(tensor, bad, f"{what} are NaN or infinite", "finite numbers", values=values)


def full_name(module: str, suffix: str) -> str:
    """A tensor's name in its file; a file of one nameless module has bare suffixes."""
    return f"{module}.{suffix}" if module else suffix


def parted(name: str) -> tuple[str, str]:
    """(module, suffix) of a tensor's name, the inverse of ``full_name``; ".weight" is no module's weight."""
    module, dot, suffix = name.rpartition(".")
    return (module, suffix) if module or not dot else ("", name)


def members(checkpoint: Checkpoint, module: str, suffixes: Sequence[str], needed: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a module that are there, by suffix, in the order of ``suffixes``. Raises CorruptError when one of
    ``needed`` is not."""
    found = {s: t for s in suffixes if (t := checkpoint.tensors.get(full_name(module, s))) is not None}
    for suffix in needed:
        if suffix not in found:
            raise CorruptError(
                f"module {module!r} is incomplete",
                file=checkpoint.path,
                tensor=full_name(module, suffix),
                found="no such tensor",
                need=f"it beside {', '.join(tensor.name for tensor in found.values())}",
            )
    return found


def claim(found: dict[str, tuple[str, ...]], module: str, members: tuple[str, ...], tensor: Tensor) -> None:
    """Enter a module's tensors; ``tensor`` holds its codes. Raises UnsupportedError when others hold them too."""
    if found.setdefault(module, members) != members:
        raise UnsupportedError(
            "two readings of one module",
            file=tensor.file,
            tensor=tensor.name,
            found=f"codes in it and among {', '.join(found[module])}",
            do="remove one of them",
        )


def dtype(tensor: Tensor, *allowed: str) -> None:
    """Refuse a dtype. Raises UnsupportedError."""
    if tensor.dtype not in allowed:
        raise UnsupportedError(
            "unexpected dtype",
            file=tensor.file,
            tensor=tensor.name,
            found=tensor.dtype,
            need=" or ".join(allowed),
            do=AS_WRITTEN,
        )


def shape(tensor: Tensor, *allowed: tuple[int, ...], why: str) -> None:
    """Refuse a shape; ``why`` says what it follows from. Raises CorruptError."""
    if tensor.shape not in allowed:
        wanted = " or ".join(str(list(s)) for s in dict.fromkeys(allowed))
        raise CorruptError(
            "shapes disagree", file=tensor.file, tensor=tensor.name, found=list(tensor.shape), need=f"{wanted} {why}"
        )


def bias(tensor: Tensor | None, weight: Tensor, lead: list[int], n: int) -> None:
    """Refuse a bias that is not one 16- or 32-bit number for each row."""
    if tensor is not None:
        dtype(tensor, "F16", "BF16", "F32")
        shape(tensor, (*lead, n), why=f"for the {n} rows of {weight.name}")


def bias_values(tensor: Tensor | None) -> Array | None:
    """A bias as it is stored, None without one. Raises CorruptError for NaN and infinite values."""
    if tensor is None:
        return None
    values = tensor.array()
    finite(tensor, values, "values of a bias")
    return values


def kept(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors, to be carried along as arrays. Raises UnsupportedError where numpy has no such type."""
    for tensor in tensors.values():
        dtype(tensor, *(name for name, (held, _) in DTYPES.items() if held is not None))
    return tensors


def rows_of_shards(config: Mapping[str, Any], module: str, n: int) -> tuple[int, ...]:
    """Rows of each part of a fused weight: q, k, v by the heads that config.json counts; gate and up in halves.

    Empty when the module is not known to be fused, or its parts do not add up to n rows.
    """
    name = module.rpartition(".")[2]
    if name == "gate_up_proj" and n % 2 == 0:
        return n // 2, n // 2
    if name == "qkv_proj":
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        heads = text.get("num_attention_heads")
        groups = text.get("num_key_value_heads", heads)
        if type(heads) is int and type(groups) is int and min(heads, groups, n) > 0:
            rows, rest = divmod(n, heads + 2 * groups)
            return (heads * rows, groups * rows, groups * rows) if rest == 0 else ()
    return ()


def number(config: Mapping[str, Any], key: str, file: str) -> int | None:
    """A whole number of a configuration, None where it says nothing. Raises UnsupportedError."""
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise UnsupportedError(f"{key} is not a number", file=file, found=repr(value)[:80], do=RIGHT_LABELS)
    return value


def texts(config: Mapping[str, Any], key: str, file: str) -> list[str]:
    """A list of texts of a configuration, empty where it says nothing. Raises UnsupportedError."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise UnsupportedError(f"{key} is not a list of texts", file=file, found=repr(value)[:80], do=RIGHT_LABELS)
    return value or []


def table(config: Mapping[str, Any], key: str, file: str) -> Mapping[str, Any]:
    """A table of a configuration, empty where it says nothing. Raises UnsupportedError."""
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise UnsupportedError(f"{key} is not a table", file=file, found=repr(value)[:80], do=RIGHT_LABELS)
    return value or {}


REORDERED = ("swizzle", "shuffle", "prepack", "pre_pack", "swapped_nibble", "swap_nibble")


def as_published(checkpoint: Checkpoint, tensor: Tensor) -> None:
    """Refuse a file whose metadata says that its bytes were reordered for some library. Raises UnsupportedError."""
    if "reordered" not in checkpoint.memo:
        checkpoint.memo["reordered"] = next(_reordered(checkpoint), None)
    if checkpoint.memo["reordered"] is not None:
        raise UnsupportedError(
            "scales or codes were reordered for a GPU library",
            file=tensor.file,
            tensor=tensor.name,
            found=checkpoint.memo["reordered"],
            need="the checkpoint as its quantiser published it",
            do="get that one, or export the model again",
        )


def _reordered(checkpoint: Checkpoint) -> Iterator[str]:
    for where, labels in (("quantization config", checkpoint.quantization), ("metadata", checkpoint.metadata)):
        for key, value in _leaves(labels):
            said = (key, value if isinstance(value, str) and len(value) < 64 else "")
            if str(value).lower() in ("", "none", "false", "0"):
                continue
            if any(word in text.lower() for word in REORDERED for text in said):
                yield f"{key} = {value!r} in the {where}"


def _leaves(labels: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(labels, Mapping):
        for key, value in labels.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(labels, list):
        for value in labels:
            yield from _leaves(value, path)
    else:
        yield path, labels
