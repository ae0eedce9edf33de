"""A session on files: real checkpoints converted to artifacts, and quantised modules that passed through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from linears import ACTIVATION, InMemory, random_x
from warptile.convert import convert
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.runtime import Session

DATA = Path(__file__).parents[1] / "data"
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3}


def on_host(array):
    return array.get() if hasattr(array, "get") else array


def assert_multiplies(session, name, dense):
    """The decoded weights are the published ones, and products are products with them."""
    np.testing.assert_array_equal(on_host(session.dequantize(name)), dense)
    for m, dtype in ((1, "float16"), (20, "bfloat16")):
        x = random_x((m, dense.shape[1]), dtype)
        want = np.float64(x) @ np.float64(dense).T
        y = session.linear(name, x)
        assert y.dtype == ACTIVATION[dtype]
        assert np.linalg.norm(np.float64(y) - want) <= TOLERANCE[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("gq_gptq_dynamic", "directory"),
        ("ct_gptq_w4_actgroup", "directory"),
        ("gq_fp8_block", "directory"),
        ("ar_awq_w4g64_asym", "directory"),
        ("gq_gptq_dynamic/model.safetensors", "file.safetensors"),
    ],
)
def test_converted_checkpoints_multiply(tmp_path, source, form, device):
    folder = source.partition("/")[0]
    convert(DATA / source, tmp_path / form, to="marlin")
    expected = np.load(DATA / folder / "expected.npz")
    with Session(tmp_path / form, device=device) as s:
        for name in expected.files:
            assert s.module(name).layout == "marlin"
            assert_multiplies(s, name, expected[name])
        plain = [name for name in s.names() if s.module(name).layout is None]
        assert plain
        for name in plain:
            weight = s.tensor(f"{name}.weight")
            assert weight.shape == (s.module(name).n, s.module(name).k)


@pytest.mark.parametrize("device", DEVICES)
def test_quantised_modules_that_passed_through_are_decoded_by_their_reader(device):
    folder = DATA / "ar_gptq_w3g32_asym"
    checkpoint, artifact = open_checkpoint(folder), InMemory({}, {})
    artifact.checkpoint = replace(
        checkpoint, quantization={"quant_method": "warptile", "source": checkpoint.quantization}
    )
    artifact.passthrough = tuple(checkpoint.tensors)
    expected = np.load(folder / "expected.npz")
    with Session(artifact, device=device) as s:
        for name in expected.files:
            module = s.module(name)
            assert (module.layout, module.element, module.group) == (None, "u3", 32)
            assert_multiplies(s, name, expected[name])


def test_a_module_its_reader_refuses_says_why_and_the_rest_works():
    folder = DATA / "ar_gptq_w3g32_asym"
    checkpoint, artifact = open_checkpoint(folder), InMemory({}, {})
    broken = np.load(folder / "expected.npz").files[0]
    artifact.passthrough = tuple(name for name in checkpoint.tensors if name != f"{broken}.scales")
    artifact.checkpoint = replace(
        checkpoint, quantization={"quant_method": "warptile", "source": checkpoint.quantization}
    )
    with Session(artifact, device="cpu") as s:
        assert broken not in s.names()
        with pytest.raises(WarptileError, match=broken):
            s.linear(broken, random_x((1, 8), "float16"))
        assert s.linear("lm_head", random_x((1, s.module("lm_head").k), "float16")).shape == (1, s.module("lm_head").n)


def test_what_is_no_artifact_is_refused():
    with pytest.raises(UnsupportedError):
        Session(DATA / "gq_gptq_dynamic", device="cpu")


def test_a_truncated_artifact_is_refused(tmp_path):
    convert(DATA / "gq_gptq_dynamic", tmp_path / "whole", to="marlin")
    file = tmp_path / "whole" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptError):
        Session(tmp_path / "whole", device="cpu")
