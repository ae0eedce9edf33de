"""Whether silu(x G.T) * (x U.T) is one launch on Marlin tiles: for a few rows and two matrices of one kind.

Half the warps of a block of marlin_decode take a tile of G, the others the same one of U. k is cut as it is for each
product alone, so that sums have the same bits. G and U are two modules, or parts of one.
"""

from __future__ import annotations

from dataclasses import replace

from ..formats.errors import UnsupportedError
from . import marlin_scales as scales
from .launch import STATIC, Device, Part, Plan
from .marlin_decode_plan import CHUNK, Decode, choose_decode, decode, parts_of_pair, refuse_decode
from .marlin_launch import rows_read, with_rows
from .marlin_plan import check_supported

ALIKE = ("k", "n_padded", "k_padded", "element", "group", "scale", "scale_block", "zero", "experts")
TILE = 64


def refuse_pair(gate: Part, up: Part) -> str | None:
    """None if one launch multiplies with both, else why not."""
    for key in ALIKE:
        if gate.spec[key] != up.spec[key]:
            return f"{key} is {gate.spec[key]} and {up.spec[key]}"
    if gate.spec.get("global") != up.spec.get("global") or scales.args(gate.spec) != scales.args(up.spec):
        return "their scales are of two kinds"
    for part in (gate, up):
        if part.spec["perm"]:
            return "each has a column order of its own"
        end = part.first + part.n
        if part.first % TILE or (end < part.spec["n"] and end % TILE):
            return f"outputs {part.first} to {end - 1} are no whole tiles of {TILE}"
        if part.n < part.spec["n"] and (scales.block(part.spec) or scales.factor(part.spec)):
            return "scales of blocks or factors of parts lie across both"
    return None


def plan_pair(
    gate: Part,
    up: Part,
    m: int,
    device: Device,
    x_dtype: str,
    aligned: bool = True,
    variant: Decode | None = None,
) -> Plan:
    """The launches of y[m, n] = silu(x G.T) * (x U.T), both products rounded to y's type first (swiglu.py).

    Parameters as ``marlin_plan.plan``'s. Raises ``UnsupportedError`` where it takes two products.
    """
    check_supported(gate.spec, device, x_dtype)
    rows, before = rows_read(gate.spec, m, device, x_dtype, aligned and gate.spec["k"] % CHUNK == 0)
    if reason := refuse_decode(gate.spec, rows, device, x_dtype, pair=True) or refuse_pair(gate, up):
        raise UnsupportedError("no single launch", need="two products", found=reason)
    if m == 0:
        return Plan((), "no rows")
    alone = choose_decode(gate.spec, device)
    chosen = variant or replace(alone, columns=min(alone.columns, -(-gate.n // TILE)))
    made = decode(gate, rows, device, x_dtype, before, chosen, up)
    if 2 * chosen.warps // max(8, chosen.warps) not in parts_of_pair(gate.spec, device.arch):
        found = "zero points and two parts of k for each warp take too many registers"
        raise UnsupportedError("no single launch", need="two products", found=found)
    if (shared := made.stages[-1].shared + STATIC) > device.shared:
        found = f"needs {shared} bytes of shared memory, a block has {device.shared}"
        raise UnsupportedError("no single launch", need="two products", found=found)
    return with_rows(made, gate.spec, m, x_dtype)
