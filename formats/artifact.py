"""Our own file: a safetensors checkpoint whose metadata says which modules are packed, and how. See docs/format.md.

    __metadata__["warptile"] = {"version": 1, "modules": {P: spec}}        the modules of this very file
    spec = what the layout records (``kernels.Y.spec``) + "source" (+ "residue")

What a spec may say, and when it is believed: ``spec.py``. Layouts are passed in: ``{"marlin": module, ...}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from . import strict_json
from .canonical import QuantTensor
from .container import ARTIFACT, Checkpoint, nbytes, open_checkpoint
from .errors import AGAIN, CorruptError, UnsupportedError
from .parts import NARROW, Part, expert_of, parts, unpacked
from .spec import (
    RESIDUE,
    Layouts,
    Spec,
    as_stored,
    check_perm,
    check_spec,
    check_tensors,
    denied,
    grouped_spec,
    module_spec,
    stored,
)
from .stream import Stream, whole
from .strict_json import shown

__all__ = [
    "NARROW",
    "RESIDUE",
    "Artifact",
    "as_stored",
    "check_artifact",
    "config",
    "grouped_spec",
    "is_artifact",
    "metadata",
    "module_spec",
    "nbytes",
    "open_artifact",
    "refuse_artifact",
    "stored",
]

Array = NDArray[Any]

VERSION = 1


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
        spec = self.modules[name]
        suffixes = self.layouts[spec["layout"]].expected(spec)
        return {suffix: self.checkpoint.tensors[f"{name}.{suffix}"].array() for suffix in suffixes}

    def names(self, name: str) -> list[str]:
        """The full names of those tensors."""
        return [
            f"{name}.{suffix}" for suffix in self.layouts[self.modules[name]["layout"]].expected(self.modules[name])
        ]

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Every linear of the source that was converted, by its name there; in the order of the modules."""
        return {part.name: part for name, spec in self.modules.items() for part in parts(name, spec)}

    def quant(self, name: str) -> QuantTensor:
        """A linear of the source in canonical form, as its reader gave it; or a module of several as it is stored.

        KeyError for an unknown name. Raises CorruptError as ``parts.unpacked``.
        """
        return whole(self.stream(name))

    def stream(self, name: str, *, in_range: bool = True) -> Stream:
        """``quant``, its codes by the slab; slabs raise CorruptError, unless codes need not be ``in_range``."""
        part = self.parts.get(name)
        module = name if part is None else part.module
        spec, tensors = self.modules[module], self.tensors(module)
        layout = self.layouts[spec["layout"]]
        if part is None:
            return view(layout, tensors, spec)
        if part.expert is not None:
            tensors, spec = expert_of(layout, spec, tensors, part.expert)
        mine = (suffix for suffix in spec.get("residue", ()) if suffix.startswith(part.prefix))
        kept = {s: self.checkpoint.tensors[f"{module}.{RESIDUE}{s}"].array() for s in mine}
        return unpacked(view(layout, tensors, spec), part, self.checkpoint.path, kept, in_range=in_range)


def view(layout: ModuleType, tensors: Mapping[str, Array], spec: Spec) -> Stream:
    """What a layout packed, its codes by the slab."""
    stream: Stream = layout.view(tensors, spec)
    return stream


def _written_here(checkpoint: Checkpoint) -> list[Path]:
    """The files of a checkpoint that say they are ours."""
    return [file for file, metadata in checkpoint.file_metadata.items() if ARTIFACT in metadata]


def is_artifact(checkpoint: Checkpoint) -> bool:
    """Whether any file of a checkpoint says it is ours."""
    return bool(_written_here(checkpoint))


def refuse_artifact(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a checkpoint that has been converted before."""
    if files := _written_here(checkpoint):
        raise UnsupportedError("already converted", file=files[0], do="unpack it first to convert it again")


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
    return check_artifact(open_checkpoint(path), layouts)


def check_artifact(checkpoint: Checkpoint, layouts: Layouts) -> Artifact:
    """``open_artifact`` of files that are open. Raises as it does."""
    if not is_artifact(checkpoint):
        raise UnsupportedError(
            "not converted yet", file=checkpoint.path, do="convert it, or name what a conversion wrote"
        )
    modules: dict[str, Spec] = {}
    for file, said in checkpoint.file_metadata.items():
        for name, spec in _modules(file, said).items():
            if name in modules:
                raise CorruptError("the module is in two files", file=file, tensor=name, do=AGAIN)
            modules[name] = spec
    owner: dict[str, str] = {}
    for name, spec in modules.items():
        check_spec(checkpoint.path, name, spec, layouts)
        for tensor in check_tensors(checkpoint, name, spec, layouts[spec["layout"]]):
            if tensor in owner:
                raise CorruptError(
                    "two modules have one tensor",
                    file=checkpoint.path,
                    tensor=tensor,
                    found=f"{owner[tensor]}, {name}",
                    do=AGAIN,
                )
            owner[tensor] = name
        check_perm(checkpoint, name, spec)
    _check_parts(checkpoint, modules)
    rest = tuple(name for name in checkpoint.tensors if name not in owner)
    for name in rest:
        module, inside, _ = name.partition(f".{RESIDUE}")
        if inside and module in modules:
            raise denied(checkpoint, module, name)
    source = _source_text(checkpoint, "source_metadata")
    for key, text in source.items():
        if not isinstance(text, str):
            raise CorruptError("source_metadata holds no string", file=checkpoint.path, tensor=shown(key), do=AGAIN)
    quantization = {**_ours(checkpoint), "source": _source_text(checkpoint, "source_quantization")}
    checkpoint = replace(checkpoint, quantization=quantization)
    return Artifact(checkpoint, modules, rest, source, layouts)


def _check_parts(checkpoint: Checkpoint, modules: Mapping[str, Spec]) -> None:
    """Raise CorruptError for a linear that is stored twice, or called like a module it is not."""
    seen: dict[str, str] = {}
    for module, spec in modules.items():
        for part in parts(module, spec):
            if part.name in seen or (part.name in modules and not part.alone):
                where = f"{seen.get(part.name, part.name)}, {module}"
                raise CorruptError(
                    "a linear is in two modules",
                    file=checkpoint.path,
                    tensor=shown(part.name),
                    found=shown(where),
                    do=AGAIN,
                )
            seen[part.name] = module


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
        raise CorruptError("a shard without our metadata", file=file, need=ARTIFACT, do=AGAIN)
    content = strict_json.parse(said[ARTIFACT].encode(), file, f"{ARTIFACT} in its metadata")
    version, modules = content.get("version"), content.get("modules")
    if type(version) is not int or version < 1:
        raise CorruptError("no version", file=file, found=shown(repr(version)), need=VERSION, do=AGAIN)
    if version > VERSION:
        raise UnsupportedError("of a newer version", file=file, found=version, need=VERSION, do="update warptile")
    unknown = content.keys() - {"version", "modules"}
    if unknown or not isinstance(modules, dict):
        found = shown(sorted(unknown)) if unknown else strict_json.kind(modules)
        raise CorruptError("metadata is malformed", file=file, found=found, need="version and modules", do=AGAIN)
    return modules
