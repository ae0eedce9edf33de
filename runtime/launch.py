"""Carrying out a plan: kernels loaded once, arguments bound once for each (module, m); a call only patches pointers."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..kernels.launch import At, Plan, Stage
from .build import compile as build_cubin
from .cubin import Cubin
from .load import Weights
from .scratch import Lane

STATIC_SHARED = 48 << 10
"""Bytes of shared memory a kernel gets without opting in."""

CALLERS = ("x", "y", "residual", "ldx", "ldy", "ld_residual", "each", "gate", "up")
OPERANDS = (*CALLERS, "scratch", "counters", "gathered", "quantized", "factors")
"""Arguments that change from call to call."""

MAPS = {"x_map": "k", "gathered_map": "k_padded"}
"""Arguments that are a tensor map by value, and the extent that is the length of their rows."""
MAP_BYTES, MAP_ALIGNMENT, MAP_ITEM = 128, 64, 2


Key = tuple[str, tuple[int, ...], str]


def _key(stage: Stage) -> Key:
    return stage.kernel, stage.variant, stage.target


class Kernels:
    """The functions loaded on one device, by (kernel, variant, target)."""

    def __init__(self, cubins: Any) -> None:
        self._cubins = cubins
        self._images: dict[Key, Cubin] = {}
        self._loaded: dict[Key, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def has(self, stage: Stage) -> bool:
        return _key(stage) in self._loaded

    def compile(self, stages: Iterable[Stage]) -> None:
        """Build what is missing, in parallel (NVRTC releases the GIL); loading is left to ``function``."""
        missing = sorted({_key(stage) for stage in stages} - self._loaded.keys() - self._images.keys())

        def image(key: Key) -> Cubin:
            return build_cubin(*key, self._cubins)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._images.update(zip(missing, pool.map(image, missing), strict=True))

    def function(self, stage: Stage) -> Any:
        """Compiled (or found built), loaded and allowed its shared memory. Raises CudaError."""
        from cuda.bindings import driver

        key = _key(stage)
        with self._lock:
            if key not in self._loaded:
                cubin = self._images.pop(key, None) or build_cubin(*key, self._cubins)
                module = _checked("load", driver.cuModuleLoadData(cubin.image))
                self._loaded[key] = module, _checked("load", driver.cuModuleGetFunction(module, cubin.entry.encode()))
            function = self._loaded[key][1]
            if stage.shared > STATIC_SHARED:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _, most = driver.cuFuncGetAttribute(attribute, function)
                if most < stage.shared:
                    _checked("shared memory", driver.cuFuncSetAttribute(function, attribute, stage.shared))
            return function

    def close(self) -> None:
        from cuda.bindings import driver

        for module, _ in self._loaded.values():
            driver.cuModuleUnload(module)
        self._loaded.clear()


class CudaError(Exception):
    """``launch: CUDA_ERROR_INVALID_VALUE (invalid argument)``."""

    def __init__(self, doing: str, status: Any) -> None:
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        super().__init__(f"{doing}: {status.name} ({text.decode() if text else 'no description'})")


def _checked(doing: str, answer: tuple[Any, ...]) -> Any:
    """A driver call's result without its status. Raises CudaError."""
    if answer[0]:
        raise CudaError(doing, answer[0])
    return answer[1] if len(answer) > 1 else None


def describe(stage: Stage) -> str:
    variant = ", ".join(map(str, stage.variant))
    size = f"grid {'x'.join(map(str, stage.grid))}, block {stage.block}, {stage.shared} B shared"
    return f"{stage.kernel}<{variant}> {stage.target}, {size}"


def in_words(plan: Plan) -> tuple[str, ...]:
    """A plan in words, line by line."""
    stages = [f"stage {i}: {describe(stage)}" for i, stage in enumerate(plan.stages, 1)]
    memory = f"scratch {plan.scratch} B, gathered x {plan.gathered} B, {plan.counters} counters"
    if plan.quantizes:
        memory += f", x as {plan.quantizes} {plan.quantized + plan.factors} B"
    rejected = [f"not {what}: {why}" for what, why in plan.rejected]
    return (*stages, f"why: {plan.why}", memory, *rejected)


@dataclass(frozen=True)
class _Prepared:
    """One stage: argument words (8 bytes each) and the array of their addresses that the driver reads."""

    stage: Stage
    function: Any
    words: memoryview
    patched: tuple[tuple[int, str], ...]
    """(word, name in OPERANDS) of what a call fills in."""
    stacked: tuple[tuple[int, int, int], ...]
    """(word, pointer of expert 0, bytes from one expert to the next)."""
    addresses: int
    keep: tuple[Any, ...]
    map: _Map | None
    config: Any
    """CUlaunchConfig of a stage that overlaps with the kernel before it or has clusters, but for the stream."""


class _Map:
    """A stage's tensor map of x or gathered x, encoded anew only when pointer or stride are not the last call's."""

    def __init__(self, source: str, rows: int, columns: int, box: tuple[int, int]) -> None:
        self.source, self._extents, self._box = source, (columns, rows), box
        self._last = (0, 0)
        self._storage = (ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT))()
        start = ctypes.addressof(self._storage)
        self.address = start + -start % MAP_ALIGNMENT

    def point(self, pointer: int, stride: int) -> None:
        """At rows of 16-bit numbers that start at ``pointer``, ``stride`` elements apart. Raises CudaError."""
        if (pointer, stride) == self._last:
            return
        from cuda.bindings import driver

        u32, u64 = driver.cuuint32_t, driver.cuuint64_t
        made = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            pointer,
            [u64(extent) for extent in self._extents],
            [u64(stride * MAP_ITEM)],
            [u32(extent) for extent in reversed(self._box)],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        ctypes.memmove(self.address, int(_checked("tensor map of x", made).getPtr()), MAP_BYTES)
        self._last = pointer, stride


class Bound:
    """A plan with the arguments of one module and one m in place."""

    def __init__(self, name: str, plan: Plan, scalars: Mapping[str, int], weights: Weights, kernels: Kernels) -> None:
        self.name, self.plan = name, plan
        self.needs_memory = bool(plan.scratch or plan.counters or plan.gathered or plan.quantized or plan.factors)
        self.adds = not plan.stages or "residual" in plan.stages[-1].args
        """Whether it takes a residual, and rounds as it is told."""
        self._scalars = scalars
        self._lock = threading.Lock()
        self._stages: list[_Prepared] = []
        for stage in plan.stages:
            try:
                self._stages.append(_prepare(stage, scalars, weights, kernels.function(stage)))
            except CudaError as error:
                raise self._blame(len(self._stages), error) from None

    def launch(self, stream: int, operands: Mapping[str, int], expert: int, lane: Lane | None) -> None:
        """All stages in order on ``stream``. ``operands`` are values for names in OPERANDS, 0 where there is none; a
        plan that needs memory takes it from ``lane``, whose lock is held. With ``quantized`` among them the stage that
        would make it is left out.

        Raises RuntimeError naming stage, CUDA error, kernel, m, n, k.
        """
        from cuda.bindings import driver

        first = int(self.plan.quantizes is not None and "quantized" in operands)
        if lane is not None:
            operands = {**self._memory(lane, first == 0), **operands}
        with self._lock:
            for i, p in enumerate(self._stages[first:], first):
                for word, operand in p.patched:
                    p.words[word] = operands.get(operand, 0)
                for word, base, step in p.stacked:
                    p.words[word] = base + expert * step
                stage = p.stage
                if p.map is not None:
                    gathered = p.map.source == "gathered_map"
                    stride = self._scalars["ld_gathered"] if gathered else operands["ldx"]
                    try:
                        p.map.point(operands["gathered" if gathered else "x"], stride)
                    except CudaError as error:
                        raise self._blame(i, error) from None
                if p.config is None:
                    (status,) = driver.cuLaunchKernel(
                        p.function, *stage.grid, stage.block, 1, 1, stage.shared, stream, p.addresses, 0
                    )
                else:
                    p.config.hStream = stream
                    (status,) = driver.cuLaunchKernelEx(p.config, p.function, p.addresses, 0)
                if status:
                    raise self._blame(i, CudaError("launch", status))

    def _memory(self, lane: Lane, quantizes: bool) -> dict[str, int]:
        """Pointers into ``lane`` of what the plan needs there."""
        plan, buffer = self.plan, lane.buffer
        memory = {
            "scratch": buffer("scratch", plan.scratch),
            "counters": buffer("counters", 4 * plan.counters),
            "gathered": buffer("gathered x", plan.gathered),
        }
        if quantizes:
            memory |= {"quantized": buffer("x in 8 bits", plan.quantized), "factors": buffer("factors", plan.factors)}
        return memory

    def _blame(self, i: int, error: CudaError) -> RuntimeError:
        m, n, k = (self._scalars[extent] for extent in "mnk")
        stages = self.plan.stages
        return RuntimeError(
            f"{self.name}: stage {i + 1} of {len(stages)} failed: {error}; {describe(stages[i])}; m={m}, n={n}, k={k}"
        )


def _prepare(stage: Stage, scalars: Mapping[str, int], weights: Weights, function: Any) -> _Prepared:
    count = len(stage.args)
    storage = bytearray(8 * max(count, 1))
    words = memoryview(storage).cast("Q")
    base = ctypes.addressof((ctypes.c_char * len(storage)).from_buffer(storage))
    addresses = (ctypes.c_void_p * max(count, 1))(*(base + 8 * i for i in range(count)))
    patched, stacked, map_ = [], [], None
    for i, named in enumerate(stage.args):
        arg, offset = (named.name, named.offset) if isinstance(named, At) else (named, 0)
        if arg in MAPS:
            assert isinstance(arg, str)
            assert stage.box is not None
            map_ = _Map(arg, scalars["m"], scalars[MAPS[arg]], stage.box)
            addresses[i] = map_.address
        elif isinstance(arg, str) and arg in OPERANDS:
            patched.append((i, arg))
        elif isinstance(arg, int) or arg in scalars:
            words[i] = (arg if isinstance(arg, int) else scalars[arg]) & 0xFFFFFFFF
        else:
            pointer = weights.pointers.get(arg)
            words[i] = 0 if pointer is None else pointer + offset
            if weights.steps.get(arg, 0):
                stacked.append((i, words[i], weights.steps[arg]))
    keep = (storage, addresses, weights)
    pointer, config = ctypes.addressof(addresses), _config(stage) if stage.overlap or stage.cluster > 1 else None
    return _Prepared(stage, function, words, tuple(patched), tuple(stacked), pointer, keep, map_, config)


def _config(stage: Stage) -> Any:
    """The launch of a stage that may start while the kernel before it still runs, or has clusters."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = stage.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = stage.block, 1, 1
    config.sharedMemBytes = stage.shared
    attributes = []
    if stage.overlap:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if stage.cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attributes[-1].value.clusterDim
        size.x, size.y, size.z = stage.cluster, 1, 1
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
