"""A conversion of a few linears without a disk: planned with any flags, packed, opened as an artifact, given back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tiny import NOWHERE, TINY, Tiny, in_memory
from warptile.convert import jobs, origin, pipeline, plan
from warptile.formats import artifact
from warptile.formats.canonical import same
from warptile.formats.container import Checkpoint, Tensor
from warptile.formats.errors import WarptileError
from warptile.formats.stream import whole
from warptile.kernels import layouts

FAMILIES = (
    ("a.q_proj", "a.k_proj", "a.v_proj"),
    ("a.experts.0.gate_proj", "a.experts.0.up_proj", "a.experts.1.gate_proj", "a.experts.1.up_proj"),
)


class Now(Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Held(Tensor):
    """A tensor in memory: nothing is mapped ahead, nothing unmapped."""

    data: bytes = b""

    def raw(self) -> Any:
        return np.frombuffer(self.data, np.uint8)

    def expect(self) -> None:
        pass

    def release(self) -> None:
        pass


@cache
def families() -> list[Tiny]:
    """A linear of every kind, or several of them that belong together, under names that say so."""
    found = []
    for tiny in TINY.values():
        if tiny.source in ("gguf", "matmulnbits"):
            continue
        found.append(tiny)
        module = next(iter(tiny.tensors)).rpartition(".")[0]
        if module in ("a", "layer"):
            for names in FAMILIES:
                tensors = {n + t.removeprefix(module): held for n in names for t, held in tiny.tensors.items()}
                found.append(replace(tiny, tensors=tensors))
    return found


def held(tiny: Tiny) -> Checkpoint:
    checkpoint = tiny.checkpoint()
    tensors = {n: Held(*vars(t).values()) for n, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def convert(checkpoint: Checkpoint, layout: str, **flags: bool) -> None:
    """Raises WarptileError for what is refused; fails when what is written is not what was planned or read."""
    planned = plan.make(checkpoint, None, layout, **flags)
    if not planned.converted:
        return
    job = pipeline._job(planned, Path("x"), Path("x.safetensors"), "x", planned.pieces, {}, "", 1)
    flow = jobs._makers(job, Now())
    tensors = {stored.name: (stored.dtype, stored.shape, b"".join(pieces(flow))) for stored in job.tensors}
    assert not list(islice(flow, 1))
    metadata = pipeline._metadata(planned, planned.pieces, first=True)
    json.dumps(metadata, ensure_ascii=False).encode()
    opened = replace(in_memory(tensors, {}, {}), metadata=metadata, file_metadata={NOWHERE: metadata})
    found = artifact.check_artifact(opened, layouts())
    files = origin.files(found)
    promised: dict[str, dict[str, Any]] = {name: {} for name in found.parts}
    for tensor in (t for file in files.values() for t in file.tensors):
        if tensor.linear is not None:
            promised[tensor.linear][tensor.name] = tensor.dtype, tensor.shape
    for name in found.parts:
        back = origin.restored(found, name, promised[name])
        for full, array in back.items():
            assert array.tobytes() == checkpoint.tensors[full].raw().tobytes(), full
    for module in planned.converted:
        for linear in module.linears:
            q = jobs.open_stream(checkpoint, linear.source, linear.name)
            assert same(found.quant(linear.name), whole(q)) is None, linear.name


def pieces(flow: Iterator[tuple[bool, Callable[[], Any]]]) -> Iterator[bytes]:
    for last, make in flow:
        yield make().tobytes()
        if last:
            return


def quietly(checkpoint: Checkpoint, turn: int) -> None:
    """Flags and layout by a number."""
    names = list(layouts())
    flags = {flag: bool(turn >> i & 1) for i, flag in enumerate(("fuse", "stack_experts", "widen"))}
    with suppress(WarptileError):
        convert(checkpoint, names[(turn >> 3) % len(names)], **flags)
