"""``verify``: one wrong bit anywhere is found, and what cannot be seen is not claimed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import gptq_case
from tiny import TINY, f32
from warptile.convert import compare, convert, verify
from warptile.convert.cli import main
from warptile.formats.container import open_checkpoint
from warptile.formats.errors import CorruptError, UsageError, VerifyError


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A source and its artifact, padded in every plane: K = 96, groups of 64, N = 40, act-order, zeros."""
    src = tmp_path / "model"
    src.mkdir()
    case = gptq_case(4, False, 64, 40, 96, g_idx="act", bias="F16")
    case.save(src)
    (src / "tokenizer.json").write_text("{}")
    return src, convert(src, to="marlin").dst


def flip(directory: Path, name: str, byte: int, bit: int = 0) -> None:
    tensor = open_checkpoint(directory).tensors[name]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset + byte % tensor.nbytes)
        old = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([old ^ (1 << bit)]))


def test_what_was_converted_is_equal(pair):
    src, dst = pair
    result = verify(dst, src)
    assert (result.modules, result.files) == (1, 2)


@pytest.mark.parametrize("suffix", ["qweight", "scales", "qzeros", "bias"])
@pytest.mark.parametrize("byte", [0, -1, 101])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_found_in_padding_too(pair, suffix, byte, bit):
    src, dst = pair
    flip(dst, f"layer.{suffix}", byte, bit)
    with pytest.raises(VerifyError, match="layer"):
        verify(dst, src)


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (r"\"checkpoint_format\":\"gptq\",\"dtypes", r"\"checkpoint_formad\":\"gptq\",\"dtypes"),
        (r"\"g_idx_zero\":false", r"\"g_idx_zero\":true "),
        (r"[\"layer.qweight\",", r"[\"layer.qweighs\","),
        (r"[12,40]", r"[40,12]"),
        (r"[96],\"layer\"]", r"[96],\"lazer\"]"),
        (r"{\"metadata\":{}", r"{\"metadata\":[]"),
        (r"{\"model.safetensors\":", r"{\"mudel.safetensors\":"),
    ],
)
def test_damage_to_what_unpack_goes_by_is_found(pair, said, instead):
    src, dst = pair
    (file,) = dst.glob("*.safetensors")
    data = file.read_bytes()
    assert data.count(said.encode()) > 0
    file.write_bytes(data.replace(said.encode(), instead.encode()))
    with pytest.raises((VerifyError, CorruptError), match=r"unpack|source entry|source_files"):
        verify(dst, src)


def test_a_source_of_another_name_is_the_same_source(tmp_path):
    case = gptq_case(4, True, 64, 40, 96)
    case.save(tmp_path)
    (src,) = tmp_path.glob("*.safetensors")
    dst = convert(src, tmp_path / "out.safetensors", to="marlin").dst
    assert verify(dst, src.rename(tmp_path / "renamed.safetensors")).modules == 1


def test_padding_is_checked_without_the_source(pair):
    _, dst = pair
    flip(dst, "layer.qweight", -1)
    with pytest.raises(VerifyError, match=r"layer\.qweight: differs at"):
        verify(dst)


@pytest.mark.parametrize("against", [False, True])
def test_a_widened_code_the_narrow_element_lacks_is_a_difference_with_its_place(tmp_path, against):
    src = tmp_path / "model"
    src.mkdir()
    gptq_case(3, False, 32, 64, 64).save(src)
    dst = convert(src, to="marlin", widen=True).dst
    flip(dst, "layer.qweight", 0, 3)
    with pytest.raises(VerifyError, match=r"layer codes: differs at \[\d+, \d+\].*need <= 7, as u3"):
        verify(dst, src if against else None)


def edit_config(dst: Path) -> None:
    config = dst / "config.json"
    config.write_text(config.read_text().replace("{", '{"added": 1, ', 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit_config, r"config\.json: unpack would not give"),
        (lambda dst: (dst / "tokenizer.json").write_text("{ }"), r"tokenizer\.json.*differs"),
        (lambda dst: (dst / "tokenizer.json").unlink(), r"tokenizer\.json.*lost"),
    ],
)
def test_a_file_that_would_come_back_changed_is_a_difference(pair, change, words):
    src, dst = pair
    change(dst)
    with pytest.raises(VerifyError, match=words):
        verify(dst, src)


def test_a_lost_config_comes_back_from_the_metadata(pair):
    src, dst = pair
    (dst / "config.json").unlink()
    assert verify(dst, src).files == 2


def test_an_artifact_is_no_source(pair, capsys):
    src, dst = pair
    with pytest.raises(UsageError, match="an artifact, not the checkpoint that one was made from; give --against that"):
        verify(dst, dst)
    assert main(["verify", str(src), "--against", str(dst)]) == 3
    assert "not converted yet; convert it, or name what a conversion wrote" in capsys.readouterr().err


def test_divisors_are_called_so(tmp_path, capsys):
    src = TINY["fp8 blocks"].save(tmp_path / "model")
    convert(src, tmp_path / "out", to="marlin", scale_convention="divide")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "f64 (1 / stored divisors)" in capsys.readouterr().out
    other = TINY["fp8 blocks"].with_(weight_scale_inv=f32(2.5, 4, 5, 6, shape=(2, 2)))
    with pytest.raises(VerifyError, match=r"scales\[0\], 1 / the divisors that are stored,: differs at .*need 0.4"):
        verify(tmp_path / "out", other.save(tmp_path / "other"))


def test_side_files_are_compared_piece_by_piece(make_directory, monkeypatch):
    src = make_directory()
    (src / "notes.txt").write_bytes(bytes(1000))
    dst = convert(src, to="marlin").dst
    monkeypatch.setattr(compare, "COPIED", 64)
    assert verify(dst, src).files
    (dst / "notes.txt").write_bytes(bytes(700) + b"x" + bytes(299))
    with pytest.raises(VerifyError, match=r"notes\.txt.*differs at \[700\]; found 120"):
        verify(dst, src)
    (dst / "notes.txt").write_bytes(bytes(999))
    with pytest.raises(VerifyError, match=r"notes\.txt: differs in length; found 999 bytes; need 1000"):
        verify(dst, src)
