"""Kernels compile for every architecture without spills, and cubins are found by what they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES
from warptile.formats.errors import UnsupportedError, WarptileError
from warptile.kernels.marlin_variants import covering, variants
from warptile.kernels.mmq_strips import KINDS
from warptile.runtime import build
from warptile.runtime import cubin as cubins

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
try:
    build.nvrtc_version()
except UnsupportedError as error:
    pytest.skip(str(error), allow_module_level=True)

U4B8, F16 = list(ELEMENTS).index("u4b8"), list(SCALE_DTYPES).index("f16")
DECODE = build.Request("marlin_decode", (U4B8, F16, F16, 0, 8, 0, 0, 0, 1, 0), "sm_90")
TILED = build.Request("marlin_tiled", (U4B8, F16, F16, 0, 4, 0, 0, 8, 4, 4, 1, 0), "sm_80")


def test_device_enumerations_are_the_canonical_rows() -> None:
    header = build.elements_header()
    assert f"enum class Element : int {{ {', '.join(ELEMENTS)} }};" in header
    assert f"enum class Dtype : int {{ {', '.join(SCALE_DTYPES)} }};" in header


MANY = [DECODE._replace(variant=(*DECODE.variant[:-2], tiles, 0)) for tiles in (2, 4)]


@pytest.mark.parametrize("request_", [DECODE, *MANY, TILED], ids=lambda r: f"{r.kernel}-{r.variant[-2]}")
def test_weights_arrive_in_16_byte_loads_and_nothing_spills(request_: build.Request) -> None:
    cubin = build.build(request_)
    report = cubins.resources(cubin)
    assert report.spills == 0
    assert report.notes == ()
    tool = cubins.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm")
    sass = cubins.disassemble(cubin.image, tool)
    assert any(op.startswith("HMMA.16816") for op in sass)
    assert any(".128" in op for op in sass if op.startswith("LDG"))
    assert not any(op.startswith(("LDL", "STL")) for op in sass)
    assert cubins.spills_in_loop(cubin, tool) == 0


@pytest.mark.parametrize("pair", [0, 1, 2])
@pytest.mark.parametrize("run", [8, 2])
def test_decode_asks_for_weights_before_it_waits_for_the_kernel_before(run: int, pair: int) -> None:
    """And reads x only after it: through shared memory, in whole fragments."""
    tool = cubins.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm")
    variant = (*DECODE.variant[:4], run, *DECODE.variant[5:7], pair, 1, 0)
    sass = cubins.disassemble(build.build(DECODE._replace(variant=variant)).image, tool)
    wait = next(i for i, op in enumerate(sass) if op.startswith("ACQBULK"))
    assert sum(op.startswith("LDG.") and ".128" in op for op in sass[:wait]) >= 8
    assert not any(op.startswith("LDGSTS") for op in sass[:wait])
    assert sum(op.startswith("LDSM") for op in sass[wait:]) == 4


def test_sm_75_multiplies_with_its_own_instructions_and_loads_before_it_stores() -> None:
    """The loads of a stage are all under way before the first store waits for one."""
    tool = cubins.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm")
    q4_k = list(KINDS).index("q4_k"), F16, list(SCALE_DTYPES).index("f32"), 0
    strips = cubins.disassemble(build.build(build.Request("mmq_tiled", (*q4_k, 2, 1, 1, 2), "sm_75")).image, tool)
    tiles = cubins.disassemble(build.build(TILED._replace(target="sm_75")).image, tool)
    matrix = {".".join(op.split(".")[:2]) for op in (*strips, *tiles) if op.startswith(("IMMA", "HMMA"))}
    assert matrix == {"IMMA.8816", "HMMA.1688"}
    first = next(i for i, op in enumerate(strips) if op.startswith("STS"))
    assert sum(op.startswith("LDG") and ".128" in op for op in strips[:first]) >= 5


E4M3, F32 = list(ELEMENTS).index("e4m3"), list(SCALE_DTYPES).index("f32")
FACTORED = [
    build.Request("marlin_tiled", (E4M3, F16, F32, 0, 0, 1, 1, 2, 4, 1, 1, 0), "sm_80"),
    build.Request("marlin_tiled", (U4B8, F16, F16, 0, 4, 0, 0, 2, 4, 1, 1, 1), "sm_80"),
    build.Request("marlin_decode", (E4M3, F32, F32, 0, 0, 1, 1, 2, 1, 0), "sm_80"),
    build.Request("mmq_tiled", (0, F16, F32, 0, 2, 1, 2, 2), "sm_80"),
]


@pytest.mark.parametrize("request_", FACTORED, ids=lambda r: f"{r.kernel}-{r.variant[0]}")
def test_no_last_factor_is_fused_with_the_bias(request_: build.Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and sums are one fma where the source says so and nowhere else, or bits would depend on the compiler."""
    tool = cubins.disassembler()
    if tool is None:
        pytest.skip("no nvdisasm")

    def fused() -> int:
        return sum(op.startswith("FFMA") for op in cubins.disassemble(build.build(request_).image, tool))

    before = fused()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fmad=false"))
    assert fused() == before


@pytest.mark.parametrize("target", build.ARCHITECTURES)
def test_each_architecture_has_kernels_to_check(target: str) -> None:
    every = {row[:2] for row in variants(90)}
    assert set(covering(target)) <= every


def test_a_cubin_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPTILE_CACHE", str(tmp_path))
    monkeypatch.delenv("WARPTILE_CUBINS", raising=False)
    first = build.compile("gather", (1,), "sm_80")
    monkeypatch.setattr(build, "build", lambda request: pytest.fail("built twice"))
    assert build.compile("gather", (1,), "sm_80") == first
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cubin", ".json"]
    assert first.image[:4] == b"\x7fELF"


def test_kernels_built_ahead_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = build.Request("gather", (0,), "sm_80")
    assert build.prebuild([request], tmp_path, jobs=1) == 1
    assert build.prebuild([request], tmp_path, jobs=1) == 0
    entry = json.loads((tmp_path / f"{build.key(request)}.json").read_text())
    assert entry["kernel"] == "gather<Variant{0}>"
    assert tuple(entry["nvrtc"]) == build.nvrtc_version()

    def absent() -> Any:
        raise UnsupportedError("no CUDA compiler")

    monkeypatch.setattr(build, "_nvrtc", absent)
    build.nvrtc_version.cache_clear()
    monkeypatch.setenv("WARPTILE_CUBINS", str(tmp_path))
    assert build.compile(*request).entry == entry["entry"]
    assert build.compiler() == tuple(entry["nvrtc"]), "plans rely on the compiler that built them"
    with pytest.raises(UnsupportedError, match="no CUDA compiler"):
        build.compile("gather", (0,), "sm_89")
    build.nvrtc_version.cache_clear()


def test_an_old_compiler_builds_no_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 0))
    with pytest.raises(UnsupportedError, match=r"found 13\.0; need 13\.3 or newer"):
        build.build(build.Request("gather", (0,), "sm_90a"))


def test_the_key_is_everything_that_shapes_the_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        build.key(DECODE),
        build.key(DECODE, (13, 5)),
        build.key(DECODE._replace(target="sm_89")),
        build.key(DECODE._replace(variant=(U4B8, F16, F16, 0, 4, 0, 0))),
        build.key(TILED),
    }
    before = build.key(DECODE)
    source, headers = build._sources("marlin_decode")
    assert {"elements.h", "mma.cuh", "decode.cuh"} <= set(headers)
    changed = {**headers, "mma.cuh": headers["mma.cuh"] + "\n"}
    monkeypatch.setattr(build, "_sources", lambda kernel: (source, changed))
    assert build.key(DECODE) != before
    assert len(keys) == 5


def test_a_kernel_that_does_not_compile_says_where() -> None:
    with pytest.raises(WarptileError, match=r"marlin_decode<Variant\{0, 0, .*\}> does not compile for sm_80: "):
        build.build(build.Request("marlin_decode", (0, 0, 0, 0, 8, 0, 0), "sm_80"))
