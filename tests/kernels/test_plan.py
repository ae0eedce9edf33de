"""What ``plan`` promises: launches that fit the kernels and the device, chosen by module, shape and device alone."""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest
from launches import A100, H200, RTX_3090, T4, fields, parameters, spec_of, type_of
from warptile.formats.errors import UnsupportedError
from warptile.kernels import marlin
from warptile.kernels.launch import Device, Stage
from warptile.kernels.marlin_decode_plan import Decode, choose_decode
from warptile.kernels.marlin_plan import plan, refuse_device
from warptile.kernels.marlin_tiled_plan import TILES, Tiled, refuse_tile
from warptile.kernels.marlin_variants import variants

LAST = 2**31 - 1


SPECS = [
    spec_of(28672, 8192),
    spec_of(4096, 4096, bias="f16"),
    spec_of(14336, 4096, 32, element="u8", zero="int", scale="f32"),
    spec_of(200, 300, 48, perm=True, bias="f32", scale="bf16"),
    spec_of(64, 100000, -1, element="u8b128"),
    spec_of(151936, 16, 16, element="u4", zero="int"),
    spec_of(4096, 7168, scale_block=[128, 128], element="e4m3", scale="f32"),
    spec_of(576, 7168, -1, scale_block=[576, 7168], element="e4m3", scale="bf16", bias="bf16"),
    spec_of(200, 300, -1, element="e4m3", shards=[100, 60, 40]),
    spec_of(5760, 2880, 32, element="e2m1", scale="e8m0", experts=32, bias="bf16"),
    spec_of(200, 300, 16, element="e2m1", scale="e4m3", shards=[100, 60, 40], **{"global": "f32"}),
]


@pytest.mark.parametrize("device", [H200, RTX_3090, A100, T4], ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 33, 64, 200, 1024, 70000])
def test_every_launch_fits_its_kernel_and_the_device(m: int, device: Device) -> None:
    types = [x for x in ("f16", "bf16", "f32") if refuse_device(device.arch, x) is None]
    for spec, x_dtype, aligned in product(SPECS, types, (True, False)):
        made = plan(spec, m, device, x_dtype, aligned)
        assert made.why
        assert bool(made.factors) == (x_dtype == "f32")
        for stage in made.stages:
            assert isinstance(stage, Stage)
            assert [type_of(a) for a in stage.args] == parameters(stage.kernel)
            assert len(stage.variant) == fields(stage.kernel)
            assert 0 < stage.shared + 128 <= device.shared or stage.shared == 0
            assert 0 < stage.grid[0] < 2**31
            assert 0 < stage.grid[1] < 2**16
            assert stage.grid[2] == 1
            assert stage.block % 32 == 0
            assert 32 <= stage.block <= 512
        assert bool(made.scratch) == bool(made.counters)
        assert made == plan(spec, m, device, x_dtype, aligned)


def test_no_rows_no_launch() -> None:
    assert plan(SPECS[0], 0, H200, "f16").stages == ()


def test_older_gpus_and_foreign_types_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="found sm_70, f16 activations; need sm_75 or newer"):
        plan(SPECS[0], 1, Device(arch=70, sms=80, shared=98304), "f16")
    with pytest.raises(UnsupportedError, match="found sm_75, bf16 activations; need sm_80 or newer for bf16"):
        plan(SPECS[0], 1, T4, "bf16")
    with pytest.raises(UnsupportedError, match="found u4b8 with f16 scales, e4m3 activations"):
        plan(SPECS[0], 1, H200, "e4m3")


@pytest.mark.parametrize(("k", "group"), [(1048512, 262128), (2096640, 131040), (2097152, 16), (2097024, 48)])
def test_rows_of_scales_are_found_in_every_module_that_has_a_plan(k: int, group: int) -> None:
    """marlin_decode's multiplication and ``Divide``, at the first and the last run of every row."""
    spec = spec_of(64, k, group)
    assert plan(spec, 1, H200, "f16").stages
    run = gcd(group // 16, 8)
    each, rows = group // 16 // run, spec["k_padded"] // group
    part, reciprocal = (2**31 + each - 1) // each, (2**32 - 1) // each + 1
    for row in range(rows):
        for at in (row * each, row * each + each - 1):
            assert (2 * at + 1) * part >> 32 == row
            assert each == 1 or at * reciprocal >> 32 == row


def test_groups_whose_rows_of_scales_would_be_mistaken_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="too large groups for a Marlin kernel; found groups of 262128, 2097024"):
        plan(spec_of(64, 2097024, 262128), 1, H200, "f16")


def test_scales_that_are_no_column_of_a_group_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="need one scale for a column and group"):
        plan({**SPECS[0], "scale_block": [128, 128]}, 1, H200, "f16")
    with pytest.raises(UnsupportedError, match="need one scale for a column and group"):
        plan({**SPECS[0], "shards": [14336, 14336]}, 1, H200, "f16")
    with pytest.raises(UnsupportedError, match="need blocks of a multiple of 64 columns, not 48"):
        plan(spec_of(192, 256, 64, element="e4m3", scale_block=[48, 64]), 1, H200, "f16")
    with pytest.raises(UnsupportedError, match="need at most 4 fused parts, not 5"):
        plan(spec_of(320, 256, -1, element="e4m3", shards=[64] * 5), 1, H200, "f16")
    with pytest.raises(UnsupportedError, match="found e2m1 with f16 scales, f16 activations; need e8m0 or e4m3 scales"):
        plan(spec_of(320, 256, 32, element="e2m1"), 1, H200, "f16")


NEVER = (LAST,) * 4
FP8 = spec_of(256, 512, element="e4m3", scale="f32", scale_block=[128, 128])
PARTS = {**FP8, "group": -1, "scale_block": [1, 512], "shards": [101, 155]}
NVFP4 = spec_of(256, 512, 16, element="e2m1", scale="e4m3", **{"global": "f32"})


@pytest.mark.parametrize(
    ("spec", "run", "kind", "pointer", "numbers"),
    [
        (spec_of(256, 512, 32, element="e2m1", scale="e8m0"), 2, (0, 0), None, NEVER),
        (spec_of(256, 512, 16, element="e2m1", scale="e4m3"), 1, (0, 0), None, NEVER),
        (NVFP4, 1, (0, 1), "global_scale", NEVER),
        ({**NVFP4, "shards": [128, 64, 64]}, 1, (0, 1), "global_scale", (LAST, 128, 192, LAST)),
        (FP8, 4, (1, 0), None, (128, LAST, LAST, LAST)),
        (spec_of(256, 512, 32, element="e4m3", scale_block=[64, 32]), 2, (1, 0), None, (64, LAST, LAST, LAST)),
        (spec_of(256, 512, 48, element="e4m3"), 1, (0, 0), None, NEVER),
        (spec_of(256, 512, -1, element="e4m3"), 0, (0, 0), None, NEVER),
        (spec_of(256, 512, -1, element="e4m3", scale_block=[48, 512]), 0, (1, 1), "scales", (48, LAST, LAST, LAST)),
        (PARTS, 0, (1, 1), "scales", (LAST, 101, LAST, LAST)),
    ],
)
def test_each_kind_of_scale_is_found_where_the_layout_puts_it(
    spec: dict[str, object], run: int, kind: tuple[int, int], pointer: str | None, numbers: tuple[int, ...]
) -> None:
    for m in (1, 64):
        stage = plan(spec, m, H200, "bf16").stages[-1]
        assert stage.variant[4:7] == (run, *kind)
        assert stage.args[3] == (pointer or "global_scale")
        at = stage.args.index("each") + 2
        assert stage.args[at : at + 4] == numbers


def test_sm_75_refuses_wide_tiles_where_short_runs_have_sums_of_their_own() -> None:
    spec = spec_of(4096, 4096, 32)
    for x_dtype, whole, refused in (("f32", False, True), ("f16", False, False), ("f16", True, True)):
        for tile in (t for t in TILES if t.shared + 128 <= T4.shared and t.blocks * t.columns <= 16):
            why = refuse_tile(spec, T4, x_dtype, tile, whole) or ""
            wide = tile.blocks * tile.columns == 16
            assert ("two instructions for one" in why) == (refused and wide), tile


def test_every_plan_for_sm_75_finds_its_kernels_among_those_built_ahead() -> None:
    ahead = set(variants(75))
    for spec, m, x_dtype in product(SPECS, (1, 16, 64, 1000), ("f16", "f32")):
        for stage in plan(spec, m, T4, x_dtype).stages:
            assert (stage.kernel, stage.variant, stage.target) in ahead


def test_every_plan_finds_its_kernels_among_those_built_ahead() -> None:
    ahead = set(variants(80))
    for spec, m, x_dtype in product(SPECS, (1, 9, 64, 1024), ("f16", "bf16", "f32")):
        for stage in plan(spec, m, A100, x_dtype).stages:
            assert (stage.kernel, stage.variant, stage.target) in ahead


@pytest.mark.parametrize("m", [4, 100])
@pytest.mark.parametrize(("perm", "aligned", "gathers"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_rows_are_gathered_only_where_they_cannot_be_read(perm: bool, aligned: bool, gathers: int, m: int) -> None:
    spec = spec_of(256, 512, perm=perm)
    made = plan(spec, m, A100, "f16", aligned)
    assert [s.kernel for s in made.stages].count("gather") == gathers
    assert made.gathered == gathers * m * spec["k_padded"] * 2
    assert made.stages[-1].kernel == ("marlin_decode" if m <= 8 else "marlin_tiled")
    assert ("x" in made.stages[-1].args) == (gathers == 0)


def test_decode_gathers_rows_that_are_no_whole_copies() -> None:
    assert [s.kernel for s in plan(spec_of(64, 516), 1, H200, "f16").stages] == ["gather", "marlin_decode"]
    assert [s.kernel for s in plan(spec_of(64, 520), 1, H200, "f16").stages] == ["marlin_decode"]


def test_a_plan_says_why_each_other_tile_was_not_taken() -> None:
    spec = spec_of(28672, 8192, scale="bf16")
    made = plan(spec, 1024, RTX_3090, "f16")
    reasons = dict(made.rejected)
    assert made.why.partition(":")[0] not in reasons
    assert "bf16 scales multiply f16 sums in fp32" in reasons["tile 256 x 128"]
    assert any(reason.endswith("times as long") for reason in reasons.values())


def test_a_tile_whose_loop_would_spill_is_refused() -> None:
    """Compiled with NVRTC 13.5 it did, for one of sm_75 to sm_120."""
    large, other = Tiled(4, 4, 4, 1), Tiled(8, 2, 8, 1)
    zeros = spec_of(4096, 4096, 32, element="u8", zero="int", scale="f32")
    for x_dtype in ("f16", "f32"):
        assert "8-bit codes and fp32 sums" in str(refuse_tile(zeros, A100, x_dtype, large))
        assert refuse_tile(zeros, A100, x_dtype, other) is None
    for spec in ({**zeros, "scale": "f16"}, {**zeros, "group": 64}, {**zeros, "element": "u4"}):
        assert refuse_tile(spec, A100, "f16", large) is None
    assert refuse_tile({**zeros, "scale": "f16"}, A100, "f16", large, whole=True) is not None
    short = spec_of(4096, 4096, 16)
    assert "k in more than two ways" in str(refuse_tile(short, A100, "f16", Tiled(8, 4, 2, 1)))
    assert refuse_tile(short, A100, "f16", Tiled(8, 4, 4, 1)) is None
    blocks = spec_of(4096, 4096, 16, element="e4m3", scale_block=[128, 16])
    for scale, tile in product(("f16", "bf16", "f32", "e8m0"), (large, other)):
        assert "scales of every 16 k" in str(refuse_tile({**blocks, "scale": scale}, A100, "bf16", tile))
        assert refuse_tile({**blocks, "group": 32, "scale_block": [128, 32]}, A100, "bf16", other) is None
    floats = spec_of(4096, 4096, 16, element="e2m1", scale="e4m3")
    assert "pairs of rows" in str(refuse_tile(floats, A100, "f32", large))
    assert refuse_tile(floats, A100, "f32", other) is None
    assert refuse_tile(floats, A100, "f16", large) is None
    long, wide = spec_of(4096, 4096, 128, element="u8", zero="int", scale="bf16"), Tiled(8, 4, 4, 1)
    assert "in bf16" in str(refuse_tile(long, A100, "bf16", wide))
    assert refuse_tile({**long, "scale": "f16"}, A100, "f16", wide) is None
    own = spec_of(4096, 4096, 32)
    assert refuse_tile(own, T4, "f16", large) is None
    assert "two instructions for one" in str(refuse_tile(own, T4, "f16", large, whole=True))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("tiles", "steps", "streams"), [(112, 128, 132), (1, 7, 5), (64, 16, 100), (131, 3, 132), (5, 1, 5)]
)
def test_cut_tiles_are_covered_once_and_summed_in_order(tiles: int, steps: int, streams: int, tile: Tiled) -> None:
    """The arithmetic of marlin_tiled's segments: shares, their owners, and the slots of their sums."""
    units = tiles * steps
    begin = [units * c // streams for c in range(streams + 1)]
    owner = [((unit + 1) * streams - 1) // units for unit in range(units)]
    assert all(begin[c] <= unit < begin[c + 1] for unit, c in enumerate(owner))
    slots: dict[int, tuple[int, int]] = {}
    for place in range(tiles):
        start = place * steps
        contributors = range(owner[start], owner[start + steps - 1] + 1)
        assert sorted(set(owner[start : start + steps])) == list(contributors)
        if len(contributors) > 1:
            for c in contributors:
                slot = 2 * c + (begin[c] < start)
                assert slots.setdefault(slot, (place, c)) == (place, c)
    assert max(slots, default=0) < 2 * streams
    assert tile.features * tile.tokens * 4 * (tile.wk - 1) <= tile.shared


@pytest.mark.parametrize(("k", "group"), [(8192, 128), (4096, -1), (300, 48), (16, 16), (100000, 256)])
def test_warps_of_all_splits_cover_k_once(k: int, group: int) -> None:
    """The arithmetic of marlin_decode's ranges: whole runs, in order, none twice."""
    run = 4 if group == -1 else next(r for r in (8, 4, 2, 1) if group // 16 % r == 0)
    slices = marlin.padded(64, k, group)[1] // 16
    unit = run if slices % 8 else 8
    for warps, splits in product((4, 8, 16), (1, 2, 3, 5)):
        parts = [unit * (slices // unit * i // (splits * warps)) for i in range(splits * warps + 1)]
        assert parts[0] == 0
        assert parts[-1] == slices
        assert parts == sorted(parts)
        assert all(p % run == 0 for p in parts)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s['n']}x{s['k']}")
@pytest.mark.parametrize("device", [H200, RTX_3090, A100, T4], ids=lambda d: f"sm_{d.arch}")
def test_decode_gives_every_block_a_tile_and_keeps_sizes_in_32_bits(spec: dict[str, int], device: Device) -> None:
    d = choose_decode(spec, device)
    assert 1 <= d.columns <= spec["n_padded"] // 64
    assert d.warps in (4, 8, 16)
    assert spec["k_padded"] // 16 * d.warps * d.splits < 2**32


def test_decode_fills_every_sm_with_two_blocks_where_most_take_two_tiles() -> None:
    large = spec_of(28672, 8192, 128)
    assert choose_decode(large, H200) == Decode(8, 1, 264)
    assert choose_decode(large, A100) == Decode(4, 1, 224)
    assert choose_decode(spec_of(28672, 8192, 32), H200) == Decode(4, 1, 448)
    assert choose_decode(spec_of(27904, 8192, 128), H200) == Decode(4, 1, 436)
    assert choose_decode(spec_of(34048, 8192, 128), H200) == Decode(4, 1, 266)


def test_decode_takes_up_to_32_rows_on_hopper_where_that_was_measured_to_be_faster() -> None:
    hopper = Device(90, 132, 232448, (13, 5))
    taken = {
        (4096, 4096): (Decode(8, 2, 64), Decode(8, 2, 64)),
        (6144, 4096): (Decode(12, 1, 96), Decode(8, 1, 96)),
        (5120, 5120): (Decode(12, 1, 80), None),
        (14336, 4096): (Decode(12, 1, 112, 2), None),
        (28672, 8192): (None, None),
        (64, 256): (Decode(4, 1, 1), Decode(4, 1, 1)),
    }
    for shape, choices in taken.items():
        for (first, last), choice in zip(((9, 16), (17, 32)), choices, strict=True):
            for m, device in product((first, last), (hopper, H200)):
                made = plan(spec_of(*shape), m, device, "f16")
                decoded = made.stages[-1].kernel == "marlin_decode"
                assert made.why.partition(":")[0] == str(choice) if choice else not decoded
                assert not choice or (made.stages[-1].variant[-2], made.scratch) == (2 if m <= 16 else 4, 0)
                assert not choice or made.stages[-1].cluster == choice.splits
    for m, x_dtype, device in ((33, "f16", hopper), (9, "f32", hopper), (9, "f16", A100), (9, "f16", RTX_3090)):
        assert plan(spec_of(4096, 4096), m, device, x_dtype).stages[-1].kernel != "marlin_decode"
    assert plan(spec_of(4096, 4096), 9, hopper, "f16", numerics="int8_row").stages[-1].kernel == "marlin_tiled"
    short = spec_of(4096, 4096, 32)
    assert plan(short, 16, hopper, "f16").stages[-1].kernel == "marlin_decode"
    assert ("decode", "serves up to 16 rows, this has 17") in plan(short, 17, hopper, "f16").rejected
    for n, kernel in ((4096, "marlin_decode"), (14336, "marlin_wgmma")):
        assert plan(spec_of(n, 4096, 16), 16, hopper, "f16").stages[-1].kernel == kernel


def test_a_batch_invariant_plan_adds_in_one_order_whatever_m_is() -> None:
    for spec, x_dtype, device in product(SPECS, ("f16", "bf16"), (A100, Device(90, 132, 232448, (13, 5)))):
        for m in (1, 8, 9, 64, 257, 4096):
            try:
                made = plan(spec, m, device, x_dtype, batch_invariant=True)
            except UnsupportedError:
                continue
            stage = made.stages[-1]
            assert made.counters == 0
            if stage.kernel == "marlin_wgmma":
                assert stage.variant[11] == 1  # way
            else:
                assert stage.kernel == "marlin_tiled"
                assert stage.variant[-3] * stage.variant[-2] == 8
            assert ("decode", "its sums depend on m") in made.rejected
