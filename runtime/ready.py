"""What a device has ready for products: weights uploaded or decoded on first use, plans bound once for each m."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..formats.errors import UnsupportedError
from ..kernels import launch as plans
from ..kernels import layouts
from ..kernels.quantize import padded
from ..kernels.quantize import stage as quantizing
from ..kernels.swiglu import stage as silu_stage
from .arrays import Operand
from .catalog import Catalog, Module
from .cublas import Cublas
from .dense import BITS, Dense, bias_of, decode, dense
from .launch import Bound, Kernels
from .load import Uploader, Weights
from .scratch import allocating, capture_id

BOUND_LIMIT = 16384
"""Bound plans kept, about a kilobyte of host memory each."""


class Ready:
    """Of one device, which is current in every call. Safe to use from several threads."""

    def __init__(
        self, catalog: Catalog, facts: plans.Device, cubins: Any, uploader: Uploader, batch_invariant: bool = False
    ) -> None:
        import cupy

        self.catalog, self.facts, self._invariant = catalog, facts, batch_invariant
        self.kernels = Kernels(cubins)
        self.cublas: Cublas | None = None
        self._uploader = uploader
        self._pool = cupy.cuda.MemoryPool()
        self._lock = threading.RLock()
        self._weights: dict[str, Weights] = {}
        self._dense: dict[tuple[str, str], Dense] = {}
        self._bound: dict[tuple[Any, ...], Bound | Dense] = {}
        self._pairs: dict[tuple[Any, ...], Bound | None] = {}
        self._others: dict[tuple[Any, ...], Bound] = {}

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self._weights.values()) + sum(d.nbytes for d in self._dense.values())

    def product(
        self,
        module: Module,
        dtype: str,
        m: int,
        aligned: bool,
        numerics: str | None,
        quantized: bool,
        stream: int | None,
    ) -> Bound | Dense:
        """The bound plan of a product, or the dense weights when no kernel of ours runs it. ``quantized``: of an x that
        is in the 8 bits of ``numerics`` already."""
        key = module.name, dtype, m, aligned, numerics, quantized
        if (bound := self._bound.get(key)) is not None:
            return bound
        with self._lock:
            plan = self.plan(module, m, dtype, aligned, numerics, quantized)
            if quantized and (isinstance(plan, str) or plan.quantizes != numerics):
                found = plan if isinstance(plan, str) else plan.why
                raise UnsupportedError(
                    "no kernel takes x in 8 bits", tensor=module.name, found=found, do="pass x itself"
                )
            if isinstance(plan, str) and self._invariant:
                raise UnsupportedError(
                    "no batch-invariant product: cuBLAS would choose its order of adding by m",
                    tensor=module.name, found=plan, do="open a session without batch_invariant for it",
                )  # fmt: skip
            if not self._warm(plan, (module,), dtype):
                self._refuse_cold(module.name, m, stream, f", numerics={numerics!r}" if numerics else "")
            with allocating():
                if len(self._bound) >= BOUND_LIMIT:
                    self._bound.clear()
                made = self._make_dense(module, dtype) if isinstance(plan, str) else self.bind(module, m, plan)
                self._bound[key] = made
                return made

    def _warm(self, plan: plans.Plan | str, modules: Sequence[Module], dtype: str) -> bool:
        """Whether nothing needs to be uploaded, decoded or compiled."""
        if isinstance(plan, str):
            return all((module.name, dtype) in self._dense for module in modules)
        return all(module.name in self._weights for module in modules) and all(map(self.kernels.has, plan.stages))

    def _refuse_cold(self, name: str, m: int, stream: int | None, more: str = "") -> None:
        """Refuse to upload or compile where that would break a capture."""
        if stream is not None and capture_id(stream) is not None:
            raise RuntimeError(
                f"{name}: not ready for m={m} inside a graph capture; "
                f"call session.prepare({m}{more}) before the capture begins"
            )

    def bind(self, module: Module, m: int, plan: plans.Plan) -> Bound:
        """A plan with the module's weights, uploaded if they are not, and m in place."""
        return Bound(module.name, plan, self._scalars(module, m), self.resident(module), self.kernels)

    def _scalars(self, module: Module, m: int) -> dict[str, int]:
        spec = self.catalog.artifact.modules[module.name]
        extents = {name: value for name, value in spec.items() if type(value) is int}
        return {**extents, "m": m, "ld_gathered": spec["k_padded"], "ld_quantized": padded(spec["k"])}

    def pair(self, gate: Module, up: Module, dtype: str, m: int, aligned: bool, stream: int | None) -> Bound | None:
        """The bound plan of a pair, None where it is two products."""
        key = gate.name, up.name, dtype, m, aligned
        with self._lock:
            if key not in self._pairs:
                if len(self._pairs) >= BOUND_LIMIT:
                    self._pairs.clear()
                self._pairs[key] = self._make_pair(gate, up, dtype, m, aligned, stream)
            return self._pairs[key]

    def _make_pair(
        self, gate: Module, up: Module, dtype: str, m: int, aligned: bool, stream: int | None
    ) -> Bound | None:
        plan, stored = self.plan_pair(gate, up, m, dtype, aligned), [self.catalog.stored(one) for one in (gate, up)]
        if isinstance(plan, str):
            return None
        name = f"{gate.name} and {up.name}"
        if not self._warm(plan, stored, dtype):
            self._refuse_cold(name, m, stream, f", swiglu=[{(gate.name, up.name)}]")
        with allocating():
            first, second = map(self.resident, stored)
            pointers = {**first.pointers, **{f"up.{suffix}": pointer for suffix, pointer in second.pointers.items()}}
            steps = {**first.steps, **{f"up.{suffix}": step for suffix, step in second.steps.items()}}
            weights = Weights((first, second), 0, pointers, steps)
            return Bound(name, plan, {**self._scalars(stored[0], m), "n": gate.n}, weights, self.kernels)

    def plan_pair(self, gate: Module, up: Module, m: int, dtype: str, aligned: bool) -> plans.Plan | str:
        """The layout's plan for one launch, or why it takes two products."""
        chosen = None if gate.layout is None else getattr(layouts()[gate.layout], "plan_pair", None)
        if chosen is None or gate.layout != up.layout:
            return "no kernel for pairs of these modules"
        if gate.expert != up.expert:
            return "they are two experts"
        if self._invariant:
            return "its sums depend on m"
        parts = (self._part(one) for one in (gate, up))
        try:
            plan: plans.Plan = chosen(*parts, m, self.facts, dtype, aligned)
        except UnsupportedError as error:
            return str(error)
        return plan

    def _part(self, module: Module) -> plans.Part:
        spec = self.catalog.artifact.modules[self.catalog.stored(module).name]
        return plans.Part(spec, module.rows[0] if module.rows else 0, module.n)

    def plan(
        self, module: Module, m: int, dtype: str, aligned: bool, numerics: str | None, quantized: bool = False
    ) -> plans.Plan | str:
        """The layout's plan, with ``quantized`` for x that is in 8 bits already, or why there is none."""
        if module.layout is None:
            return f"its weights passed through conversion as {module.element}"
        spec = self.catalog.artifact.modules[module.name]
        try:
            how = {"numerics": numerics, "batch_invariant": self._invariant, "quantized": quantized}
            plan: plans.Plan = layouts()[module.layout].plan(spec, m, self.facts, dtype, aligned, **how)
        except UnsupportedError as error:
            return str(error)
        return plan

    def resident(self, module: Module) -> Weights:
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

        if (module.name, dtype) in self._dense:
            return self._dense[module.name, dtype]
        self.cublas = self.cublas or Cublas()
        with cupy.cuda.using_allocator(self._pool.malloc):
            if module.element == dtype:
                weight, bias = self.catalog.plain(module)
                made = Dense(cupy.empty(weight.shape, BITS[dtype]), dtype, bias_of(bias))
                self._uploader.copy(made.weight.data.ptr, weight)
            else:
                w, bias = self.decoded(module)
                made = dense(w, bias, dtype)
                del w
            cupy.cuda.get_current_stream().synchronize()
        self._pool.free_all_blocks()
        self._dense[module.name, dtype] = made
        return made

    def decoded(self, module: Module) -> tuple[Any, Any]:
        """float32 weights on the device, and the bias as stored, on the host."""
        import cupy

        q = self.catalog.quant(module)
        if q is not None:
            return decode(q), q.bias
        weight, bias = self.catalog.plain(module)
        return cupy.asarray(np.ascontiguousarray(weight).astype(np.float32)), bias

    def quantizer(self, x: Operand, numerics: str, stream: int | None) -> Bound:
        """The launch that quantises an x of these extents."""
        m, k = x.rows, x.shape[-1]
        scalars = {"m": m, "n": 0, "k": k, "k_padded": padded(k), "ld_quantized": padded(k)}
        return self._alone("quantize", ("quantize", numerics, x.dtype, m, k), scalars, stream,
                           lambda: quantizing(numerics, m, k, self.facts, x.dtype))  # fmt: skip

    def gating(self, m: int, n: int, dtype: str, stream: int | None) -> Bound:
        """The launch that makes silu(gate) * up of two products."""
        scalars = {"m": m, "n": n, "k": 0}
        return self._alone("swiglu", ("swiglu", dtype, m, n), scalars, stream,
                           lambda: silu_stage(m, n, self.facts, dtype))  # fmt: skip

    def _alone(
        self,
        name: str,
        key: tuple[Any, ...],
        scalars: dict[str, int],
        stream: int | None,
        stage: Callable[[], plans.Stage],
    ) -> Bound:
        """A launch that reads no module's tensors."""
        with self._lock:
            if key not in self._others:
                made = stage()
                if not self.kernels.has(made):
                    self._refuse_cold(name, scalars["m"], stream)
                with allocating():
                    bound = Bound(name, plans.Plan((made,), ""), scalars, Weights(None, 0, {}, {}), self.kernels)
                if len(self._others) >= BOUND_LIMIT:
                    self._others.clear()
                self._others[key] = bound
            return self._others[key]

    def close(self) -> None:
        self._bound.clear()
        self._pairs.clear()
        self._others.clear()
        self._dense.clear()
        self._pool.free_all_blocks()
        self._weights.clear()
        self.kernels.close()
        if self.cublas is not None:
            self.cublas.close()
