"""Checks that readers share."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from warptile.formats import checks
from warptile.formats.container import Tensor
from warptile.formats.errors import CorruptError

TENSOR = Tensor("scales", "F16", (1,), Path("a.safetensors"), 0, 2)
EVERY = np.arange(1 << 16, dtype=np.uint16)


def refused(values: np.ndarray) -> bool:
    try:
        checks.finite(TENSOR, values)
    except CorruptError:
        return True
    return False


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits_is_finite_or_refused(dtype: type) -> None:
    values = EVERY.view(dtype)
    good = np.isfinite(values.astype(np.float32))
    assert not refused(values[good])
    for one in values[~good]:
        assert refused(np.array([1, one, 2], dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_its_place(dtype: type, value: float) -> None:
    values = np.full((3, 4), np.finfo(dtype).max, dtype)
    assert not refused(values)
    values[::2, ::3] = value
    with pytest.raises(CorruptError, match=r"scales are NaN or infinite; found 4 of 12, the first at \[0, 0\]"):
        checks.finite(TENSOR, values.T.T)
