"""A session: one artifact, one device, products by name."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from ..formats.artifact import Artifact, open_artifact
from ..kernels import layouts
from ..kernels.epilogue import ROUNDINGS
from ..kernels.quantize import KINDS
from . import arrays
from .arrays import Kind, Operand
from .catalog import Catalog, Module
from .product import Pair, Product, Quantized, check_numerics
from .reference import Reference

SCRATCH_LIMIT = 1 << 30


class Backend(Protocol):
    """What the session needs of a device."""

    device: str

    @property
    def scratch_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def linear(self, product: Product) -> Any: ...
    def swiglu(self, pair: Pair) -> Any: ...
    def quantize(self, kind: Kind, x: Operand, numerics: str) -> Quantized: ...
    def dequantize(self, module: Module) -> Any: ...
    def tensor(self, name: str) -> Any: ...
    def explain(self, module: Module, m: int, dtype: str, numerics: str | None) -> tuple[str, ...]: ...
    def load(self, modules: Sequence[Module]) -> None: ...
    def explain_pair(self, gate: Module, up: Module, m: int, dtype: str) -> tuple[str, ...]: ...
    def prepare(
        self, modules: Sequence[Module], ms: Sequence[int], dtypes: Sequence[str], numerics: str | None
    ) -> None: ...
    def prepare_pairs(
        self, pairs: Sequence[tuple[Module, Module]], ms: Sequence[int], dtypes: Sequence[str]
    ) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Explanation:
    """Why a product runs as it does; ``str()`` is the text for people."""

    name: str
    m: int
    n: int
    k: int
    device: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.name}: y[{self.m}, {self.n}] = x[{self.m}, {self.k}] @ W.T on {self.device}"
        return "\n".join([head, *(f"  {line}" for line in self.lines)])


class Session:
    """Maps an artifact and multiplies with its linears.

    ``path`` is an artifact's file or directory, or an artifact already open. ``device`` is ``cuda:<i>`` or ``cpu``;
    by default the first CUDA device, and the NumPy reference backend where there is none. ``cubins`` is a folder of
    kernels built beforehand (default: the environment variable WARPTILE_CUBINS). ``scratch_limit`` caps, in bytes,
    the scratch memory kept between calls; what a captured graph uses is kept whatever the cap. ``batch_invariant``
    gives a row of x the same bits whatever the other rows are and however many: slower for few rows, and a product
    that no kernel of ours runs is an UnsupportedError.

    Safe to use from several threads and on several streams at once. Every method of a closed session raises
    RuntimeError. Opening raises the errors of ``open_artifact``, and RuntimeError when the device cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Artifact,
        device: str | None = None,
        cubins: str | os.PathLike[str] | None = None,
        scratch_limit: int = SCRATCH_LIMIT,
        batch_invariant: bool = False,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)) and not hasattr(path, "modules"):
            raise TypeError(f"path is {type(path).__name__}; need a path or an open artifact")
        artifact = open_artifact(path, layouts()) if isinstance(path, (str, os.PathLike)) else path
        self._catalog = Catalog(artifact)
        self._live: Backend | None = _open(self._catalog, device, cubins, scratch_limit, batch_invariant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free everything on the device. A captured graph that used this session must not be replayed afterwards."""
        if self._live is not None:
            self._live.close()
            self._live = None

    @property
    def _backend(self) -> Backend:
        if self._live is None:
            raise RuntimeError("the session is closed; open a new one")
        return self._live

    @property
    def device(self) -> str:
        return self._backend.device

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device scratch held for later calls and captured graphs."""
        return self._backend.scratch_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory that hold modules."""
        return self._backend.weight_bytes

    def release(self) -> None:
        """Free cached scratch, except what captured graphs use."""
        self._backend.release()

    def names(self) -> list[str]:
        """Every name ``linear`` takes: modules, and the linears that some of them were made of."""
        _ = self._backend  # refuses when closed
        return list(self._catalog.modules)

    def module(self, name: str) -> Module:
        """The shape and types of a linear. Raises KeyError naming close matches."""
        _ = self._backend  # refuses when closed
        return self._catalog.module(name)

    def tensor(self, name: str) -> Any:
        """A pass-through tensor in its stored shape: numpy on the cpu (read-only), cupy on a CUDA device.

        Types that cupy has no name for come as unsigned integers of the same width. Raises KeyError.
        """
        return self._backend.tensor(name)

    def dequantize(self, name: str) -> Any:
        """The decoded weights, float32 [n, k] or [E, n, k] in logical order, without bias; numpy or cupy."""
        return self._backend.dequantize(self._catalog.module(name))

    def linear(
        self,
        name: str,
        x: Any,
        out: Any = None,
        expert: int | None = None,
        numerics: str | None = None,
        residual: Any = None,
        rounding: str = "once",
    ) -> Any:
        """y = x @ W.T (+ bias) (+ residual), accumulated in fp32, rounded once to x's type.

        ``x`` is [.., k] float16, bfloat16 or float32, any strides; the result [.., n] is of x's kind, type and place.
        ``out`` takes the result instead: x's kind and type, rows contiguous, not overlapping x. ``expert`` picks one of
        a stacked module. A linear that was fused with others still has its name: the others' outputs are made too, and
        left behind. Work goes on the caller's current stream.

        ``residual`` [.., n] of x's kind and type is added to the product and may be ``out`` itself. ``rounding`` "each"
        rounds the product, and again after bias and after residual (see kernels/epilogue.py).

        ``numerics`` is "exact" (x as it is), "int8" (x rounded to 8 bits in blocks of 32), "e4m3" (in blocks of 128),
        "int8_row" (all of a row alike), or None for what suits the module's layout. What ``quantize`` gave may stand
        for x.

        Raises KeyError (name), TypeError (kind or type), ValueError (shape, device, overlap, a handle used where it
        does not belong), UnsupportedError (numerics that the layout does not do), RuntimeError (a launch failed, or a
        graph is being captured and ``prepare`` has not been called; the session stays usable).
        """
        backend = self._backend
        module = self._catalog.module(name)
        _check_expert(module, expert)
        handle = x if isinstance(x, Quantized) else None
        if handle is not None:
            handle.check(backend, module.name, module.k, numerics)
            kind, source, numerics = handle.kind, handle.x, handle.numerics
        else:
            kind = arrays.kind_of(x)
            source = kind.operand(x)
        check_numerics(module, numerics)
        if rounding not in ROUNDINGS:
            raise ValueError(f"{module.name}: rounding is {rounding!r}; need {' or '.join(ROUNDINGS)}")
        target, added = (_like_x(module.name, kind, what, a) for what, a in (("out", out), ("residual", residual)))
        arrays.check(module.name, module.n, module.k, source, target, added)
        return backend.linear(Product(module, kind, source, target, expert, numerics, handle, added, rounding))

    def swiglu(self, gate: str, up: str, x: Any, out: Any = None, expert: int | None = None) -> Any:
        """silu(x @ G.T) * (x @ U.T), where gate and up name linears of one shape, with their biases.

        Both products are rounded to x's type first; silu and the multiplication are float32, rounded once: the bits of
        two ``linear`` and ``kernels/swiglu.py``. For a few rows it is one launch, where the layout has a kernel for
        pairs. Other parameters, result and errors as for ``linear``; ValueError when the two do not fit each other.
        """
        backend = self._backend
        both = self._catalog.module(gate), self._catalog.module(up)
        for module in both:
            _check_expert(module, expert)
        _check_pair(*both)
        kind = arrays.kind_of(x)
        source, target = kind.operand(x), _like_x(gate, kind, "out", out)
        arrays.check(both[0].name, both[0].n, both[0].k, source, target)
        first, second = (Product(module, kind, source, None, expert) for module in both)
        return backend.swiglu(Pair(first, second, target))

    def quantize(self, x: Any, numerics: str = "int8") -> Quantized:
        """x [.., k] rounded to 8 bits once, on the caller's current stream, for every ``linear`` that reads it: strips
        take "int8" (FP8 strips "e4m3"), Marlin tiles of integers "int8_row".

        The handle belongs to this session, this k and this stream, or to the graph being captured. Use it in a ``with``
        statement, or ``close()`` it, or let it go: its memory then serves the next one on the stream.
        Raises TypeError, ValueError (numerics, device), RuntimeError (a launch, or a capture before ``prepare``).
        """
        backend = self._backend
        if numerics not in KINDS:
            raise ValueError(f"numerics is {numerics!r}; need {' or '.join(KINDS)}")
        kind = arrays.kind_of(x)
        source = kind.operand(x)
        arrays.check("quantize", 0, source.shape[-1] if source.shape else 1, source, None)
        return backend.quantize(kind, source, numerics)

    def explain(
        self, name: str, m: int, dtype: str = "float16", numerics: str | None = None, up: str | None = None
    ) -> Explanation:
        """Which kernels would multiply an x of m rows, how and why, and what was rejected; with ``up``, in
        ``swiglu(name, up, x)``."""
        backend, module = self._backend, self._catalog.module(name)
        check_numerics(module, numerics)
        m, kind = _extent(m), _activation(dtype)
        if up is not None:
            second = self._catalog.module(up)
            _check_pair(module, second)
            lines = backend.explain_pair(module, second, m, kind)
            return Explanation(f"{module.name} and {second.name}", m, module.n, module.k, backend.device, lines)
        stored = self._catalog.stored(module)
        lines = backend.explain(stored, m, kind, numerics)
        if module.rows is not None:
            first, end = module.rows
            part = f"outputs {first} to {end - 1} of " if module.n < stored.n else ""
            expert = "" if module.expert is None else f"expert {module.expert} of "
            copied = ": all of them are made, its own copied out" if part else ""
            lines = (f"{part}{expert}{stored.name}{copied}", *lines)
        return Explanation(module.name, m, module.n, module.k, backend.device, lines)

    def load(self, names: str | Iterable[str] | None = None) -> None:
        """Upload modules now instead of on first use; all of them by default."""
        self._backend.load(self._stored(names))

    def prepare(
        self,
        m: int | Iterable[int],
        dtype: str | Iterable[str] = ("float16", "bfloat16"),
        names: str | Iterable[str] | None = None,
        numerics: str | None = None,
        swiglu: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Upload, compile and allocate for products of m rows, so that a graph capture finds everything in place.

        ``swiglu`` lists the (gate, up) that will be multiplied as pairs; ``names`` then are by default just these, else
        all that do ``numerics``. A product of a handle finds everything in place where x itself would be rounded alike:
        name its ``numerics`` where by default x is not.
        """
        ms = [_extent(value) for value in (m if isinstance(m, Iterable) else [m])]
        dtypes = [_activation(value) for value in ([dtype] if isinstance(dtype, str) else dtype)]
        pairs = [(self._catalog.module(gate), self._catalog.module(up)) for gate, up in swiglu]
        for pair in pairs:
            _check_pair(*pair)
        modules = self._stored([one.name for pair in pairs for one in pair] if pairs and names is None else names)
        able = [module for module in modules if numerics is None or numerics in module.numerics]
        if names is None and able:
            modules = able
        for module in modules:
            check_numerics(module, numerics)
        self._backend.prepare(modules, ms, dtypes, numerics)
        self._backend.prepare_pairs(pairs, ms, dtypes)

    def _stored(self, names: str | Iterable[str] | None) -> list[Module]:
        """The modules that hold these linears, each once; all by default."""
        catalog = self._catalog
        names = catalog.modules if names is None else [names] if isinstance(names, str) else names
        modules = map(catalog.stored, map(catalog.module, names))
        return list({module.name: module for module in modules}.values())


def _like_x(name: str, kind: Kind, what: str, array: Any) -> Operand | None:
    """An array that goes with an x of ``kind``. Raises TypeError."""
    if array is None:
        return None
    found = arrays.kind_of(array)
    if type(found) is not type(kind):
        raise TypeError(f"{name}: {what} is {found.name}, x is {kind.name}; need the same kind")
    return kind.operand(array)


def _check_pair(gate: Module, up: Module) -> None:
    if (gate.n, gate.k) != (up.n, up.k):
        found = f"{gate.name} is {gate.n} x {gate.k}, {up.name} {up.n} x {up.k}"
        raise ValueError(f"{found}; need the same shape")


def _check_expert(module: Module, expert: int | None) -> None:
    if expert is not None:
        expert = _whole("expert", expert)
    if module.experts is None:
        if expert is not None:
            raise ValueError(f"{module.name}: expert={expert} given; this module has no experts")
    elif expert is None:
        raise ValueError(f"{module.name}: holds {module.experts} experts; say which with expert=")
    elif not 0 <= expert < module.experts:
        raise ValueError(f"{module.name}: expert {expert} of {module.experts}; need 0..{module.experts - 1}")


def _whole(what: str, value: Any) -> int:
    """Any integer type but bool. Raises TypeError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is {value!r}; need an integer")
    return operator.index(value)


def _extent(m: int) -> int:
    m = _whole("m", m)
    if not 0 <= m < 2**31:
        raise ValueError(f"m is {m}; need 0 <= m < 2^31")
    return m


def _activation(dtype: str) -> str:
    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}.get(dtype, dtype)
    if short not in arrays.ACTIVATIONS:
        raise TypeError(f"activations of {dtype}; need float16, bfloat16 or float32")
    return short


def _open(
    catalog: Catalog,
    device: str | None,
    cubins: str | os.PathLike[str] | None,
    scratch_limit: int,
    batch_invariant: bool,
) -> Backend:
    """The backend of a device by name. Raises TypeError, ValueError (name), RuntimeError (no such device)."""
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device is {device!r}; need a name: cuda:<i> or cpu")
    if device == "cpu":
        return Reference(catalog, "device is cpu", batch_invariant)
    if device is not None and not (device == "cuda" or device.removeprefix("cuda:").isdecimal()):
        raise ValueError(f"device is {device!r}; need cuda:<i> or cpu")
    from .device import Cuda, devices

    count, why = devices()
    if device is None and not count:
        return Reference(catalog, why, batch_invariant)
    index = int(device.removeprefix("cuda:")) if device not in (None, "cuda") else 0
    if index >= count:
        raise RuntimeError(f"no device cuda:{index}; {f'found {count}' if count else why}")
    return Cuda(catalog, index, cubins, scratch_limit, batch_invariant)
