"""Whether ``weight_shape`` can be true: k is said there and nowhere stored, and the words of a row are k * bits / 32.

So are the bits, by a switch or the label. Where the two do not go together, the other tensors tell which of them lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from . import compressed_tensors_stream as streams
from .compressed_tensors_config import Arguments
from .container import Tensor
from .errors import CorruptError
from .groups import covers


def check_k(members: Mapping[str, Tensor], n: int, k: int, label: Arguments) -> None:
    """Refuse the k of ``weight_shape`` when no width, or not the one that is said, explains the words of a row with it.

    Not when g_idx, scales and zero points agree with k and not with the width, nor when they do not tell and the width
    is ``--bits``: then whoever says the width is to blame, as ``compressed_tensors_stream.decide`` has it.

    Raises CorruptError.
    """
    packed, shape, bits = members["weight_packed"], members["weight_shape"], label.bits
    words = packed.shape[1]
    possible = streams.widths(k, words)
    if possible and bits in (None, *possible):
        return
    held = [] if bits is None else streams.counts(words, bits)
    agreeing = [count for count in held if _explain(members, n, count, [bits or 0], label)]
    true, switched = _explain(members, n, k, possible, label), "bits" in label.switched
    if possible and (not held or (true and not agreeing) or (true == bool(agreeing) and switched)):
        return
    by = "--bits" if switched else "the label"
    instead = f", or say --bits {' or '.join(map(str, possible))} if {by} is wrong" if possible else ""
    raise CorruptError(
        "shapes disagree",
        file=shape.file,
        tensor=shape.name,
        found=f"{n} x {k}",
        need=_need(n, words, packed.name, bits, by, agreeing or held),
        do=f"get the checkpoint again{instead}",
    )


def _need(n: int, words: int, packed: str, bits: int | None, by: str, counts: list[int]) -> str:
    row = f"as {words} words a row of {packed} hold"
    if not counts:
        return f"{n} x k with k codes of 2 to 8 bits, {row}"
    some = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{n} x {some}, {row} with {bits} bits as {by} says"


def _explain(members: Mapping[str, Tensor], n: int, k: int, widths: Iterable[int], label: Arguments) -> bool:
    """Whether k channels, of one of some widths, are what every other tensor has that tells."""
    return any(all(_witnesses(members, n, k, bits, label)) for bits in widths)


def _witnesses(members: Mapping[str, Tensor], n: int, k: int, bits: int, label: Arguments) -> Iterator[bool]:
    if "weight_g_idx" in members:
        yield members["weight_g_idx"].shape == (k,)
    scale, zeros = members["weight_scale"], members.get("weight_zero_point")
    if len(scale.shape) == 2 and scale.shape[0] == n and label.group_size:
        yield any(covers(size, k, scale.shape[1]) for size in label.group_size)
    if zeros is not None and len(zeros.shape) == 2:
        yield any(streams.words(n, bits, stream) == zeros.shape[0] for stream in (streams.DENSE, streams.WORDWISE))
