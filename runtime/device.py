"""The CUDA backend: modules uploaded on first use, plans bound once for each m, launched on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from ..formats.errors import UnsupportedError
from ..kernels import launch as plans
from ..kernels.quantize import KINDS, nbytes
from . import build
from .arrays import ACTIVATIONS, CupyKind, Kind, NumpyKind, Operand, borrowed, host_view
from .catalog import Catalog, Module
from .cublas import Cublas
from .dense import BITS, Dense, multiply
from .launch import Bound, in_words
from .load import Uploader
from .product import Pair, Product, Quantized
from .ready import Ready
from .rows import ROWS, given, packed, some
from .scratch import Lane, Lanes, capture_id


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

    def __init__(
        self, catalog: Catalog, index: int, cubins: Any, scratch_limit: int, batch_invariant: bool = False
    ) -> None:
        self.catalog, self.index, self.device = catalog, index, f"cuda:{index}"
        with current(index):
            uploader = Uploader()
            self._lanes = Lanes(scratch_limit, uploader)
            self.ready = Ready(catalog, _facts(index, cubins), cubins, uploader, batch_invariant)

    @property
    def scratch_bytes(self) -> int:
        return self._lanes.nbytes

    @property
    def weight_bytes(self) -> int:
        return self.ready.weight_bytes

    def linear(self, p: Product) -> Any:
        return self._around(p, p.out, self._product)

    def swiglu(self, p: Pair) -> Any:
        return self._around(p.gate, p.out, partial(self._pair, up=p.up))

    def _around(self, p: Product, out: Operand | None, work: Callable[[Product, Operand, int], None]) -> Any:
        """``work(p, out, stream)`` with operands on this device, and its result where the caller wants it."""
        self._at_home(p.module.name, p.kind, x=p.x, out=out, residual=p.residual)
        with current(self.index):
            stream, x, result = p.kind.stream(self.index), p.x, None
            if p.quantized is not None and p.quantized.lane is not self._lanes.of(stream):
                raise ValueError(
                    f"{p.module.name}: x was quantized on another stream or graph capture; call quantize() on this one"
                )
            if out is None:
                result = p.kind.empty((*x.shape[:-1], p.module.n), x.dtype, x.owner)
                out = p.kind.target(result)
            if x.rows and p.module.n:
                if x.device is None:
                    self._through_host(p, out, stream, work)
                else:
                    work(p, out, stream)
            return out.owner if result is None else p.kind.deliver(result, x.owner)

    def _at_home(self, name: str, kind: Kind, **operands: Operand | None) -> None:
        for what, operand in operands.items():
            if operand is not None and operand.device != self.index and not isinstance(kind, NumpyKind):
                where = "the cpu" if operand.device is None else f"cuda:{operand.device}"
                raise ValueError(f"{name}: {what} is on {where}, this session on {self.device}; move it there")

    def quantize(self, kind: Kind, x: Operand, numerics: str) -> Quantized:
        self._at_home("quantize", kind, x=x)
        with current(self.index):
            stream = kind.stream(self.index)
            lane = self._lanes.of(stream)
            bound, (codes, factors) = self.ready.quantizer(x, numerics, stream), nbytes(numerics, x.rows, x.shape[-1])
            with lane.lock:
                loan = lane.lend(codes + factors, "x in 8 bits")
                handle = Quantized(self, kind, borrowed(x), numerics, lane, loan, partial(setattr, loan, "free", True))
                if x.rows:
                    there = x if x.device is not None else self._sent("quantize", "x", x, lane, stream)
                    there = there if there.row_stride is not None else packed(there, lane, stream)
                    assert there.row_stride is not None
                    given = {"quantized": loan.memory.ptr, "factors": loan.memory.ptr + codes}
                    bound.launch(stream, {"x": there.pointer, "ldx": there.row_stride, **given}, 0, None)
            self._lanes.settle(lane)
            return handle

    def _through_host(
        self, p: Product, out: Operand, stream: int, work: Callable[[Product, Operand, int], None]
    ) -> None:
        """numpy in, numpy out: both copied through the lane's staging memory; returns when the result is there."""
        from cupy.cuda import runtime

        m, n = p.x.rows, p.module.n
        lane = self._lanes.of(stream)
        with lane.lock:
            x = p.x if p.quantized is not None else self._sent(p.module.name, "x", p.x, lane, stream)
            back = Operand(lane.buffer("host y", m * n * x.item), (m, n), (n, 1), x.dtype, self.index, lane)
            added = None if p.residual is None else self._sent(p.module.name, "residual", p.residual, lane, stream)
            work(replace(p, x=x, residual=added), back, stream)
            result = np.empty((m, n), ACTIVATIONS[x.dtype])
            runtime.memcpyAsync(result.ctypes.data, back.pointer, result.nbytes, runtime.memcpyDeviceToHost, stream)
            runtime.streamSynchronize(stream)
        host_view(out)[...] = result.reshape(out.shape)

    def _sent(self, name: str, what: str, x: Operand, lane: Lane, stream: int) -> Operand:
        """A host array's rows in the lane's staging memory. Hold the lane's lock."""
        from cupy.cuda import runtime

        if capture_id(stream) is not None:
            raise RuntimeError(f"{name}: numpy arrays cannot take part in a graph capture; pass cupy or torch")
        shape = (x.rows, x.shape[-1])
        source = np.ascontiguousarray(host_view(x)).reshape(shape)
        there = Operand(lane.buffer(f"host {what}", source.nbytes), shape, (shape[1], 1), x.dtype, self.index, lane)
        runtime.memcpyAsync(there.pointer, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream)
        return there

    def _product(self, p: Product, out: Operand, stream: int) -> None:
        if p.module.stored_in is not None:
            self._part(p, out, stream)
            return
        if p.x.row_stride is not None:
            self._rows(p, out, stream)
            return
        lane = self._lanes.of(stream)
        with lane.lock:
            self._rows(replace(p, x=packed(p.x, lane, stream)), out, stream)
        self._lanes.settle(lane)

    def _pair(self, gate: Product, out: Operand, stream: int, up: Product) -> None:
        """silu of one product times the other: one launch, or two products and a third."""
        lane, x = self._lanes.of(stream), gate.x
        with lane.lock:
            if x.row_stride is None:
                x = packed(x, lane, stream)
            for start in range(0, x.rows, ROWS):
                part, to = some(x, start), some(out, start)
                operands = {"x": part.pointer, "ldx": part.row_stride or 0, "y": to.pointer, "ldy": to.row_stride or 0}
                bound = self.ready.pair(gate.module, up.module, x.dtype, part.rows, part.aligned, stream)
                if bound is not None:
                    expert = gate.expert if gate.module.expert is None else gate.module.expert
                    _launch(bound, stream, operands, expert or 0, lane)
                    continue
                shape = m, n = part.rows, gate.module.n
                for name, one in (("gate", gate), ("up", up)):
                    operands[name] = lane.buffer(f"{name} product", m * n * x.item)
                    made = Operand(operands[name], shape, (n, 1), x.dtype, self.index, lane)
                    self._product(replace(one, x=part), made, stream)
                self.ready.gating(m, n, x.dtype, stream).launch(stream, operands, 0, None)
        self._lanes.settle(lane)

    def _part(self, p: Product, out: Operand, stream: int) -> None:
        """The product of the module that holds a linear, of which its columns are copied: right wherever they begin."""
        from cupy.cuda import runtime

        module, whole = p.module, self.catalog.stored(p.module)
        assert module.rows is not None
        p = replace(p, module=whole, expert=p.expert if module.expert is None else module.expert)
        if module.n == whole.n:
            self._product(p, out, stream)
            return
        lane, m, item = self._lanes.of(stream), p.x.rows, p.x.item
        pitch, first, width = whole.n * item, module.rows[0] * item, module.n * item

        def copy(to: int, to_pitch: int, source: int, source_pitch: int) -> None:
            device = runtime.memcpyDeviceToDevice
            runtime.memcpy2DAsync(to, max(to_pitch, width), source, max(source_pitch, width), width, m, device, stream)

        assert out.row_stride is not None
        with lane.lock:
            y = lane.buffer("all parts", m * pitch)
            made = Operand(y, (m, whole.n), (whole.n, 1), p.x.dtype, self.index, lane)
            if p.residual is not None:  # its own columns; what the others add up to is left behind
                assert p.residual.row_stride is not None
                copy(y + first, pitch, p.residual.pointer, p.residual.row_stride * item)
                p = replace(p, residual=made)
            self._product(p, made, stream)
            copy(out.pointer, out.row_stride * item, y + first, pitch)
        self._lanes.settle(lane)

    def _rows(self, p: Product, out: Operand, stream: int) -> None:
        """A product of regular rows, at most ROWS of them at once."""
        for start in range(0, p.x.rows, ROWS):
            part, to = some(p.x, start), some(out, start)
            how = part.aligned, p.numerics, p.quantized is not None
            bound = self.ready.product(p.module, p.x.dtype, part.rows, *how, stream)
            added = None if p.residual is None else some(p.residual, start)
            operands = {"x": part.pointer, "y": to.pointer, "ldx": part.row_stride or 0, "ldy": to.row_stride or 0}
            if added is not None:
                operands |= {"residual": added.pointer, "ld_residual": added.row_stride or 0}
            if p.rounding == "each":
                operands["each"] = 1
            if p.quantized is not None:
                operands |= given(p.quantized, start)
            if isinstance(bound, Bound) and not bound.adds:
                _refuse_adding(p)
            if isinstance(bound, Bound) and not bound.needs_memory:
                bound.launch(stream, operands, p.expert or 0, None)
                continue
            lane = self._lanes.of(stream)
            with lane.lock:
                if isinstance(bound, Dense):
                    assert self.ready.cublas is not None
                    multiplied = replace(p, x=part, out=to, residual=added)
                    _multiply(self.ready.cublas, bound, multiplied, lane, stream)
                else:
                    _launch(bound, stream, operands, p.expert or 0, lane)
            self._lanes.settle(lane)

    def dequantize(self, module: Module) -> Any:
        with current(self.index):
            return self.ready.decoded(module)[0]

    def tensor(self, name: str) -> Any:
        import cupy

        array = np.ascontiguousarray(self.catalog.tensor(name))
        with current(self.index):
            try:
                return cupy.asarray(array)
            except (TypeError, ValueError):
                return cupy.asarray(array.view(f"u{array.itemsize}"))

    def explain(self, module: Module, m: int, dtype: str, numerics: str | None) -> tuple[str, ...]:
        plan = self.ready.plan(module, m, dtype, module.k % 8 == 0, numerics)
        if isinstance(plan, str):
            return (f"cuBLAS, decoded on the device once, fp32 accumulation: {plan}",)
        return in_words(plan)

    def explain_pair(self, gate: Module, up: Module, m: int, dtype: str) -> tuple[str, ...]:
        plan = self.ready.plan_pair(gate, up, m, dtype, gate.k % 8 == 0)
        if isinstance(plan, str):
            lines = (self.explain(self.catalog.stored(one), m, dtype, None) for one in (gate, up))
            told = (f"{one.name}: {line[0]}" for one, line in zip((gate, up), lines, strict=True))
            return (f"two products, then silu of the first times the second: {plan}", *told)
        return in_words(plan)

    def load(self, modules: Sequence[Module]) -> None:
        with current(self.index):
            for module in modules:
                dtype = module.element if module.element in ("f16", "bf16") else "f16"
                if isinstance(self.ready.plan(module, 1, dtype, True, None), str):
                    self.ready.product(module, dtype, 1, True, None, False, None)
                else:
                    self.ready.resident(module)

    def prepare(
        self, modules: Sequence[Module], ms: Sequence[int], dtypes: Sequence[str], numerics: str | None
    ) -> None:
        """Runs every product once on zeros: that loads kernels (cuBLAS's own too) and grows this stream's lane.
        Where it rounds x to 8 bits, the product of a handle is made ready too."""
        import cupy

        todo = [(module, min(m, ROWS), dtype) for module in modules for dtype in dtypes for m in ms if m]
        ways = [(aligned, numerics, quantized) for aligned in (False, True) for quantized in (False, True)]
        chosen = [self.ready.plan(*one, *way) for one in todo for way in ways]
        self.ready.kernels.compile([stage for plan in chosen if not isinstance(plan, str) for stage in plan.stages])
        kind = CupyKind()
        with current(self.index):
            stream = kind.stream(self.index)
            for module, m, dtype in todo:
                bits = BITS[dtype]
                x, y = cupy.zeros((m, module.k), bits), cupy.empty((m, module.n), bits)
                source, target = (replace(kind.operand(array), dtype=dtype) for array in (x, y))
                for aligned in (False, True):
                    self.ready.product(module, dtype, m, aligned, numerics, False, None)
                    given = self.ready.plan(module, m, dtype, aligned, numerics, True)
                    if not isinstance(given, str) and given.quantizes is not None:
                        self.ready.product(module, dtype, m, aligned, given.quantizes, True, None)
                for shared in module.numerics:
                    if shared in KINDS:
                        self.ready.quantizer(source, shared, None)
                expert = None if module.experts is None else 0
                self._product(Product(module, kind, source, None, expert, numerics), target, stream)
            cupy.cuda.get_current_stream().synchronize()

    def prepare_pairs(self, pairs: Sequence[tuple[Module, Module]], ms: Sequence[int], dtypes: Sequence[str]) -> None:
        """As ``prepare``, after it."""
        import cupy

        kind = CupyKind()
        for (gate, up), m, dtype in product(pairs, ms, dtypes):
            with current(self.index):
                x, y = (cupy.zeros((min(m, ROWS), width), BITS[dtype]) for width in (gate.k, gate.n))
                source, target = (replace(kind.operand(array), dtype=dtype) for array in (x, y))
                both = (Product(one, kind, source, None, 0 if one.experts else None) for one in (gate, up))
                if m:
                    for aligned in (False, True):
                        self.ready.pair(gate, up, dtype, x.shape[0], aligned, None)
                    self.ready.gating(x.shape[0], gate.n, dtype, None)
                    self._pair(next(both), target, kind.stream(self.index), up=next(both))
                    cupy.cuda.get_current_stream().synchronize()

    def release(self) -> None:
        with current(self.index):
            self._lanes.trim(0)

    def close(self) -> None:
        import cupy

        with current(self.index):
            cupy.cuda.runtime.deviceSynchronize()
            self.ready.close()
            self._lanes.clear()


def _launch(bound: Bound, stream: int, operands: dict[str, int], expert: int, lane: Lane) -> None:
    """A launch with scratch; counters that a failure may have left counting are given up."""
    try:
        bound.launch(stream, operands, expert, lane)
    except RuntimeError:
        lane.reset()
        raise


def _multiply(cublas: Cublas, d: Dense, p: Product, lane: Lane, stream: int) -> None:
    try:
        multiply(cublas, d, p, lane, stream)
    except RuntimeError as error:
        m, n, k = p.x.rows, p.module.n, p.module.k
        raise RuntimeError(f"{p.module.name}: cuBLAS: {error}; m={m}, n={n}, k={k}") from error


def _refuse_adding(p: Product) -> None:
    """For kernels that end with one rounding of sum and bias."""
    each = p.rounding == "each" and p.module.bias
    if p.residual is not None or each:
        asked = "round each step" if p.residual is None else "add a residual"
        raise UnsupportedError(f"kernels of {p.module.layout} modules do not {asked}", tensor=p.module.name)
