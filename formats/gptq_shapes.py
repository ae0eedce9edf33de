"""Bits of a GPTQ module's codes from its shapes, cross-checked with what its label says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .errors import CorruptError, UnsupportedError
from .gptq_config import BITS, Label
from .gptq_zeros import width
from .groups import claimed, covers

Say = Callable[[str], None]


@dataclass(frozen=True)
class Shapes:
    """Extents that bound the bits of a code: qweight [rows, n] has k * bits / 32 rows."""

    rows: int
    n: int
    groups: int
    k: int | None
    """Length of g_idx, None without one."""
    zero_words: int | None
    """Words in a row of qzeros, ceil(n * bits / 32), None without any."""

    def fit(self, bits: int) -> bool:
        whole = self.rows * 32 % bits == 0 if self.k is None else self.rows * 32 == self.k * bits
        return whole and self.zero_words in (None, width(self.n, bits))


def code_bits(shapes: Shapes, label: Label, say: Say, file: str, tensor: str) -> int:
    """Bits of a code. Raises UnsupportedError (label contradicts, ambiguous, planar widths) and CorruptError (shapes
    that no width explains)."""
    fitting = [bits for bits in BITS if shapes.fit(bits)]
    if not fitting:
        raise _no_width(shapes, label, file, tensor)
    agreed = [bits for bits in label.bits if bits in fitting]
    if agreed:
        return agreed[0]
    if label.bits:
        _refuse_g_idx(shapes, fitting, label, file, tensor)
        switch = "--bits" if "bits" in label.switched else None
        raise UnsupportedError(
            f"{switch or 'the label'} contradicts the shapes",
            file=file,
            tensor=tensor,
            found=f"tensors of {_either(fitting)}-bit codes",
            need=f"bits {claimed(label.bits, switch)}",
            do=f"--bits {fitting[0]} believes the tensors",
        )
    # Words of zeros are rounded up: a width that fills them wins over one that leaves lanes unused.
    if shapes.zero_words is not None:
        fitting = [bits for bits in fitting if shapes.n * bits % 32 == 0] or fitting
    if len(fitting) > 1 and label.group_size:
        covered = [b for b in fitting if any(covers(g, shapes.rows * 32 // b, shapes.groups) for g in label.group_size)]
        fitting = covered or fitting
    if len(fitting) > 1:
        raise UnsupportedError(
            "the shapes do not tell the bits of a code",
            file=file,
            tensor=tensor,
            found=f"{_either(fitting)} bits possible",
            do="say --bits, and --group-size if groups do not divide k",
        )
    say(f"assumed {fitting[0]}-bit codes from the shapes")
    return fitting[0]


def _refuse_g_idx(shapes: Shapes, fitting: Sequence[int], label: Label, file: str, qweight: str) -> None:
    """Raise CorruptError where the scales' groups are those of as many channels as the label's width gives, and not of
    those that g_idx has: then the length of g_idx is wrong, and no width of its own follows from it."""
    if shapes.k is None:
        return

    def grouped(k: int) -> bool:
        return any(covers(size, k, shapes.groups) for size in label.group_size if size != -1)

    for bits in label.bits:
        if replace(shapes, k=None).fit(bits) and grouped(shapes.rows * 32 // bits) and not grouped(shapes.k):
            instead = f"; --bits {_either(fitting)} if g_idx is right"
            raise _one_wrong(shapes, bits, "g_idx", [shapes.k], [shapes.rows * 32 // bits], file, qweight, instead)


def _one_wrong(
    shapes: Shapes, bits: int, suffix: str, found: list[int], need: list[int], file: str, qweight: str, do: str = ""
) -> CorruptError:
    """The error for the one tensor that all others, and the label, speak against."""
    return CorruptError(
        "shapes disagree",
        file=file,
        tensor=qweight.removesuffix("qweight") + suffix,
        found=found,
        need=f"{need}, as qweight [{shapes.rows}, {shapes.n}] of {bits}-bit codes has",
        do=f"get the checkpoint again{do}",
    )


def _either(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def _no_width(shapes: Shapes, label: Label, file: str, tensor: str) -> UnsupportedError | CorruptError:
    """The error for shapes that belong to no width of ours."""
    rows, n, k = shapes.rows, shapes.n, shapes.k
    planar = [bits for bits in (5, 6, 7) if shapes.fit(bits)]
    if planar and k is not None:
        return UnsupportedError(
            f"{planar[0]}-bit GPTQ is stored in planes",
            file=file,
            tensor=tensor,
            need="bits 2, 3, 4 or 8",
            do="quantise it to one of these",
        )
    if k is not None and label.bits and k * label.bits[0] % 32:
        return CorruptError(
            f"{k} input channels of {label.bits[0]} bits do not fill whole words",
            file=file,
            tensor=tensor,
            found=f"{rows} rows of words, g_idx of {k}",
            need="k * bits divisible by 32",
        )
    if k is not None and shapes.zero_words is not None:
        for bits in label.bits:
            if replace(shapes, k=None).fit(bits):
                return _one_wrong(shapes, bits, "g_idx", [k], [rows * 32 // bits], file, tensor)
            if replace(shapes, zero_words=None).fit(bits):
                zeros = [shapes.groups, shapes.zero_words], [shapes.groups, width(n, bits)]
                return _one_wrong(shapes, bits, "qzeros", *zeros, file, tensor)
    found = [f"qweight [{rows}, {n}]"]
    found += [] if k is None else [f"g_idx [{k}]"]
    found += [] if shapes.zero_words is None else [f"qzeros [{shapes.groups}, {shapes.zero_words}]"]
    return CorruptError(
        "shapes disagree",
        file=file,
        tensor=tensor,
        found=", ".join(found),
        need=f"[k * b / 32, n], [k] and [groups, n * b / 32] with b {_either(label.bits or BITS)}",
    )
