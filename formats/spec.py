"""A module's entry in an artifact's metadata: one table of its keys for reader and writer, and what makes it safe.

A spec is believed only when the layout, given the outline the spec describes, would write that very spec, and when the
tensors are those the layout then expects. Layouts are passed in: ``{"marlin": module, ...}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import strict_json
from .canonical import ELEMENTS, SCALE_DTYPES
from .container import Checkpoint
from .errors import AGAIN, CorruptError, UnsupportedError
from .parts import is_entries, is_source, misplaced
from .strict_json import shown
from .tensor import dtype_name

Array = NDArray[Any]
T = TypeVar("T")
Spec = dict[str, Any]
Layouts = Mapping[str, ModuleType]

RESIDUE = "source."
"""Prefix of the suffixes under which source tensors are kept that nothing else determines."""

# Names of dtypes in ``layout.expected`` -> safetensors' names.
STORED_DTYPES = {name: dtype_name(dtype) for name, dtype in SCALE_DTYPES.items()} | {"i32": "I32", "u8": "U8"}


def _size(low: int, high: int = 2**31 - 1) -> Callable[[object], bool]:
    return lambda v: type(v) is int and low <= v <= high


def _list(each: Callable[[object], bool], length: int | None = None) -> Callable[[object], bool]:
    return lambda v: isinstance(v, list) and length in (None, len(v)) and all(map(each, v))


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda v: any(v is w or (type(v) is type(w) and v == w) for w in values)


def _text(v: object) -> bool:
    return isinstance(v, str) and v != ""


# Key of a spec -> (what its value must be, in words; the test). A layout uses some of them.
KEYS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "layout": ("a name", _text),
    "element": (" or ".join(ELEMENTS), _one_of(*ELEMENTS)),
    "signed": ("true or false", _one_of(True, False)),
    "n": ("1 to 2^31 - 1", _size(1)),
    "k": ("1 to 2^31 - 1", _size(1)),
    "n_padded": ("1 to 2^31 - 1", _size(1)),
    "k_padded": ("1 to 2^31 - 1", _size(1)),
    "experts": ("null, or 1 to 2^20", lambda v: v is None or _size(1, 2**20)(v)),
    "group": ("-1, or 1 to 2^31 - 1", lambda v: _one_of(-1)(v) or _size(1)(v)),
    "scale": (" or ".join(SCALE_DTYPES), _one_of(*SCALE_DTYPES)),
    "scale_block": ("[rows, columns]", _list(_size(1), 2)),
    "zero": ('null or "int"', _one_of(None, "int")),
    "perm": ("true or false", _one_of(True, False)),
    "bias": ("null, f16, bf16 or f32", _one_of(None, "f16", "bf16", "f32")),
    "kind": ("a name", _text),
    "global": ("f32", _one_of("f32")),
    "shards": ("a list of sizes", _list(_size(1))),
    "row_order": ('"ggml_rope"', _one_of("ggml_rope")),
    "source": ("an object with a format", is_source),
    "parts": ("a list of name, n, source, and what else a part has", is_entries),
    "residue": ("a list of suffixes", _list(_text)),
}
OURS = ("source", "parts", "residue")  # the keys that are not the layout's


def module_spec(spec: Spec, source: Mapping[str, Any], residue: Iterable[tuple[str, Any, Any]] = ()) -> Spec:
    """A module's entry in the metadata: the layout's spec, the reader's ``source``, the suffixes of the residue."""
    return _whole_spec(spec, {"source": dict(source)}, residue)


def grouped_spec(spec: Spec, entries: Sequence[Spec], residue: Iterable[tuple[str, Any, Any]] = ()) -> Spec:
    """The same of a module that holds several linears: ``entries`` as ``parts.entry`` makes them."""
    return _whole_spec(spec, {"parts": list(entries)}, residue)


def _whole_spec(spec: Spec, origin: Spec, residue: Iterable[tuple[str, Any, Any]]) -> Spec:
    kept = {"residue": sorted(suffix for suffix, *_ in residue)}
    whole = {**spec, **origin, **(kept if kept["residue"] else {})}
    for key, value in whole.items():
        assert KEYS[key][1](value), (key, value)
    return whole


def stored(
    spec: Spec, layout: ModuleType, residue: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]] = ()
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{suffix: (safetensors dtype, shape)} of all tensors of a module: the layout's, then the residue."""
    packed = {s: (STORED_DTYPES[dtype], shape) for s, (dtype, shape) in layout.expected(spec).items()}
    return packed | {f"{RESIDUE}{s}": (dtype_name(dtype), tuple(shape)) for s, dtype, shape in sorted(residue)}


def as_stored(tensors: Mapping[str, T], residue: Mapping[str, Array]) -> dict[str, T | Array]:
    """The same for arrays: {suffix: array}."""
    return {**tensors, **{f"{RESIDUE}{suffix}": residue[suffix] for suffix in sorted(residue)}}


def check_spec(file: Path, name: str, spec: object, layouts: Layouts) -> None:
    """Types by the table, then that the layout, given the outline the spec describes, writes that very spec.

    Raises CorruptError, and UnsupportedError for a layout that is not in ``layouts``.
    """

    if not isinstance(spec, dict):
        raise CorruptError("the spec is not an object", file=file, tensor=name, found=strict_json.kind(spec), do=AGAIN)

    def corrupt(key: str, need: object) -> CorruptError:
        found = f"{shown(key)} = {shown(repr(spec[key]))}" if key in spec else f"no {key}"
        return CorruptError("the spec is wrong", file=file, tensor=name, found=found, need=need, do=AGAIN)

    for key, value in spec.items():
        if key not in KEYS:
            raise corrupt(key, "keys of version 1")
        if not KEYS[key][1](value):
            raise corrupt(key, KEYS[key][0])
    if "layout" not in spec or ("source" in spec) == ("parts" in spec):
        raise corrupt("layout" if "layout" not in spec else "source", "it, or parts")
    if spec["layout"] not in layouts:
        raise UnsupportedError(
            "unknown layout",
            file=file,
            tensor=name,
            found=shown(spec["layout"]),
            need=" or ".join(layouts),
            do="update warptile",
        )
    layout = layouts[spec["layout"]]
    packed = {key: value for key, value in spec.items() if key not in OURS}
    try:
        outline = layout.outline(packed)
    except KeyError as missing:
        raise corrupt(missing.args[0], KEYS[missing.args[0]][0]) from None
    reason = layout.accepts(outline)
    if reason is not None:
        raise CorruptError("the layout cannot hold it", file=file, tensor=name, found=reason, do=AGAIN)
    derived = layout.spec(outline)
    for key in (*derived, *packed):
        if key not in derived or packed.get(key, derived) != derived[key]:
            raise corrupt(key, derived.get(key, f"no such key in {spec['layout']}"))
    need = misplaced(spec, outline)
    if need is not None:
        raise corrupt("parts" if "parts" in spec else "source", need)


def check_tensors(checkpoint: Checkpoint, name: str, spec: Spec, layout: ModuleType) -> Sequence[str]:
    """The names of a module's tensors. ``spec`` has passed ``check_spec``.

    Raises CorruptError: one is missing or of another dtype or shape, or there is one that the spec denies.
    """
    promised = stored(spec, layout)
    for suffix, need in promised.items():
        tensor = checkpoint.tensors.get(f"{name}.{suffix}")
        if tensor is None or (tensor.dtype, tensor.shape) != need:
            raise CorruptError(
                f"module {name} and its tensors disagree",
                file=checkpoint.path,
                tensor=f"{name}.{suffix}",
                found="nothing" if tensor is None else f"{tensor.dtype} {shown(list(tensor.shape))}",
                need=f"{need[0]} {list(need[1])}",
                do=AGAIN,
            )
    kept = [f"{RESIDUE}{suffix}" for suffix in spec.get("residue", ())]
    for suffix in kept:
        if f"{name}.{suffix}" not in checkpoint.tensors:
            raise CorruptError(
                f"module {name} lost a tensor",
                file=checkpoint.path,
                tensor=f"{name}.{suffix}",
                found="nothing",
                do=AGAIN,
            )
    for suffix in layout.MEMBERS:
        if suffix not in promised and f"{name}.{suffix}" in checkpoint.tensors:
            raise denied(checkpoint, name, f"{name}.{suffix}")
    return [f"{name}.{suffix}" for suffix in (*promised, *kept)]


def denied(checkpoint: Checkpoint, module: str, tensor: str) -> CorruptError:
    """The error for a tensor under a module's name that its spec says it does not have."""
    return CorruptError(
        f"a tensor that the spec of module {module} denies", file=checkpoint.path, tensor=tensor, do=AGAIN
    )


def check_perm(checkpoint: Checkpoint, name: str, spec: Spec) -> None:
    """Raise CorruptError unless perm holds the k logical channels once each, then the padding in its own order."""
    tensor = checkpoint.tensors.get(f"{name}.perm")
    if not spec.get("perm") or tensor is None:
        return
    perm, k = tensor.array(), spec["k"]
    padding = np.arange(k, len(perm))
    if not np.array_equal(np.sort(perm[:k]), np.arange(k)) or not np.array_equal(perm[k:], padding):
        raise CorruptError(
            "not a permutation",
            file=checkpoint.path,
            tensor=tensor.name,
            need=f"0 to {k - 1} once each, then padding",
            do=AGAIN,
        )
