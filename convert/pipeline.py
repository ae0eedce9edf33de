"""``convert()``: open, plan, and write every piece of the plan in order, one module in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..formats import artifact, sources
from ..formats.canonical import recode, widened
from ..formats.container import CONFIG, Checkpoint, Entry, companion, open_checkpoint, rebuilder
from ..formats.errors import UnsupportedError, UsageError
from ..formats.options import Options
from ..kernels import layouts
from . import origin
from . import plan as planning
from . import shards as out
from .plan import Module, Plan
from .progress import Progress
from .staging import check_paths, check_space, default_destination, is_file, staged

Array = NDArray[Any]


@dataclass(frozen=True)
class Result:
    """What ``convert`` did, or with ``dry_run`` would do."""

    plan: Plan
    dst: Path
    files: tuple[str, ...]
    written: bool

    @property
    def notes(self) -> Sequence[tuple[str, str]]:
        """(module or "", text): assumptions and warnings of the readers."""
        return self.plan.checkpoint.notes


def convert(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    to: str,
    source: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    widen: bool = False,
    max_shard_size: str | int = "5GB",
    workers: int = 1,
    quiet: bool = True,
    **options: Any,
) -> Result:
    """Repack a checkpoint, a .safetensors file or a directory, for one layout; codes and scales do not change.

    Args:
        dst: default ``<stem>-<layout>`` beside ``src``; one file when it ends in .safetensors, else a directory.
        to: a layout of ``kernels.layouts()``.
        source: a format of ``formats.sources()``; None merges what every reader claims.
        strict: an error unless every quantised module converts.
        dry_run: plan only; write nothing and read no codes.
        widen: store 2- and 3-bit codes in 4-bit fields, losslessly.
        max_shard_size: bytes, or a text such as "5GB"; a directory only.
        workers: shards written at a time, each holding one module in memory.
        quiet: no progress bar; there is none either where stderr is no terminal.
        **options: the fields of ``Options``.

    Raises:
        WarptileError: a subclass says why, ``exit_code`` what the command line makes of it. Nothing is left at
            ``dst`` then, nor beside it.
    """
    src, limit = Path(src), out.parse_size(max_shard_size)
    planning.known(source, sources(), "source format")
    planning.known(to, layouts(), "layout")
    if workers < 1:
        raise UsageError("no worker, no work", found=f"workers {workers}", need="1 or more")
    dst = Path(dst) if dst is not None else default_destination(src, to)
    if rebuilder(dst) is not None:
        raise UsageError("an artifact is a .safetensors file or a directory", file=dst, do="name one of these")
    check_paths(src, dst, overwrite=overwrite or dry_run)
    checkpoint = open_checkpoint(src, Options(**options))
    plan = planning.make(checkpoint, source, to, widen=widen)
    _check_converted(plan, strict)
    if is_file(dst) and checkpoint.side_files:
        checkpoint.note("", f"one file has no place for {len(checkpoint.side_files)} side files: not copied")
    sizes = [sum(t.nbytes for t in piece) for piece in plan.pieces]
    cut = [range(len(sizes))] if is_file(dst) else out.assign(sizes, limit)
    files = [dst.name] if is_file(dst) else out.names(len(cut))
    result = Result(plan, dst, tuple(files), written=not dry_run)
    if dry_run:
        return result
    beside = sum(map(len, checkpoint.companions.values()))
    check_space(dst, plan.nbytes + beside + sum(file.stat().st_size for file in checkpoint.side_files))
    with staged(dst) as product, closing(Progress(plan.nbytes, "converting", quiet)) as progress:
        owner = {t.name: m for m in plan.converted for t in m.tensors}
        shards = [
            _shard(plan, owner, file, plan.pieces[run.start : run.stop], first=run.start == 0, advance=progress.advance)
            for file, run in zip(files, cut, strict=True)
        ]
        out.write(shards, lambda file: product if is_file(dst) else product / file, workers)
        if not is_file(dst):
            if len(shards) > 1:
                out.write_index(shards, product, plan.nbytes)
            if checkpoint.config:
                out.write_json(product / CONFIG, artifact.config(checkpoint.config, to))
            out.copy_side_files(checkpoint.side_files, product)
        for suffix, content in checkpoint.companions.items():
            out.write_bytes(companion(product, suffix), content)
    return result


def _check_converted(plan: Plan, strict: bool) -> None:
    if plan.refused and (strict or not plan.converted):
        first = plan.refused[0]
        raise UnsupportedError(
            f"{len(plan.refused)} of {len(plan.modules)} modules cannot become {plan.layout}",
            file=plan.checkpoint.path,
            tensor=first.name,
            found=first.refusal,
        )
    if not plan.converted:
        raise UnsupportedError("no quantised module in it", file=plan.checkpoint.path, do="nothing to convert")


def _shard(
    plan: Plan,
    owner: Mapping[str, Module],
    file: str,
    pieces: Iterable[Sequence[out.Stored]],
    *,
    first: bool,
    advance: Callable[[int], None],
) -> out.Shard:
    entries: list[Entry] = []
    batches: dict[str, out.Batch] = {}
    for tensor in (t for piece in pieces for t in piece):
        module = owner.get(tensor.name)
        if module is None:
            data = out.copied(plan.checkpoint.tensors[tensor.name])
        else:
            batch = batches.setdefault(module.name, out.Batch(partial(_pack, plan.checkpoint, module, plan.layout)))
            data = batch.tensor(tensor)
        entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, out.counted(data, advance)))
    specs = {m.name: m.spec for m in plan.converted if m.name in batches and m.spec is not None}
    metadata = artifact.metadata(plan.checkpoint, specs, first=first) | (origin.metadata(plan) if first else {})
    return out.Shard(file, tuple(entries), metadata)


def _pack(checkpoint: Checkpoint, module: Module, layout: str) -> dict[str, Array]:
    """Read one module and pack it: the arrays its plan promised, by full name."""
    q = sources()[module.source].read(checkpoint, module.name).check()
    assert q.outline() == module.outline, f"{module.source}: describe and read disagree on {module.name}"
    if module.spec is not None and artifact.NARROW in module.spec["source"]:
        q = recode(q, widened(q.element))
    tensors, _ = layouts()[layout].pack(q)
    return {f"{module.name}.{suffix}": array for suffix, array in artifact.as_stored(tensors, q.residue).items()}
