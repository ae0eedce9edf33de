"""What ``plan`` promises for strips: launches that fit the kernels and the device, refusals by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from launches import A100, H200, RTX_3090, RTX_4090, T4, fields, parameters, type_of
from warptile.formats.canonical import SCALE_DTYPES
from warptile.formats.errors import UnsupportedError
from warptile.kernels.launch import Device
from warptile.kernels.mmq_decode_plan import choose_decode
from warptile.kernels.mmq_plan import numerics, plan
from warptile.kernels.mmq_strips import KINDS
from warptile.kernels.mmq_tiled_plan import ONE_STAGE_TILES, TILES, choose_tile
from warptile.kernels.mmq_variants import CHECKED, covering, variants

LAST = 2**31 - 1


def spec_of(kind: str, n: int, k: int, **other: Any) -> dict[str, Any]:
    own = KINDS[kind].scales[0][1] if KINDS[kind].scales else 128
    spec = {
        "kind": kind,
        "n": n,
        "k": k,
        "scale": "f32",
        "group": own,
        "scale_block": [1 if KINDS[kind].scales else 128, own],
    }
    padded = {"n_padded": -(-n // 128) * 128, "k_padded": -(-k // 256) * 256}
    return {**spec, **padded, "bias": None, "experts": None, **other}


SPECS = [
    spec_of("q4_0", 28672, 8192),
    spec_of("q4_k", 4096, 4096, bias="f16"),
    spec_of("q6_k", 151936, 4096),
    spec_of("q8_0", 100, 2880, bias="f32"),
    spec_of("mxfp4", 5760, 2880, experts=32, bias="bf16"),
    spec_of("nvfp4", 200, 300, shards=[100, 60, 40], **{"global": "f32"}),
    spec_of("q5_k", 1024, 14336),
    spec_of("iq4_xs", 16, 256),
    spec_of("fp8", 7168, 18432, scale="bf16"),
    spec_of("fp8", 576, 7168, group=-1, scale_block=[576, 7168]),
]


@pytest.mark.parametrize("device", [H200, RTX_4090, RTX_3090, A100, T4], ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("m", [1, 8, 9, 16, 33, 64, 100, 257, 5000])
def test_every_launch_fits_its_kernel_and_the_device(m: int, device: Device) -> None:
    ahead = set(variants(device.arch))
    for spec, x_dtype in product(SPECS, ("f16", "bf16", "f32")):
        if spec["kind"] == "fp8" and device.arch < 89:
            continue
        made = plan(spec, m, device, x_dtype)
        assert made == plan(spec, m, device, x_dtype, numerics=numerics(spec)[0])
        assert made.why
        given = plan(spec, m, device, x_dtype, quantized=True)
        assert given.quantizes == numerics(spec)[0]
        assert given.quantized == m * spec["k_padded"]
        assert given.stages[0].kernel == "quantize"
        assert made == given or (made.quantizes, made.quantized, m) == (None, 0, 1)
        for stage in (*made.stages, *given.stages):
            assert [type_of(a) for a in stage.args] == parameters(stage.kernel)
            assert len(stage.variant) == fields(stage.kernel)
            assert stage.overlap == device.overlaps
            assert (stage.kernel, stage.variant, stage.target) in ahead
            assert 0 <= stage.shared + 128 <= device.shared
            assert 0 < stage.grid[0] < 2**31
            assert 0 < stage.grid[1] < 2**16
            assert 32 <= stage.block <= 512
        assert bool(made.scratch) == bool(made.counters)


@pytest.mark.parametrize("device", [H200, RTX_4090, RTX_3090, A100, T4], ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s['kind']}-{s['n']}x{s['k']}")
def test_decode_gives_every_warp_a_step_and_every_block_a_row(spec: dict[str, Any], device: Device) -> None:
    d, steps = choose_decode(spec, device), spec["k_padded"] // 256
    assert 1 <= d.warps <= 16
    assert d.warps * d.splits <= steps
    assert 1 <= d.columns <= -(-spec["n"] // 16)
    assert d.chunk >= 1


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s['kind']}-{s['n']}x{s['k']}")
def test_a_plan_says_why_each_other_tile_was_not_taken(spec: dict[str, Any]) -> None:
    for m in (9, 64, 1000):
        made = plan(spec, m, RTX_4090, "f16")
        reasons = dict(made.rejected)
        assert made.why.partition(":")[0] not in reasons
        assert len(reasons) == 2 * len(TILES)
        assert made.stages[-1].kernel == "mmq_tiled"


def test_sm_75_is_offered_rings_of_one_stage_and_more_warps_than_fit_are_not_asked_for() -> None:
    for spec, m in product(SPECS[:8], (9, 64, 1000)):
        made = plan(spec, m, T4, "f16")
        assert len(dict(made.rejected)) == 2 * len(ONE_STAGE_TILES)
        assert all("1 stage" in told for told, _ in made.rejected if told != "decode")
    q8_0 = dict(plan(SPECS[3], 1000, T4, "f16").rejected)
    assert q8_0["tile 128 x 128, 1 stage"] == "needs 71872 bytes of shared memory, a block has 65536"
    assert all(choose_decode(spec, T4).shared <= 65536 - 128 for spec in SPECS[:8])
    assert max(choose_decode(spec, T4).warps for spec in SPECS[:8]) > 8


def test_more_rows_take_wider_tiles() -> None:
    tokens = [choose_tile(SPECS[0], m, H200)[0].tokens for m in (9, 16, 32, 64, 128)]
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[3]) == (16, 64)


def test_scales_beside_the_strips_and_factors_of_the_whole_are_told_apart() -> None:
    def told(spec: dict[str, Any]) -> tuple[int, str, tuple[Any, ...]]:
        stage = plan(spec, 1, H200, "f16").stages[-1]
        return stage.variant[3], stage.args[2], stage.args[17:25]

    never = (LAST,) * 4
    assert told(SPECS[0]) == (0, "global_scale", (*never, 1, 128, 1, 1))
    assert told(SPECS[5]) == (0, "global_scale", (LAST, 100, 160, LAST, 1, 128, 1, 1))
    assert told(SPECS[8]) == (1, "global_scale", (*never, 128, 128, 56, 144))
    assert told(SPECS[9]) == (0, "scales", (576, LAST, LAST, LAST, 1, 128, 1, 1))
    rows = spec_of("fp8", 130, 300, group=-1, scale_block=[1, 300])
    assert told(rows) == (0, "scales", (1, LAST, LAST, LAST, 1, 128, 1, 1))
    parts = spec_of("fp8", 130, 300, group=-1, scale_block=[10, 300], shards=[100, 30])
    assert told(parts) == (0, "scales", (LAST, 100, LAST, LAST, 1, 128, 1, 1))


@pytest.mark.parametrize(
    ("spec", "device", "x_dtype", "words"),
    [
        (SPECS[0], Device(arch=70, sms=80, shared=98304), "f16", "found sm_70; need sm_75 or newer"),
        (SPECS[8], T4, "f16", "e4m3 activations on this GPU; found sm_75; need sm_89 or newer"),
        (SPECS[8], A100, "f16", "e4m3 activations on this GPU; found sm_80; need sm_89 or newer"),
        (SPECS[0], H200, "e4m3", "need f16, bf16, f32 activations"),
        (
            spec_of("fp8", 256, 256, scale="f64"),
            H200,
            "f16",
            "need scales of f16 or bf16 or f32 or e8m0, not f64 .1 / stored divisors.",
        ),
        (spec_of("fp8", 256, 256, scale_block=[1, 32]), H200, "f16", "need scales of a multiple of 128 k, not 32"),
        (spec_of("nvfp4", 320, 256, shards=[64] * 5), H200, "f16", "need at most 4 fused parts, not 5"),
        ({**SPECS[9], "global": "f32"}, H200, "f16", "need one factor for all of k, not two"),
    ],
)
def test_what_no_kernel_does_is_refused(spec: dict[str, Any], device: Device, x_dtype: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        plan(spec, 1, device, x_dtype)


def test_a_batch_invariant_plan_adds_in_one_order_whatever_m_is() -> None:
    for spec, m in product(SPECS, (1, 8, 9, 64, 257)):
        made = plan(spec, m, RTX_4090, "f16", batch_invariant=True)
        assert made.stages[-1].kernel == "mmq_tiled"
        assert (made.counters, made.scratch) == (0, 0)


def test_exact_numerics_have_no_kernel() -> None:
    with pytest.raises(UnsupportedError, match="activations as they are; found q4_0"):
        plan(SPECS[0], 1, H200, "f16", numerics="exact")


def test_no_rows_no_launch() -> None:
    assert plan(SPECS[0], 0, H200, "f16").stages == ()


@pytest.mark.parametrize("target", CHECKED)
def test_ci_compiles_every_kind_for_every_architecture(target: str) -> None:
    rows = [row for row in covering(target) if row[0] != "quantize"]
    assert set(rows) <= {row[:2] for row in variants(int(target[3:]))}
    kinds = len(KINDS) - (int(target[3:]) < 89)
    assert len({variant[0] for _, variant in rows}) == kinds
    assert len(rows) == kinds * (2 if target == "sm_75" else 1)


def test_ci_compiles_every_kind_in_both_kernels_and_every_tile() -> None:
    rows = {row for target in CHECKED for row in covering(target) if row[0] != "quantize"}
    assert {(kernel, variant[0]) for kernel, variant in rows} == set(
        product(("mmq_decode", "mmq_tiled"), range(len(KINDS)))
    )
    tiles = {variant[4:] for kernel, variant in rows if kernel == "mmq_tiled"}
    assert tiles == {(t.blocks, t.strips, t.stages, t.resident) for t in (*TILES, *ONE_STAGE_TILES)}
    assert {variant[1] for _, variant in rows} == {list(SCALE_DTYPES).index(x) for x in ("f16", "bf16", "f32")}
