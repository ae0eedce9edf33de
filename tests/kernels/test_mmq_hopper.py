"""mmq_wgmma compiles as it must for sm_90a, and its plan describes the very kernel."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from host_kernels import COMPILER as COMPILED
from host_kernels import aligned, run, sources
from strip_linears import random_strips
from warptile.formats.errors import UnsupportedError
from warptile.kernels import gather, mmq, mmq_hopper_plan, wgmma_plan
from warptile.kernels.launch import Device
from warptile.kernels.mmq_hopper_plan import TILES
from warptile.kernels.mmq_plan import plan
from warptile.kernels.mmq_strips import KINDS
from warptile.kernels.wgmma_plan import Wgmma
from warptile.runtime import build
from warptile.runtime import cubin as cubins

INSIDE = [kind for kind, facts in KINDS.items() if facts.scales]
H200 = Device(arch=90, sms=132, shared=232448, nvrtc=(13, 5))

try:
    COMPILER = build.nvrtc_version()
except UnsupportedError:
    COMPILER = (0, 0)
needs_nvrtc = pytest.mark.skipif(COMPILER < wgmma_plan.NVRTC, reason="needs NVRTC 13.3 or newer")


def spec_of(kind: str, n: int = 28672, k: int = 8192, **other: object) -> dict[str, object]:
    padded = {"n_padded": -(-n // 128) * 128, "k_padded": -(-k // 256) * 256}
    own = KINDS[kind].scales[0][1] if KINDS[kind].scales else 128
    return {
        "kind": kind,
        "n": n,
        "k": k,
        **padded,
        "group": own,
        "scale_block": [1, own],
        "bias": None,
        "experts": None,
        **other,
    }


@needs_nvrtc
@pytest.mark.parametrize(
    ("kind", "x_dtype", "tile"),
    [
        ("q4_k", "f16", (256, 128)),
        ("q6_k", "bf16", (256, 64)),
        ("q6_k", "f16", (256, 128)),
        ("nvfp4", "bf16", (256, 128)),
        ("mxfp4", "bf16", (256, 32)),
        ("q4_0", "f16", (512, 16)),
        ("iq4_xs", "f16", (256, 16)),
        ("q4_k", "f16", (128, 256, 2)),
        ("q6_k", "f16", (128, 256, 2)),
        ("mxfp4", "bf16", (128, 256, 2)),
    ],
)
def test_tensor_cores_are_fed_from_registers_without_spills_or_serialisation(
    kind: str, x_dtype: str, tile: tuple[int, ...]
) -> None:
    stage = plan(spec_of(kind), 256, H200, x_dtype, variant=Wgmma(*tile[:2], 1, *tile[2:]), numerics="exact").stages[-1]
    cubin = build.build(build.Request(stage.kernel, stage.variant, stage.target))
    report = cubins.resources(cubin)
    assert report.notes == ()
    tool = cubins.disassembler()
    assert cubins.spills_in_loop(cubin, tool) == 0
    if tool is None:
        pytest.skip("no nvdisasm")
    sass = cubins.disassemble(cubin.image, tool)
    at = [i for i, op in enumerate(sass) if op.startswith(f"HGMMA.64x{tile[1]}x16")]
    assert "R2UR" not in sass[at[0] : at[-1]]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("m", [17, 64, 4096])
def test_a_device_of_one_sm_has_no_blocks_that_share_x(m: int, batch_invariant: bool) -> None:
    one = Device(90, sms=1, shared=H200.shared, nvrtc=H200.nvrtc)
    made = plan(spec_of("q4_0"), m, one, "f16", batch_invariant=batch_invariant)
    assert (made.stages[-1].cluster, made.stages[-1].grid) == (1, (1, 1, 1))
    assert "a cluster's blocks need 2 SMs, this has 1" in dict(made.rejected).values()


@needs_nvrtc
def test_a_plan_asks_for_the_shared_memory_the_kernel_lays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """``shared`` is sizeof(Shared), for every tile and kind: the compiler checks it. All fit an sm_90."""
    source = files("warptile.kernels").joinpath("mmq_wgmma.cu").read_text("utf-8")
    for tile, kind in product(TILES, INSIDE):
        if mmq_hopper_plan.refuse_tile(spec_of(kind), H200, tile):
            continue
        stage = plan(spec_of(kind), 64, H200, "bf16", variant=tile, numerics="exact").stages[-1]
        shared = f"Shared<Strips<Variant{{{', '.join(map(str, stage.variant))}}}>>"
        source += f"static_assert(sizeof({shared}) == {stage.shared});\n"
        assert stage.shared <= H200.shared
    source += "template <Variant V> __global__ void nothing() {}\n"
    monkeypatch.setattr(build, "_sources", lambda kernel: (source, build._headers(source)))
    build.build(build.Request("nothing", stage.variant, "sm_90a"))


def test_arguments_are_the_kernels_parameters() -> None:
    source = files("warptile.kernels").joinpath("mmq_wgmma.cu").read_text("utf-8")
    (found,) = re.findall(r"mmq_wgmma\(([^)]*)\)\s*{", source)
    names = [re.findall(r"\w+", p)[-1] for p in found.split(",")]
    numbers = ("bias_type", "part1", "part2", "part3", "split")
    args = plan(spec_of("nvfp4"), 256, H200, "bf16").stages[-1].args
    named = ["factors" if a == "global_scale" else a for a in args if isinstance(a, str)]
    assert named == [name for name in names if name not in numbers]
    assert [type(a) for a in args] == [int if name in numbers else str for name in names]


@pytest.mark.parametrize(
    ("kind", "x_dtype", "fewest"),
    [
        ("q4_0", "f16", 17),
        ("q4_0", "bf16", 33),
        ("q8_0", "f16", 17),
        ("q4_k", "f16", 33),
        ("q6_k", "f16", 17),
        ("q6_k", "bf16", 17),
        ("iq4_nl", "f16", 33),
        ("mxfp4", "bf16", 9),
        ("nvfp4", "f16", 9),
    ],
)
def test_many_rows_go_to_hoppers_tensor_cores_and_few_to_8_bits(kind: str, x_dtype: str, fewest: int) -> None:
    for m in (1, 8, 9, 16, 17, 32, 33, 4096):
        made = plan(spec_of(kind), m, H200, x_dtype)
        assert (made.stages[-1].kernel == "mmq_wgmma") == (m >= fewest)
        for numerics, int8 in ((None, m < fewest), ("int8", True)):
            given = plan(spec_of(kind), m, H200, x_dtype, numerics=numerics, quantized=True)
            assert given.quantizes == ("int8" if int8 else None)
    assert plan(spec_of(kind), 1, H200, x_dtype, numerics="exact").stages[-1].kernel == "mmq_wgmma"


@pytest.mark.parametrize(("kind", "x_dtype"), [("q8_0", "f16"), ("q4_k", "f16"), ("q6_k", "f16"), ("mxfp4", "bf16")])
@pytest.mark.parametrize(("n", "m"), [(28672, 256), (28672, 2048), (14336, 2048)])
def test_many_rows_take_the_tile_that_measured_fastest(kind: str, x_dtype: str, n: int, m: int) -> None:
    """benchmarks/results/tiles.jsonl; q4_0 takes within 2 % as long in either."""
    spec = spec_of(kind, n, 8192 if n == 28672 else 4096)
    assert plan(spec, m, H200, x_dtype).why.startswith("wgmma 128 x 256, 2 blocks share x")
    assert plan(spec_of("q4_0"), m, H200, "f16").why.startswith("wgmma 256 x 128")


def test_tiles_that_do_not_fit_are_refused_with_the_reason() -> None:
    made = plan(spec_of("q8_0"), 16, H200, "f16", numerics="exact")
    assert made.stages[-1].shared <= H200.shared
    assert any(tile == "wgmma 512 x 16" and "bytes of shared memory" in why for tile, why in made.rejected)
    for n, cluster in ((4096, 2), (4096 + 128, 1)):
        made = plan(spec_of("q4_k", n), 4096, H200, "f16")
        assert made.stages[-1].cluster == cluster
        assert any(f"{n} is no multiple" in why for _, why in made.rejected) == (cluster == 1)


@pytest.mark.skipif(COMPILED is None, reason="no g++")
@pytest.mark.parametrize(("k", "pitch"), [(512, 512), (504, 504), (509, 512), (16, 24), (40, 41)])
def test_x_comes_with_the_even_ones_of_each_16_before_the_odd_ones(k: int, pitch: int, tmp_path: Path) -> None:
    """And zeros beyond k; rows on 16 bytes and rows that are not."""
    padded = -(-k // 256) * 256
    x = np.random.default_rng(0).integers(1, 65536, (3, pitch)).astype(np.uint16)
    memory = {"x": aligned(x), "gathered": aligned(np.full((3, padded), 7, np.uint16)), "perm": aligned(np.zeros(1))}
    stage = gather.stage(gather.FRAGMENTS, 3, padded, H200)
    run(stage, memory, {"m": 3, "k": k, "k_padded": padded, "ldx": pitch}, sources(tmp_path))
    want = np.zeros((3, padded), np.uint16)
    want[:, :k] = x[:, :k]
    want = np.moveaxis(want.reshape(3, -1, 8, 2), 3, 2).reshape(3, padded)
    np.testing.assert_array_equal(memory["gathered"].view(np.uint16).reshape(3, padded), want)


@pytest.mark.parametrize(
    ("kind", "x_dtype", "device", "reason"),
    [
        ("mxfp4", "f16", H200, "out of f16's range"),
        ("fp8", "bf16", H200, "which fp8 has beside them"),
        ("q4_k", "f32", H200, "f16 or bf16 activations"),
        ("q4_k", "bf16", Device(80, 108, 166912), "needs sm_90"),
        ("q4_k", "bf16", Device(90, 132, 232448, (13, 0)), "needs NVRTC 13.3"),
    ],
)
def test_exact_products_that_do_not_run_say_why(kind: str, x_dtype: str, device: Device, reason: str) -> None:
    spec = spec_of(kind, scale="f32", scale_block=[128, 128], group=128) if kind == "fp8" else spec_of(kind)
    with pytest.raises(UnsupportedError, match=reason):
        plan(spec, 64, device, x_dtype, numerics="exact")


def test_a_batch_invariant_plan_adds_in_one_order_whatever_m_is() -> None:
    for m in (1, 8, 64, 300, 4096):
        made = plan(spec_of("q5_k"), m, H200, "bf16", batch_invariant=True)
        assert made.stages[-1].kernel == "mmq_wgmma"
        assert made.counters == 0


def test_every_plan_finds_its_kernel_among_those_built_ahead() -> None:
    ahead = set(mmq_hopper_plan.variants())
    for kind, x_dtype, m in product(("q8_0", "nvfp4"), ("f16", "bf16"), (64, 256)):
        quant = random_strips(kind, 200, 512, whole=kind == "nvfp4")
        for stage in plan(mmq.spec(quant.outline()), m, H200, x_dtype, numerics="exact").stages:
            assert (stage.kernel, stage.variant, stage.target) in ahead
