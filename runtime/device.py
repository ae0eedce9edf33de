"""The CUDA backend: modules uploaded on first use, plans bound once for each m, launched on the caller's stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from ..formats.errors import UnsupportedError
from ..kernels import launch as plans
from ..kernels import layouts
from . import build
from .arrays import ACTIVATIONS, ITEM, CupyKind, Kind, NumpyKind, Operand, host_view
from .catalog import Catalog, Module
from .cublas import Cublas
from .dense import BITS, Dense, bias_of, decode, dense, multiply, view
from .launch import Bound, Kernels, describe
from .load import Uploader, Weights
from .scratch import Lane, Lanes, allocating, capture_id, on

ROWS = 1 << 18
"""Rows of x in one product: grids and 32-bit extents hold that many for any n and k."""

BOUND_LIMIT = 16384
"""Bound plans kept, about a kilobyte of host memory each."""


def devices() -> tuple[int, str]:
    """How many CUDA devices there are, and why none can be used."""
    try:
        import cupy

        import_module("cuda.bindings.driver")
    except ImportError as error:
        return 0, f"{error}; pip install 'warptile[cuda13]'"
    try:
        return int(cupy.cuda.runtime.getDeviceCount()), "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, str(error)


@contextmanager
def current(index: int) -> Iterator[None]:
    """Makes a device current for this thread. (cupy's own context keeps one stack for all threads.)"""
    from cupy.cuda import runtime

    before = runtime.getDevice()
    runtime.setDevice(index)
    try:
        yield
    finally:
        if before != index:
            runtime.setDevice(before)


def _facts(index: int, cubins: Any) -> plans.Device:
    from cuda.bindings import driver
    from cupy.cuda import runtime

    def attribute(name: str) -> int:
        number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(runtime.deviceGetAttribute(int(number), index))

    return plans.Device(
        arch=attribute("COMPUTE_CAPABILITY_MAJOR") * 10 + attribute("COMPUTE_CAPABILITY_MINOR"),
        sms=attribute("MULTIPROCESSOR_COUNT"),
        shared=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        nvrtc=build.compiler(cubins),
    )


class Cuda:
    """One device. Every entry makes it current for the call and puts the caller's device back."""

    def __init__(self, catalog: Catalog, index: int, cubins: Any, scratch_limit: int) -> None:
        import cupy

        self.catalog, self.index, self.device = catalog, index, f"cuda:{index}"
        self._pool = cupy.cuda.MemoryPool()
        self._lock = threading.RLock()
        self._weights: dict[str, Weights] = {}
        self._dense: dict[tuple[str, str], Dense] = {}
        self._cublas: Cublas | None = None
        self._bound: dict[tuple[str, str, int, bool], Bound] = {}
        with current(index):
            self.facts = _facts(index, cubins)
            self._uploader = Uploader()
            self._kernels = Kernels(cubins)
            self._lanes = Lanes(scratch_limit, self._uploader)

    @property
    def scratch_bytes(self) -> int:
        return self._lanes.nbytes

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self._weights.values()) + sum(d.nbytes for d in self._dense.values())

    def linear(self, module: Module, kind: Kind, x: Operand, out: Operand | None, expert: int | None) -> Any:
        for what, operand in (("x", x), ("out", out)):
            if operand is not None and operand.device != self.index and not isinstance(kind, NumpyKind):
                where = "the cpu" if operand.device is None else f"cuda:{operand.device}"
                raise ValueError(f"{module.name}: {what} is on {where}, this session on {self.device}; move it there")
        with current(self.index):
            stream = kind.stream(self.index)
            result = None
            if out is None:
                result = kind.empty((*x.shape[:-1], module.n), x.dtype, x.owner)
                out = kind.target(result)
            if x.rows and module.n:
                if x.device is None:
                    self._through_host(module, x, out, expert, stream)
                else:
                    self._product(module, x, out, expert, stream)
            return out.owner if result is None else kind.deliver(result, x.owner)

    def _through_host(self, module: Module, x: Operand, out: Operand, expert: int | None, stream: int) -> None:
        """numpy in, numpy out: both copied through the lane's staging memory; returns when the result is there."""
        from cupy.cuda import runtime

        if capture_id(stream) is not None:
            raise RuntimeError(f"{module.name}: numpy arrays cannot take part in a graph capture; pass cupy or torch")
        m, n, k = x.rows, module.n, module.k
        source = np.ascontiguousarray(host_view(x)).reshape(m, k)
        result = np.empty((m, n), source.dtype)
        lane = self._lanes.of(stream)
        with lane.lock:
            there = Operand(lane.buffer("host x", m * k * ITEM), (m, k), (k, 1), x.dtype, self.index, lane)
            back = Operand(lane.buffer("host y", m * n * ITEM), (m, n), (n, 1), x.dtype, self.index, lane)
            runtime.memcpyAsync(there.pointer, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream)
            self._product(module, there, back, expert, stream)
            runtime.memcpyAsync(result.ctypes.data, back.pointer, result.nbytes, runtime.memcpyDeviceToHost, stream)
            runtime.streamSynchronize(stream)
        host_view(out)[...] = result.reshape(out.shape)

    def _product(self, module: Module, x: Operand, out: Operand, expert: int | None, stream: int) -> None:
        if x.row_stride is not None:
            self._rows(module, x, out, expert, stream)
            return
        lane = self._lanes.of(stream)
        with lane.lock:
            self._rows(module, _packed(x, lane, stream), out, expert, stream)
        self._lanes.settle(lane)

    def _rows(self, module: Module, x: Operand, out: Operand, expert: int | None, stream: int) -> None:
        """A product of regular rows, at most ROWS of them at once."""
        for start in range(0, x.rows, ROWS):
            part, to = _slice(x, start), _slice(out, start)
            bound = self._ready(module, x.dtype, part.rows, part.aligned, stream)
            if isinstance(bound, Bound) and not bound.needs_memory:
                bound.launch(stream, part, to, expert or 0, None)
                continue
            lane = self._lanes.of(stream)
            with lane.lock:
                if isinstance(bound, Dense):
                    assert self._cublas is not None
                    _multiply(self._cublas, bound, module, part, to, expert, lane, stream)
                else:
                    _launch(bound, stream, part, to, expert or 0, lane)
            self._lanes.settle(lane)

    def _ready(self, module: Module, dtype: str, m: int, aligned: bool, stream: int | None) -> Bound | Dense:
        """The bound plan of a product, or the dense weights when no kernel of ours runs it."""
        bound = self._bound.get((module.name, dtype, m, aligned)) or self._dense.get((module.name, dtype))
        if bound is not None:
            return bound
        with self._lock:
            plan = self._plan(module, m, dtype, aligned)
            stages = () if isinstance(plan, str) else plan.stages
            cold = not stages or module.name not in self._weights or not all(map(self._kernels.has, stages))
            if cold and stream is not None and capture_id(stream) is not None:
                raise RuntimeError(
                    f"{module.name}: not ready for m={m} inside a graph capture; "
                    f"call session.prepare({m}) before the capture begins"
                )
            with allocating():
                if isinstance(plan, str):
                    return self._make_dense(module, dtype)
                if len(self._bound) >= BOUND_LIMIT:
                    self._bound.clear()
                spec = self.catalog.artifact.modules[module.name]
                extents = {name: value for name, value in spec.items() if type(value) is int}
                scalars = {**extents, "m": m, "ld_gathered": spec["k_padded"]}
                made = Bound(module.name, plan, scalars, self._resident(module), self._kernels)
                self._bound[module.name, dtype, m, aligned] = made
                return made

    def _plan(self, module: Module, m: int, dtype: str, aligned: bool) -> plans.Plan | str:
        """The layout's plan, or why there is none."""
        if module.layout is None:
            return f"its weights passed through conversion as {module.element}"
        spec = self.catalog.artifact.modules[module.name]
        try:
            plan: plans.Plan = layouts()[module.layout].plan(spec, m, self.facts, dtype, aligned)
        except UnsupportedError as error:
            return str(error)
        return plan

    def _resident(self, module: Module) -> Weights:
        """The module's tensors on the device, uploaded now if they are not."""
        with self._lock, allocating():
            if module.name not in self._weights:
                spec = self.catalog.artifact.modules[module.name]
                layout = layouts()[spec["layout"]]
                flat = layout.expected({**spec, "experts": None})
                wanted = layout.expected(spec)
                tensors = {s: a for s, a in self.catalog.artifact.tensors(module.name).items() if s in wanted}
                stacked = {s: wanted[s][1] != flat[s][1] for s in tensors}
                self._weights[module.name] = self._uploader.upload(module.name, tensors, stacked)
            return self._weights[module.name]

    def _make_dense(self, module: Module, dtype: str) -> Dense:
        """Decoded in a pool of its own, so that the temporaries go back to the device."""
        import cupy

        self._cublas = self._cublas or Cublas()
        with cupy.cuda.using_allocator(self._pool.malloc):
            if module.element == dtype:
                weight, bias = self.catalog.plain(module)
                made = Dense(cupy.empty(weight.shape, BITS[dtype]), dtype, bias_of(bias))
                self._uploader.copy(made.weight.data.ptr, weight)
            else:
                w, bias = self._decoded(module)
                made = dense(w, bias, dtype)
                del w
            cupy.cuda.get_current_stream().synchronize()
        self._pool.free_all_blocks()
        self._dense[module.name, dtype] = made
        return made

    def _decoded(self, module: Module) -> tuple[Any, Any]:
        """float32 weights on the device, and the bias as stored, on the host."""
        import cupy

        q = self.catalog.quant(module)
        if q is not None:
            return decode(q), q.bias
        weight, bias = self.catalog.plain(module)
        return cupy.asarray(np.ascontiguousarray(weight).astype(np.float32)), bias

    def dequantize(self, module: Module) -> Any:
        with current(self.index):
            return self._decoded(module)[0]

    def tensor(self, name: str) -> Any:
        import cupy

        array = np.ascontiguousarray(self.catalog.tensor(name))
        with current(self.index):
            try:
                return cupy.asarray(array)
            except (TypeError, ValueError):
                return cupy.asarray(array.view(f"u{array.itemsize}"))

    def explain(self, module: Module, m: int, dtype: str) -> tuple[str, ...]:
        plan = self._plan(module, m, dtype, module.k % 8 == 0)
        if isinstance(plan, str):
            return (f"cuBLAS, decoded on the device once, fp32 accumulation: {plan}",)
        stages = [f"stage {i}: {describe(stage)}" for i, stage in enumerate(plan.stages, 1)]
        memory = f"scratch {plan.scratch} B, gathered x {plan.gathered} B, {plan.counters} counters"
        rejected = [f"not {what}: {why}" for what, why in plan.rejected]
        return (*stages, f"why: {plan.why}", memory, *rejected)

    def load(self, modules: Sequence[Module]) -> None:
        with current(self.index):
            for module in modules:
                dtype = module.element if module.element in ACTIVATIONS else "f16"
                if isinstance(self._plan(module, 1, dtype, True), str):
                    self._ready(module, dtype, 1, True, None)
                else:
                    self._resident(module)

    def prepare(self, modules: Sequence[Module], ms: Sequence[int], dtypes: Sequence[str]) -> None:
        """Runs every product once on zeros: that loads kernels (cuBLAS's own too) and grows this stream's lane."""
        import cupy

        todo = [(module, min(m, ROWS), dtype) for module in modules for dtype in dtypes for m in ms if m]
        chosen = [self._plan(*one, aligned) for one in todo for aligned in (False, True)]
        self._kernels.compile([stage for plan in chosen if not isinstance(plan, str) for stage in plan.stages])
        kind = CupyKind()
        with current(self.index):
            stream = kind.stream(self.index)
            for module, m, dtype in todo:
                for aligned in (False, True):
                    self._ready(module, dtype, m, aligned, None)
                x, y = cupy.zeros((m, module.k), cupy.uint16), cupy.empty((m, module.n), cupy.uint16)
                source, target = (replace(kind.operand(array), dtype=dtype) for array in (x, y))
                self._product(module, source, target, None if module.experts is None else 0, stream)
            cupy.cuda.get_current_stream().synchronize()

    def release(self) -> None:
        with current(self.index):
            self._lanes.trim(0)

    def close(self) -> None:
        import cupy

        with current(self.index):
            cupy.cuda.runtime.deviceSynchronize()
            self._bound.clear()
            self._dense.clear()
            self._pool.free_all_blocks()
            self._weights.clear()
            self._lanes.clear()
            self._kernels.close()
            if self._cublas is not None:
                self._cublas.close()


def _launch(bound: Bound, stream: int, x: Operand, out: Operand, expert: int, lane: Lane) -> None:
    """A launch with scratch; counters that a failure may have left counting are given up."""
    try:
        bound.launch(stream, x, out, expert, lane)
    except RuntimeError:
        lane.reset()
        raise


def _multiply(
    cublas: Cublas, d: Dense, module: Module, x: Operand, out: Operand, expert: int | None, lane: Lane, stream: int
) -> None:
    try:
        multiply(cublas, d, x, out, expert, lane, stream)
    except RuntimeError as error:
        raise RuntimeError(f"{module.name}: cuBLAS: {error}; m={x.rows}, n={module.n}, k={module.k}") from error


def _slice(x: Operand, start: int) -> Operand:
    """At most ROWS rows of an operand of regular rows, as a matrix."""
    if start == 0 and x.rows <= ROWS:
        return x
    stride, width = x.row_stride, x.shape[-1]
    assert stride is not None
    shape = min(ROWS, x.rows - start), width
    return replace(x, pointer=x.pointer + start * stride * ITEM, shape=shape, strides=(stride, 1))


def _packed(x: Operand, lane: Lane, stream: int) -> Operand:
    """A copy of x in the lane, as contiguous rows."""
    shape = (x.rows, x.shape[-1])
    with on(stream):
        source = view(x.pointer, x.shape, x.strides, "uint16", x.owner)
        copy = view(lane.buffer("packed x", x.rows * shape[1] * ITEM), shape, (shape[1], 1), "uint16", lane)
        copy.reshape(x.shape)[...] = source
    return replace(x, pointer=copy.data.ptr, shape=shape, strides=(shape[1], 1), owner=lane)
