"""Results as tables for people and as JSON for scripts: ``text(result)`` and ``data(result)``, one pair per kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from typing import Any

from ..formats.canonical import scale_words
from ..formats.errors import WarptileError, printable
from .grouping import Apart
from .inspect import Contents, Support
from .modules import Module
from .pipeline import Result
from .unpack import Unpacked
from .verify import Verified

Cells = Sequence[object]


def table(head: Sequence[str], rows: Iterable[Cells]) -> list[str]:
    """Left-aligned columns, numbers to the right; names are made safe to print."""
    lines = [[printable(cell) for cell in row] for row in (head, *(list(r) for r in rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = [
        len(lines) > 1 and all(line[i].lstrip("-").isdigit() or not line[i] for line in lines[1:])
        for i in range(len(head))
    ]
    return [
        "  ".join(
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def size(nbytes: float) -> str:
    """Bytes for people: ``1.3 MB``; decimal units, as ``--max-shard-size`` has them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def noted(notes: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each different text, with the modules it is true of."""
    modules: dict[str, dict[str, None]] = defaultdict(dict)
    for module, text in notes:
        modules[text].update({module: None} if module else {})
    return [printable(f"note: {text}{_some(list(names))}") for text, names in modules.items()]


def _some(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" ({names[0]})" if len(names) == 1 else f" ({len(names)} modules: {names[0]}, ..)"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _shape(n: int, k: int, experts: int | None) -> str:
    return f"{n} x {k}" if experts is None else f"{experts} x {n} x {k}"


@singledispatch
def text(result: object) -> str:
    """What a person reads on stdout."""
    raise TypeError(type(result))


@singledispatch
def data(result: object) -> dict[str, Any]:
    """What a script reads on stdout, as JSON."""
    raise TypeError(type(result))


def _holds(name: str, parts: Iterable[str]) -> str:
    """``3: q_proj, k_proj, v_proj``, ``8: 0.w1 .. 7.w1``: the parts of a module, but for what it is called too."""
    words = name.split(".")
    short = []
    for part in (part.split(".") for part in parts):
        same = next((i for i, (a, b) in enumerate(zip(part, words, strict=False)) if a != b), len(part))
        tail = next((i for i, (a, b) in enumerate(zip(part[::-1], words[::-1], strict=False)) if a != b), 0)
        short.append(".".join(part[same : len(part) - tail or None]))
    return f"{len(short)}: {', '.join(short) if len(short) <= 3 else f'{short[0]} .. {short[-1]}'}"


def _held(m: Module) -> str:
    return _holds(m.name, (linear.name for linear in m.linears)) if m.grouped else ""


def _apart(apart: Iterable[Apart]) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for group in apart:
        reasons[group.reason].append(f"{group.name} ({_holds(group.name, group.parts)})")
    lines = []
    for reason, names in reasons.items():
        lines += [printable(f"stored apart: {reason}"), *(printable(f"  {name}") for name in names)]
    return lines


def _refusals(refused: Iterable[Module]) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for module in refused:
        reasons[module.refusal or ""].append(module.name)
    lines = []
    for reason, names in reasons.items():
        lines += [printable(f"not converted: {reason}"), *(printable(f"  {name}") for name in names)]
    return lines


@text.register
def _(result: Result) -> str:
    plan, counts = result.plan, result.plan.counts
    lines = []
    grouped = any(m.grouped for m in plan.modules)
    if not result.written:
        rows = [
            (
                m.name,
                m.source,
                plan.layout if m.spec is not None else "as it is",
                m.element,
                _shape(m.outline.n, m.outline.k, m.outline.experts),
                m.outline.group,
                size(sum(plan.checkpoint.tensors[t].nbytes for t in m.members)),
                size(m.nbytes),
                *([_held(m)] if grouped else []),
            )
            for m in plan.modules
        ]
        head = ("module", "source", "layout", "element", "out x in", "group", "in", "out")
        lines += table((*head, "parts") if grouped else head, rows)
    lines += _refusals(plan.refused) + _apart(plan.apart)
    lines += noted(result.notes)
    lines.append(
        f"{counts['input']} tensors = {counts['converted']} converted + {counts['consumed']} consumed"
        f" + {counts['passed_through']} passed through"
    )
    shards = f" in {len(result.files)} shards" if len(result.files) > 1 else ""
    if result.written:
        inside = sum(len(m.linears) for m in plan.converted)
        of = f" of {inside} linears" if grouped else ""
        modules = f"{_count(len(plan.converted), f'{plan.layout} module')}{of}"
        lines.append(printable(f"{result.dst}: {modules}, {size(plan.nbytes)}{shards}"))
    else:
        if result.side_files:
            lines.append(f"{_count(len(result.side_files), 'side file')} would be copied as they are")
        for path in result.replaces:
            lines.append(printable(f"{path} exists: --overwrite would replace it, and without it is an error"))
        lines.append(
            printable(
                f"{result.dst} would take {size(plan.nbytes + result.beside)} of disk{shards};"
                f" packing, about {size(plan.peak)} of memory"
            )
        )
    return "\n".join(lines)


@data.register
def _(result: Result) -> dict[str, Any]:
    plan = result.plan
    return {
        "source": str(plan.checkpoint.path),
        "destination": str(result.dst),
        "written": result.written,
        "replaces": bool(result.replaces),
        "files": list(result.files),
        "side_files": list(result.side_files),
        "layout": plan.layout,
        "tensors": plan.counts,
        "nbytes": plan.nbytes,
        "nbytes_beside": result.beside,
        "peak_memory": plan.peak,
        "modules": {m.name: _planned(plan.checkpoint.tensors, m) for m in plan.modules},
        "apart": [{"module": a.name, "parts": list(a.parts), "reason": a.reason} for a in plan.apart],
        "passed_through": list(plan.passed),
        "notes": [{"module": module, "text": note} for module, note in result.notes],
    }


def _planned(tensors: Mapping[str, Any], m: Module) -> dict[str, Any]:
    q = m.outline
    return {
        "source": m.source,
        "layout": None if m.spec is None else m.spec["layout"],
        "refusal": m.refusal,
        "element": q.element.name,
        "n": q.n,
        "k": q.k,
        "experts": q.experts,
        "group": q.group,
        "parts": [linear.name for linear in m.linears] if m.grouped else [],
        "nbytes_in": sum(tensors[t].nbytes for t in m.members),
        "nbytes_out": m.nbytes,
    }


@data.register
def _(error: WarptileError) -> dict[str, Any]:
    said = {key: getattr(error, key) for key in ("file", "tensor", "what", "found", "need", "do")}
    return {"line": str(error), **{key: None if value is None else str(value) for key, value in said.items()}}


@text.register
def _(contents: Contents) -> str:
    grouped = any(x.parts for x in contents.linears)
    rows = [
        (
            x.name,
            x.holder,
            x.element,
            _shape(x.n, x.k, x.experts),
            x.group,
            scale_words(x.scale),
            " ".join(part for part in ("zero", "perm", "bias") if getattr(x, part)),
            size(x.nbytes),
            *([_holds(x.name, x.parts) if x.parts else ""] if grouped else []),
        )
        for x in contents.linears
    ]
    what = "layout" if contents.kind == "artifact" else "source"
    lines = [printable(f"{contents.path}: {contents.kind}, {_count(len(rows), 'quantised module')}")]
    head = ("module", what, "element", "out x in", "group", "scales", "with", "size")
    lines += table((*head, "parts") if grouped else head, rows) if rows else []
    refused: dict[str, list[str]] = defaultdict(list)
    for x in contents.linears:
        for layout, reason in x.refusals.items():
            refused[f"not for {layout}: {reason}"].append(x.name)
    lines += [printable(f"{reason}{_some(names)}") for reason, names in refused.items()]
    lines += [f"other tensors: {count} {dtype}, {size(nbytes)}" for dtype, (count, nbytes) in contents.others.items()]
    return "\n".join(lines + noted(contents.notes))


@data.register
def _(contents: Contents) -> dict[str, Any]:
    return {
        "path": str(contents.path),
        "kind": contents.kind,
        "modules": {
            x.name: {**vars(x), "refusals": dict(x.refusals), "parts": list(x.parts)} for x in contents.linears
        },
        "others": {dtype: {"tensors": c, "nbytes": b} for dtype, (c, b) in contents.others.items()},
        "notes": [{"module": module, "text": note} for module, note in contents.notes],
    }


@text.register
def _(result: Verified) -> str:
    modules = _count(result.modules, "module")
    if result.against is None:
        return printable(
            f"{result.path}: {modules} unpacked and packed to the same bytes; --against SRC compares values"
        )
    others = _count(result.passed_through, "other tensor")
    return printable(f"{result.path}: {modules} and {others}, equal to {result.against}")


@data.register
def _(result: Verified) -> dict[str, Any]:
    against = None if result.against is None else str(result.against)
    return {**vars(result), "path": str(result.path), "against": against, "equal": True}


@text.register
def _(result: Unpacked) -> str:
    return printable(
        f"{result.dst}: {_count(result.restored, 'module')} restored, {_count(result.passed_through, 'other tensor')},"
        f" {size(result.nbytes)} in {_count(len(result.files), 'file')}"
    )


@data.register
def _(result: Unpacked) -> dict[str, Any]:
    return {**vars(result), "dst": str(result.dst), "files": list(result.files)}


@text.register
def _(support: Support) -> str:
    pairs = [(s, *(f"{s}-to-{y}".replace("_", "-") for y in support.layouts)) for s in support.sources]
    held = [(e, *("yes" if row[y] else "" for y in support.layouts)) for e, row in support.elements.items()]
    blocks = (
        table(("source", *(f"to {y}" for y in support.layouts)), pairs),
        table(("element", *support.layouts), held),
        [f"{name}: {title}" for name, title in {**support.sources, **support.layouts}.items()],
    )
    return "\n\n".join("\n".join(block) for block in blocks)


@data.register
def _(support: Support) -> dict[str, Any]:
    return dict(vars(support))
