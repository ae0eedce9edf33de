"""Artifacts: what is written comes back, and a spec that lies about its tensors is refused before it is decoded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from warptile.formats import artifact
from warptile.formats.canonical import ELEMENTS, Level, QuantTensor, recode, same, widened
from warptile.formats.container import Checkpoint, Entry, dtype_name, open_checkpoint, write_safetensors
from warptile.formats.errors import CorruptError, UnsupportedError, WarptileError
from warptile.kernels import layouts, marlin

MODULE = "model.layers.0.up_proj"
EDITS = dict[str, Any]


def quant(element: str = "u4", n: int = 70, k: int = 100, group: int = 32, **parts: Any) -> QuantTensor:
    rng = np.random.default_rng(n * k)
    lead = parts.pop("lead", ())
    e = ELEMENTS[element]
    scales = rng.standard_normal((*lead, n, -(-k // group))).astype(parts.pop("scale", np.float16))
    codes = rng.integers(0, 2**e.bits, (*lead, n, k), dtype=np.uint8)
    return QuantTensor(e, codes, (Level(scales, (1, group)),), source={"format": "gptq", "bits": e.bits}, **parts)


def zeros(n: int = 70, groups: int = 4, bits: int = 4) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2**bits, (n, groups), dtype=np.uint8)


def save(path: Path, tensors: dict[str, np.ndarray], **metadata: object) -> Path:
    """A safetensors file written here, so that it may hold any lie."""
    header: dict[str, object] = {
        "__metadata__": {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    }
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": dtype_name(array.dtype), "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))
    return path


def parts(q: QuantTensor, name: str = MODULE) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A module's tensors by full name, and its spec."""
    tensors, spec = marlin.pack(q)
    kept = artifact.as_stored(tensors, q.residue)
    return {f"{name}.{s}": a for s, a in kept.items()}, artifact.module_spec(spec, q.source, q.outline().residue)


def act_order() -> QuantTensor:
    perm = np.random.default_rng(2).permutation(100).astype(np.int32)
    return quant(zero=zeros(), perm=perm, residue={"g_idx": np.arange(100, dtype=np.int32)})


def lie(path: Path, q: QuantTensor, edit: Callable[[dict[str, np.ndarray], dict[str, Any]], object]) -> Path:
    tensors, spec = parts(q)
    edit(tensors, spec)
    return save(path / "a.safetensors", tensors, warptile={"version": 1, "modules": {MODULE: spec}})


def refused(path: Path) -> WarptileError:
    with pytest.raises(WarptileError) as e:
        artifact.open_artifact(path, layouts())
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 700
    return e.value


QUANTS: dict[str, QuantTensor] = {
    "sym": quant("u4b8"),
    "asym": quant(zero=zeros()),
    "8 bit": quant("u8b128", scale=ml_dtypes.bfloat16),
    "signed": quant("s8", scale=np.float32),
    "one group": quant("u4b8", group=100),
    "a bias": quant("u4b8", bias=np.arange(70).astype(ml_dtypes.bfloat16)),
    "act-order, a residue": act_order(),
    "experts": quant("u8", lead=(3,), n=5, k=32, bias=np.zeros((3, 5), np.float16)),
    "2 bit": quant("u2b2"),
    "3 bit with zeros": quant("u3", zero=zeros(bits=3)),
}


@pytest.mark.parametrize("case", QUANTS)
def test_what_is_written_comes_back(tmp_path, case):
    q = QUANTS[case]
    wide = recode(q, widened(q.element))
    narrow = {"narrow": q.element.name} if wide is not q else {}
    tensors, layout_spec = marlin.pack(wide)
    spec = artifact.module_spec(layout_spec, {**q.source, **narrow}, q.outline().residue)
    arrays = artifact.as_stored(tensors, q.residue)
    promised = artifact.stored(spec, marlin, q.outline().residue)
    assert promised == {s: (dtype_name(a.dtype), a.shape) for s, a in arrays.items()}
    entries = [Entry(f"{MODULE}.{s}", *promised[s], lambda a=a: [a]) for s, a in arrays.items()]
    other = Entry("norm", "F32", (2,), lambda: [np.ones(2, np.float32)])
    source = Checkpoint(tmp_path, {}, quantization={"bits": 4}, metadata={"format": "pt", "by": "someone"})
    write_safetensors(tmp_path / "a.safetensors", [*entries, other], artifact.metadata(source, {MODULE: spec}))

    opened = artifact.open_artifact(tmp_path / "a.safetensors", layouts())
    assert opened.modules == {MODULE: spec}
    assert opened.passthrough == ("norm",)
    assert opened.source_metadata == source.metadata
    assert opened.checkpoint.quantization == {"quant_method": "warptile", "source": {"bits": 4}}
    for suffix, array in tensors.items():
        assert opened.tensors(MODULE)[suffix].tobytes() == array.tobytes()
    back = opened.quant(MODULE)
    assert same(back, q) is None
    assert back.source == q.source
    assert {s: a.tolist() for s, a in back.residue.items()} == {s: a.tolist() for s, a in q.residue.items()}


def test_metadata_is_text_and_does_not_depend_on_the_order_of_keys(tmp_path):
    _, spec = parts(QUANTS["sym"])
    source = Checkpoint(tmp_path, {}, metadata={"format": "pt"})
    one = artifact.metadata(source, {"b": spec, "a": spec})
    two = artifact.metadata(source, {"a": dict(reversed(spec.items())), "b": spec})
    assert one == two
    assert one["format"] == "pt"
    assert json.loads(one["warptile"]) == {"version": 1, "modules": {"a": spec, "b": spec}}
    assert json.loads(one["source_metadata"]) == {"format": "pt"}
    assert artifact.metadata(source, {}, first=False).keys() == {"format", "warptile"}


def test_config_keeps_the_sources_own_quantization_config():
    source = {"model_type": "llama", "quantization_config": {"bits": 4}}
    made = artifact.config(source, "marlin")
    ours = {"quant_method": "warptile", "version": 1, "layout": "marlin"}
    assert made == {"model_type": "llama", "quantization_config": {**ours, "source": {"bits": 4}}}
    assert source["quantization_config"] == {"bits": 4}
    assert artifact.config({}, "marlin") == {"quantization_config": ours}


# Spec lies: each of these values under each of these keys.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 63, 64, 96, 128, 2**31 - 1, 2**31, 2**63, 10**400, 1.0, -0.5, "", "u4", "u8", "int",
    "f16", "f32",
    "marlin", "../x", [], [1], [1, 32], [1, 64], [2, 32], [1, 2**31 - 1], {}, {"format": "gptq"}, {"format": 1},
]  # fmt: skip


# What tensors cannot tell, so that a change may stay in bounds: where in the last tile real rows end, how far the last
# group reaches, what a code stands for, what the source was.
UNSEEN = ("n", "k", "scale_block", "element", "signed", "source")


def attempt(path: Path) -> artifact.Artifact | WarptileError:
    try:
        return artifact.open_artifact(path, layouts())
    except WarptileError as error:
        return error


@pytest.mark.parametrize("case", ["sym", "act-order, a residue", "experts", "signed"])
def test_no_change_to_a_spec_leads_out_of_its_tensors(tmp_path, case):
    tensors, spec = parts(QUANTS[case])
    lead = [] if spec["experts"] is None else [spec["experts"]]
    for key in [*spec, "kind", "shards", "row_order", "unknown"]:
        lies = [{**spec, key: value} for value in VALUES] + [{k: v for k, v in spec.items() if k != key}]
        for wrong in (lie for lie in lies if json.dumps(lie) != json.dumps(spec)):
            path = save(tmp_path / "a.safetensors", tensors, warptile={"version": 1, "modules": {MODULE: wrong}})
            result = attempt(path)
            if isinstance(result, artifact.Artifact):
                assert key in UNSEEN, (key, wrong.get(key))
                assert result.quant(MODULE).check().codes.shape == (*lead, wrong["n"], wrong["k"])
            else:
                assert isinstance(result, CorruptError) or (key, result.exit_code) == ("layout", 3), result
                assert (result.tensor or "").startswith(MODULE)


def view(tensors: dict[str, np.ndarray], suffix: str, dtype: str) -> None:
    tensors[f"{MODULE}.{suffix}"] = tensors[f"{MODULE}.{suffix}"].view(dtype)


LIES: dict[str, tuple[str, Callable[[dict[str, np.ndarray], dict[str, Any]], object], str]] = {
    "a missing tensor": ("asym", lambda t, s: t.pop(f"{MODULE}.qzeros"), "qzeros"),
    "a missing residue": ("act-order, a residue", lambda t, s: t.pop(f"{MODULE}.source.g_idx"), "source.g_idx"),
    "a tensor too many": ("sym", lambda t, s: t.update({f"{MODULE}.qzeros": np.zeros(4, np.int32)}), "qzeros"),
    "a perm it denies": ("sym", lambda t, s: t.update({f"{MODULE}.perm": np.arange(128, dtype=np.int32)}), "perm"),
    "another dtype": ("sym", lambda t, s: view(t, "qweight", "f4"), "qweight"),
    "unsigned words": ("sym", lambda t, s: view(t, "qweight", "u4"), "qweight"),
    "another shape": ("sym", lambda t, s: t.update({f"{MODULE}.scales": t[f"{MODULE}.scales"].T}), "scales"),
    "fewer rows": ("sym", lambda t, s: t.update({f"{MODULE}.qweight": t[f"{MODULE}.qweight"][:-1]}), "qweight"),
    "scales of another type": (
        "sym",
        lambda t, s: t.update({f"{MODULE}.scales": t[f"{MODULE}.scales"].astype(ml_dtypes.bfloat16)}),
        "scales",
    ),
    "a bias of another length": ("a bias", lambda t, s: t.update({f"{MODULE}.bias": t[f"{MODULE}.bias"][:64]}), "bias"),
    "n and n_padded both larger": ("sym", lambda t, s: s.update(n=4096, n_padded=4096), "qweight"),
    "k and k_padded both larger": ("sym", lambda t, s: s.update(k=4096, k_padded=4096), "qweight"),
    "k beyond the padding": ("sym", lambda t, s: s.update(k=129), "k_padded"),
    "n a padding too small": ("sym", lambda t, s: s.update(n=64), "n_padded"),
    "a group that is not the block": ("sym", lambda t, s: s.update(group=64), "group"),
    "a block that is not the group": ("sym", lambda t, s: s.update(scale_block=[1, 64]), "group"),
    "a group of one": ("sym", lambda t, s: s.update(group=1, scale_block=[1, 1]), "multiple of 16"),
    "experts there are none of": ("sym", lambda t, s: s.update(experts=1), "qweight"),
    "fewer experts": ("experts", lambda t, s: s.update(experts=2), "qweight"),
    "an element it cannot hold": ("sym", lambda t, s: s.update(element="iq4"), "iq4"),
    "an element of other width": ("sym", lambda t, s: s.update(element="u8b128"), "qweight"),
    "a zero point beside a fixed one": ("sym", lambda t, s: s.update(zero="int"), "zero point"),
    "narrow is nonsense": ("sym", lambda t, s: s["source"].update(narrow="u1"), "source"),
    "narrow is a list": ("sym", lambda t, s: s["source"].update(narrow=[]), "source"),
    "narrow is not narrower": ("sym", lambda t, s: s["source"].update(narrow="u4b8"), "source"),
    "narrow of another kind": ("sym", lambda t, s: s["source"].update(narrow="u3"), "source"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_spec_and_its_tensors_must_agree(tmp_path, case):
    which, edit, says = LIES[case]
    q = replace(QUANTS[which], source={"format": "gptq"})
    error = refused(lie(tmp_path, q, edit))
    assert isinstance(error, CorruptError)
    assert MODULE in str(error)
    assert says in str(error), error


PERMS = {
    "a channel twice": lambda p: p.__setitem__(3, p[4]),
    "a channel below zero": lambda p: p.__setitem__(3, -1),
    "a channel past the end": lambda p: p.__setitem__(3, 10**6),
    "a channel of the padding": lambda p: p.__setitem__(slice(99, 101), p[[100, 99]]),
    "padding out of order": lambda p: p.__setitem__(slice(100, 102), [101, 100]),
    "padding that points at a channel": lambda p: p.__setitem__(127, 0),
}


@pytest.mark.parametrize("case", PERMS)
def test_perm_is_a_permutation_with_the_padding_in_its_place(tmp_path, case):
    error = refused(lie(tmp_path, act_order(), lambda t, s: PERMS[case](t[f"{MODULE}.perm"])))
    assert (error.exit_code, error.tensor) == (4, f"{MODULE}.perm")


def test_a_widened_code_outside_its_narrow_element_is_refused(tmp_path):
    q = quant("u4b8")
    path = lie(tmp_path, q, lambda t, s: s["source"].update(narrow="u2b2"))
    opened = artifact.open_artifact(path, layouts())
    with pytest.raises(CorruptError, match="out of range"):
        opened.quant(MODULE)


METADATA: dict[str, tuple[object, int]] = {
    "not JSON": ("{", 4),
    "an array": ("[]", 4),
    "nothing in it": ({}, 4),
    "no modules": ({"version": 1}, 4),
    "modules in a list": ({"version": 1, "modules": []}, 4),
    "version 0": ({"version": 0, "modules": {}}, 4),
    "version true": ({"version": True, "modules": {}}, 4),
    "version of text": ({"version": "1", "modules": {}}, 4),
    "version 2": ({"version": 2, "modules": {}}, 3),
    "an unknown key": ({"version": 1, "modules": {}, "more": 1}, 4),
    "a module that is null": ({"version": 1, "modules": {MODULE: None}}, 4),
    "a module that is empty": ({"version": 1, "modules": {MODULE: {}}}, 4),
    "a module twice": ('{"version": 1, "modules": {"a": {}, "a": {}}}', 4),
    "NaN": ('{"version": NaN, "modules": {}}', 4),
    "deep nesting": ('{"version": ' + "[" * 10**5, 4),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_is_malformed(tmp_path, case):
    content, code = METADATA[case]
    assert refused(save(tmp_path / "a.safetensors", {}, warptile=content)).exit_code == code


@pytest.mark.parametrize("key", ["source_metadata", "source_quantization"])
@pytest.mark.parametrize("content", ["", "[]", '{"a": {"b": 1}, "a": 2}'])
def test_what_it_says_of_its_source_is_checked_too(tmp_path, key, content):
    path = save(tmp_path / "a.safetensors", {}, warptile={"version": 1, "modules": {}}, **{key: content})
    assert key in str(refused(path))


def shards(directory: Path, *files: tuple[dict[str, np.ndarray], dict[str, object]]) -> Path:
    weight_map = {}
    for i, (tensors, metadata) in enumerate(files):
        save(directory / f"{i}.safetensors", tensors, **metadata)
        weight_map |= dict.fromkeys(tensors, f"{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_every_shard_lists_its_own_modules(tmp_path):
    (a, spec_a), (b, spec_b) = parts(QUANTS["sym"], "a"), parts(QUANTS["asym"], "b")
    says_a, says_b = ({"warptile": {"version": 1, "modules": m}} for m in ({"a": spec_a}, {"b": spec_b}))
    opened = artifact.open_artifact(shards(tmp_path, (a, says_a), (b, says_b)), layouts())
    assert opened.modules == {"a": spec_a, "b": spec_b}
    assert same(opened.quant("b"), QUANTS["asym"]) is None
    assert "without our metadata" in str(refused(shards(tmp_path, (a, says_a), (b, {"format": "pt"}))))
    both = {"warptile": {"version": 1, "modules": {"a": spec_a, "b": spec_b}}}
    assert "in two files" in str(refused(shards(tmp_path, (a, says_a), (b, both))))


def test_two_modules_may_not_share_a_tensor(tmp_path):
    tensors, spec = parts(QUANTS["sym"], "m")
    inner, inner_spec = parts(QUANTS["sym"], "m.source")
    modules = {"m": {**spec, "residue": ["qweight"]}, "m.source": inner_spec}
    path = save(tmp_path / "a.safetensors", tensors | inner, warptile={"version": 1, "modules": modules})
    assert "two modules have one tensor" in str(refused(path))


def test_an_unknown_layout_is_unsupported_and_named(tmp_path):
    error = refused(lie(tmp_path, QUANTS["sym"], lambda t, s: s.update(layout="spiral")))
    assert isinstance(error, UnsupportedError)
    assert "spiral" in str(error)


def test_an_artifact_is_known_and_not_converted_twice(tmp_path):
    ours = open_checkpoint(lie(tmp_path, QUANTS["sym"], lambda t, s: None))
    theirs = open_checkpoint(save(tmp_path / "b.safetensors", {}, format="pt"))
    assert (artifact.is_artifact(ours), artifact.is_artifact(theirs)) == (True, False)
    with pytest.raises(UnsupportedError, match="already converted"):
        artifact.refuse_artifact(ours)
    artifact.refuse_artifact(theirs)
    with pytest.raises(UnsupportedError, match="not converted yet"):
        artifact.open_artifact(tmp_path / "b.safetensors", layouts())


def test_the_sources_quantization_is_told_whichever_file_it_came_from(tmp_path):
    tensors, spec = parts(QUANTS["sym"])
    source = Checkpoint(tmp_path, {}, quantization={"bits": 4})
    save(tmp_path / "model.safetensors", tensors, **artifact.metadata(source, {MODULE: spec}))
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    (tmp_path / "config.json").write_text(json.dumps(artifact.config({}, "marlin")))
    found = artifact.open_artifact(tmp_path, layouts()).checkpoint.quantization
    assert found == {"quant_method": "warptile", "version": 1, "layout": "marlin", "source": {"bits": 4}}
