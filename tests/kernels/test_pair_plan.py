"""When a gate/up pair is one launch, and that its products are cut along k as each would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launches import A100, H200, T4, fields, parameters, type_of
from warptile.formats.errors import UnsupportedError
from warptile.kernels import marlin
from warptile.kernels.launch import At, Part, Stage
from warptile.kernels.marlin_decode_plan import choose_decode
from warptile.kernels.marlin_pair_plan import plan_pair
from warptile.kernels.marlin_plan import plan
from warptile.kernels.marlin_variants import variants

MODERN = replace(H200, nvrtc=(13, 5))


def spec_of(n: int, k: int, group: int = 128, **other: object) -> dict[str, object]:
    np_, kp = marlin.padded(n, k, group)
    spec = {"element": "u4b8", "scale": "f16", "scale_block": [1, group], "zero": None, "perm": False, "bias": None}
    return {**spec, "experts": None, "n": n, "k": k, "n_padded": np_, "k_padded": kp, "group": group, **other}


def whole(spec: dict[str, object]) -> Part:
    return Part(spec, 0, spec["n"])  # type: ignore[arg-type]


FITTING = [
    spec_of(14336, 4096),
    spec_of(4096, 4096, 32, element="u4", zero="int", bias="f32"),
    spec_of(200, 300, -1, element="u8b128"),
    spec_of(2880, 2880, 32, element="e2m1", scale="e8m0", bias="bf16", experts=32),
    spec_of(256, 512, element="e4m3", scale="f32", scale_block=[128, 128]),
]


@pytest.mark.parametrize("x_dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("spec", FITTING, ids=lambda s: f"{s['element']}-{s['n']}x{s['k']}")
def test_one_launch_cuts_k_as_each_product_alone(spec: dict[str, object], aligned: bool, x_dtype: str) -> None:
    for m in (1, 4):
        made = plan_pair(whole(spec), whole(spec), m, A100, x_dtype, aligned)
        alone = plan(spec, m, A100, x_dtype, aligned)
        one, other = made.stages[-1], alone.stages[-1]
        assert isinstance(one, Stage)
        assert [type_of(a) for a in one.args] == parameters("marlin_decode")
        assert len(one.variant) == fields("marlin_decode")
        assert made.stages[:-1] == alone.stages[:-1]
        parts = one.block // 32 // 2 * one.variant[-3]
        assert (parts, one.grid[1]) == (other.block // 32, other.grid[1])
        assert one.block <= 512
        assert one.shared + 128 <= A100.shared
        assert (one.kernel, one.variant, one.target) in set(variants(80, [str(spec["element"])]))


def test_parts_of_one_module_begin_where_the_layout_puts_them() -> None:
    spec = spec_of(28672, 4096, 32, element="u4", zero="int", bias="f16")
    args = plan_pair(Part(spec, 0, 14336), Part(spec, 14336, 14336), 1, H200, "f16").stages[-1].args
    assert args[:5] == ("qweight", "scales", "qzeros", "global_scale", "bias")
    column = {"qweight": 8, "scales": 2, "qzeros": 0.5, "global_scale": 0, "bias": 2}  # bytes
    assert args[-8:-3] == tuple(At(f"up.{name}", int(14336 * each)) for name, each in column.items())
    assert args[args.index("counters") + 2] == 14336
    assert choose_decode(spec, H200).columns >= 224


@pytest.mark.parametrize(
    ("gate", "up", "m", "words"),
    [
        (whole(spec_of(64, 256)), whole(spec_of(64, 256)), 9, "serves up to 8 rows, this has 9"),
        (whole(spec_of(64, 256)), whole(spec_of(64, 256, 32)), 1, "group is 128 and 32"),
        (whole(spec_of(64, 256)), whole(spec_of(64, 256, element="u4", zero="int")), 1, "element is u4b8 and u4"),
        (whole(spec_of(64, 256, perm=True)), whole(spec_of(64, 256, perm=True)), 1, "a column order of its own"),
        (
            Part(spec_of(192, 256), 0, 96),
            Part(spec_of(192, 256), 96, 96),
            1,
            "outputs 0 to 95 are no whole tiles of 64",
        ),
        (whole(spec_of(28672, 8192, 16)), whole(spec_of(28672, 8192, 16)), 1, "a scale for every 16 k"),
    ],
)
def test_two_products_where_one_launch_would_not_do(gate: Part, up: Part, m: int, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        plan_pair(gate, up, m, MODERN, "f16")


def test_two_products_where_shared_memory_does_not_hold_the_sums_of_both() -> None:
    small = whole(spec_of(2048, 4096))
    assert plan_pair(small, small, 7, T4, "f16").stages[-1].shared + 128 <= T4.shared
    with pytest.raises(UnsupportedError, match="found needs 69760 bytes of shared memory, a block has 65536"):
        plan_pair(small, small, 8, T4, "f16")


def test_two_products_on_sm_75_where_zero_points_and_two_parts_of_k_would_spill() -> None:
    with_zeros = spec_of(4096, 4096, 32, element="u4", zero="int")
    with pytest.raises(UnsupportedError, match="zero points and two parts of k"):
        plan_pair(whole(with_zeros), whole(with_zeros), 1, T4, "f16")
    for spec, device in ((spec_of(4096, 4096, 32), T4), (with_zeros, A100)):
        stage = plan_pair(whole(spec), whole(spec), 1, device, "f16").stages[-1]
        assert stage.variant[-3] == 2
        assert (stage.kernel, stage.variant, stage.target) in set(variants(device.arch))


def test_scales_of_every_16_k_take_wgmma_where_the_matrix_is_large() -> None:
    for n, k, group, kernel in ((28672, 8192, 16, "wgmma"), (14336, 4096, 16, "decode"), (28672, 8192, 32, "decode")):
        made = plan(spec_of(n, k, group), 1, MODERN, "f16")
        assert made.stages[-1].kernel == f"marlin_{kernel}"
    assert plan(spec_of(28672, 8192, 16), 1, A100, "f16").stages[-1].kernel == "marlin_decode"
    assert ("decode", "slower than wgmma where large matrices have a scale for every 16 k") in plan(
        spec_of(28672, 8192, 16), 8, MODERN, "f16"
    ).rejected
