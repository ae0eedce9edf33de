"""What kernels do with a finished fp32 sum (``output.cuh``), bit for bit.

| rounding | y |
| --- | --- |
| once | round((sum + bias) + residual) |
| each | round(round(round(sum) + bias) + residual): the bits of a product, an addition and another one |

Sums and additions are float32, round is to y's type, half to even. A product without bias adds 0, one without residual
does not add. With y in float32 both are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROUNDINGS = ("once", "each")


def finish(
    sums: Array, dtype: np.dtype[Any], bias: Array | None = None, residual: Array | None = None, rounding: str = "once"
) -> Array:
    """y [m, n] in ``dtype`` from float32 sums [m, n], bias [n] of any type, residual [m, n] in ``dtype``."""

    def step(v: Array) -> Array:
        return v.astype(dtype).astype(np.float32) if rounding == "each" else v

    with np.errstate(all="ignore"):
        y = step(sums) + (np.float32(0) if bias is None else bias.astype(np.float32))
        if residual is not None:
            y = step(y) + residual.astype(np.float32)
        return y.astype(dtype)
