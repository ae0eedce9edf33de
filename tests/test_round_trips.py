"""Any legal module of any source: the weights an independent decoder finds, and every byte back through every layout.

A flipped byte changes what the bytes say: that is read, or refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decoders import DECODERS, array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import MODULES
from tiny import Tiny
from warptile.convert import plan
from warptile.formats import sources, stream
from warptile.formats.canonical import QuantTensor, dequantize, recode, same, widened
from warptile.formats.container import dtype_name
from warptile.formats.errors import CorruptError, UnsupportedError
from warptile.formats.spec import stored
from warptile.kernels import layouts

QUICK = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def read(tiny: Tiny) -> tuple[str, QuantTensor]:
    """The one module, as the plan would have it. Raises what readers raise."""
    checkpoint = tiny.checkpoint()
    ((module, (reader, members)),) = plan.claims(checkpoint, None).items()
    assert reader == tiny.source
    assert sorted(members) == sorted(tiny.tensors)
    format_ = sources()[reader]
    outline = format_.describe(checkpoint, module)
    q = format_.read(checkpoint, module).check()
    assert q.outline() == outline
    return module, q


def check_weights(tiny: Tiny, q: QuantTensor) -> None:
    with np.errstate(invalid="ignore"):
        wanted = DECODERS[tiny.source](tiny)
    single = tiny.source == "gguf"  # ggml's arithmetic, and its +0 for code 8 of e2m1
    found = dequantize(q, np.float32 if single else np.float64).astype(np.float64)
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)
    bias = next((name for name in tiny.tensors if name.endswith("bias")), None)
    assert (q.bias is None) == (bias is None)
    assert bias is None or q.bias.tobytes() == tiny.tensors[bias][2]


def check_bytes(tiny: Tiny, written: dict[str, Any]) -> None:
    found = {name: (dtype_name(a.dtype), a.shape, np.ascontiguousarray(a).tobytes()) for name, a in written.items()}
    assert found == {name: (dtype, tuple(shape), data) for name, (dtype, shape, data) in tiny.tensors.items()}


def check_layouts(tiny: Tiny, module: str, q: QuantTensor) -> None:
    """Every layout that accepts it gives it back: its tensors, its spec, and the source's very bytes."""
    format_ = sources()[tiny.source]
    for layout in layouts().values():
        held = q if layout.accepts(q.outline()) is None else recode(q, widened(q.element))
        if layout.accepts(held.outline()) is not None:
            continue
        tensors, spec = layout.pack(held)
        assert spec == layout.spec(held.outline())
        shapes = {suffix: (dtype_name(a.dtype), a.shape) for suffix, a in tensors.items()}
        assert shapes == stored(spec, layout)
        back = recode(layout.unpack(tensors, spec), q.element)
        assert same(back, q) is None, same(back, q)
        check_bytes(tiny, format_.write(module, replace(back, source=q.source, residue=q.residue)))


@pytest.mark.parametrize("source", sources())
@QUICK
@given(data=st.data())
def test_a_module_is_read_as_described_and_comes_back_to_the_byte(source: str, data: st.DataObject) -> None:
    tiny = data.draw(MODULES[source])
    module, q = read(tiny)
    check_weights(tiny, q)
    check_bytes(tiny, sources()[source].write(module, q))
    check_layouts(tiny, module, q)


@pytest.mark.parametrize("source", sources())
@QUICK
@given(data=st.data())
def test_any_rectangle_of_a_module_is_that_of_the_whole(source: str, data: st.DataObject) -> None:
    """Of the reader's stream, and of each layout's view of what was packed in pieces of a few codes."""
    tiny = data.draw(MODULES[source])
    module, q = read(tiny)
    opened = sources()[source].stream(tiny.checkpoint(), module)
    streams = [opened]
    for layout in layouts().values():
        if layout.accepts(q.outline()) is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stream, "STEP", data.draw(st.sampled_from([64, 1000, 1 << 20])))
                streams.append(layout.view(*stream.assembled(*layout.stream(opened))))
    codes = q.codes.reshape(-1, q.n, q.k)
    expert = data.draw(st.integers(0, len(codes) - 1))
    top, left = data.draw(st.integers(0, q.n - 1)), data.draw(st.integers(0, q.k - 1))
    rows, columns = slice(top, data.draw(st.integers(top + 1, q.n))), slice(left, data.draw(st.integers(left + 1, q.k)))
    for each in streams:
        np.testing.assert_array_equal(each.slab(expert, rows, columns), codes[expert, rows, columns])


CODES = (".qweight", ".B", "weight_packed", "_blocks", "weight.blocks", "weight_Q4", ".weight")
ANY = ("input_scale",)
INTEGERS = ("gptq", "awq", "compressed_tensors", "matmulnbits")


def legal(tiny: Tiny, name: str) -> bool | None:
    """Whether a tensor may hold what it holds; None where that takes more than a look at its bytes."""
    values, source = array(tiny, name), tiny.source
    said, raw = tiny.quantization, np.frombuffer(tiny.tensors[name][2], np.uint8)
    if name.endswith("bias"):
        return bool(np.isfinite(values).all())
    if name.endswith(ANY):
        return True
    if source in INTEGERS and name.endswith(("scales", ".s", "weight_scale")):
        return bool(np.isfinite(values).all())
    if source == "gptq" and name.endswith("qzeros"):
        return True
    if source == "awq" and name.endswith("qzeros"):
        return said["zero_point"] or bool((raw == 0x88).all())
    if source == "matmulnbits" and name.endswith("zeros"):
        return True
    if source == "fp8" and name.endswith(".weight"):
        return tiny.options.nan is not None or not (raw & 127 == 127).any()
    if source == "mxfp4" and name.endswith(("scales", "weight_scale")):
        return tiny.options.nan is not None or not (raw == 255).any()
    if source == "nvfp4" and name.endswith("weight_scale"):
        return not (raw > 0x7E).any()
    if source == "nvfp4" and name.endswith("weight_scale_2"):
        return bool((np.isfinite(values) & (values > 0)).all())
    wordwise = source == "compressed_tensors" and said["version"].startswith("0.12")
    return True if name.endswith(CODES) and source != "gguf" and not wordwise else None


@pytest.mark.parametrize("source", sources())
@QUICK
@given(data=st.data())
def test_a_flipped_byte_is_read_as_it_stands_or_refused_by_name(source: str, data: st.DataObject) -> None:
    tiny = data.draw(MODULES[source])
    name = data.draw(st.sampled_from([name for name, (_, _, held) in tiny.tensors.items() if held]))
    dtype, shape, held = tiny.tensors[name]
    at, mask = data.draw(st.integers(0, len(held) - 1)), data.draw(st.integers(1, 255))
    changed = held[:at] + bytes([held[at] ^ mask]) + held[at + 1 :]
    tiny = replace(tiny, tensors={**tiny.tensors, name: (dtype, shape, changed)})
    allowed = legal(tiny, name)
    module, q, refused = "", None, None
    try:
        module, q = read(tiny)
    except (CorruptError, UnsupportedError) as error:
        refused = error
    if q is None:
        assert allowed is not True, refused
        assert refused.tensor in tiny.tensors
        assert str(refused).isprintable()
        return
    assert allowed is not False
    check_weights(tiny, q)
    check_bytes(tiny, sources()[source].write(module, q))
    check_layouts(tiny, module, q)


@pytest.mark.parametrize("version", ["0.12.2", "0.19.0"])
@pytest.mark.parametrize("bits", [3, 5])
@pytest.mark.parametrize(("n", "k"), [(7, 1), (7, 6), (40, 4), (64, 2)])
def test_zero_points_are_packed_as_their_writer_did_even_where_codes_do_not_tell(
    version: str, bits: int, n: int, k: int
) -> None:
    """Found by the test above: few inputs fill one word either way, the column of zero points beside them does not."""
    rng, per, wordwise = np.random.default_rng(n), 32 // bits, version.startswith("0.12")
    mask = np.uint32(2 ** (per * bits) - 1 if wordwise else 2**32 - 1)
    height = -(-n // per) if wordwise else -(-n * bits // 32)
    tensors = {
        "a.weight_packed": ("I32", (n, 1), (rng.integers(0, 2**32, n, np.uint32) & mask).tobytes()),
        "a.weight_scale": ("F32", (n, 1), rng.random(n, np.float32).tobytes()),
        "a.weight_shape": ("I64", (2,), np.array([n, k], np.int64).tobytes()),
        "a.weight_zero_point": ("I32", (height, 1), (rng.integers(0, 2**32, height, np.uint32) & mask).tobytes()),
    }
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    label = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    tiny = Tiny("compressed_tensors", tensors, {**label, "version": version})
    module, q = read(tiny)
    check_weights(tiny, q)
    check_bytes(tiny, sources()[tiny.source].write(module, q))
