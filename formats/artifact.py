"""Our own file: a safetensors checkpoint whose metadata says which modules are packed, and how. See docs/format.md.

    __metadata__["warptile"] = {"version": 1, "modules": {P: spec}}        the modules of this very file
    spec = what the layout records (``kernels.Y.spec``) + "source" (+ "residue")

Reader and writer use one table of keys, and a spec is believed only when the layout, given the outline the spec
describes, would write that very spec and those very tensors. Layouts are passed in: ``{"marlin": module, ...}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import strict_json
from .canonical import ELEMENTS, SCALE_DTYPES, Element, QuantTensor, recode, widened
from .container import ARTIFACT, Checkpoint, dtype_name, nbytes, open_checkpoint
from .errors import CorruptError, UnsupportedError
from .strict_json import shown

__all__ = [
    "Artifact",
    "as_stored",
    "config",
    "is_artifact",
    "metadata",
    "module_spec",
    "nbytes",
    "open_artifact",
    "refuse_artifact",
    "stored",
]

Array = NDArray[Any]
Spec = dict[str, Any]
Layouts = Mapping[str, ModuleType]

VERSION = 1
NARROW = "narrow"
"""Key of ``source``: the element whose codes ``--widen`` put into wider fields."""
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
    "source": ("an object with a format", lambda v: isinstance(v, dict) and _text(v.get("format"))),
    "residue": ("a list of suffixes", _list(_text)),
}
OURS = ("source", "residue")  # the keys that are not the layout's


@dataclass(frozen=True)
class Artifact:
    """An artifact whose every spec has been checked against its tensors; nothing but permutations has been read."""

    checkpoint: Checkpoint
    """``quantization`` is ``{"quant_method": "warptile", "source": the source's own, ...}``, wherever it was found."""
    modules: dict[str, Spec]
    passthrough: tuple[str, ...]
    """Names of the tensors that belong to no module, in file order."""
    source_metadata: dict[str, str]
    """The source's own ``__metadata__``."""
    layouts: Layouts

    def tensors(self, name: str) -> dict[str, Array]:
        """{suffix: mapped array} of what the layout packed for a module. KeyError for an unknown name."""
        suffixes = self.layouts[self.modules[name]["layout"]].expected(self.modules[name])
        return {suffix: self.checkpoint.tensors[f"{name}.{suffix}"].array() for suffix in suffixes}

    def quant(self, name: str) -> QuantTensor:
        """The module in canonical form, as its source's reader gave it. KeyError for an unknown name.

        Raises CorruptError: a widened code that its narrow element does not have.
        """
        spec = self.modules[name]
        q: QuantTensor = self.layouts[spec["layout"]].unpack(self.tensors(name), spec)
        source = dict(spec["source"])
        narrow = source.pop(NARROW, None)
        if narrow is not None:
            q = recode(q, ELEMENTS[narrow])
            if int(q.codes.max(initial=0)) >= 2**q.element.bits:
                raise CorruptError(
                    "a code is out of range",
                    file=self.checkpoint.path,
                    tensor=name,
                    found=int(q.codes.max()),
                    need=f"< {2**q.element.bits}, as {narrow}",
                )
        kept = {s: self.checkpoint.tensors[f"{name}.{RESIDUE}{s}"].array() for s in spec.get("residue", ())}
        return replace(q, source=source, residue=kept)


def is_artifact(checkpoint: Checkpoint) -> bool:
    """Whether any file of a checkpoint says it is ours."""
    return any(ARTIFACT in metadata for metadata in checkpoint.file_metadata.values())


def refuse_artifact(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a checkpoint that has been converted before."""
    if is_artifact(checkpoint):
        raise UnsupportedError("already converted", file=checkpoint.path, do="unpack it first to convert it again")


def module_spec(spec: Spec, source: Mapping[str, Any], residue: Iterable[tuple[str, Any, Any]] = ()) -> Spec:
    """A module's entry in the metadata: the layout's spec, the reader's ``source``, the suffixes of the residue."""
    kept = {"residue": sorted(suffix for suffix, *_ in residue)}
    whole = {**spec, "source": dict(source), **(kept if kept["residue"] else {})}
    for key, value in whole.items():
        assert KEYS[key][1](value), (key, value)
    return whole


def stored(
    spec: Spec, layout: ModuleType, residue: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]] = ()
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{suffix: (safetensors dtype, shape)} of all tensors of a module: the layout's, then the residue."""
    packed = {s: (STORED_DTYPES[dtype], shape) for s, (dtype, shape) in layout.expected(spec).items()}
    return packed | {f"{RESIDUE}{s}": (dtype_name(dtype), tuple(shape)) for s, dtype, shape in sorted(residue)}


def as_stored(tensors: Mapping[str, Array], residue: Mapping[str, Array]) -> dict[str, Array]:
    """The same for arrays: {suffix: array}."""
    return {**tensors, **{f"{RESIDUE}{suffix}": residue[suffix] for suffix in sorted(residue)}}


def metadata(source: Checkpoint, modules: Mapping[str, Spec], *, first: bool = True) -> dict[str, str]:
    """``__metadata__`` of one file of an artifact that holds ``modules``; the first file also tells of the source."""
    out = {"format": "pt", ARTIFACT: _dump({"version": VERSION, "modules": modules})}
    if first and source.metadata:
        out["source_metadata"] = _dump(source.metadata)
    if first and source.quantization:
        out["source_quantization"] = _dump(source.quantization)
    return out


def config(source: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """config.json of an artifact: the source's, its quantization_config kept inside ours."""
    kept = {"source": source["quantization_config"]} if "quantization_config" in source else {}
    return {**source, "quantization_config": {"quant_method": ARTIFACT, "version": VERSION, "layout": layout, **kept}}


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def open_artifact(path: str | os.PathLike[str], layouts: Layouts) -> Artifact:
    """Open an artifact and check every spec against its tensors; permutations are the only data read.

    Raises:
        UnsupportedError: not an artifact, of a newer version, or of a layout that is not in ``layouts``.
        CorruptError: a spec that is malformed, or that its tensors do not bear out.
        WarptileError: it cannot be read.
    """
    checkpoint = open_checkpoint(path)
    if not is_artifact(checkpoint):
        raise UnsupportedError("not converted yet", file=checkpoint.path, do="convert it first")
    modules: dict[str, Spec] = {}
    for file, said in checkpoint.file_metadata.items():
        for name, spec in _modules(file, said).items():
            if name in modules:
                raise CorruptError("the module is in two files", file=file, tensor=name)
            modules[name] = spec
    owner: dict[str, str] = {}
    for name, spec in modules.items():
        _check_spec(checkpoint, name, spec, layouts)
        for tensor in _check_tensors(checkpoint, name, spec, layouts[spec["layout"]]):
            if tensor in owner:
                raise CorruptError(
                    "two modules have one tensor", file=checkpoint.path, tensor=tensor, found=f"{owner[tensor]}, {name}"
                )
            owner[tensor] = name
        _check_perm(checkpoint, name, spec)
    rest = tuple(name for name in checkpoint.tensors if name not in owner)
    for name in rest:
        module, inside, _ = name.partition(f".{RESIDUE}")
        if inside and module in modules:
            raise _denied(checkpoint, module, name)
    source = _source_text(checkpoint, "source_metadata")
    for key, text in source.items():
        if not isinstance(text, str):
            raise CorruptError("source_metadata holds no string", file=checkpoint.path, tensor=shown(key))
    quantization = {**_ours(checkpoint), "source": _source_text(checkpoint, "source_quantization")}
    checkpoint = replace(checkpoint, quantization=quantization)
    return Artifact(checkpoint, modules, rest, source, layouts)


def _ours(checkpoint: Checkpoint) -> dict[str, Any]:
    """Our part of config.json; a lone file has none."""
    ours = checkpoint.config.get("quantization_config")
    return ours if isinstance(ours, dict) and ours.get("quant_method") == ARTIFACT else {"quant_method": ARTIFACT}


def _source_text(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    text = checkpoint.metadata.get(key, "{}")
    return strict_json.parse(text.encode(), checkpoint.path, f"{key} in its metadata", constants=True)


def _modules(file: Path, said: Mapping[str, str]) -> dict[str, Any]:
    """The specs of one file, as they stand there."""
    if ARTIFACT not in said:
        raise CorruptError("a shard without our metadata", file=file, need=ARTIFACT, do="convert the source again")
    content = strict_json.parse(said[ARTIFACT].encode(), file, f"{ARTIFACT} in its metadata")
    version, modules = content.get("version"), content.get("modules")
    if type(version) is not int or version < 1:
        raise CorruptError("no version", file=file, found=shown(repr(version)), need=VERSION)
    if version > VERSION:
        raise UnsupportedError("of a newer version", file=file, found=version, need=VERSION, do="update warptile")
    unknown = content.keys() - {"version", "modules"}
    if unknown or not isinstance(modules, dict):
        found = shown(sorted(unknown)) if unknown else strict_json.kind(modules)
        raise CorruptError("metadata is malformed", file=file, found=found, need="version and modules")
    return modules


def _check_spec(checkpoint: Checkpoint, name: str, spec: object, layouts: Layouts) -> None:
    """Types by the table, then that the layout, given the outline the spec describes, writes that very spec."""

    def corrupt(key: str, need: object) -> CorruptError:
        found = f"{key} = {shown(repr(spec.get(key, 'nothing')))}" if isinstance(spec, dict) else repr(spec)
        return CorruptError("the spec is wrong", file=checkpoint.path, tensor=name, found=found, need=need)

    if not isinstance(spec, dict):
        raise CorruptError("the spec is not an object", file=checkpoint.path, tensor=name, found=strict_json.kind(spec))
    for key, value in spec.items():
        if key not in KEYS:
            raise corrupt(key, "keys of version 1")
        if not KEYS[key][1](value):
            raise corrupt(key, KEYS[key][0])
    if "layout" not in spec or "source" not in spec:
        raise corrupt("layout" if "layout" not in spec else "source", "it")
    if spec["layout"] not in layouts:
        raise UnsupportedError(
            "unknown layout",
            file=checkpoint.path,
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
        raise CorruptError("the layout cannot hold it", file=checkpoint.path, tensor=name, found=reason)
    derived = layout.spec(outline)
    for key in (*derived, *packed):
        if key not in derived or packed.get(key, derived) != derived[key]:
            raise corrupt(key, derived.get(key, f"no such key in {spec['layout']}"))
    narrow = spec["source"].get(NARROW)
    if narrow is not None and not _narrower(narrow, outline.element):
        raise corrupt("source", f"an element narrower than {outline.element.name}")


def _narrower(name: object, wide: Element) -> bool:
    return isinstance(name, str) and name in ELEMENTS and ELEMENTS[name] != wide and widened(ELEMENTS[name]) == wide


def _check_tensors(checkpoint: Checkpoint, name: str, spec: Spec, layout: ModuleType) -> Sequence[str]:
    """The names of the tensors a spec promises, all there; none that the layout could have but the spec denies."""
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
            )
    kept = [f"{RESIDUE}{suffix}" for suffix in spec.get("residue", ())]
    for suffix in kept:
        if f"{name}.{suffix}" not in checkpoint.tensors:
            raise CorruptError(
                f"module {name} lost a tensor", file=checkpoint.path, tensor=f"{name}.{suffix}", found="nothing"
            )
    for suffix in layout.MEMBERS:
        if suffix not in promised and f"{name}.{suffix}" in checkpoint.tensors:
            raise _denied(checkpoint, name, f"{name}.{suffix}")
    return [f"{name}.{suffix}" for suffix in (*promised, *kept)]


def _denied(checkpoint: Checkpoint, module: str, tensor: str) -> CorruptError:
    return CorruptError(f"a tensor that the spec of module {module} denies", file=checkpoint.path, tensor=tensor)


def _check_perm(checkpoint: Checkpoint, name: str, spec: Spec) -> None:
    """perm is a permutation of the k logical channels, followed by the padding in its own order."""
    tensor = checkpoint.tensors.get(f"{name}.perm")
    if not spec.get("perm") or tensor is None:
        return
    perm, k = tensor.array(), spec["k"]
    padding = np.arange(k, len(perm))
    if not np.array_equal(np.sort(perm[:k]), np.arange(k)) or not np.array_equal(perm[k:], padding):
        raise CorruptError(
            "not a permutation", file=checkpoint.path, tensor=tensor.name, need=f"0 to {k - 1} once each, then padding"
        )
