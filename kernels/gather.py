"""The stage that copies x into the order and the 16-byte rows that a kernel reads: gather.cu's launch."""

from __future__ import annotations

from .launch import Device, Stage

AS_IT_LIES, PERM, FRAGMENTS = 0, 1, 2
"""Orders of k: its own; the module's ``perm``; within each 16 as strips hold it, for MMAs of 16 bits."""


def stage(order: int, m: int, k_padded: int, device: Device, quantized: bool = False) -> Stage:
    """x [m, k], or what quantize.py made of it in 16 bits -> ``gathered`` [m, k_padded], zeros beyond k."""
    x, ldx = ("quantized", "ld_quantized") if quantized else ("x", "ldx")
    return Stage(
        kernel="gather",
        variant=(order,),
        target=f"sm_{device.arch}",
        grid=(-(-k_padded // (4096 if order == FRAGMENTS else 2048)), min(m, 4 * device.sms), 1),
        block=256,
        shared=0,
        args=("perm", x, "gathered", "m", "k", "k_padded", ldx),
        overlap=device.overlaps,
    )
