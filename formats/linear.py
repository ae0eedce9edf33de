"""An integer linear before its codes and scales are read, as the readers of 2-D modules put it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from . import checks
from .canonical import Element, Level, Outline, QuantTensor, order_digest
from .container import Checkpoint, Tensor
from .stream import hollow

Array = NDArray[Any]


@dataclass(frozen=True)
class Linear:
    """What the headers, the zero points and the order of channels of one module say."""

    members: Mapping[str, Tensor]
    """By suffix, or by role."""
    scales: Tensor
    element: Element
    n: int
    k: int
    block: tuple[int, int]
    """Weights of one scale."""
    zero: Array | None
    """On the scales' grid."""
    perm: Array | None
    source: dict[str, Any]
    residue: Mapping[str, Array] = field(default_factory=dict)

    def outline(self) -> Outline:
        """What ``describe`` gives."""
        bias = self.members.get("bias")
        return Outline(
            element=self.element,
            n=self.n,
            k=self.k,
            experts=None,
            scales=((self.scales.dtype.lower(), self.block),),
            zero_max=None if self.zero is None else int(self.zero.max()),
            perm=self.perm is not None,
            order=order_digest(self.perm),
            bias=None if bias is None else bias.dtype.lower(),
            source=self.source,
            residue=tuple((suffix, data.dtype, data.shape) for suffix, data in self.residue.items()),
        )

    def tensor(self, scales: Array) -> QuantTensor:
        """What ``read`` gives, with the shape of its codes and no content; ``scales`` on their grid.

        Raises CorruptError for a bias that is NaN or infinite.
        """
        bias = self.members.get("bias")
        return QuantTensor(
            element=self.element,
            codes=hollow(self.n, self.k),
            scales=(Level(scales, self.block),),
            zero=self.zero,
            perm=self.perm,
            bias=checks.bias_values(bias),
            source=self.source,
            residue=self.residue,
        )


def assuming(checkpoint: Checkpoint, module: str) -> tuple[list[str], Callable[[str], None]]:
    """(what was assumed of a module, what takes an assumption): each is noted, and listed for ``source``."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        checkpoint.note(module, text)

    return said, say
