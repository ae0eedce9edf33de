"""marlin_wgmma compiles as it must for sm_90a, and its plan describes the very kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise, product

import pytest
from warptile.formats.errors import UnsupportedError
from warptile.kernels import marlin, wgmma_plan
from warptile.kernels.launch import Device
from warptile.kernels.marlin_hopper_plan import TILES, refuse_tile
from warptile.kernels.marlin_plan import plan
from warptile.kernels.wgmma_plan import Wgmma
from warptile.runtime import build
from warptile.runtime import cubin as cubins

H200 = Device(arch=90, sms=132, shared=232448, nvrtc=(13, 5))

try:
    COMPILER = build.nvrtc_version()
except UnsupportedError:
    COMPILER = (0, 0)
needs_nvrtc = pytest.mark.skipif(COMPILER < wgmma_plan.NVRTC, reason="needs NVRTC 13.3 or newer")


def spec_of(n: int, k: int, group: int = 128, **other: object) -> dict[str, object]:
    np_, kp = marlin.padded(n, k, group)
    spec = {"element": "u4b8", "scale": "f16", "scale_block": [1, group], "zero": None, "perm": False, "bias": None}
    extents = {"experts": None, "n": n, "k": k, "n_padded": np_, "k_padded": kp, "group": group}
    return {**spec, **extents, **other}


def request(spec: dict[str, object], x_dtype: str, tile: Wgmma) -> build.Request:
    stage = plan(spec, 64, H200, x_dtype, variant=tile).stages[-1]
    return build.Request(stage.kernel, stage.variant, stage.target)


# Between the tiles every element, scale kind, both activations, and one, two and four rows of scales.
MODULES = [
    (spec_of(4096, 4096), "f16"),
    (spec_of(4096, 4096, 32, element="u4", zero="int"), "f16"),
    (spec_of(4096, 4096, element="u8b128", scale="bf16"), "bf16"),
    (spec_of(4096, 4096, 16, element="u8", zero="int", scale="f32"), "bf16"),
    (spec_of(4096, 4096, element="u4", zero="int"), "bf16"),
    (spec_of(4096, 4096, 64, element="u8b128", scale="f32"), "f16"),
    (spec_of(4096, 4096, -1, scale="bf16"), "bf16"),
    (spec_of(4096, 4096, element="u8", zero="int", scale="bf16"), "bf16"),
]
# Floats: scales on weights, on sums of 64 k (of blocks, of columns), on finished sums, and factors.
FLOATS = [
    (Wgmma(256, 16, 2), spec_of(4096, 4096, 32, element="e2m1", scale="e8m0"), "bf16"),
    (Wgmma(256, 128, 1), spec_of(4096, 4096, 16, element="e2m1", scale="e4m3", **{"global": "f32"}), "bf16"),
    (Wgmma(256, 32, 2), spec_of(4096, 4096, 16, element="e2m1", scale="e4m3", **{"global": "f32"}), "f16"),
    (Wgmma(128, 256, 1, cluster=2), spec_of(4096, 4096, 16, element="e2m1", scale="e4m3", **{"global": "f32"}), "bf16"),
    (Wgmma(128, 256, 1, cluster=2), spec_of(4096, 4096, 32, element="e2m1", scale="e8m0"), "bf16"),
    (Wgmma(256, 64, 1, sums=True), spec_of(4096, 4096, element="e4m3", scale="f32", scale_block=[128, 128]), "bf16"),
    (Wgmma(128, 32, 2, sums=True), spec_of(4096, 4096, element="e4m3", scale="f32", scale_block=[128, 128]), "f16"),
    (Wgmma(128, 64, 2, sums=True), spec_of(4096, 4096, element="e4m3", scale="bf16"), "bf16"),
    (Wgmma(128, 128, 1, 2, True), spec_of(4096, 4096, element="e4m3", scale="f32", scale_block=[128, 128]), "bf16"),
    (Wgmma(128, 128, 1, 2, True), spec_of(4096, 4096, 64, element="e4m3", scale="bf16"), "bf16"),
    (Wgmma(256, 128, 1), spec_of(4096, 4096, -1, element="e4m3", scale="f32"), "bf16"),
    (Wgmma(256, 64, 1), spec_of(4096, 4096, -1, element="e4m3", scale="f32", scale_block=[4096, 4096]), "f16"),
]
PAIRS = [(t, *m) for t, m in product(TILES, MODULES) if refuse_tile(m[0], H200, m[1], t) is None]
"""Of tiles and integers. A quarter of them is compiled here, more with what ``build --check`` covers."""
COMPILED = [(t, s, x) for t, s, x in PAIRS if (TILES.index(t) + MODULES.index((s, x))) % 4 == 0]


@needs_nvrtc
@pytest.mark.parametrize(
    ("tile", "module"),
    [(tile, (spec, x_dtype)) for tile, spec, x_dtype in COMPILED + FLOATS],
    ids=lambda p: str(p) if isinstance(p, Wgmma) else f"{p[0]['element']} g{p[0]['group']} {p[0]['scale']} {p[1]}",
)
def test_tensor_cores_are_fed_from_registers_without_spills_or_serialisation(
    tile: Wgmma, module: tuple[dict[str, object], str]
) -> None:
    cubin = build.build(request(*module, tile))
    report = cubins.resources(cubin)
    assert report.notes == ()  # C7510 .. C7519: wgmma serialised, or not safe
    assert report.spills == 0
    tool = cubins.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm")
    sass = cubins.disassemble(cubin.image, tool)
    assert any(op.startswith(f"HGMMA.64x{tile.tokens}x16") for op in sass)
    assert not any(op.startswith(("LDL", "STL")) for op in sass)
    assert "UBLKCP.S.G" in sass
    assert "UTMALDG.2D.MULTICAST" in sass if tile.cluster > 1 else "UTMALDG.2D" in sass
    assert any(op.startswith("STG.E.128") for op in sass)


@needs_nvrtc
def test_the_main_loop_keeps_addresses_in_uniform_registers() -> None:
    """Where the compiler loses sight of what is the same in all lanes, each wgmma costs two R2UR and more."""
    tool = cubins.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm")
    sass = cubins.disassemble(build.build(request(spec_of(28672, 8192), "f16", Wgmma(256, 128, 1))).image, tool)
    at = [i for i, op in enumerate(sass) if op.startswith("HGMMA")]
    assert "R2UR" not in sass[at[0] : at[-1]]


@needs_nvrtc
def test_a_plan_asks_for_the_shared_memory_the_kernel_lays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """``shared`` is sizeof(Shared), for every tile and kind of module: the compiler checks it."""
    source = files("warptile.kernels").joinpath("marlin_wgmma.cu").read_text("utf-8")
    for tile, spec, x_dtype in PAIRS + FLOATS:
        stage = plan(spec, 64, H200, x_dtype, variant=tile).stages[-1]
        shared = f"Shared<Tiles<Variant{{{', '.join(map(str, stage.variant))}}}>>"
        source += f"static_assert(sizeof({shared}) == {stage.shared});\n"
    source += "template <Variant V> __global__ void nothing() {}\n"
    monkeypatch.setattr(build, "_sources", lambda kernel: (source, build._headers(source)))
    build.build(build.Request("nothing", stage.variant, "sm_90a"))


def owner(unit: int, units: int, workers: int) -> int:
    return ((unit + 1) * workers - 1) // units


@pytest.mark.parametrize(("m", "n", "k"), [(128, 28672, 8192), (33, 640, 1000), (200, 4096, 4096), (4096, 14336, 4096)])
@pytest.mark.parametrize("tile", [t for t in TILES if t.deep == 1], ids=str)
def test_cut_tiles_are_shared_evenly_and_each_part_has_its_own_slot(m: int, n: int, k: int, tile: Wgmma) -> None:
    """The arithmetic of the kernel's Schedule: shares are contiguous, none is empty, no two parts meet in scratch."""
    spec = spec_of(n, k)
    if refuse_tile(spec, H200, "f16", tile):
        return
    made = plan(spec, m, H200, "f16", variant=replace(tile, cut=True))
    stage = made.stages[-1]
    run = stage.variant[7]
    assert run == (1 if spec["k_padded"] % 128 else 2)  # type: ignore[operator]
    workers, split, steps = stage.grid[0] // tile.cluster, stage.args[-1], -(-k // (64 * run))
    assert stage.grid[0] % tile.cluster == 0
    assert isinstance(split, int)
    tiles = -(-m // tile.tokens) * -(-spec["n_padded"] // (tile.features * tile.cluster))  # type: ignore[operator]
    assert split in (0, tiles % (132 // tile.cluster))
    if not split:
        return
    units = split * steps
    start = [units * b // workers for b in range(workers + 1)]
    sizes = {b - a for a, b in pairwise(start)}
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1
    assert all(start[owner(u, units, workers)] <= u < start[owner(u, units, workers) + 1] for u in range(units))
    slots = set()
    for t in range(split):
        head, tail = owner(t * steps, units, workers), owner((t + 1) * steps - 1, units, workers)
        if head < tail:
            for worker in range(head, tail + 1):
                slot = 2 * worker + (worker == head)
                assert slot not in slots
                slots.add(slot)
                assert (slot + 1) * tile.features * tile.cluster * tile.tokens * 4 <= made.scratch
    assert split * tile.warps * tile.cluster == made.counters


@pytest.mark.parametrize(("m", "n", "k"), [(64, 4096, 4096), (33, 640, 1000), (200, 200, 64)])
@pytest.mark.parametrize("tile", [t for t in TILES if t.deep > 1], ids=str)
def test_blocks_of_one_tile_part_k_and_tokens_once(m: int, n: int, k: int, tile: Wgmma) -> None:
    """The arithmetic of the kernel's Schedule and finish_share; parts of sums fit where the stages of x were."""
    spec = spec_of(n, k)
    made = plan(spec, m, H200, "f16", variant=tile)
    stage = made.stages[-1]
    assert (stage.cluster, stage.args[-1], made.scratch, made.counters) == (tile.deep, 0, 0, 0)
    assert stage.grid == (-(-m // tile.tokens) * -(-n // tile.features) * tile.deep, 1, 1)
    run, stages = stage.variant[7], stage.variant[14]
    groups = tile.tokens // 16
    for extent in (-(-k // (64 * run)), groups):
        bounds = [extent * part // tile.deep for part in range(tile.deep + 1)]
        assert (bounds[0], bounds[-1]) == (0, extent)
        assert bounds == sorted(bounds)
    most = -(-groups // tile.deep)
    assert most * 16 * tile.features * 4 * tile.deep <= stages * tile.tokens * 128
    assert refuse_tile(spec, H200, "f16", replace(tile, cut=True)) == "its tiles are parted along k already"


def test_blocks_part_k_where_tiles_are_fewer_than_sms() -> None:
    """As measured in turns on 2026-11-30: docs/performance-notes.md."""

    def chosen(n: int, k: int, m: int) -> tuple[int, ...]:
        return plan(spec_of(n, k), m, H200, "f16").stages[-1].variant[9:14]

    assert chosen(4096, 4096, 64) == (128, 64, 1, 1, 3)
    assert chosen(4096, 4096, 128) == (128, 64, 1, 1, 2)
    assert chosen(4096, 4096, 256) == (128, 128, 1, 1, 2)
    for n, k, m in ((14336, 4096, 32), (4096, 4096, 512), (14336, 4096, 64), (14336, 4096, 128), (28672, 8192, 64)):
        assert chosen(n, k, m)[4] == 1


def test_a_compiler_that_breaks_wgmma_or_another_gpu_gets_the_other_kernels() -> None:
    spec = spec_of(28672, 8192)
    for device, reason in (
        (Device(90, 132, 232448, (13, 2)), "needs NVRTC 13.3 or newer, this is 13.2"),
        (Device(100, 148, 232448, (13, 5)), "needs sm_90, this is sm_100"),
    ):
        made = plan(spec, 1024, device, "f16")
        assert made.stages[-1].kernel == "marlin_tiled"
        assert ("wgmma", reason) in made.rejected
    assert plan(spec, 1024, H200, "f16").stages[-1].kernel == "marlin_wgmma"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group": 48}, "multiples of 64, not 48"),
        ({"element": "e2m1", "scale": "e8m0", "group": 32}, "e8m0 scales of every 32 would round in f16"),
        ({"element": "e4m3", "scale": "f32", "group": 16}, "f32 scales of every 16 would round in f16"),
    ],
)
def test_modules_that_do_not_fit_go_elsewhere_with_the_reason(change: dict[str, object], reason: str) -> None:
    made = plan({**spec_of(4096, 4096 * 3), **change}, 256, H200, "f16")
    assert made.stages[-1].kernel == "marlin_tiled"
    assert any(what == "wgmma" and reason in why for what, why in made.rejected)


def test_x_that_cannot_be_copied_as_it_lies_is_gathered_first() -> None:
    spec = spec_of(28672, 4040)
    straight, gathered = (plan(spec, 256, H200, "f16", aligned) for aligned in (True, False))
    assert [s.kernel for s in gathered.stages] == ["gather", "marlin_wgmma"]
    assert "x_map" in straight.stages[-1].args
    assert {"gathered_map", "k_padded"} <= set(gathered.stages[-1].args)
    assert gathered.gathered == 2 * 256 * 4096
    tokens, cluster = straight.stages[-1].variant[10], straight.stages[-1].variant[12]
    assert straight.stages[-1].box == (tokens // cluster, 64)
    assert straight.stages[-1].cluster == cluster


def test_arguments_are_the_kernels_parameters() -> None:
    source = files("warptile.kernels").joinpath("marlin_wgmma.cu").read_text("utf-8")
    (found,) = re.findall(r"marlin_wgmma\(([^)]*)\)\s*{", source)
    names = [re.findall(r"\w+", p)[-1] for p in found.split(",")]
    numbers = ("bias_type", "columns", "part1", "part2", "part3", "split")
    spec = spec_of(4096, 4096, 16, element="e2m1", scale="e4m3", **{"global": "f32"})
    args = plan(spec, 256, H200, "f16").stages[-1].args
    assert ["factors" if a == "global_scale" else a for a in args if isinstance(a, str)] == [
        name for name in names if name not in numbers
    ]
    assert [type(a) for a in args] == [int if name in numbers else str for name in names]


def test_tiles_whose_registers_hold_one_set_of_sums_are_refused_where_scales_take_two() -> None:
    blocks = spec_of(28672, 8192, element="e4m3", scale="f32", scale_block=[128, 128])
    made = plan(blocks, 2048, H200, "bf16")
    assert made.stages[-1].kernel == "marlin_wgmma"
    assert (str(Wgmma(256, 128, 1)), "f32 scales multiply fp32 sums, of which this tile has one set") in made.rejected
    exact = spec_of(28672, 8192, 32, element="e2m1", scale="e8m0")
    tile = plan(exact, 2048, H200, "bf16").stages[-1].variant
    assert tile[8] == 0  # weights
    assert tile[10] == 256


def test_blocks_that_share_x_have_whole_tiles_of_outputs() -> None:
    tile = Wgmma(128, 256, 1, cluster=2)
    assert refuse_tile(spec_of(4096, 4096), H200, "f16", tile) is None
    reason = refuse_tile(spec_of(4096 + 128, 4096), H200, "f16", tile)
    assert reason == "blocks that share x have 256 outputs, of which 4224 is no multiple"


def test_a_device_of_one_sm_has_no_blocks_that_share_x() -> None:
    one = Device(90, sms=1, shared=H200.shared, nvrtc=H200.nvrtc)
    assert refuse_tile(spec_of(4096, 4096), one, "f16", Wgmma(128, 256, 1, cluster=2)) == (
        "a cluster's blocks need 2 SMs, this has 1"
    )
    for m, batch_invariant in product((33, 64, 4096), (False, True)):
        (stage,) = plan(spec_of(4096, 4096), m, one, "f16", batch_invariant=batch_invariant).stages
        assert (stage.kernel, stage.cluster, stage.grid) == ("marlin_wgmma", 1, (1, 1, 1))


@pytest.mark.parametrize("change", [{}, {"scale": "bf16"}, {"element": "e4m3", "scale": "f32"}, {"group": 64}], ids=str)
def test_batch_invariant_tiles_scale_what_all_of_them_scale(change: dict[str, object]) -> None:
    """Sums that are scaled and weights that are round differently: sums only where weights cannot be scaled exactly."""
    spec = {**spec_of(4096, 4096), **change}
    chosen = [plan(spec, m, H200, "f16", batch_invariant=True).stages[-1].variant[8] for m in (1, 17, 64, 300, 4096)]
    assert chosen == [int(change.get("element") == "e4m3")] * 5


def test_stages_overlap_where_the_device_can() -> None:
    for m, (x_dtype, numerics) in product((1, 64), (("f16", "exact"), ("f32", "exact"), ("f16", "int8_row"))):
        for arch, overlap in ((80, False), (89, False), (90, True), (120, True)):
            device = Device(arch, 132, 232448, (13, 5))
            stages = plan(spec_of(4096, 4096, perm=True), m, device, x_dtype, numerics=numerics).stages
            assert [s.overlap for s in stages] == [overlap] * (3 if numerics == "int8_row" else 2)
