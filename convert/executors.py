"""Where shards are written: here, one after the other, or on the workers of a dask.distributed cluster.

All machines see SRC and DST under the same paths. A worker that dies costs the shard it was writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..formats.errors import UsageError, WarptileError
from . import manifest
from .jobs import Job, run
from .manifest import Finished

RETRIES = 3
CONNECT = "10s"


class Serial(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def executor(scheduler: str | None) -> Iterator[Executor]:
    """A cluster's executor, or with None a ``Serial`` one.

    Raises:
        UsageError: the package distributed is not installed.
        WarptileError: no scheduler answers at that address.
    """
    if scheduler is None:
        yield Serial()
        return
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(
            "--scheduler needs the package distributed", do="pip install 'warptile[distributed]'"
        ) from None
    try:
        client = Client(scheduler, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError) as e:
        raise WarptileError(
            "no scheduler answers", file=scheduler, found=e, do="start one with dask-scheduler"
        ) from None
    with client:
        yield client.get_executor(retries=RETRIES)


def _once(job: Job) -> Finished:
    """``run``, or the record of a shard whose worker died with the answer: a cluster then asks for it again."""
    done = manifest.finished(manifest.staging(job.path), [job.path])
    return done[job.file] if job.file in done else run(job)


def carry_out(jobs: Sequence[Job], where: Executor, advance: Callable[[int], None]) -> list[Finished]:
    """Run every job; ``advance`` is told the bytes that are written."""
    if isinstance(where, Serial):
        return [where.submit(partial(run, advance=advance), job).result() for job in jobs]
    pending = {where.submit(_once, job): job for job in jobs}
    try:
        for future in as_completed(pending):
            future.result()
            advance(pending[future].nbytes)
    except BaseException:
        for future in pending:
            future.cancel()
        raise
    return [future.result() for future in pending]
