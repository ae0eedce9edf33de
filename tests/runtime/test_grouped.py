"""Modules of several linears: they multiply under their own name and under each linear's, whatever the rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cases import Case, gptq_case, write_file
from linears import random_x
from warptile.convert import convert
from warptile.kernels.swiglu import swiglu
from warptile.runtime import Session

DATA = Path(__file__).parents[1] / "data"
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3}
ATTN, MOE = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
# Rows that begin inside a tile of 64, inside a lane's 8, and at the border of a tile.
ROWS = {"q_proj": 72, "k_proj": 40, "v_proj": 16}


@pytest.fixture(scope="module")
def linears() -> dict[str, Case]:
    """q, k, v with bias and act-order; gate and up of three experts, one with zero points; down of them."""
    found = {
        f"{ATTN}.{name}": gptq_case(n=n, k=96, bias="F16", g_idx="act", module=f"{ATTN}.{name}")
        for name, n in ROWS.items()
    }
    for expert in range(3):
        for i, (name, n, k) in enumerate((("gate_proj", 40, 64), ("up_proj", 40, 64), ("down_proj", 64, 32))):
            module = f"{MOE}.{expert}.{name}"
            sym = expert != 1 or name == "down_proj"
            found[module] = gptq_case(sym=sym, n=n, k=k, bias="F32", module=module, seed=10 * expert + i)
    return found


@pytest.fixture(scope="module")
def artifact(linears, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    write_file(folder / "model.safetensors", {n: t for case in linears.values() for n, t in case.tensors.items()})
    config = {key: value for key, value in next(iter(linears.values())).config.items() if key != "sym"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    result = convert(folder, to="marlin", fuse=True, stack_experts=True)
    assert [m.name for m in result.plan.converted] == [
        f"{ATTN}.qkv_proj", f"{MOE}.gate_up_proj", f"{MOE}.down_proj"
    ]  # fmt: skip
    return result.dst


@pytest.fixture(scope="module", params=DEVICES)
def session(request, artifact):
    with Session(artifact, device=request.param) as s:
        yield s


def on_host(array):
    return array.get() if hasattr(array, "get") else array


def bias_of(case: Case) -> np.ndarray:
    ((dtype, _, data),) = [stored for name, stored in case.tensors.items() if name.endswith(".bias")]
    return np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype])


def assert_product(y, x, case):
    want = np.float64(x) @ case.dense.T + np.float64(bias_of(case))
    assert y.shape == want.shape
    assert np.linalg.norm(np.float64(on_host(y)) - want) <= TOLERANCE[x.dtype.name] * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [1, 5, 33])
def test_every_linear_multiplies_under_its_old_name(session, linears, m, dtype):
    for name, case in linears.items():
        x = random_x((m, case.dense.shape[1]), dtype)
        assert_product(session.linear(name, x), x, case)
        np.testing.assert_array_equal(on_host(session.dequantize(name)), np.float32(case.dense))


@pytest.mark.parametrize("m", [1, 20])
def test_a_linear_is_columns_of_the_product_of_its_module(session, m):
    x = random_x((m, 96), "float16")
    whole, start = session.linear(f"{ATTN}.qkv_proj", x), 0
    for name, n in ROWS.items():
        np.testing.assert_array_equal(session.linear(f"{ATTN}.{name}", x), whole[:, start : start + n])
        start += n
    assert start == whole.shape[1]


@pytest.mark.parametrize("m", [1, 20])
def test_a_residual_is_added_to_the_part_alone(session, m):
    x, residual = random_x((m, 96), "float16"), random_x((m, 128), "float16", seed=8)
    whole = session.linear(f"{ATTN}.qkv_proj", x, residual=residual)
    for name, start in (("q_proj", 0), ("k_proj", 72), ("v_proj", 112)):
        own = np.ascontiguousarray(residual[:, start : start + ROWS[name]])
        y = session.linear(f"{ATTN}.{name}", x, residual=own)
        np.testing.assert_array_equal(y, whole[:, start : start + ROWS[name]])


@pytest.mark.parametrize("m", [1, 20])
def test_gate_and_up_of_one_module_make_a_pair(session, m):
    x = random_x((m, 64), "float16")
    for expert in range(3):
        gate, up = (f"{MOE}.{expert}.{name}" for name in ("gate_proj", "up_proj"))
        want = swiglu(session.linear(gate, x), session.linear(up, x))
        np.testing.assert_array_equal(session.swiglu(gate, up, x), want)


def test_an_expert_of_a_stack_answers_to_both_names(session, linears):
    x = random_x((4, 64), "bfloat16")
    for expert in range(3):
        both = session.linear(f"{MOE}.gate_up_proj", x, expert=expert)
        for i, name in enumerate(("gate_proj", "up_proj")):
            np.testing.assert_array_equal(session.linear(f"{MOE}.{expert}.{name}", x), both[:, 40 * i : 40 * i + 40])
        down = random_x((4, 32), "float16")
        y = session.linear(f"{MOE}.down_proj", down, expert=expert)
        np.testing.assert_array_equal(session.linear(f"{MOE}.{expert}.down_proj", down), y)
        assert_product(y, down, linears[f"{MOE}.{expert}.down_proj"])


@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 3, 96), (0, 96)])
def test_any_leading_shape(session, shape):
    x = random_x(shape, "float16")
    y, whole = session.linear(f"{ATTN}.k_proj", x), session.linear(f"{ATTN}.qkv_proj", x)
    np.testing.assert_array_equal(y, whole[..., 72:112])


def test_out_takes_the_rows_and_nothing_beside_them(session):
    x, buffer = random_x((3, 96), "float16"), np.full((5, 60), 7, np.float16)
    out = buffer[1:4, 10:50]
    assert session.linear(f"{ATTN}.k_proj", x, out=out) is out
    np.testing.assert_array_equal(out, session.linear(f"{ATTN}.qkv_proj", x)[:, 72:112])
    out[...] = 7
    assert (buffer == 7).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [f"{ATTN}.k_proj", f"{MOE}.1.up_proj", f"{MOE}.2.down_proj"])
def test_a_residual_is_that_of_the_part(session, linears, name, dtype):
    case = linears[name]
    x, added = (random_x((3, size), "float16").astype(dtype) for size in reversed(case.dense.shape))
    buffer = np.zeros((3, 2 * added.shape[1]), dtype)
    strided = buffer[:, 5 : 5 + added.shape[1]]
    strided[...] = added
    y = session.linear(name, x, residual=strided)
    want = np.float64(x) @ case.dense.T + np.float64(bias_of(case)) + np.float64(added)
    assert y.dtype == x.dtype
    assert np.linalg.norm(np.float64(y) - want) <= {"float16": 1e-3, "float32": 1e-5}[dtype] * np.linalg.norm(want)
    assert session.linear(name, x, residual=strided, out=strided) is strided
    np.testing.assert_array_equal(strided, y)


def test_strided_x(session):
    x = random_x((4, 300), "float16")[:, 7:199:2]
    y = session.linear(f"{ATTN}.v_proj", x)
    np.testing.assert_array_equal(y, session.linear(f"{ATTN}.v_proj", np.ascontiguousarray(x)))


def within(name: str, whole: str) -> bool:
    """Whether a linear of the fixture is stored in a module."""
    parts = {"qkv_proj": tuple(ROWS), "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    return name.rpartition(".")[2] in parts[whole.rpartition(".")[2]]


def test_names_and_modules_tell_what_is_stored_where(session, linears):
    stored = [f"{ATTN}.qkv_proj", f"{MOE}.gate_up_proj", f"{MOE}.down_proj"]
    assert session.names() == [*sorted(stored), *(n for whole in sorted(stored) for n in linears if within(n, whole))]
    k = session.module(f"{ATTN}.k_proj.weight")
    assert (k.n, k.k, k.stored_in, k.rows, k.expert, k.experts) == (40, 96, stored[0], (72, 112), None, None)
    assert k.act_order
    up = session.module(f"{MOE}.2.up_proj")
    assert (up.n, up.stored_in, up.rows, up.expert, up.experts) == (40, stored[1], (40, 80), 2, None)
    assert (up.element, up.zero, session.module(stored[1]).element) == ("u4b8", False, "u4")
    assert session.module(f"{MOE}.1.up_proj").zero
    with pytest.raises(ValueError, match="no experts"):
        session.linear(f"{MOE}.2.up_proj", random_x((1, 64), "float16"), expert=2)
    with pytest.raises(ValueError, match="holds 3 experts"):
        session.linear(stored[1], random_x((1, 64), "float16"))
    with pytest.raises(KeyError, match="gate_up_proj"):
        session.linear(f"{MOE}.3.gate_up_proj", random_x((1, 64), "float16"))


def test_explain_says_whose_part_it_is(session):
    text = str(session.explain(f"{MOE}.1.up_proj", 4))
    assert f"outputs 40 to 79 of expert 1 of {MOE}.gate_up_proj: all of them are made, its own copied out" in text
    assert f"expert 1 of {MOE}.down_proj" in str(session.explain(f"{MOE}.1.down_proj", 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("ar_gptq_w4g64_moe", "marlin"),
        ("gq_fp8_block", "marlin"),
        ("ct_nvfp4", "marlin"),
        ("ct_gptq_w4_actgroup", "marlin"),
        ("ct_nvfp4", "mmq"),
    ],
)
def test_real_checkpoints_multiply_under_the_names_they_had(source, layout, device, tmp_path):
    result = convert(DATA / source, tmp_path / "out", to=layout, fuse=True, stack_experts=True)
    expected = np.load(DATA / source / "expected.npz")
    with Session(result.dst, device=device) as s:
        views = [name for name in expected.files if s.module(name).stored_in is not None]
        assert views
        for name in views:
            dense, x = expected[name], random_x((3, expected[name].shape[1]), "bfloat16")
            np.testing.assert_allclose(on_host(s.dequantize(name)), dense, rtol=0, atol=1e-7 * np.abs(dense).max())
            want = np.float64(x) @ np.float64(dense).T
            y = np.float64(s.linear(name, x, numerics="exact"))
            assert np.linalg.norm(y - want) <= 3e-3 * np.linalg.norm(want)


@pytest.mark.gpu
def test_views_take_part_in_a_graph_and_allocate_nothing_after_the_first_call(artifact, linears):
    cp = pytest.importorskip("cupy", reason="cupy is not installed")
    name = f"{ATTN}.k_proj"
    x = random_x((4, 96), "float16")
    with Session(artifact) as s:
        s.prepare(4, "float16", [name])
        given, out = cp.asarray(x), cp.empty((4, 40), np.float16)
        s.linear(name, given, out=out)
        held = s.scratch_bytes
        s.linear(name, given, out=out)
        assert s.scratch_bytes == held
        eager = out.get()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            out[...] = 0
            stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
            try:
                s.linear(name, given, out=out)
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
        np.testing.assert_array_equal(out.get(), eager)
        assert_product(eager, x, linears[name])


@pytest.mark.gpu
def test_a_stack_and_its_views_share_their_memory(artifact):
    with Session(artifact) as s:
        s.load([f"{MOE}.0.up_proj"])
        held = s.weight_bytes
        assert held > 0
        for expert in range(3):
            s.linear(f"{MOE}.{expert}.gate_proj", random_x((2, 64), "float16"))
        s.linear(f"{MOE}.gate_up_proj", random_x((2, 64), "float16"), expert=1)
        assert s.weight_bytes == held


GPT_OSS = {"gate_up_proj": (5760, 2880), "down_proj": (2880, 2880)}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """MXFP4 experts of the shapes of gpt-oss, two of them; and their weights [E, n, k], by the format's description."""
    folder, rng = tmp_path_factory.mktemp("gpt_oss"), np.random.default_rng(0)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    tensors, dense = {}, {}
    for name, (n, k) in GPT_OSS.items():
        codes = rng.integers(0, 16, (2, n, k), dtype=np.uint8)
        scales = rng.integers(117, 124, (2, n, k // 32), dtype=np.uint8)
        bias = rng.integers(0x3C00, 0x4000, (2, n), dtype=np.uint16)
        tensors[f"{MOE}.{name}_blocks"] = (
            "U8",
            (2, n, k // 32, 16),
            (codes[..., ::2] | codes[..., 1::2] << 4).tobytes(),
        )
        tensors[f"{MOE}.{name}_scales"] = ("U8", scales.shape, scales.tobytes())
        tensors[f"{MOE}.{name}_bias"] = ("BF16", bias.shape, bias.tobytes())
        sign = np.where(codes >> 3, -1.0, 1.0)
        dense[name] = sign * values[codes & 7] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, -1)
        dense[f"{name} bias"] = (bias.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    write_file(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    return folder, dense


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["marlin", "mmq"])
def test_experts_of_the_shapes_of_gpt_oss_convert_and_run(gpt_oss, layout, device, tmp_path):
    folder, dense = gpt_oss
    result = convert(folder, tmp_path / "out", to=layout)
    with Session(result.dst, device=device) as s:
        for name, (n, k) in GPT_OSS.items():
            module = s.module(f"{MOE}.{name}")
            assert (module.n, module.k, module.experts) == (n, k, 2)
            x = random_x((3, k), "bfloat16")
            want = np.float64(x) @ dense[name][1].T + dense[f"{name} bias"][1]
            y = np.float64(s.linear(f"{MOE}.{name}", x, expert=1, numerics="exact"))
            assert np.linalg.norm(y - want) <= 3e-3 * np.linalg.norm(want)
