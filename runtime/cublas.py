"""The one cuBLAS call the runtime needs, made directly: cupy refuses its own while a stream is being captured."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

COMPUTE_32F, GEMM_DEFAULT = 68, -1
TRANSPOSED, AS_IT_IS = 1, 0
FP32_REDUCTIONS = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums of a split k stay in fp32."""
TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType

WORKSPACE = 32 << 20
"""Bytes NVIDIA recommends for Hopper; each stream and each captured graph has its own."""


def _library() -> ctypes.CDLL:
    """The library cupy has loaded, by the name of its version. Raises RuntimeError."""
    import cupy

    try:
        from cupy.cuda import cublas

        major = cublas.getVersion(cupy.cuda.device.get_cublas_handle()) // 10000
        return ctypes.CDLL(f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}")
    except (ImportError, OSError) as error:
        raise RuntimeError(f"cuBLAS does not load ({error}); pip install nvidia-cublas") from None


class Cublas:
    """A handle of the current device. Safe to use from several threads."""

    def __init__(self) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, FP32_REDUCTIONS)

    def _call(self, function: str, *args: Any) -> None:
        if status := getattr(self._library, function)(*args):
            raise RuntimeError(f"{function} failed with status {status}")

    def close(self) -> None:
        self._call("cublasDestroy_v2", self._handle)

    def gemm(
        self, m: int, n: int, k: int, w: int, x: int, ldx: int, source: str, y: int, ldy: int, target: str,
        stream: int, workspace: int,
    ) -> None:  # fmt: skip
        """Row-major y[m, n] = x[m, k] w[n, k].T with fp32 sums, which cuBLAS sees as column-major y^T = w x^T.

        ``source`` and ``target`` name the types of x and w, and of y; ``workspace`` points to WORKSPACE bytes.
        Raises ValueError for extents past 32 bits, RuntimeError when cuBLAS refuses.
        """
        if max(m, n, k, ldx, ldy) >= 2**31:
            raise ValueError(f"cuBLAS takes extents below 2^31; got m={m}, n={n}, k={k}, ldx={ldx}, ldy={ldy}")
        pointer, number = ctypes.c_void_p, ctypes.c_int
        with self._lock:
            self._call("cublasSetStream_v2", self._handle, pointer(stream))
            self._call("cublasSetWorkspace_v2", self._handle, pointer(workspace), ctypes.c_size_t(WORKSPACE))
            self._call(
                "cublasGemmEx", self._handle, TRANSPOSED, AS_IT_IS, number(n), number(m), number(k),
                ctypes.byref(self._one), pointer(w), TYPES[source], number(k), pointer(x), TYPES[source], number(ldx),
                ctypes.byref(self._zero), pointer(y), TYPES[target], number(ldy), COMPUTE_32F, GEMM_DEFAULT,
            )  # fmt: skip
