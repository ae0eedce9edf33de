"""``convert()`` and ``unpack()``: what is written, what passes through, what comes back."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from warptile.convert import convert, modules, unpack, verify
from warptile.formats import output, sources, stream
from warptile.formats.artifact import open_artifact
from warptile.formats.canonical import dequantize
from warptile.formats.errors import UnsupportedError, UsageError, WarptileError
from warptile.kernels import layouts

DOWN, K_PROJ = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"


def by_hand(parts: dict[str, np.ndarray], bits: int = 4) -> np.ndarray:
    """float64 [n, k] of a symmetric GPTQ module, from the formula."""
    shifts = np.arange(0, 32, bits)
    q = (parts["qweight"].view(np.uint32)[:, None, :] >> shifts[None, :, None]) & (2**bits - 1)
    q = q.reshape(-1, parts["qweight"].shape[1]).astype(np.float64) - 2 ** (bits - 1)
    return (q * parts["scales"].astype(np.float64)[parts["g_idx"]]).T


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_weights_are_those_of_the_source(make_directory, plain_tensors):
    src = make_directory()
    result = convert(src, to="marlin", source="gptq")
    assert result.dst == src.with_name("model-marlin")
    artifact = open_artifact(result.dst, layouts())
    tensors = plain_tensors()
    for name in (DOWN, K_PROJ):
        parts = {s: tensors[f"{name}.{s}"] for s in ("qweight", "scales", "g_idx")}
        np.testing.assert_array_equal(dequantize(artifact.quant(name), np.float64), by_hand(parts))


def test_other_tensors_pass_through_byte_for_byte(make_directory, read_tensors):
    src = make_directory()
    result = convert(src, to="marlin")
    before, after = read_tensors(src), read_tensors(result.dst)
    passed = ("model.embed_tokens.weight", "model.norm.weight", "model.rotary.inv_freq")
    assert {name: after[name] for name in passed} == {name: before[name] for name in passed}
    assert result.plan.counts == {"input": 12, "converted": 2, "consumed": 7, "passed_through": 3}
    assert set(after) == {
        *passed,
        *(f"{DOWN}.{s}" for s in ("qweight", "scales", "perm", "bias")),
        *(f"{K_PROJ}.{s}" for s in ("qweight", "scales")),
    }


def test_config_is_rewritten_and_side_files_are_copied(make_directory):
    src = make_directory()
    dst = convert(src, to="marlin").dst
    config, before = (json.loads((d / "config.json").read_text()) for d in (dst, src))
    quantization = before.pop("quantization_config")
    assert config.pop("quantization_config") == {
        "quant_method": "warptile",
        "version": 1,
        "layout": "marlin",
        "source": quantization,
    }
    assert config == before
    for name in ("tokenizer.json", "quantize_config.json"):
        assert (dst / name).read_bytes() == (src / name).read_bytes()


def test_side_files_of_a_hub_cache_are_copied_and_not_linked(make_directory, tmp_path):
    snapshots = tmp_path / "models--a--b" / "snapshots"
    snapshots.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    src = make_directory().rename(snapshots / "revision")
    for file in src.iterdir():
        file.rename(tmp_path / "models--a--b" / "blobs" / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    dst = convert(src, tmp_path / "out", to="marlin").dst
    assert (dst / "tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()
    assert not any(file.is_symlink() for file in dst.iterdir())


def test_shards_are_cut_by_size_and_each_lists_its_own_modules(make_directory, read_tensors):
    src = make_directory()
    whole = read_tensors(convert(src, src.with_name("whole"), to="marlin").dst)
    result = convert(src, src.with_name("cut"), to="marlin", max_shard_size="4KB")
    index = json.loads((result.dst / "model.safetensors.index.json").read_text())
    assert set(result.files) == set(index["weight_map"].values()) == {p.name for p in result.dst.glob("*.safetensors")}
    assert result.files[0] == f"model-00001-of-{len(result.files):05d}.safetensors"
    assert len(result.files) > 2
    assert read_tensors(result.dst) == whole
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in whole.values())
    for file in result.files:
        held = read_tensors(result.dst / file)
        assert {name for name, shard in index["weight_map"].items() if shard == file} == set(held)
        listed = set(open_artifact(result.dst / file, layouts()).modules)
        assert listed == {m for m in (DOWN, K_PROJ) if f"{m}.qweight" in held}


def test_a_directory_unpacks_to_the_very_files(make_directory):
    for shards in (1, 3):
        src = make_directory(f"m{shards}", shards=shards)
        dst = convert(src, to="marlin", max_shard_size="5KB").dst
        back = unpack(dst, src.with_name(f"back{shards}")).dst
        before, after = files(src), files(back)
        assert set(before) == set(after)
        weights = {name for name in before if name.endswith((".safetensors", ".index.json"))}
        assert {n: d for n, d in before.items() if n not in weights} == {
            n: d for n, d in after.items() if n not in weights
        }


@pytest.mark.parametrize("shards", [1, 3])
def test_unpacked_tensors_are_the_source_bytes_in_their_own_files(make_directory, read_tensors, shards):
    src = make_directory(shards=shards)
    back = unpack(convert(src, to="marlin").dst, src.with_name("back")).dst
    for file in src.glob("*.safetensors"):
        assert list(read_tensors(back / file.name).items()) == list(read_tensors(file).items())


def test_an_edited_config_is_restored_with_its_edits(make_directory):
    src = make_directory()
    dst = convert(src, to="marlin").dst
    config = json.loads((dst / "config.json").read_text())
    (dst / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    restored = json.loads((unpack(dst, src.with_name("back")).dst / "config.json").read_text())
    assert restored == {**json.loads((src / "config.json").read_text()), "rope_theta": 5}


def test_a_file_gives_a_file_and_comes_back(make_file, read_tensors):
    src = make_file()
    result = convert(src, to="marlin")
    assert result.dst == src.with_name("model-marlin.safetensors")
    back = unpack(result.dst, src.with_name("back.safetensors")).dst
    assert read_tensors(back) == read_tensors(src)
    assert sorted(p.name for p in src.parent.iterdir()) == ["back.safetensors", result.dst.name, src.name]


def test_a_directory_into_one_file_keeps_everything_but_side_files(make_directory, read_tensors):
    src = make_directory(shards=2)
    result = convert(src, src.with_name("one.safetensors"), to="marlin", max_shard_size="1KB")
    assert any("side files" in text for _, text in result.notes)
    back = unpack(result.dst, src.with_name("back")).dst
    assert read_tensors(back) == read_tensors(src)
    assert (back / "config.json").read_bytes() == (src / "config.json").read_bytes()


def test_output_depends_on_nothing_but_the_source(make_directory):
    src = make_directory(shards=2)
    made = [
        files(convert(src, src.with_name(f"out{workers}"), to="marlin", max_shard_size="4KB", workers=workers).dst)
        for workers in (1, 3)
    ]
    assert made[0] == made[1]


def test_a_system_without_advice_and_affinity_converts_as_well(make_directory, monkeypatch):
    """As on macOS."""
    src = make_directory()
    for name in ("posix_fadvise", "sched_getaffinity", "O_DIRECT"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(output, "DIRECT", 0)
    verify(convert(src, to="marlin").dst, src)


def test_a_module_the_layout_refuses_passes_through_with_its_reason(make_directory, module_tensors, plain_tensors):
    narrow = module_tensors(bits=2)
    tensors = plain_tensors() | {f"extra.{s}": a for s, a in narrow.items()}
    src = make_directory(tensors=tensors, label={"dynamic": {"extra": {"bits": 2}}})
    result = convert(src, to="marlin")
    (refused,) = result.plan.refused
    assert refused.name == "extra"
    assert "--widen" in (refused.refusal or "")
    assert {f"extra.{s}" for s in narrow} <= set(result.plan.passed)
    verify(result.dst, src)
    with pytest.raises(UnsupportedError, match="1 of 3 modules"):
        convert(src, src.with_name("strict"), to="marlin", strict=True)
    assert not src.with_name("strict").exists()


def test_a_tensor_with_the_name_of_a_part_keeps_its_module_as_it_is(make_directory, plain_tensors):
    src = make_directory(tensors=plain_tensors() | {f"{K_PROJ}.perm": np.zeros(3, np.int32)})
    result = convert(src, to="marlin")
    assert [(m.name, f"{K_PROJ}.perm" in (m.refusal or "")) for m in result.plan.refused] == [(K_PROJ, True)]
    verify(result.dst, src)


def test_none_converted_is_an_error_that_leaves_nothing(make_directory):
    src = make_directory(bits=2)
    with pytest.raises(UnsupportedError, match="--widen"):
        convert(src, to="marlin")
    assert [p.name for p in src.parent.iterdir()] == ["model"]


def test_widened_codes_come_back_narrow(make_directory, read_tensors):
    src = make_directory(bits=2)
    result = convert(src, to="marlin", widen=True)
    assert {m.spec["source"]["narrow"] for m in result.plan.converted} == {"u2b2"}
    verify(result.dst)
    verify(result.dst, src)
    assert read_tensors(unpack(result.dst, src.with_name("back")).dst) == read_tensors(src)


def test_a_dry_run_reads_no_codes_and_writes_nothing(make_directory, monkeypatch):
    src = make_directory()
    dry = convert(src, to="marlin", dry_run=True)
    assert [p.name for p in src.parent.iterdir()] == ["model"]
    with monkeypatch.context() as patch:
        for module in sources().values():
            patch.setattr(module, "read", None)
            patch.setattr(module, "stream", None, raising=False)
        again = convert(src, to="marlin", dry_run=True)
    wet = convert(src, to="marlin")
    assert dry.plan.counts == again.plan.counts == wet.plan.counts
    assert (
        dry.plan.nbytes
        == wet.plan.nbytes
        == sum(len(data) for data in files(wet.dst).values())
        - sum(p.stat().st_size for p in wet.dst.iterdir() if p.suffix == ".json")
        - header_bytes(wet.dst)
    )


def header_bytes(directory: Path) -> int:
    return sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in directory.glob("*.safetensors"))


def test_memory_is_that_of_a_few_slabs_and_foretold(make_directory, module_tensors, monkeypatch):
    for module in (stream, modules):
        monkeypatch.setattr(module, "STEP", 1 << 17)

    def peak(count: int, k: int) -> tuple[int, int]:
        parts = module_tensors(k=k, n=512, group=128)
        tensors = {f"layers.{i}.{s}": a for i in range(count) for s, a in parts.items()}
        src = make_directory(f"m{count}-{k}", tensors=tensors, label={"group_size": 128})
        tracemalloc.start()
        result = convert(src, to="marlin", workers=2)
        reached = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return reached, result.plan.peak

    (small, _), (large, foretold), (many, _) = peak(1, 4096), peak(1, 32768), peak(4, 4096)
    assert many < small + 1_000_000
    assert large < small + 3_000_000  # its scales; its codes would be 16 MB
    assert large < foretold + 1_000_000


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_a_tied_head_is_neither_lost_nor_written_twice(make_directory, plain_tensors, read_tensors, head, tied):
    tensors = plain_tensors()
    if head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    src = make_directory(tensors=tensors)
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    assert ("lm_head.weight" in read_tensors(convert(src, to="marlin").dst)) == head


def test_an_artifact_is_not_converted_again(make_directory):
    dst = convert(make_directory(), to="marlin").dst
    with pytest.raises(UnsupportedError, match="already"):
        convert(dst, to="marlin")


def test_an_existing_destination_is_replaced_only_on_request(make_directory):
    src = make_directory()
    dst = convert(src, to="marlin").dst
    (dst / "tokenizer.json").write_text("old")
    with pytest.raises(WarptileError, match="already exists"):
        convert(src, to="marlin")
    assert (dst / "tokenizer.json").read_text() == "old"
    convert(src, to="marlin", overwrite=True)
    assert (dst / "tokenizer.json").read_text() != "old"
    verify(dst, src)
    assert sorted(p.name for p in src.parent.iterdir()) == ["model", "model-marlin"]


def test_a_failed_overwrite_leaves_the_old_one(make_directory, monkeypatch):
    src = make_directory()
    dst = convert(src, to="marlin").dst
    before = files(dst)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(WarptileError, match="No space left"):
        convert(src, to="marlin", overwrite=True)
    assert files(dst) == before
    assert sorted(p.name for p in src.parent.iterdir()) == ["model", "model-marlin"]


def test_a_directory_that_is_no_checkpoint_is_never_replaced(make_directory, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(WarptileError, match="not an artifact"):
        convert(make_directory(), tmp_path / "home", to="marlin", overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_source_and_destination_may_not_meet(make_directory, make_file, tmp_path):
    src, file = make_directory(), make_file("lone.safetensors")
    (tmp_path / "link").symlink_to(src)
    (tmp_path / "hard.safetensors").hardlink_to(file)
    for a, b in (
        (src, src),
        (src, tmp_path / "link"),
        (tmp_path / "link", src),
        (src, src / "out"),
        (src, src / "out.safetensors"),
        (src, tmp_path),
        (src / "model.safetensors", src),
        (file, file),
        (file, tmp_path / "hard.safetensors"),
        (file, tmp_path / "model" / ".." / "lone.safetensors"),
    ):
        with pytest.raises(UsageError, match="destination is the source"):
            convert(a, b, to="marlin", overwrite=True)
    assert not list(tmp_path.rglob("*.partial"))


def test_notes_name_what_was_assumed(make_file):
    result = convert(make_file(), to="marlin", dry_run=True)
    assert result.notes


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-1", "0", "0.1"])
def test_a_shard_size_that_is_none_is_a_usage_error(make_directory, text):
    with pytest.raises(UsageError, match="size"):
        convert(make_directory(), to="marlin", max_shard_size=text)


@pytest.mark.parametrize(("source", "to"), [("gptq", "nothing"), ("nothing", "marlin")])
def test_unknown_names_are_usage_errors(make_directory, source, to):
    with pytest.raises(UsageError, match="unknown"):
        convert(make_directory(), source=source, to=to)


def test_overwrite_spares_a_file_that_is_no_checkpoint(make_directory, tmp_path):
    mine = tmp_path / "notes"
    mine.write_text("keep")
    with pytest.raises(WarptileError, match="what is there is not an artifact"):
        convert(make_directory(), mine, to="marlin", overwrite=True)
    assert mine.read_text() == "keep"


def test_json_as_a_source_is_told_apart_from_a_damaged_file(make_directory):
    with pytest.raises(UnsupportedError, match="JSON holds no weights; give the directory it lies in"):
        convert(make_directory() / "config.json", to="marlin")


@pytest.mark.parametrize("name", ["model.pt", "model.bin"])
def test_a_destination_of_a_kind_that_is_not_written_is_refused(make_directory, tmp_path, name):
    with pytest.raises(UsageError, match="files cannot be written"):
        convert(make_directory(), tmp_path / name, to="marlin")
    assert not (tmp_path / name).exists()


def test_more_workers_need_more_memory_and_a_dry_run_says_so(make_directory, module_tensors):
    parts = module_tensors(k=65536, n=1024, group=128)
    src = make_directory(tensors={f"layer.{s}": a for s, a in parts.items()}, label={"group_size": 128})
    peaks = [convert(src, to="marlin", dry_run=True, workers=workers).plan.peak for workers in (1, 2, 4)]
    slab = 6 * stream.ACROSS * stream.STEP
    assert (peaks[1] - peaks[0], peaks[2] - peaks[1]) == (slab, 2 * slab)
