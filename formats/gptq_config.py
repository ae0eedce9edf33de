"""What a configuration of the GPTQ family says of one module. Labels only: the tensors decide, in ``gptq.py``.

| key | written by |
| --- | --- |
| ``bits`` ``group_size`` (-1: all of k) ``sym`` ``desc_act`` | everyone |
| ``checkpoint_format`` / ``format`` | AutoGPTQ, GPTQModel: gptq (zeros stored minus one), gptq_v2, marlin, ... |
| ``packing_format`` | auto-round |
| ``dynamic`` {regex: overrides}, ``-:`` not quantised, first match of ``re.match`` wins | GPTQModel, auto-round |
| ``extra_config`` {name or regex: overrides}, names first, then ``re.search`` | auto-round |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RIGHT_LABELS, UnsupportedError, UsageError
from .options import CHOICES, Options
from .patterns import matcher

BITS = (2, 3, 4, 8)

METHODS = ("gptq", "auto-round", "intel/auto-round")
# checkpoint_format -> how zeros are stored; ``gptq`` stores zero - 1.
CONVENTIONS = CHOICES["checkpoint_format"]
PLANAR = "gptq_p"
# packing_format -> the same.
PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}
ELSEWHERE = ("auto_round:llm_compressor", "auto_round:auto_awq", "auto_round:awq")
AWQ_KEYS = ("w_bit", "q_group_size", "zero_point", "version")


@dataclass(frozen=True)
class Label:
    """The claims about one module. Empty or None where nothing is said."""

    bits: tuple[int, ...]
    """Values to believe, in this order; more than one when a rule and a command-line switch both speak."""
    group_size: tuple[int, ...]
    """The same for the group size; -1 is one group over all of k."""
    sym: bool | None
    convention: str | None
    """gptq, gptq_v2 or marlin; None when a configuration exists and does not tell."""
    forced: bool
    """The convention was given on the command line."""
    switched: frozenset[str]
    """Of ``bits`` and ``group_size``: those whose first value is the command line's."""
    wrap: str | None
    quantizer: str
    found: bool
    """There is a configuration at all."""
    remarks: tuple[str, ...] = ()


def method(config: Mapping[str, Any]) -> str | None:
    """The quantisation method a configuration names or implies by its keys; None without a configuration."""
    if not config:
        return None
    named = config.get("quant_method") or config.get("method")
    if named is not None:
        named = str(named).lower()
        elsewhere = named in METHODS and config.get("packing_format") in ELSEWHERE
        return str(config["packing_format"]) if elsewhere else named
    return "awq" if any(key in config for key in AWQ_KEYS) else "gptq"


def is_marlin(config: Mapping[str, Any]) -> bool:
    """The label says that the weights are stored as Marlin tiles."""
    return "marlin" in (config.get("checkpoint_format"), config.get("format")) or config.get("is_marlin_format") is True


def label(config: Mapping[str, Any], options: Options, module: str, file: str) -> Label:
    """Base settings, then the module's own rule, then the command line.

    Raises UnsupportedError (unknown method, format, bits, pack_dtype, or a rule that cannot be evaluated) and
    UsageError (a switch with a value that GPTQ does not have).
    """
    named = method(config)
    if named not in (None, *METHODS) and options.checkpoint_format is None:
        raise UnsupportedError(
            f"{module} has GPTQ's tensors, the label says another method",
            file=file,
            found=f"quant_method {named!r}",
            do="--checkpoint-format gptq or gptq_v2 reads it as GPTQ",
        )
    rule, overrides = _rule(config, module, file)
    remarks: tuple[str, ...] = ()
    if overrides is None:
        remarks = (
            f"rule {rule!r} says not quantised, its tensors say it is: read with the settings of the whole file",
        )
        overrides = {}
    settings = {**config, **overrides}

    if options.bits is not None and options.bits not in BITS:
        raise UsageError(f"--bits {options.bits}: {_strange(options.bits)}", tensor=module, need="2, 3, 4 or 8")
    bits = _said(options.bits, settings, overrides, "bits", file)
    for b in bits:
        if b not in BITS:
            raise UnsupportedError(
                _strange(b),
                file=file,
                tensor=module,
                found=f"bits {b}",
                need="bits 2, 3, 4 or 8",
                do="quantise it to one of these; if the label is wrong, correct it",
            )
    group_size = _said(options.group_size, settings, overrides, "group_size", file)
    for g in group_size:
        if g < 1 and g != -1:
            raise UnsupportedError(
                "no such group size", file=file, tensor=module, found=g, need="-1 or more than 0", do=RIGHT_LABELS
            )
    sym = settings.get("sym")
    if sym is not None and not isinstance(sym, bool):
        raise UnsupportedError("sym is not true or false", file=file, tensor=module, found=repr(sym), do=RIGHT_LABELS)
    # No switch can settle this one: the order of the bits is another, the shapes are the same.
    if PLANAR in (settings.get("checkpoint_format"), settings.get("format")):
        raise UnsupportedError(
            "codes are stored in planes",
            file=file,
            tensor=module,
            found=f"format {PLANAR!r}",
            need=" or ".join(CONVENTIONS),
            do="save it again in one of these",
        )
    pack_dtype = settings.get("pack_dtype")
    if pack_dtype not in (None, "int32", "torch.int32"):
        raise UnsupportedError(
            "codes are packed in other words than ours",
            file=file,
            found=f"pack_dtype {pack_dtype!r}",
            need="int32",
            do="pack the model in these",
        )
    return Label(
        bits=bits,
        group_size=group_size,
        sym=sym,
        convention=options.checkpoint_format or _convention(settings, file),
        forced=options.checkpoint_format is not None,
        switched=frozenset(key for key in ("bits", "group_size") if getattr(options, key) is not None),
        wrap=options.zero_wrap,
        quantizer=_quantizer(config),
        found=bool(config),
        remarks=remarks,
    )


def _strange(bits: int) -> str:
    return f"{bits}-bit GPTQ is stored in planes" if bits in (5, 6, 7) else f"{bits} bits are unknown to GPTQ"


def _said(
    option: int | None, settings: Mapping[str, Any], overrides: Mapping[str, Any], key: str, file: str
) -> tuple[int, ...]:
    """The switch replaces what the whole file says; a module's own rule still counts beside it."""
    said = [] if option is None else [option]
    value = settings.get(key)
    if value is not None and (option is None or key in overrides):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnsupportedError(f"{key} is not a number", file=file, found=repr(value), do=RIGHT_LABELS)
        said.append(value)
    return tuple(said)


def _convention(settings: Mapping[str, Any], file: str) -> str | None:
    """checkpoint_format, format and packing_format on one scale; GPTQ without any of them is ``gptq``."""
    if is_marlin(settings):
        return "marlin"
    named = {key: settings[key] for key in ("checkpoint_format", "format") if settings.get(key) is not None}
    if len(set(map(repr, named.values()))) > 1:
        raise UnsupportedError(
            "two labels disagree on how zeros are stored",
            file=file,
            found=", ".join(f"{key} {value!r}" for key, value in named.items()),
            do="--checkpoint-format says which to believe",
        )
    for value in named.values():
        if value not in CONVENTIONS:
            raise UnsupportedError(
                "unknown GPTQ variant",
                file=file,
                found=f"checkpoint_format {value!r}",
                need=", ".join(CONVENTIONS),
                do="--checkpoint-format says how zeros are stored",
            )
        return str(value)
    packing = settings.get("packing_format")
    if packing is not None:
        if not isinstance(packing, str) or packing not in PACKINGS:
            raise UnsupportedError(
                "unknown packing",
                file=file,
                found=f"packing_format {packing!r}",
                need=", ".join(PACKINGS),
                do="--checkpoint-format says how zeros are stored",
            )
        return PACKINGS[packing]
    return None if method(settings) in METHODS[1:] else "gptq"


def _quantizer(config: Mapping[str, Any]) -> str:
    meta = config.get("meta")
    quantizer = meta.get("quantizer", "") if isinstance(meta, Mapping) else ""
    return str(quantizer[0] if isinstance(quantizer, list) and quantizer else quantizer)


def _rule(config: Mapping[str, Any], module: str, file: str) -> tuple[str, Mapping[str, Any] | None]:
    """(pattern, overrides) of the module's rule, ("", {}) without one, (pattern, None): said to be not quantised."""
    dynamic = _table(config, "dynamic", file)
    for pattern, overrides in dynamic.items():
        negative = pattern.startswith("-:")
        if matcher(re.sub(r"^[-+]:", "", pattern), len(module), file).match(module):
            return pattern, None if negative else _override(overrides)
    extra = _table(config, "extra_config", file)
    if module in extra:
        return module, _override(extra[module])
    for pattern, overrides in extra.items():
        if set(pattern) & set(r"\*+?^$()[]{}|") and matcher(pattern, len(module), file, anywhere=True).search(module):
            return pattern, _override(overrides)
    return "", {}


def _table(config: Mapping[str, Any], key: str, file: str) -> Mapping[str, Any]:
    table = config.get(key) or {}
    if not isinstance(table, Mapping):
        found = type(table).__name__
        raise UnsupportedError(f"{key} is not a table of rules", file=file, found=found, do=RIGHT_LABELS)
    return table


def _override(overrides: Any) -> Mapping[str, Any] | None:
    if not isinstance(overrides, Mapping):
        return {}
    return None if overrides.get("bits") in (16, 32) else overrides
