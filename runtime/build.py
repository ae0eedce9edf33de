"""Kernels -> cubins, with NVRTC; no GPU needed. Cubins are cached, or built ahead for machines without a new NVRTC.

    python -m warptile.runtime.build --arch 90 OUT     every kernel that ``plan`` can choose there, into the folder OUT
    python -m warptile.runtime.build --check           a covering set for every architecture; fails on spills in a loop

A cubin is known by a key over everything that shaped it: the kernel's source, our headers it includes, flags, target
and template arguments. In the user's cache the compiler's version is part of the key; in a folder built ahead it is not
(it stands in the entry). Never PTX: PTX of a new compiler does not load on an older driver, a cubin does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..formats.canonical import ELEMENTS, SCALE_DTYPES
from ..formats.errors import UnsupportedError, UsageError, WarptileError
from ..kernels.mmq_strips import header as strips_header
from .cubin import Cubin, disassembler, resources, spills_in_loop

FLAGS = ("-std=c++20", "--ptxas-options=-v", "-default-device")
COMPILER = "nvrtc.json"
"""Beside cubins built ahead: [major, minor] of the oldest compiler that built any of them."""
WGMMA_NVRTC = (13, 3)
"""Older ones may overwrite the A registers of a wgmma that still runs: wrong results without a word."""
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Request(NamedTuple):
    """What to compile: ``kernel`` and ``variant`` as in ``launch.Stage``, ``target`` such as sm_90a."""

    kernel: str
    variant: tuple[int, ...]
    target: str

    @property
    def expression(self) -> str:
        return f"{self.kernel}<Variant{{{', '.join(map(str, self.variant))}}}>"


def elements_header() -> str:
    """``elements.h``: the element and scale types of ``canonical`` as C++, so that the two cannot disagree."""
    facts = ",\n".join(f"    {{{e.bits}, {e.bias}, {e.exponent}, {e.mantissa}}}" for e in ELEMENTS.values())
    return (
        "// Generated from formats/canonical.py.\n#pragma once\n"
        f"enum class Element : int {{ {', '.join(ELEMENTS)} }};\n"
        f"enum class Dtype : int {{ {', '.join(SCALE_DTYPES)} }};\n"
        "struct ElementFacts {\n  int bits, bias, exponent, mantissa;\n};\n"
        "constexpr __host__ __device__ ElementFacts facts(Element e) {\n"
        f"  constexpr ElementFacts rows[] = {{\n{facts}}};\n  return rows[int(e)];\n}}\n"
    )


GENERATED = {"elements.h": elements_header, "strips.h": strips_header}
"""Headers that are tables of Python, printed."""


def _headers(source: str) -> dict[str, str]:
    """Our headers that a source includes, however deep: name -> text."""
    found: dict[str, str] = {}
    pending = INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name not in found:
            folder = files(__package__.rpartition(".")[0] + ".kernels")
            found[name] = GENERATED[name]() if name in GENERATED else folder.joinpath(name).read_text("utf-8")
            pending += INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


@cache
def _sources(kernel: str) -> tuple[str, dict[str, str]]:
    source = files(__package__.rpartition(".")[0] + ".kernels").joinpath(f"{kernel}.cu").read_text("utf-8")
    return source, _headers(source)


def key(request: Request, version: tuple[int, int] | None = None) -> str:
    """Names the cubin in a folder: 32 hexadecimal digits; ``version`` is NVRTC's, None in folders built ahead."""
    source, headers = _sources(request.kernel)
    parts = [source, *(f"{name}\0{text}" for name, text in headers.items()), *FLAGS, request.target]
    return hashlib.blake2b("\0".join([*parts, request.expression, str(version)]).encode(), digest_size=16).hexdigest()


def cache_folder() -> Path:
    """``$WARPTILE_CACHE``, else ``warptile`` in the user's cache folder."""
    if folder := os.environ.get("WARPTILE_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "warptile" / "cubins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warptile" / "cubins"


def _load(folder: Path, name: str) -> Cubin | None:
    try:
        entry = json.loads((folder / f"{name}.json").read_text("utf-8"))
        return Cubin((folder / f"{name}.cubin").read_bytes(), entry["entry"], entry["log"])
    except FileNotFoundError:
        return None


def _publish(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _store(folder: Path, name: str, request: Request, version: tuple[int, int], cubin: Cubin) -> None:
    """The image first, then the entry that makes it visible."""
    folder.mkdir(parents=True, exist_ok=True)
    _publish(folder / f"{name}.cubin", cubin.image)
    entry = {
        "kernel": request.expression,
        "target": request.target,
        "entry": cubin.entry,
        "nvrtc": list(version),
        "log": cubin.log,
    }
    _publish(folder / f"{name}.json", json.dumps(entry, indent=1).encode())


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise UnsupportedError(
            "no CUDA compiler",
            need="cuda-bindings and nvidia-cuda-nvrtc",
            do="pip install 'warptile[cuda13]', or set WARPTILE_CUBINS to a folder of kernels built ahead",
        ) from None
    return nvrtc


def _call(function: str, *args: Any) -> Any:
    """An NVRTC call's results, without the status; raises on failure."""
    nvrtc = _nvrtc()
    try:
        status, *results = getattr(nvrtc, function)(*args)
    except RuntimeError as error:  # the bindings without the library
        raise UnsupportedError(f"NVRTC does not load ({error})", do="pip install nvidia-cuda-nvrtc") from None
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise WarptileError(f"{function} failed with {status.name}")
    return results[0] if len(results) == 1 else results


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the compiler that would be used; raises ``UnsupportedError`` when there is none."""
    major, minor = _call("nvrtcVersion")
    return int(major), int(minor)


def compiler(cubins: str | Path | None = None) -> tuple[int, int]:
    """(major, minor) of the NVRTC whose kernels run here: the one that filled the folder built ahead, else the one
    installed; (0, 0) when there is neither."""
    ahead = cubins or os.environ.get("WARPTILE_CUBINS")
    if ahead and (Path(ahead) / COMPILER).exists():
        major, minor = json.loads((Path(ahead) / COMPILER).read_text("utf-8"))
        return int(major), int(minor)
    try:
        return nvrtc_version()
    except UnsupportedError:
        return 0, 0


def _text(program: Any, what: str) -> bytes:
    buffer = b" " * int(_call(f"nvrtcGet{what}Size", program))
    _call(f"nvrtcGet{what}", program, buffer)
    return buffer


def _include_options() -> list[str]:
    """CUDA's own headers, for kernels that want them (nvidia-cuda-runtime brings them)."""
    spec = find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    return [f"-I{p}" for root in roots for p in sorted(root.glob("c*/include")) if (p / "cuda_fp16.h").exists()]


def build(request: Request) -> Cubin:
    """Compile now, past every cache. Raises ``WarptileError`` with the compiler's words when it fails."""
    if request.target.endswith("90a") and nvrtc_version() < WGMMA_NVRTC:
        raise UnsupportedError(
            f"NVRTC miscompiles {request.kernel} for {request.target}",
            found="{}.{}".format(*nvrtc_version()),
            need="{}.{} or newer".format(*WGMMA_NVRTC),
            do="pip install 'nvidia-cuda-nvrtc>=13.3'",
        )
    source, headers = _sources(request.kernel)
    texts, names = [text.encode() for text in headers.values()], [name.encode() for name in headers]
    program = _call("nvrtcCreateProgram", source.encode(), f"{request.kernel}.cu".encode(), len(names), texts, names)
    try:
        _call("nvrtcAddNameExpression", program, request.expression.encode())
        options = [o.encode() for o in (*FLAGS, f"-arch={request.target}", *_include_options())]
        (status,) = _nvrtc().nvrtcCompileProgram(program, len(options), options)
        log = _text(program, "ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
        if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
            first = next((line for line in log.splitlines() if "error" in line), log)
            raise WarptileError(f"{request.expression} does not compile for {request.target}: {first}")
        entry = _call("nvrtcGetLoweredName", program, request.expression.encode()).decode()
        return Cubin(_text(program, "CUBIN"), entry, log)
    finally:
        _call("nvrtcDestroyProgram", program)


def compile(kernel: str, variant: Sequence[int], target: str, cubins: str | Path | None = None) -> Cubin:
    """The cubin of one stage: from ``cubins`` (default ``$WARPTILE_CUBINS``), from the user's cache, or built now.

    Raises ``UnsupportedError`` when it must be built and there is no NVRTC.
    """
    request = Request(kernel, tuple(variant), target)
    ahead = cubins or os.environ.get("WARPTILE_CUBINS")
    if ahead and (cubin := _load(Path(ahead), key(request))):
        return cubin
    version, folder = nvrtc_version(), cache_folder()
    name = key(request, version)
    if cubin := _load(folder, name):
        return cubin
    cubin = build(request)
    try:
        _store(folder, name, request, version, cubin)
    except OSError as error:
        warnings.warn(f"kernels are compiled anew in every process: {error}; set WARPTILE_CACHE", stacklevel=2)
    return cubin


def _parallel(requests: Iterable[Request], jobs: int) -> Iterator[tuple[Request, Cubin]]:
    """Built in parallel (NVRTC releases the GIL), handed over in order."""
    listed = list(requests)
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(listed, pool.map(build, listed), strict=True)


def prebuild(requests: Iterable[Request], folder: Path, jobs: int) -> int:
    """Build what ``folder`` does not hold yet; the number built."""
    missing = [r for r in requests if not (folder / f"{key(r)}.json").exists()]
    folder.mkdir(parents=True, exist_ok=True)
    oldest = min(nvrtc_version(), compiler(folder)) if (folder / COMPILER).exists() else nvrtc_version()
    _publish(folder / COMPILER, json.dumps(oldest).encode())
    for request, cubin in _parallel(missing, jobs):
        _store(folder, key(request), request, nvrtc_version(), cubin)
    return len(missing)


def check(requests: Iterable[Request], jobs: int) -> list[str]:
    """Build, print a table of resources, and return what is wrong: spills in a loop of products, C75xx remarks."""
    wrong, tool = [], disassembler()
    print("| target | kernel | registers | shared | spills |\n| --- | --- | --- | --- | --- |")
    for request, cubin in _parallel(requests, jobs):
        r = resources(cubin)
        print(f"| {request.target} | {request.expression} | {r.registers} | {r.shared} | {r.spills} |", flush=True)
        wrong += [f"{request.target} {request.expression}: {note}" for note in r.notes]
        if spills := spills_in_loop(cubin, tool):
            wrong.append(f"{request.target} {request.expression}: {spills} spills in its loop")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    from ..kernels import layouts

    parser = argparse.ArgumentParser("python -m warptile.runtime.build", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where to put cubins built ahead")
    parser.add_argument("--arch", type=int, help="compute capability x 10: 75, 80, 90, ...")
    parser.add_argument("--element", action="append", help="only kernels for these elements")
    parser.add_argument("--check", action="store_true", help="compile a covering set and fail on spills")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    try:
        if options.check:
            targets = [t for t in ARCHITECTURES if options.arch is None or t == f"sm_{options.arch}"]
            chosen = [Request(kernel, v, t) for m in layouts().values() for t in targets for kernel, v in m.covering(t)]
            wrong = check(chosen, options.jobs)
            print("\n".join(wrong) if wrong else f"{len(chosen)} kernels, no spills in a loop", file=sys.stderr)
            return 1 if wrong else 0
        if options.folder is None or options.arch is None:
            raise UsageError("--arch and a folder are needed, or --check")
        every = [Request(*row) for m in layouts().values() for row in m.variants(options.arch, options.element)]
        built = prebuild(every, options.folder, options.jobs)
        print(f"{len(every)} kernels in {options.folder}, {built} built now", file=sys.stderr)
        return 0
    except WarptileError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
