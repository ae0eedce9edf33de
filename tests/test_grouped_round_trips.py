"""Any legal linears of sources that are files of their own kind, grouped: every layout gives each one's bytes back.

Models in safetensors files go through files: ``test_conversions.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import MODULES
from tiny import Held, Tiny, in_memory
from warptile.convert import jobs, plan
from warptile.formats import artifact, sources
from warptile.formats.canonical import dequantize
from warptile.formats.container import Checkpoint, dtype_name
from warptile.kernels import layouts

QUICK = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
# Source -> (what ``MODULES`` call its linear, the end of its codes' name, which axis from the last has the outputs).
KINDS = {"gguf": ("blk.0.ffn_up", ".weight", 2), "matmulnbits": ("fc", "_Q4", 3)}


class Loose(Held):
    """Held in memory: there is nothing to give back."""

    def release(self) -> None:
        pass


def renamed(value: Any, stem: str, name: str) -> Any:
    """A label with other names in it."""
    if isinstance(value, dict):
        return {renamed(key, stem, name): renamed(one, stem, name) for key, one in value.items()}
    if isinstance(value, list):
        return [renamed(one, stem, name) for one in value]
    return name + value.removeprefix(stem) if isinstance(value, str) and value.startswith(stem) else value


def copies(tiny: Tiny, names: list[str]) -> Tiny:
    """One checkpoint of several such linears, each with its outputs' codes in another order."""
    stem, codes, axis = KINDS[tiny.source]
    tensors, label = {}, dict(tiny.quantization)
    for i, name in enumerate(names):
        for old, (dtype, shape, data) in tiny.tensors.items():
            whole = np.frombuffer(data, np.uint8).reshape(*shape, -1)
            turned = np.roll(whole, i, len(shape) - axis).tobytes() if old.endswith(codes) else data
            tensors[name + old.removeprefix(stem)] = dtype, shape, turned
        for key in {"types", "nodes"} & label.keys():
            more = renamed(tiny.quantization[key], stem, name)
            label[key] = more if i == 0 else {**label[key], **more} if isinstance(more, dict) else label[key] + more
    return replace(tiny, tensors=tensors, quantization=label)


def written(checkpoint: Checkpoint, made: plan.Plan, pool: ThreadPoolExecutor) -> artifact.Artifact:
    """The artifact of a plan, as a job makes it, in memory."""
    pieces = tuple((module, module.tensors) for module in made.converted)
    job = jobs.Job("x", Path("x"), "", checkpoint, made.layout, pieces, {}, 2)
    tensors, makers = {}, jobs._makers(job, pool)
    for stored in job.tensors:
        data, last = b"", False
        while not last:
            last, make = next(makers)
            data += make().tobytes()
        tensors[stored.name] = stored.dtype, stored.shape, data
    assert next(makers, None) is None
    said = artifact.metadata(checkpoint, {module.name: module.spec for module in made.converted})
    held = in_memory(tensors, {}, {})
    held = replace(held, metadata=said, file_metadata=dict.fromkeys(held.file_metadata, said))
    return artifact.check_artifact(held, layouts())


def grouped(tiny: Tiny, layout: str, pool: ThreadPoolExecutor) -> Iterator[plan.Module]:
    """Modules of the plan that hold several linears, once all linears have been found unharmed in what is stored."""
    checkpoint = tiny.checkpoint()
    loose = {name: Loose(**vars(tensor)) for name, tensor in checkpoint.tensors.items()}
    checkpoint = replace(checkpoint, tensors=loose)
    made = plan.make(checkpoint, None, layout, widen=True, fuse=True, stack_experts=True)
    if not made.converted:
        return
    found = written(checkpoint, made, pool)
    assert found.parts.keys() == {linear.name for module in made.converted for linear in module.linears}
    for part in found.parts.values():
        reader, q = sources()[part.reader], found.quant(part.name).check()
        back = {name: (dtype_name(a.dtype), a.shape, np.ascontiguousarray(a).tobytes())
                for name, a in reader.write(part.name, q).items()}  # fmt: skip
        assert back == {
            name: (tiny.tensors[name][0], tuple(tiny.tensors[name][1]), tiny.tensors[name][2]) for name in back
        }
        whole = dequantize(found.quant(part.module), np.float64)
        mine = (whole if part.expert is None else whole[part.expert])[..., part.rows, :]
        np.testing.assert_array_equal(mine, dequantize(q, np.float64))
    held = {name for module in made.converted for name in module.members}
    assert len(held) == sum(len(module.members) for module in made.converted)
    yield from (module for module in made.converted if module.grouped)
    assert made.apart or len(made.converted) == 1, "alike, and neither one nor listed"


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("source", KINDS)
@QUICK
@given(data=st.data())
def test_gate_and_up_of_experts_come_back(source: str, layout: str, pool: ThreadPoolExecutor, data: Any) -> None:
    tiny = data.draw(MODULES[source])
    names = [f"m.experts.{e}.{name}" for e in range(data.draw(st.integers(1, 3))) for name in ("gate_proj", "up_proj")]
    for module in grouped(copies(tiny, names), layout, pool):
        assert module.name.startswith("m.experts.")
        assert len(module.linears) in (2, len(names) // 2, len(names))


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("source", KINDS)
@QUICK
@given(data=st.data())
def test_q_k_and_v_come_back(source: str, layout: str, pool: ThreadPoolExecutor, data: Any) -> None:
    names = ["m.q_proj", "m.k_proj", "m.v_proj"]
    for module in grouped(copies(data.draw(MODULES[source]), names), layout, pool):
        assert module.name.startswith("m.qkv_proj")
        assert len(module.linears) == 3
