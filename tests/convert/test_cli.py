"""The command line: which commands and flags exist, and what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from inspect import signature

import pytest
from warptile.convert import cli, convert
from warptile.convert.cli import HELP, main
from warptile.formats import sources
from warptile.formats.options import Options
from warptile.kernels import layouts


@pytest.fixture
def run(capsys):
    def call(*args: object) -> str:
        code = main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return call


def test_every_pair_has_a_command(run):
    text = run("--help")
    for source in sources():
        for layout in layouts():
            assert f"{source}-to-{layout}".replace("_", "-") in text


def test_every_parameter_of_convert_has_a_flag(run):
    own = {p for p in signature(convert).parameters if p not in ("src", "dst", "to", "source", "options")}
    assert own | {f.name for f in fields(Options)} == set(HELP)
    text = run("auto", "--help")
    assert all(f"--{name.replace('_', '-')}" in text for name in [*HELP, "to", "json"])


@pytest.mark.parametrize("source", sources())
def test_a_pair_shows_only_the_switches_its_reader_understands(run, source):
    text = run(f"{source}-to-{next(iter(layouts()))}".replace("_", "-"), "--help")
    shown = {f.name for f in fields(Options) if f"--{f.name.replace('_', '-')}" in text}
    assert shown == set(getattr(sources()[source], "OPTIONS", ()))


def test_a_conversion_says_what_became_of_every_tensor(run, make_directory):
    text = run("gptq-to-marlin", make_directory())
    assert "12 tensors = 2 converted + 7 consumed + 3 passed through" in text


def test_auto_makes_the_same_bytes(run, make_directory):
    src = make_directory()
    run("gptq-to-marlin", src, src.with_name("a"))
    run("auto", src, src.with_name("b"), "--to", "marlin")
    assert (src.with_name("a") / "model.safetensors").read_bytes() == (
        src.with_name("b") / "model.safetensors"
    ).read_bytes()


def test_json_of_a_plan_and_of_a_run_agree(run, make_directory):
    src = make_directory()
    dry = json.loads(run("gptq-to-marlin", src, "--dry-run", "--json"))
    wet = json.loads(run("gptq-to-marlin", src, "--json"))
    assert {**dry, "written": True} == wet
    tensors = wet["tensors"]
    assert tensors["input"] == tensors["converted"] + tensors["consumed"] + tensors["passed_through"]


def test_a_dry_run_shows_each_module_and_what_it_needs(run, make_directory):
    src = make_directory()
    text = run("gptq-to-marlin", src, "--dry-run")
    assert "model.layers.0.self_attn.k_proj  gptq    marlin  u4b8     128 x 64" in text
    assert "of disk" in text
    assert "of memory" in text
    assert not src.with_name("model-marlin").exists()


def test_inspect_shows_a_checkpoint_and_its_artifact(run, make_directory):
    src = make_directory()
    run("gptq-to-marlin", src)
    for path, kind in ((src, "checkpoint"), (src.with_name("model-marlin"), "artifact")):
        text = run("inspect", path)
        assert f"{kind}, 2 quantised modules" in text
        found = json.loads(run("inspect", path, "--json"))
        assert found["kind"] == kind
        module = found["modules"]["model.layers.0.mlp.down_proj"]
        assert (module["n"], module["k"], module["perm"], module["bias"]) == (64, 96, True, True)
        assert sum(other["tensors"] for other in found["others"].values()) == 3


def test_verify_and_unpack_report(run, make_directory):
    src = make_directory()
    run("gptq-to-marlin", src)
    dst = src.with_name("model-marlin")
    assert "2 modules unpacked and packed to the same bytes" in run("verify", dst)
    assert "2 modules and 3 other tensors, equal to" in run("verify", dst, "--against", src)
    assert json.loads(run("verify", dst, "--against", src, "--json"))["equal"] is True
    assert json.loads(run("unpack", dst, src.with_name("back"), "--json"))["restored"] == 2


def test_formats_prints_the_registry(run):
    text = run("formats")
    found = json.loads(run("formats", "--json"))
    assert (set(found["sources"]), set(found["layouts"])) == (set(sources()), set(layouts()))
    assert found["elements"]["u4b8"]["marlin"] is True
    assert found["elements"]["u3b4"]["marlin"] is False
    assert "gptq-to-marlin" in text


def test_a_reader_that_leaves_early_is_no_error():
    run = subprocess.run(
        f"{sys.executable} -m warptile.convert formats | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_quiet_says_nothing(run, make_directory):
    assert run("gptq-to-marlin", make_directory(), "--quiet") == ""


def test_a_note_that_holds_for_many_modules_is_one_line(run, make_file):
    text = run("gptq-to-marlin", make_file())
    notes = [line for line in text.splitlines() if line.startswith("note: ")]
    assert notes
    assert len(notes) == len({line.partition(" (")[0] for line in notes})


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    assert "gptq-to-marlin" in printed.out
    assert not printed.err


def test_the_version_is_that_of_the_installed_package(run, monkeypatch):
    monkeypatch.setattr(cli, "version", {"warptile": "1.2.3"}.__getitem__)
    assert run("--version") == "warptile 1.2.3\n"


def test_a_source_tree_that_is_not_installed_has_no_version(run, monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", missing)
    assert run("--version") == "warptile, from a source tree that is not installed\n"
