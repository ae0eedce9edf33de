"""Codes of any width in 32-bit words, as compressed-tensors packs them: one dense stream, or whole codes a word.

Widths that divide 32 look the same both ways. For the others the stream is dense in version 0.19, while 0.12 put
32 // bits codes in a word and left its top bits unused.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import pack_ragged, unpack_ragged
from .container import Tensor
from .errors import CorruptError, UnsupportedError
from .stream import STEP

Array = NDArray[Any]

BITS = range(2, 9)
DENSE, WORDWISE = "dense", "wordwise"
LAST_WORDWISE, FIRST_DENSE = (0, 12), (0, 19)


def words(count: int, bits: int, stream: str) -> int:
    """Words of ``count`` codes."""
    return -(-count * bits // 32) if stream == DENSE else -(-count // (32 // bits))


def widths(count: int, found: int) -> list[int]:
    """Bits of ``count`` codes that take ``found`` words."""
    return [bits for bits in BITS if any(words(count, bits, stream) == found for stream in (DENSE, WORDWISE))]


def counts(found: int, bits: int) -> list[int]:
    """How many codes of so many bits can take ``found`` words; none of a width that is not packed."""
    if bits not in BITS:
        return []
    dense = range((found - 1) * 32 // bits + 1, found * 32 // bits + 1)
    return sorted({*dense, *range((found - 1) * (32 // bits) + 1, found * (32 // bits) + 1)})


def decide(
    packed: Tensor, k: int, said: int | None, by: str, version: str, zeros: tuple[int, int] | None = None
) -> tuple[int, str]:
    """(bits, stream) of ``packed`` [n, w] with k codes a row; ``zeros``: (codes, words) of a column of zero points.

    ``said`` are the bits that a switch or the label gives, ``by`` is which of them, ``version`` the writer's.

    Some width explains w. Raises UnsupportedError when what is said contradicts it, or several readings are left.
    """
    found = packed.shape[1]
    fitting = {(b, s) for b in BITS for s in (DENSE, WORDWISE) if words(k, b, s) == found}
    where: dict[str, Any] = {"file": packed.file, "tensor": packed.name}
    possible = sorted({b for b, _ in fitting})
    if said is not None and said not in possible:
        raise UnsupportedError(
            f"{by} contradicts the shapes",
            **where,
            found=f"{found} words for {k} codes, so {' or '.join(map(str, possible))} bits",
            need=f"{said} bits as {by} says",
            do=f"--bits {possible[0]} believes the tensors",
        )
    if said is None and len(possible) > 1:
        raise UnsupportedError(
            "the shapes do not tell the bits of a code", **where, found=f"{' or '.join(map(str, possible))} bits",
            do="say --bits",
        )  # fmt: skip
    bits = possible[0] if said is None else said
    streams = {s for b, s in fitting if b == bits}
    longest = k
    if zeros is not None:
        streams = {s for s in streams if words(zeros[0], bits, s) == zeros[1]} or streams
        longest = max(k, zeros[0])
    if DENSE in streams and (32 % bits == 0 or longest * bits <= 32 or len(streams) == 1):
        return bits, DENSE
    if len(streams) == 1:
        return bits, WORDWISE
    return bits, _by_version(version, bits, where)


def _by_version(version: str, bits: int, where: dict[str, Any]) -> str:
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else None
    if release is not None and release <= LAST_WORDWISE:
        return WORDWISE
    if release is not None and release >= FIRST_DENSE:
        return DENSE
    raise UnsupportedError(
        f"{bits}-bit codes can be one dense stream or {32 // bits} codes a word, and the shapes do not tell",
        **where,
        found=f"version {version!r} in the configuration",
        need="at most 0.12 (codes a word) or at least 0.19 (dense)",
        do="set version there to the writer's",
    )


def unpack(packed: Array, bits: int, count: int, stream: str) -> Array:
    """int32 or uint32 [.., w] -> uint8 [.., count]."""
    if stream == DENSE:
        return unpack_ragged(packed, bits, count)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    fields = np.ascontiguousarray(packed).view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return fields.astype(np.uint8).reshape(*packed.shape[:-1], -1)[..., :count]


def pack(codes: Array, bits: int, stream: str) -> Array:
    """The inverse of ``unpack``: uint32, with zeros in the bits of no code."""
    if stream == DENSE:
        return pack_ragged(codes, bits)
    count, width = codes.shape[-1], 32 // bits
    padded = np.zeros((*codes.shape[:-1], words(count, bits, stream) * width), np.uint32)
    padded[..., :count] = codes
    shifts = np.arange(width, dtype=np.uint32) * np.uint32(bits)
    packed: Array = np.bitwise_or.reduce(padded.reshape(*codes.shape[:-1], -1, width) << shifts, axis=-1)
    return packed


def spare(packed: Array, bits: int, count: int, stream: str) -> Array | None:
    """int32 [..]: the last word of each row with the bits of codes cleared; None when nothing is left.

    Unused bits on top of the other words of a wordwise stream are not looked at: ``check_tops`` does.
    """
    per_word = 32 // bits
    used = count * bits % 32 if stream == DENSE else (count % per_word or per_word) * bits
    if used == 0:
        return None
    left = np.ascontiguousarray(packed[..., -1]).view(np.uint32) >> np.uint32(used) << np.uint32(used)
    return left.view(np.int32) if left.any() else None


def check_tops(tensor: Tensor, bits: int, stream: str, along: int = 1) -> None:
    """Raise CorruptError when a word that is not the last ``along`` its axis has bits above its codes."""
    if stream == WORDWISE:
        words = tensor.array() if along else tensor.array().T
        step = max(1, STEP // words.shape[1])
        for first in range(0, len(words), step):
            if (words[first : first + step, :-1].view(np.uint32) >> np.uint32(32 // bits * bits)).any():
                raise CorruptError("bits above the codes of a word are set", file=tensor.file, tensor=tensor.name)


def starts(channels: Array, bits: int, stream: str) -> Array:
    """int64: the bit of a row at which the code of each channel begins."""
    word, place = np.divmod(channels.astype(np.int64), 32 // bits)
    return channels.astype(np.int64) * bits if stream == DENSE else 32 * word + bits * place
