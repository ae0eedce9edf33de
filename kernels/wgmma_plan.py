"""What the kernels on wgmma.cuh's pipeline have in common: tiles, how they go round the device, what they need.

A block's tile is ``features`` x ``tokens``; ``ways`` groups of warps share its features and take every ways-th run of
k. Blocks side by side may be a cluster, which shares x: they are one worker, with one tile of as many times the
features, and each of their warps has 16 features instead of 32. Tiles go round a grid of one block for each SM; with
``cut`` those of the last wave are cut along k, so that every worker has its share, and the warps that finish last add
the parts in order. Where tiles are fewer than SMs, a cluster's blocks may be ``deep`` instead: they have one tile, each
a part of k, and add through each other's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from .launch import Device

NVRTC = (13, 3)
"""Compilers before this one may overwrite the A registers of a wgmma that still runs."""

SHARED = 232448
"""Bytes of shared memory a block has on every sm_90."""

STEP = 64  # k of a stage of x

START = 6.0
"""us of a launch, its first loads and its last stores; H200, 2026-11-29, as all that follow."""
CUT, SUMS = 2.0, 2800
"""us of adding the parts of cut tiles, and a tile's sums that lengthen it by another us."""
LARGE, LATE = 1 << 15, 10.0
"""From how many sums on, 128 in a thread, it takes so many us more: that many are not added in one go."""

JOIN = 1.0
"""us of adding the parts of a cluster's blocks; H200, 2026-11-30."""


@dataclass(frozen=True)
class Wgmma:
    """A block's shape."""

    features: int
    tokens: int
    ways: int
    cluster: int = 1
    sums: bool = False
    """Whether scales multiply fp32 sums instead of weights."""
    cut: bool = False
    deep: int = 1
    """Blocks of a cluster that have one tile, each a part of k."""

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.cluster * self.deep

    @property
    def warps(self) -> int:
        """Of one way."""
        return self.features // (16 if self.blocks > 1 else 32)

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.ways + 128

    def workers(self, device: Device) -> int:
        """Blocks or clusters at work at once. SMs come in groups of 16 or 18, of which an H200 has lost some: of 44
        clusters of three 39 fit, and all 66 of two."""
        return device.sms // self.blocks if self.blocks < 3 else max(1, device.sms * 7 // 8 // self.blocks)

    def __str__(self) -> str:
        said = {
            f", {self.cluster} blocks share x": self.cluster > 1,
            f", k in {self.ways} ways": self.ways > 1,
            f", k over {self.deep} blocks": self.deep > 1,
            ", scaled sums": self.sums,
            ", last wave cut": self.cut,
        }
        return f"wgmma {self.features} x {self.tokens}" + "".join(text for text, true in said.items() if true)


def refuse(device: Device) -> str | None:
    """None if the pipeline runs on this device, else why not."""
    if device.arch != 90:
        return f"needs sm_90, this is sm_{device.arch}"
    if device.nvrtc < NVRTC:
        return f"needs NVRTC {NVRTC[0]}.{NVRTC[1]} or newer, this is {device.nvrtc[0]}.{device.nvrtc[1]}"
    return None


def refuse_cluster(w: Wgmma, n_padded: int, device: Device) -> str | None:
    """None if the tile's blocks that share x run at once and have whole tiles of outputs, else why not."""
    if device.sms < w.blocks:
        return f"a cluster's blocks need {w.blocks} SMs, this has {device.sms}"
    if w.deep > 1 and w.cut:
        return "its tiles are parted along k already"
    if w.cluster > 1 and n_padded % (w.features * w.cluster):
        return f"blocks that share x have {w.features * w.cluster} outputs, of which {n_padded} is no multiple"
    return None


def tiles(w: Wgmma, n_padded: int, m: int) -> int:
    """Tiles of a product."""
    return -(-m // w.tokens) * -(-n_padded // (w.features * w.cluster))


def estimate(w: Wgmma, count: int, step: float, k: int, device: Device) -> float:
    """us on an H200, roughly, of ``count`` tiles whose steps of 64 k take ``step`` us each."""
    workers = w.workers(device)
    waves = count / workers if w.cut else -(-count // workers)
    if w.deep > 1:  # a wave begins when clusters of the one before it have ended
        return waves * (START + -(-k // STEP // w.deep) * step + JOIN)
    sums = w.features * w.tokens
    add = CUT + sums / SUMS + (LATE if sums >= LARGE else 0) if w.cut else 0
    return START + waves * -(-k // STEP) * step + add


def share(w: Wgmma, count: int, units: int, device: Device) -> tuple[int, int]:
    """(blocks, tiles that are cut) of ``count`` tiles of so many units each, which no cut parts."""
    if w.deep > 1:  # a cluster for each
        return count * w.blocks, 0
    most = w.workers(device)
    split = count % most if w.cut else 0
    workers = min(most, count * units if split else count)
    if split * units < workers or split * units * workers >= 2**32:  # a share for each, divided in 32 bits
        workers, split = min(most, count), 0
    return workers * w.cluster, split


def memory(w: Wgmma, blocks: int, split: int) -> tuple[int, int]:
    """(bytes of scratch, counters) of ``share``'s answer."""
    return 8 * blocks * w.features * w.tokens if split else 0, split * w.warps * w.cluster


def shared(w: Wgmma, x_stages: int, weights: int, barriers: int) -> int:
    """sizeof(Shared), bytes, with ``weights`` bytes of stages of weights and so many barriers."""
    out = w.features * min(w.tokens, 32) * 2
    sums = 4 * w.tokens * w.features if w.ways > 1 else 16
    return -(-(x_stages * w.tokens * STEP * 2 + weights + out + sums + 8 * barriers) // 1024) * 1024
