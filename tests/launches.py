"""Devices that plans are made for, and what a launch must agree with in its kernel's source."""

from __future__ import annotations

import re
from importlib.resources import files

from warptile.kernels import marlin
from warptile.kernels.launch import At, Device

H200 = Device(arch=90, sms=132, shared=232448)
RTX_3090 = Device(arch=86, sms=82, shared=101376)
A100 = Device(arch=80, sms=108, shared=166912)
T4 = Device(arch=75, sms=40, shared=65536)
RTX_4090 = Device(arch=89, sms=128, shared=101376)


def parameters(kernel: str) -> list[str]:
    """The C++ types of a kernel's parameters, in order: "pointer", "int" or "i64"."""
    source = files("warptile.kernels").joinpath(f"{kernel}.cu").read_text("utf-8")
    (found,) = re.findall(rf"__global__[^;]*?\b{kernel}\(([^)]*)\)\s*{{", source)
    return ["pointer" if "*" in p else p.split()[0] for p in found.split(",")]


def type_of(arg: str | int | At) -> str:
    if isinstance(arg, int) or arg in ("m", "n", "k", "n_padded", "k_padded", "group", "each"):
        return "int"
    return "i64" if arg in ("ldx", "ldy", "ld_residual", "ld_gathered", "ld_quantized") else "pointer"


def fields(kernel: str) -> int:
    source = files("warptile.kernels").joinpath(f"{kernel}.cu").read_text("utf-8")
    (body,) = re.findall(r"struct Variant \{(.*?)\};", source, re.DOTALL)
    return sum(len(line.split(",")) for line in re.findall(r"int ([^;]*);", body))


def spec_of(n: int, k: int, group: int = 128, **other: object) -> dict[str, object]:
    """What a Marlin module's spec says, 4-bit integers with f16 scales unless told otherwise."""
    np_, kp = marlin.padded(n, k, group)
    spec = {
        "element": "u4b8",
        "scale": "f16",
        "scale_block": [1, group],
        "zero": None,
        "perm": False,
        "bias": None,
        "experts": None,
    }
    return {**spec, "n": n, "k": k, "n_padded": np_, "k_padded": kp, "group": group, **other}
