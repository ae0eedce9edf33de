"""Several linears as one, and apart again: side by side along n, or one to each expert of a stack.

    along n     rows of codes, scales, zero points and bias one after the other; one order of inputs for all
                [n0, k], [n1, k]  ->  [n0 + n1, k]
    stacked     linears of one shape and kind  ->  [E, n, k]

Nothing is computed anew. A factor of a whole weight stays that weight's: fused parts have one each (``Level.shards``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .canonical import ELEMENTS, Element, Level, Outline, QuantTensor, from_shards, scale_words
from .stream import Blocks, Stream, hollow

Array = NDArray[Any]
Named = Mapping[str, Outline]
Block = tuple[int, int]

# What linears have in common that are to be one: (words, what is compared).
ALIKE: tuple[tuple[str, Callable[[Outline], object]], ...] = (
    ("inputs differ", lambda q: q.k),
    ("act-order differs", lambda q: f"order {q.order[:8]}" if q.order else "none"),
    ("biases differ", lambda q: q.bias or "none"),
)
FUSED = (
    ("numbers of experts differ", lambda q: q.experts or "none"),
    ("zero points are not in all", lambda q: "none" if q.zero_max is None else "some"),
    ("elements differ", lambda q: q.element.name),
    ("scales differ", lambda q: _listed((*q.scales, *q.offsets), block_n=False)),
    ("parts of its own", lambda q: q.shards or "none"),
)
STACKED = (
    ("outputs differ", lambda q: q.n),
    ("experts of its own", lambda q: q.experts or "none"),
    ("scales differ", lambda q: _listed((*q.scales, *q.offsets))),
    ("parts differ", lambda q: q.shards or "none"),
)


def _listed(levels: Iterable[tuple[str, Block]], *, block_n: bool = True) -> str:
    return " x ".join(f"{scale_words(dtype)} per {f'{bn} x ' if block_n else ''}{bk}" for dtype, (bn, bk) in levels)


def _differ(qs: Named, facts: Iterable[tuple[str, Callable[[Outline], object]]]) -> str | None:
    for what, fact in facts:
        (first, value), *others = ((name, fact(q)) for name, q in qs.items())
        for name, other in others:
            if other != value:
                return f"{what}: {first} {value}, {name} {other}"
    return None


def along_n(qs: Named) -> Outline | str:
    """The outline of linears side by side, in the order of ``qs``; or why they cannot be.

    ``qs`` are called in the reason as they are here. ``source`` and ``residue`` stay with the parts.
    """
    reason = _differ(qs, (*ALIKE, *FUSED))
    if reason is None and next(iter(qs.values())).shards:
        reason = "its parts have factors of their own"
    if reason is not None:
        return reason
    first = next(iter(qs.values()))
    ns = {name: q.n for name, q in qs.items()}
    joined: dict[str, list[tuple[str, Block]]] = {"scales": [], "offsets": []}
    shards: tuple[int, ...] = ()
    for kind, levels in joined.items():
        for i, (dtype, _) in enumerate(getattr(first, kind)):
            blocks = [getattr(q, kind)[i][1] for q in qs.values()]
            found = _joined_block(ns, first.k, blocks, finest=i == 0)
            if isinstance(found, str):
                return found
            block, parts = found
            if parts and i + 1 < len(getattr(first, kind)):
                return f"a factor of the whole is not the coarsest: {_listed(getattr(first, kind))}"
            levels.append((dtype, block))
            shards = parts or shards
    if shards and first.zero_max is not None and len(first.scales) == 1:
        return "zero points under a factor of the whole"
    return replace(
        first,
        n=sum(ns.values()),
        scales=tuple(joined["scales"]),
        offsets=tuple(joined["offsets"]),
        zero_max=_largest(q.zero_max for q in qs.values()),
        source={},
        residue=(),
        shards=shards,
    )


def _joined_block(
    ns: Mapping[str, int], k: int, blocks: Sequence[Block], *, finest: bool
) -> tuple[Block, tuple[int, ...]] | str:
    """(block, shards) of a level of factors side by side, or why its blocks do not meet at the seams.

    Factors of weights of one row each are the rows' in the finest level, the weights' in others.
    """
    rows = tuple(ns.values())
    if all(block == (n, k) for block, n in zip(blocks, rows, strict=True)) and not (finest and max(rows) == 1):
        return (gcd(*rows), k), rows
    if len(set(blocks)) > 1:
        return f"blocks differ: {', '.join(f'{name} {bn} x {bk}' for name, (bn, bk) in zip(ns, blocks, strict=True))}"
    (block_n, _), end = blocks[0], 0
    for name, n in list(ns.items())[:-1]:
        end += n
        if end % block_n:
            return f"blocks of {block_n} rows would straddle the seam: {name} has {n} rows"
    return blocks[0], ()


def stacked(qs: Named) -> Outline | str:
    """The outline of linears as experts, in the order of ``qs``; or why they cannot be.

    Where some have zero points all get them: ``with_zeros``.
    """
    reason = _differ(qs, (*ALIKE, *STACKED))
    if reason is None and next(iter(qs.values())).experts is not None:
        reason = "they are stacks already"
    if reason is not None:
        return reason
    zeros = any(q.zero_max is not None for q in qs.values())
    alike = {name: _with_zeros(q) if zeros else q for name, q in qs.items()}
    reason = _differ(alike, (("elements differ", lambda q: q.element.name),))
    if reason is not None:
        return reason
    first = next(iter(alike.values()))
    largest = _largest(q.zero_max for q in alike.values())
    return replace(first, experts=len(qs), zero_max=largest, source={}, residue=())


def _largest(zeros: Iterable[int | None]) -> int | None:
    return max((zero for zero in zeros if zero is not None), default=None)


def asymmetric(element: Element) -> tuple[Element, int] | None:
    """(the element of the same integers with zero points, the zero point that is this one's bias), if there is one."""
    name = f"u{element.bits}"
    if element.is_float or element.table or name not in ELEMENTS or element == ELEMENTS[name]:
        return None
    return ELEMENTS[name], 2 ** (element.bits - 1) if element.signed else element.bias


def _with_zeros(q: Outline) -> Outline:
    found = asymmetric(q.element)
    return q if q.zero_max is not None or found is None else replace(q, element=found[0], zero_max=found[1])


def with_zeros(stream: Stream) -> Stream:
    """The same weights with a constant zero point, of an element that ``asymmetric`` has one for."""
    q = stream.tensor
    found = asymmetric(q.element)
    assert found is not None
    element, zero = found
    everywhere = np.broadcast_to(np.uint8(zero), q.scales[0].data.shape)
    return _flipped(replace(stream, tensor=replace(q, element=element, zero=everywhere)), q.element)


def without_zeros(stream: Stream, element: Element) -> Stream | None:
    """The inverse of ``with_zeros``; None where some zero point is another than the one of ``element``."""
    q = stream.tensor
    found = asymmetric(element)
    assert q.zero is not None
    if found is None or (q.zero != found[1]).any():
        return None
    return _flipped(replace(stream, tensor=replace(q, element=element, zero=None)), element)


def _flipped(stream: Stream, symmetric: Element) -> Stream:
    """Codes of two's complement as unsigned ones, or back."""
    if not symmetric.signed:
        return stream
    slab, sign = stream.slab, np.uint8(1 << symmetric.bits - 1)
    return replace(stream, blocks=None, slab=lambda expert, rows, columns: slab(expert, rows, columns) ^ sign)


def join(streams: Sequence[Stream]) -> Stream:
    """The tensor of which ``along_n`` gives the outline; its slabs take rows from each part they touch."""
    if len(streams) == 1:
        return streams[0]
    qs = [stream.tensor for stream in streams]
    outline = along_n({str(i): q.outline() for i, q in enumerate(qs)})
    assert isinstance(outline, Outline), outline
    ends = list(accumulate(q.n for q in qs))
    starts = [end - q.n for end, q in zip(ends, qs, strict=True)]

    def gathered(rows: slice, of: Callable[[Stream, slice], Array]) -> Array:
        """``of`` each part that has some of the rows, with what they are there."""
        pieces = [
            of(stream, slice(max(rows.start, start) - start, min(rows.stop, end) - start))
            for stream, start, end in zip(streams, starts, ends, strict=True)
            if start < rows.stop and rows.start < end
        ]
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def slab(expert: int, rows: slice, columns: slice) -> Array:
        return gathered(rows, lambda stream, some: stream.slab(expert, some, columns))

    def levels(kind: str) -> tuple[Level, ...]:
        return tuple(
            _joined_level(parts, [q.n for q in qs], outline.k, finest=i == 0)
            for i, parts in enumerate(zip(*(getattr(q, kind) for q in qs), strict=True))
        )

    first = qs[0]
    tensor = QuantTensor(
        element=first.element,
        codes=hollow(*first.codes.shape[:-2], outline.n, first.k),
        scales=levels("scales"),
        zero=None if first.zero is None else np.concatenate([q.zero for q in qs if q.zero is not None], axis=-2),
        offsets=levels("offsets"),
        perm=first.perm,
        bias=None if first.bias is None else np.concatenate([q.bias for q in qs if q.bias is not None], axis=-1),
    )
    blocks = [stream.blocks for stream in streams if stream.blocks is not None]
    stored = None
    if len(blocks) == len(streams) and len({block.fields for block in blocks}) == 1:
        stored = Blocks(blocks[0].fields, lambda expert, rows: gathered(rows, partial(_stored, expert)))
    return Stream(tensor, slab, max(stream.along for stream in streams), stored)


def _stored(expert: int, stream: Stream, rows: slice) -> Array:
    assert stream.blocks is not None
    return stream.blocks.rows(expert, rows)


def _joined_level(parts: Sequence[Level], rows: Sequence[int], k: int, *, finest: bool) -> Level:
    ns, blocks = {str(i): n for i, n in enumerate(rows)}, [part.block for part in parts]
    found = _joined_block(ns, k, blocks, finest=finest)
    assert not isinstance(found, str), found
    block, shards = found
    data = np.concatenate([part.data for part in parts], axis=-2)
    return from_shards(data, shards, k) if shards else Level(data, block)


def cut(stream: Stream, rows: slice) -> Stream:
    """Some rows of a tensor as one of its own: those of whole shards, or that begin where blocks of factors do."""
    q = stream.tensor
    if (rows.start, rows.stop) == (0, q.n):
        return stream

    def moved(levels: Iterable[Level]) -> tuple[Level, ...]:
        return tuple(_cut_level(level, rows) for level in levels)

    def within(grid: Array | None) -> Array | None:
        step = q.scales[0].block[0]
        return None if grid is None else grid[..., rows.start // step : -(-rows.stop // step), :]

    tensor = replace(
        q,
        codes=hollow(*q.codes.shape[:-2], rows.stop - rows.start, q.k),
        scales=moved(q.scales),
        zero=within(q.zero),
        offsets=moved(q.offsets),
        bias=None if q.bias is None else q.bias[..., rows],
    )

    def slab(expert: int, some: slice, columns: slice) -> Array:
        return stream.slab(expert, slice(rows.start + some.start, rows.start + some.stop), columns)

    return Stream(tensor, slab, stream.along)


def pick(stream: Stream, expert: int) -> Stream:
    """One expert of a stack as a tensor of its own."""
    q = stream.tensor

    def of(levels: Iterable[Level]) -> tuple[Level, ...]:
        return tuple(replace(level, data=level.data[expert]) for level in levels)

    tensor = replace(
        q,
        codes=hollow(q.n, q.k),
        scales=of(q.scales),
        zero=None if q.zero is None else q.zero[expert],
        offsets=of(q.offsets),
        bias=None if q.bias is None else q.bias[expert],
    )
    return Stream(tensor, lambda _, rows, columns: stream.slab(expert, rows, columns), stream.along)


def _cut_level(level: Level, rows: slice) -> Level:
    step = level.block[0]
    if level.shards:
        first = rows.start // step
        return Level(level.data[..., first : first + 1, :], (rows.stop - rows.start, level.block[1]))
    return Level(level.data[..., rows.start // step : -(-rows.stop // step), :], level.block)
