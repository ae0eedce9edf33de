"""``convert()``: open, plan, cut into shards, have them written, publish."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from ..formats import artifact, sources
from ..formats.container import CONFIG, companion, open_checkpoint, rebuilder
from ..formats.errors import UnsupportedError, UsageError
from ..formats.options import Options
from ..kernels import layouts
from . import manifest, origin
from . import plan as planning
from . import shards as out
from .executors import carry_out, executor
from .jobs import Job, needed
from .plan import Plan
from .progress import Progress
from .staging import check_companions, check_left, check_paths, check_space, default_destination, is_file, staged
from .workers import threads


@dataclass(frozen=True)
class Result:
    """What ``convert`` did, or with ``dry_run`` would do."""

    plan: Plan
    dst: Path
    files: tuple[str, ...]
    side_files: tuple[str, ...]
    """Copied as they are."""
    beside: int
    """Bytes of what is written beside the weights: side files and companions."""
    replaces: tuple[Path, ...]
    """What stands, or stood, at ``dst`` and where its companions go."""
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
    fuse: bool = False,
    stack_experts: bool = False,
    max_shard_size: str | int = "5GB",
    workers: int = 0,
    scheduler: str | None = None,
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
        fuse: store q, k, v and gate, up of one block as one module each, where all that they share is alike.
        stack_experts: store the same linear of all experts of a block as one module.
        max_shard_size: bytes, or a text such as "5GB"; a directory only.
        workers: threads that pack; 0 is one for every core.
        scheduler: the address of a dask.distributed scheduler whose workers write the shards, such as
            "tcp://host:8786"; they see ``src`` and ``dst`` under the same paths.
        quiet: no progress bar; there is none either where stderr is no terminal.
        **options: the fields of ``Options``.

    Raises:
        WarptileError: a subclass says why, ``exit_code`` what the command line makes of it. Nothing is left at
            ``dst`` then, nor beside it; but where a disk or the network failed, finished shards wait beside it for
            the same call.
    """
    src, limit = Path(src), out.parse_size(max_shard_size)
    planning.known(source, sources(), "source format")
    planning.known(to, layouts(), "layout")
    threads(workers)  # refuses fewer than none before anything is read
    if scheduler is not None:
        src = Path(os.path.abspath(src))
    dst = Path(dst) if dst is not None else default_destination(src, to)
    if rebuilder(dst) is not None:
        raise UsageError("an artifact is a .safetensors file or a directory", file=dst, do="name one of these")
    check_paths(src, dst, overwrite=overwrite or dry_run, artifact=True)
    checkpoint = open_checkpoint(src, Options(**options))
    beside = check_companions(dst, checkpoint.companions, overwrite=overwrite or dry_run)
    replaces = (*([dst] if os.path.lexists(dst) else ()), *beside)
    plan = planning.make(checkpoint, source, to, widen=widen, fuse=fuse, stack_experts=stack_experts, workers=workers)
    _check_converted(plan, strict)
    if find_spec("numba") is None:
        checkpoint.note("", "numba cannot be imported: codes are moved by NumPy, ten times slower")
    side_files = () if is_file(dst) else checkpoint.side_files
    if len(side_files) < len(checkpoint.side_files):
        checkpoint.note("", f"one file has no place for {len(checkpoint.side_files)} side files: not copied")
    more = sum(map(len, checkpoint.companions.values())) + sum(file.stat().st_size for file in side_files)
    sizes = [sum(t.nbytes for t in piece) for piece in plan.pieces]
    cut = [range(len(sizes))] if is_file(dst) else out.assign(sizes, limit)
    files = [dst.name] if is_file(dst) else out.names(len(cut))
    copied = tuple(file.name for file in side_files)
    if overwrite and not is_file(dst):
        check_left(dst, [*copied, *(companion(dst, suffix).name for suffix in checkpoint.companions)])
    result = Result(plan, dst, tuple(files), copied, more, replaces, written=not dry_run)
    if dry_run:
        return result
    said = [_metadata(plan, plan.pieces[run.start : run.stop], first=run.start == 0) for run in cut]
    key = _key(plan, files, cut, said)
    with staged(dst, key, overwrite=overwrite) as product, executor(scheduler) as where:
        done = manifest.finished(product.parent, [_place(product, dst, file) for file in files])
        check_space(dst, plan.nbytes + more - sum(shard.nbytes for shard in done.values()))
        jobs = [
            _job(plan, product, dst, file, plan.pieces[run.start : run.stop], metadata, key, workers)
            for file, run, metadata in zip(files, cut, said, strict=True)
        ]
        left = [job for job in jobs if job.file not in done]
        there = sum(job.nbytes for job in jobs if job.file in done)
        with closing(Progress(plan.nbytes, "converting", quiet, there)) as progress:
            for shard in (*done.values(), *carry_out(left, where, progress.advance)):
                for note in shard.notes:
                    checkpoint.note(*note)
        if not is_file(dst):
            if len(jobs) > 1:
                out.write_index({t.name: job.file for job in jobs for t in job.tensors}, product, plan.nbytes)
            if checkpoint.config:
                out.write_json(product / CONFIG, artifact.config(checkpoint.config, to))
            out.copy_side_files(side_files, product)
        for suffix, content in checkpoint.companions.items():
            out.write_bytes(companion(product, suffix), content)
    return result


def _place(product: Path, dst: Path, file: str) -> Path:
    return product if is_file(dst) else product / file


def _check_converted(plan: Plan, strict: bool) -> None:
    if plan.refused and (strict or not plan.converted):
        first = plan.refused[0]
        raise UnsupportedError(
            f"{len(plan.refused)} of {len(plan.modules)} modules cannot become {plan.layout}",
            file=plan.checkpoint.path,
            tensor=first.name,
            found=first.refusal,
            do="leave out --strict and they pass through" if plan.converted else "convert inspect shows every module",
        )
    if not plan.converted:
        raise UnsupportedError("no quantised module in it", file=plan.checkpoint.path, do="nothing to convert")


def _metadata(plan: Plan, pieces: Iterable[Sequence[out.Stored]], *, first: bool) -> dict[str, str]:
    """``__metadata__`` of a shard; the first one's also tells of the source."""
    names = {t.name for piece in pieces for t in piece}
    specs = {m.name: m.spec for m in plan.converted if m.tensors[0].name in names and m.spec is not None}
    return artifact.metadata(plan.checkpoint, specs, first=first) | (origin.metadata(plan) if first else {})


def _key(plan: Plan, files: Sequence[str], cut: Sequence[range], metadata: Sequence[Mapping[str, str]]) -> str:
    """What makes two runs the same: what is written, of which files in which state. 128 bits in hexadecimal."""
    checkpoint = plan.checkpoint
    sources = {t.file for t in checkpoint.tensors.values()} | {*checkpoint.file_metadata}
    state = [(str(file.absolute()), s.st_size, s.st_mtime_ns) for file in sorted(sources) for s in (file.stat(),)]
    header = [(t.name, t.dtype, t.shape, t.offset) for t in checkpoint.tensors.values()]
    written = [(t.name, t.dtype, t.shape) for piece in plan.pieces for t in piece]
    run = (artifact.VERSION, plan.layout, asdict(checkpoint.options), state, header, written, files, cut, metadata)
    return xxhash.xxh3_128_hexdigest(repr(run).encode())


def _job(
    plan: Plan,
    product: Path,
    dst: Path,
    file: str,
    pieces: Iterable[Sequence[out.Stored]],
    metadata: Mapping[str, str],
    key: str,
    workers: int,
) -> Job:
    owner = {m.tensors[0].name: m for m in plan.converted}
    owned = tuple((owner.get(piece[0].name), tuple(piece)) for piece in pieces)
    path = _place(product, dst, file).absolute()
    return Job(file, path, key, needed(plan.checkpoint, owned), plan.layout, owned, metadata, workers)
