"""Which kernels multiply with a Marlin module: a function of (module, m, device) and nothing else.

m <= 16    marlin_decode: W is read once, straight into registers; a block covers tiles of 64 features
m > 16     marlin_tiled: blocks of 64 to 256 features x 32 to 128 tokens, after ``gather`` when x cannot be copied
           row by row in 16-byte pieces (act-order, odd strides)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from ..formats.errors import UnsupportedError
from .launch import Device, Plan, Stage

Spec = Mapping[str, Any]

DECODE_TOKENS = 16
X_DTYPES = ("f16", "bf16")
SCALES = ("f16", "bf16", "f32")
STORED = {"u4b8": False, "u4": True, "u8b128": False, "u8": True}
"""Elements with kernels, and whether zero points come with them as a rule."""

CHECKED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

WEIGHTS = ("qweight", "scales", "qzeros")
EXTENTS = ("m", "n", "k", "n_padded", "k_padded", "group")


@dataclass(frozen=True)
class Decode:
    """How marlin_decode divides the work. ``columns`` x ``splits`` blocks of ``warps`` warps, which also split k."""

    warps: int
    splits: int
    columns: int

    def __str__(self) -> str:
        return f"decode, {self.warps} warps, k in {self.splits}, {self.columns} blocks along n"


@dataclass(frozen=True)
class Tiled:
    """A block's shape in marlin_tiled: ``wn`` x ``wm`` warps of 16 ``columns`` features x 8 ``blocks`` tokens, the
    other warps along k; ``cut`` cuts the tiles of the last wave along k so that every SM has its share."""

    blocks: int
    columns: int
    wn: int
    wm: int
    cut: bool = False

    @property
    def wk(self) -> int:
        return 8 // (self.wn * self.wm)

    @property
    def features(self) -> int:
        return 16 * self.columns * self.wn

    @property
    def tokens(self) -> int:
        return 8 * self.blocks * self.wm

    @property
    def shared(self) -> int:
        stage = self.tokens * 128 * self.wk
        return max(stage * (3 if stage > 16384 else 4), self.tokens * (self.features + 8) * 2)

    def __str__(self) -> str:
        return f"tile {self.features} x {self.tokens}, k in {self.wk}{', cut' if self.cut else ''}"


SHAPES = ((4, 4, 1, 1), (4, 4, 2, 1), (4, 4, 4, 1), (8, 4, 2, 1), (8, 4, 4, 1), (8, 2, 8, 1), (16, 2, 4, 1), (16, 2, 8, 1))
TILES = tuple(Tiled(*shape) for shape in SHAPES)


def _common(spec: Spec, x_dtype: str, most: int) -> tuple[int, ...]:
    """The fields every Variant begins with; ``most`` slices of 16 k at most share one scale in a loop body."""
    names, dtypes = list(ELEMENTS), list(SCALE_DTYPES)
    run = 0 if spec["group"] == -1 else gcd(spec["group"] // 16, most)
    zero = int(spec["zero"] is not None)
    return names.index(spec["element"]), dtypes.index(x_dtype), dtypes.index(spec["scale"]), zero, run


def _bias_type(spec: Spec) -> int:
    return list(SCALE_DTYPES).index(spec["bias"]) if spec["bias"] else 0


def _decode_slices(spec: Spec) -> int:
    """Slices that share a scale at most: what a warp keeps in flight."""
    return 32 // ELEMENTS[spec["element"]].bits


def _decode_shared(spec: Spec, m: int, d: Decode) -> int:
    """x of a block's range of k, and the sums of its warps (twice when it takes several tiles)."""
    run = _common(spec, "f16", _decode_slices(spec))[-1] or 4
    depth = 4 if run == 1 else _decode_slices(spec)
    unit = depth if spec["k_padded"] // 16 % depth == 0 else run
    slices = unit * -(-(spec["k_padded"] // 16 // unit) // d.splits) + 1
    buffers = 1 if d.columns >= spec["n_padded"] // 64 else 2
    return slices * m * 32 + buffers * d.warps * m * 68 * 4


def _decode(spec: Spec, m: int, device: Device, x_dtype: str, d: Decode, why: str) -> Plan:
    common = _common(spec, x_dtype, _decode_slices(spec))
    stage = Stage(
        kernel="marlin_decode",
        variant=(*common, 1 if m <= 8 else 2),
        target=f"sm_{device.arch}",
        grid=(d.columns, d.splits, 1),
        block=32 * d.warps,
        shared=_decode_shared(spec, m, d),
        args=(*WEIGHTS, "perm", "bias", "x", "y", "scratch", "counters", *EXTENTS, "ldx", "ldy", _bias_type(spec)),
    )
    cut = d.splits > 1
    return Plan(
        (stage,),
        f"{d}: {why}",
        scratch=4 * d.splits * m * spec["n_padded"] if cut else 0,
        counters=spec["n_padded"] // 64 if cut else 0,
    )


def _choose_decode(spec: Spec, m: int, device: Device) -> Decode:
    tiles = spec["n_padded"] // 64
    return Decode(8, 1, tiles)


def _gather(spec: Spec, m: int, device: Device) -> Stage:
    return Stage(
        kernel="gather",
        variant=(int(spec["perm"]),),
        target=f"sm_{device.arch}",
        grid=(-(-spec["k_padded"] // 2048), min(m, 4 * device.sms), 1),
        block=256,
        shared=0,
        args=("perm", "x", "gathered", "m", "k", "k_padded", "ldx"),
    )


def _tiled(spec: Spec, m: int, device: Device, x_dtype: str, aligned: bool, t: Tiled, why: str) -> Plan:
    gather = spec["perm"] or not aligned
    rows, columns = -(-m // t.tokens), -(-spec["n_padded"] // t.features)
    steps = -(-spec["k_padded"] // (64 * t.wk))
    waves, rest = divmod(rows * columns, device.sms)
    streams = min(device.sms, rest * steps) if t.cut else rest
    stage = Stage(
        kernel="marlin_tiled",
        variant=(*_common(spec, x_dtype, 4), t.blocks, t.columns, t.wn, t.wm),
        target=f"sm_{device.arch}",
        grid=(device.sms if waves else streams, 1, 1),
        block=256,
        shared=t.shared,
        args=(
            *WEIGHTS,
            "bias",
            "gathered" if gather else "x",
            "y",
            "scratch",
            "counters",
            "m",
            "n",
            "k_padded" if gather else "k",
            *EXTENTS[3:],
            "ld_gathered" if gather else "ldx",
            "ldy",
            _bias_type(spec),
            rows,
            steps,
            waves,
            streams,
        ),
    )
    cut = streams > rest
    return Plan(
        (_gather(spec, m, device), stage) if gather else (stage,),
        f"{t}: {why}",
        scratch=8 * streams * t.features * t.tokens if cut else 0,
        gathered=2 * m * spec["k_padded"] if gather else 0,
        counters=rest if cut else 0,
    )


def _refuse_tile(spec: Spec, device: Device, x_dtype: str, t: Tiled) -> str | None:
    if t.shared > device.shared:
        return f"needs {t.shared} bytes of shared memory, a block has {device.shared}"
    if t.blocks * t.columns > 16 and spec["group"] != -1 and spec["scale"] != x_dtype:
        return f"{spec['scale']} scales on {x_dtype} sums need their registers"
    return None


def _choose_tiled(spec: Spec, m: int, device: Device, x_dtype: str) -> tuple[Tiled, list[tuple[str, str]]]:
    fits = [t for t in TILES if _refuse_tile(spec, device, x_dtype, t) is None]
    return fits[-1], []


def plan(
    spec: Spec, m: int, device: Device, x_dtype: str, aligned: bool = True, variant: Decode | Tiled | None = None
) -> Plan:
    """The launches of y[m, n] = x[m, k] @ W.T for a module that ``marlin.spec`` describes.

    ``x_dtype``: "f16" or "bf16", also y's. ``aligned``: every row of x starts on 16 bytes. ``variant`` replaces the
    choice, for measuring. Raises ``UnsupportedError`` where no kernel of ours runs.
    """
    if device.arch < 80:
        raise UnsupportedError(
            "no Marlin kernel for this GPU", found=f"sm_{device.arch}", need="sm_80 or newer", do="dequantize instead"
        )
    if x_dtype not in X_DTYPES or spec["element"] not in STORED or spec["scale"] not in SCALES:
        found = f"{spec['element']} with {spec['scale']} scales, {x_dtype} activations"
        raise UnsupportedError("no Marlin kernel for these types", found=found, need="f16 or bf16 activations")
    if m == 0:
        return Plan((), "no rows")
    if isinstance(variant, Decode):
        return _decode(spec, m, device, x_dtype, variant, "asked for")
    if isinstance(variant, Tiled):
        return _tiled(spec, m, device, x_dtype, aligned, variant, "asked for")
    if m <= DECODE_TOKENS:
        return _decode(spec, m, device, x_dtype, _choose_decode(spec, m, device), "m <= 16, bound by reading W once")
    tile, rejected = _choose_tiled(spec, m, device, x_dtype)
    return _tiled(spec, m, device, x_dtype, aligned, tile, "")


def variants(arch: int, elements: Sequence[str] | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(kernel, variant, target) of everything ``plan`` can ask for on an architecture, for building ahead."""
    device = Device(arch, sms=1, shared=1 << 20)
    yield from (("gather", (ordered,), f"sm_{arch}") for ordered in (0, 1))
    seen = set()
    for element, scale, x_dtype, group in product(elements or STORED, SCALES, X_DTYPES, (-1, 16, 32, 64, 128)):
        spec = {"element": element, "scale": scale, "group": group, "zero": "int" if STORED[element] else None}
        decode, tiled = _common(spec, x_dtype, _decode_slices(spec)), _common(spec, x_dtype, 4)
        rows = [("marlin_decode", (*decode, blocks)) for blocks in (1, 2)]
        fitting = (t for t in TILES if _refuse_tile(spec, device, x_dtype, t) is None)
        rows += [("marlin_tiled", (*tiled, t.blocks, t.columns, t.wn, t.wm)) for t in fitting]
        for row in rows:
            if row not in seen:
                seen.add(row)
                yield *row, f"sm_{arch}"


def covering(target: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A third of a subset of ``variants`` in which every two values of two template arguments meet: what CI compiles.

    Each third falls to two of the six architectures, so that each pair is seen on an older and on a newer one.
    """
    if target not in CHECKED:
        return
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for kernel, variant, _ in variants(80):
        pairs = {(kernel, i, variant[i], j, variant[j]) for j in range(len(variant)) for i in range(j + 1)}
        if not pairs <= seen:
            seen |= pairs
            chosen.append((kernel, variant))
    yield from chosen[CHECKED.index(target) % 3 :: 3]
