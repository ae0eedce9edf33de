"""Products of the kernels for Hopper on the host: devices of few SMs, on which small matrices have several waves of
tiles and cut ones, and how exact a product must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from host_products import TYPES, carried_out
from linears import ACTIVATION, random_x
from warptile.formats.canonical import ELEMENTS, QuantTensor, dequantize
from warptile.kernels.launch import Device, Plan
from warptile.kernels.wgmma_plan import Wgmma

ROWS = {16: 150, 32: 75, 64: 75, 128: 133, 256: 261}
"""Of x, by the tokens of a tile: the last one is not full, of 16 there is more than one band."""
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3}
SHARED = 232448


def device(sms: int = 3) -> Device:
    return Device(arch=90, sms=sms, shared=SHARED, nvrtc=(13, 5))


def plan_of(layout: ModuleType, spec: dict[str, Any], m: int, x_dtype: str, aligned: bool, w: Wgmma) -> Plan:
    """The plan for the fewest workers, but three, that cut tiles where the tile says so."""
    plans = (layout.plan(spec, m, device(n * w.blocks), x_dtype, aligned, w, "exact") for n in range(3, 12))
    return next(made for made in plans if made.counters or not w.cut)


def multiplied(
    layout: ModuleType, q: QuantTensor, x: np.ndarray, w: Wgmma, folder: Path, expert: int = 0, **more: Any
) -> np.ndarray:
    """y of a tile, whole or cut."""
    tensors, spec = layout.pack(q)
    made = plan_of(layout, spec, len(x), TYPES[x.dtype.name], x.shape[1] % 8 == 0, w)
    assert made.stages[-1].kernel in ("marlin_wgmma", "mmq_wgmma")
    return carried_out(made, tensors, spec, x, folder, expert, layout=layout, **more)


def weights_of(q: QuantTensor, expert: int = 0) -> np.ndarray:
    return dequantize(q, np.float64).reshape(-1, q.n, q.k)[expert]


def assert_close(y: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> None:
    """As a whole, and each element within one rounding of every weight and one of its own."""
    want = np.float64(x) @ w.T + (0 if bias is None else np.float64(bias))
    error = np.abs(np.float64(y) - want)
    dtype = y.dtype.name
    assert np.linalg.norm(error) <= TOLERANCE[dtype] * np.linalg.norm(want)
    size = np.abs(np.float64(x)) @ np.abs(w).T
    bound = 1.02 * ROUNDING[dtype] * (np.abs(want) + size) + 2.0**-24
    assert (error <= bound).all(), f"{(error / bound).max():.1f} times the bound"


def assert_decoded(y: np.ndarray, rows: np.ndarray, q: QuantTensor, expert: int = 0) -> None:
    """What one-hot rows return: weights rounded once, or by way of float32. A factor for all of k is not among what is
    rounded to a weight: it multiplies the sum."""
    to, factor = y.dtype, np.float32(1)
    if len(q.scales) > 1 and q.scales[-1].block[1] >= q.k:
        ones = tuple(replace(level, data=np.ones_like(level.data)) for level in q.scales[:-1])
        unit = replace(q, element=ELEMENTS["u8"], codes=np.ones_like(q.codes), scales=(*ones, q.scales[-1]), offsets=())
        factor = np.float32(weights_of(unit, expert)).T[rows]
        q = replace(q, scales=q.scales[:-1], offsets=q.offsets[:-1])
    with np.errstate(over="ignore"):
        decoded = (dequantize(q, first).reshape(-1, q.n, q.k)[expert] for first in (np.float64, np.float32))
        weights = (np.float32(w.T[rows].astype(to)) for w in decoded)
        once, twice = (np.float32((w * factor).astype(to)) for w in weights)
    got = np.float32(y)
    np.testing.assert_array_equal(got, np.where(got == twice, twice, once))


def assert_multiplies(layout: ModuleType, q: QuantTensor, w: Wgmma, dtype: str, folder: Path, expert: int = 0) -> None:
    """One-hot and random rows, of the tile whole and cut, each with threads and copies in another order."""
    m, plain = ROWS[w.tokens], replace(q, bias=None)
    rows = np.resize(np.random.default_rng(1).permutation(q.k), m)
    one_hot, x = np.eye(q.k, dtype=ACTIVATION[dtype])[rows], random_x((m, q.k), dtype)
    bias = None if q.bias is None else q.bias.reshape(-1, q.n)[expert]
    for seed, tile in enumerate((w, replace(w, cut=w.deep == 1))):
        assert_decoded(multiplied(layout, plain, one_hot, tile, folder, expert, seed=seed), rows, q, expert)
        y = multiplied(layout, q, x, tile, folder, expert, seed=2 + seed)
        assert_close(y, x, weights_of(q, expert), bias)


def spread(pairs: list[tuple[Any, Wgmma]], every: int) -> list[Any]:
    """Some of ((module, type of x), tile), for CI: one of ``every``, and one of each tile that has none."""
    chosen = pairs[::every]
    for pair in pairs[every // 2 :]:
        if all(pair[1] != w for _, w in chosen):
            chosen.append(pair)
    return [pytest.param(*pair, id=f"{pair[0][0]}-{pair[0][1]}-{pair[1]}") for pair in chosen]
