"""What a device has ready for products: weights uploaded or decoded on first use, plans bound once for each m."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ..formats.errors import UnsupportedError
from ..kernels import launch as plans
from ..kernels import layouts
from ..kernels.quantize import padded
from ..kernels.quantize import stage as quantizing
from .arrays import Operand
from .catalog import Catalog, Module
from .cublas import Cublas
from .dense import BITS, Dense, bias_of, decode, dense
from .launch import Bound, Kernels
from .load import Uploader, Weights
from .product import Quantized
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
        self._quantizers: dict[tuple[Any, ...], Bound] = {}

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
        handle: Quantized | None,
        stream: int | None,
    ) -> Bound | Dense:
        """The bound plan of a product, or the dense weights when no kernel of ours runs it."""
        key = module.name, dtype, m, aligned, numerics
        bound = self._bound.get(key)
        if bound is not None and (handle is None or isinstance(bound, Bound)):
            return bound
        with self._lock:
            plan = self.plan(module, m, dtype, aligned, numerics)
            if handle is not None and (isinstance(plan, str) or plan.quantizes != handle.numerics):
                found = plan if isinstance(plan, str) else plan.why
                raise UnsupportedError(
                    "no kernel takes x in 8 bits", tensor=module.name, found=found, do="pass x itself"
                )
            if isinstance(plan, str) and self._invariant:
                raise UnsupportedError(
                    "no batch-invariant product: cuBLAS would choose its order of adding by m",
                    tensor=module.name, found=plan, do="open a session without batch_invariant for it",
                )  # fmt: skip
            stages = () if isinstance(plan, str) else plan.stages
            if not stages or module.name not in self._weights or not all(map(self.kernels.has, stages)):
                self._refuse_cold(module.name, m, stream)
            with allocating():
                if len(self._bound) >= BOUND_LIMIT:
                    self._bound.clear()
                made = self._make_dense(module, dtype) if isinstance(plan, str) else self.bind(module, m, plan)
                self._bound[key] = made
                return made

    def _refuse_cold(self, name: str, m: int, stream: int | None) -> None:
        """Refuse to upload or compile where that would break a capture."""
        if stream is not None and capture_id(stream) is not None:
            raise RuntimeError(
                f"{name}: not ready for m={m} inside a graph capture; "
                f"call session.prepare({m}) before the capture begins"
            )

    def bind(self, module: Module, m: int, plan: plans.Plan) -> Bound:
        """A plan with the module's weights, uploaded if they are not, and m in place."""
        spec = self.catalog.artifact.modules[module.name]
        extents = {name: value for name, value in spec.items() if type(value) is int}
        scalars = {**extents, "m": m, "ld_gathered": spec["k_padded"]}
        return Bound(module.name, plan, scalars, self.resident(module), self.kernels)

    def plan(self, module: Module, m: int, dtype: str, aligned: bool, numerics: str | None) -> plans.Plan | str:
        """The layout's plan, or why there is none."""
        if module.layout is None:
            return f"its weights passed through conversion as {module.element}"
        spec = self.catalog.artifact.modules[module.name]
        try:
            layout, how = layouts()[module.layout], {"numerics": numerics, "batch_invariant": self._invariant}
            plan: plans.Plan = layout.plan(spec, m, self.facts, dtype, aligned, **how)
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
        m, k, key = x.rows, x.shape[-1], ("", numerics, x.dtype, x.rows, x.shape[-1])
        with self._lock:
            if key not in self._quantizers:
                stage = quantizing(numerics, m, k, self.facts, x.dtype)
                if not self.kernels.has(stage):
                    self._refuse_cold("quantize", m, stream)
                scalars = {"m": m, "n": 0, "k": k, "k_padded": padded(k)}
                with allocating():
                    bound = Bound("quantize", plans.Plan((stage,), ""), scalars, Weights(None, 0, {}, {}), self.kernels)
                self._quantizers[key] = bound
            return self._quantizers[key]

    def close(self) -> None:
        self._bound.clear()
        self._quantizers.clear()
        self._dense.clear()
        self._pool.free_all_blocks()
        self._weights.clear()
        self.kernels.close()
        if self.cublas is not None:
            self.cublas.close()
