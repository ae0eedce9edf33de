"""The caller's arrays: adopted without a copy where they live, and results of the same kind.

A kind is where an array comes from (numpy, cupy, torch, any DLPack exporter). Everything behind this module sees
``Operand``: a pointer, a shape and strides.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ACTIVATIONS: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}
_NAMES = {dtype: name for name, dtype in ACTIVATIONS.items()}
_TORCH = {"torch.float16": "f16", "torch.bfloat16": "bf16", "torch.float32": "f32"}


@dataclass(frozen=True)
class Operand:
    """Borrowed memory: ``strides`` in elements, ``device`` the CUDA ordinal or None for host memory."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    """``f16``, ``bf16``, ``f32``, or the foreign name of a type no kernel takes."""
    device: int | None
    owner: Any
    """The array that keeps the memory alive."""
    writable: bool = True

    @property
    def item(self) -> int:
        """Bytes of one number."""
        return 4 if self.dtype == "f32" else 2

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else prod(self.shape[:-1])

    @property
    def row_stride(self) -> int | None:
        """Elements between rows when the operand is one matrix of contiguous rows, else None."""
        if len(self.shape) == 2 and self.strides[1] == 1 and 0 < self.shape[1] <= self.strides[0]:
            return self.strides[0]
        *lead, width = self.shape
        if 0 in self.shape:
            return width
        if width > 1 and self.strides[-1] != 1:
            return None
        stride, extent = None, 1
        for size, step in zip(reversed(lead), reversed(self.strides[:-1]), strict=True):
            if size == 1:
                continue
            if stride is None:
                stride = step
            elif step != stride * extent:
                return None
            extent *= size
        stride = width if stride is None else stride
        return stride if stride >= width or self.rows <= 1 else None

    @property
    def aligned(self) -> bool:
        """Whether every row starts on 16 bytes."""
        return self.row_stride is not None and (self.pointer | self.row_stride * self.item) % 16 == 0

    def span(self) -> tuple[int, int]:
        """First byte and the byte after the last that any element occupies."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        low = high = 0
        for size, step in zip(self.shape, self.strides, strict=True):
            low, high = low + min((size - 1) * step, 0), high + max((size - 1) * step, 0)
        return self.pointer + low * self.item, self.pointer + (high + 1) * self.item


def _name(dtype: np.dtype[Any]) -> str:
    return _NAMES.get(dtype) or (dtype.name if dtype.isnative else dtype.str)


def _steps(x: Any) -> tuple[int, ...]:
    """Strides in elements. Raises ValueError for a view whose elements do not lie on a grid of whole elements."""
    item, strides = x.itemsize, x.strides
    if any(step % item for step in strides) and any(n > 1 and s % item for n, s in zip(x.shape, strides, strict=True)):
        raise ValueError(f"strides of {list(strides)} bytes are not whole {x.dtype} elements; pass a contiguous copy")
    return tuple([step // item for step in strides])


class Kind(Protocol):
    """One array library."""

    name: str

    def operand(self, x: Any) -> Operand:
        """Raises TypeError for what cannot be adopted."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """A new array of this kind where ``like`` lives."""

    def target(self, result: Any) -> Operand:
        """The memory of what ``empty`` made."""

    def deliver(self, result: Any, like: Any) -> Any:
        """What ``empty`` made, finished and as the caller gets it."""

    def stream(self, device: int) -> int:
        """The handle of the caller's current CUDA stream on a device."""


class _Native:
    """A library whose own arrays hold the result from the start."""

    def operand(self, x: Any) -> Operand:
        raise NotImplementedError

    def target(self, result: Any) -> Operand:
        return self.operand(result)

    def deliver(self, result: Any, like: Any) -> Any:
        return result


class NumpyKind(_Native):
    name = "numpy"

    def operand(self, x: Any) -> Operand:
        return Operand(x.ctypes.data, x.shape, _steps(x), _name(x.dtype), None, x, x.flags.writeable)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return np.empty(shape, ACTIVATIONS[dtype])

    def stream(self, device: int) -> int:
        return CupyKind().stream(device)


class CupyKind(_Native):
    name = "cupy"

    def operand(self, x: Any) -> Operand:
        return Operand(x.data.ptr, x.shape, _steps(x), _name(x.dtype), x.data.device_id, x)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        import cupy

        return cupy.empty(shape, ACTIVATIONS[dtype])

    def stream(self, device: int) -> int:
        import cupy

        return int(cupy.cuda.get_current_stream(device).ptr)


class TorchKind(_Native):
    name = "torch"

    def operand(self, x: Any) -> Operand:
        import torch

        if x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                "x requires grad and warptile computes no gradients; pass x.detach() or use torch.no_grad()"
            )
        if x.layout != torch.strided:
            raise TypeError(f"x has layout {x.layout}; need a strided tensor")
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(f"x is on {x.device}; need a cuda or cpu tensor")
        dtype = str(x.dtype)
        device = x.device.index if x.device.type == "cuda" else None
        return Operand(x.data_ptr(), tuple(x.shape), x.stride(), _TORCH.get(dtype, dtype), device, x)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        import torch

        types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
        return torch.empty(shape, dtype=types[dtype], device=like.device)

    def stream(self, device: int) -> int:
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)


class DLPackKind:
    """Any other exporter: adopted through DLPack; the result goes back through its namespace's from_dlpack."""

    name = "dlpack"

    def _via(self, x: Any) -> Kind:
        on_cuda = x.__dlpack_device__()[0] in (2, 13)  # kDLCUDA, kDLCUDAManaged
        return CupyKind() if on_cuda else NumpyKind()

    def operand(self, x: Any) -> Operand:
        via = self._via(x)
        try:
            library = import_module(via.name)
            return replace(via.operand(library.from_dlpack(x)), owner=x)
        except (BufferError, RuntimeError, ImportError, ValueError) as error:
            raise TypeError(f"cannot adopt {type(x).__name__} through DLPack: {error}") from error

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return self._via(like).empty(shape, dtype, like)

    def target(self, result: Any) -> Operand:
        return kind_of(result).operand(result)

    def deliver(self, result: Any, like: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        return result if namespace is None else namespace().from_dlpack(result)

    def stream(self, device: int) -> int:
        return CupyKind().stream(device)


def kind_of(x: Any) -> Kind:
    """The library an array comes from. Raises TypeError for what is no array."""
    if isinstance(x, np.ndarray):
        return NumpyKind()
    for module, base, kind in (("cupy", "ndarray", CupyKind), ("torch", "Tensor", TorchKind)):
        if module in sys.modules and isinstance(x, getattr(sys.modules[module], base)):
            made: Kind = kind()
            return made
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPackKind()
    raise TypeError(f"x is {type(x).__name__}; need a cupy, torch, numpy or other DLPack array")


def host_view(operand: Operand) -> Array:
    """The numpy view of host memory; no copy, writable."""
    item = operand.item
    extent = (operand.span()[1] - operand.span()[0]) // item
    assert operand.device is None
    if not extent:
        return np.empty(operand.shape, ACTIVATIONS[operand.dtype])
    low = operand.span()[0]
    word = ctypes.c_uint32 if item == 4 else ctypes.c_uint16
    raw = np.ctypeslib.as_array((word * extent).from_address(low))
    view = np.lib.stride_tricks.as_strided(
        raw[(operand.pointer - low) // item :], operand.shape, [s * item for s in operand.strides]
    )
    return view.view(ACTIVATIONS[operand.dtype])


def borrowed(x: Operand) -> Operand:
    """Shape, type and place of an operand whose memory nobody will read: contiguous rows at address 0."""
    steps = [1]
    for size in reversed(x.shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return replace(x, pointer=0, strides=tuple(reversed(steps)))


def check(name: str, n: int, k: int, x: Operand, out: Operand | None, residual: Operand | None = None) -> None:
    """Refuse, before anything runs, what does not fit a linear of n x k. Raises TypeError or ValueError."""
    if x.dtype not in ACTIVATIONS:
        raise TypeError(f"{name}: x is {x.dtype}; need float16, bfloat16 or float32")
    if not x.shape or x.shape[-1] != k:
        raise ValueError(f"{name}: x has shape {list(x.shape)}; need [.., {k}]")
    if x.pointer % x.item:
        raise ValueError(f"{name}: x starts at byte {x.pointer % x.item} of an element; need whole {x.dtype} elements")
    if x.rows >= 2**31:
        raise ValueError(f"{name}: x has {x.rows} rows; need fewer than 2^31")
    for what, operand in (("out", out), ("residual", residual)):
        if operand is not None:
            _check_like_y(name, what, operand, x, (*x.shape[:-1], n))
    if out is None:
        return
    if not out.writable:
        raise ValueError(f"{name}: out is read-only")
    if _overlap(x, out):
        raise ValueError(f"{name}: out overlaps x; need memory of its own")
    same = residual is not None and (residual.pointer, residual.row_stride) == (out.pointer, out.row_stride)
    if residual is not None and not same and _overlap(residual, out):
        raise ValueError(f"{name}: out overlaps residual; need the very same elements, or none")


def _check_like_y(name: str, what: str, operand: Operand, x: Operand, want: tuple[int, ...]) -> None:
    if operand.shape != want:
        raise ValueError(f"{name}: {what} has shape {list(operand.shape)}; need {list(want)}")
    if operand.dtype != x.dtype:
        raise TypeError(f"{name}: {what} is {operand.dtype}, x is {x.dtype}; need the same")
    if operand.pointer % operand.item:
        at = operand.pointer % operand.item
        raise ValueError(f"{name}: {what} starts at byte {at} of an element; need whole {operand.dtype} elements")
    if operand.row_stride is None:
        raise ValueError(f"{name}: {what} has strides {list(operand.strides)}; need one matrix of contiguous rows")


def _overlap(a: Operand, b: Operand) -> bool:
    """Whether two operands share an element. Column slices of one buffer (a common row stride) are told apart."""
    (a0, a1), (b0, b1) = a.span(), b.span()
    if a.device != b.device or a1 <= b0 or b1 <= a0 or a0 == a1 or b0 == b1:
        return False
    if a.row_stride is None or a.row_stride != b.row_stride:
        return True
    pitch, distance = a.row_stride * a.item, b.pointer - a.pointer
    column = distance % pitch
    return column < a.shape[-1] * a.item or column + b.shape[-1] * b.item > pitch
