"""Products with converted weights against the speed of light, cuBLAS and Humming, all in one run.

    python benchmarks/matmul.py                                  int4, group 128, fp16, the shapes of shapes.py
    python benchmarks/matmul.py --element u8b128 --group 64 --dtype bfloat16 --m 1,16,256
    python benchmarks/matmul.py --kind q4_k --m 1,8,64 --peers ""      strips of a kind
    python benchmarks/matmul.py --plot benchmarks/results/h200.jsonl matmul.png

Method: timing.py. Every line of the table has its error beside it: ||y - ref|| / ||ref|| against a float64 product
with the decoded weights and x as it is, on the first 512 features and at most 64 rows. Times are of the whole call,
rounding x to 8 bits included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from shapes import MS, SHAPES, Shape
from timing import copies, graph_time, torch_graph_time
from warptile.formats import artifact
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES, Level, QuantTensor, dequantize, grid_shape
from warptile.formats.container import Checkpoint, Entry, dtype_name, write_safetensors
from warptile.kernels import marlin, mmq
from warptile.runtime import Session

HERE = Path(__file__).parent
CHECKED_FEATURES, CHECKED_ROWS = 512, 64
ROUNDED_X = 0.045
"""The largest error where x is rounded to 8 bits: for e4m3 (NMSE 2e-3); int8 stays below 0.0224 (5e-4)."""
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


# (element, group): scale levels as (dtype, rows of a block), the whole being (f32, None). Others have one for a row.
LEVELS = {
    ("e4m3", 128): (("f32", 128),),
    ("e2m1", 32): (("e8m0", 1),),
    ("e2m1", 16): (("e4m3", 1), ("f32", None)),
}


def random_linear(shape: Shape, element: str, group: int, scale: str) -> QuantTensor:
    """Random codes (never NaN) and scales; zero points for the integers that have no bias of their own."""
    rng = np.random.default_rng(0)
    e = ELEMENTS[element]
    codes = rng.integers(0, 2**e.bits, (shape.n, shape.k), dtype=np.uint8)
    if e.finite_nan:
        codes[codes & 0x7F == 0x7F] = 0
    levels = []
    for dtype, rows in LEVELS.get((element, group), ((scale, 1),)):
        block = (rows, shape.k if group == -1 else group) if rows else (shape.n, shape.k)
        data = rng.random(grid_shape(shape.n, shape.k, block)) * 0.01 + 0.005
        levels.append(Level(data.astype(SCALE_DTYPES[dtype]), block))
    integer = not e.is_float and not e.bias
    zero = rng.integers(0, 2**e.bits, levels[0].data.shape, dtype=np.uint8) if integer else None
    return QuantTensor(e, codes, tuple(levels), zero=zero)


def head_of(q: QuantTensor, n: int) -> QuantTensor:
    """The first n output features."""
    scales = tuple(Level(level.data[: -(-n // level.block[0])], level.block) for level in q.scales)
    return replace(q, codes=q.codes[:n], scales=scales, zero=None if q.zero is None else q.zero[:n])


# Smallest and largest scale of random strips by type; minima are as large.
STRIP_SCALES = {
    "f16": (0.001, 0.002),
    "f32": (0.01, 0.02),
    "u6": (1, 63),
    "s8": (-127, 127),
    "e8m0": (115, 123),
    "e4m3": (32, 80),
}


def random_strips(k: int, kind: str) -> QuantTensor:
    """CHECKED_FEATURES rows of random codes (never NaN) and factors that make strips of a kind."""
    rng, of = np.random.default_rng(0), mmq.KINDS[kind]
    element = ELEMENTS[next(iter(of.elements))]

    def level(dtype: str, rows: int, columns: int) -> Level:
        shape, to, (low, high) = (CHECKED_FEATURES // rows, k // columns), SCALE_DTYPES[dtype], STRIP_SCALES[dtype]
        if to.itemsize == 1:
            return Level(rng.integers(low, high, shape).astype(np.int8).view(to), (rows, columns))
        return Level(rng.uniform(low, high, shape).astype(to), (rows, columns))

    return QuantTensor(
        element,
        rng.choice(np.flatnonzero(np.isfinite(element.values())).astype(np.uint8), (CHECKED_FEATURES, k)),
        tuple(level(d, 1, own) for d, own in of.scales) or (level("f32", 128, 128),),
        offsets=tuple(level(d, 1, own) for d, own in of.minima),
    )


def packed(shape: Shape, args: argparse.Namespace) -> tuple[dict[str, np.ndarray], dict[str, Any], QuantTensor]:
    """(tensors, spec) of a random module, and its first CHECKED_FEATURES rows, which strips repeat."""
    if args.kind is None:
        scale = args.scale or {"float16": "f16", "bfloat16": "bf16"}[args.dtype]
        q = random_linear(shape, args.element, args.group, scale)
        return *marlin.pack(q), head_of(q, CHECKED_FEATURES)
    q = random_strips(shape.k, args.kind)
    tensors, spec = mmq.pack(q)
    again = shape.n // CHECKED_FEATURES
    tensors["strips"] = np.tile(tensors["strips"], (again, 1, 1, 1))
    if "scales" in tensors:
        tensors["scales"] = np.tile(tensors["scales"], (1, again))
    return tensors, {**spec, "n": shape.n, "n_padded": shape.n}, q


def write_copies(path: Path, tensors: dict[str, np.ndarray], spec: dict[str, Any]) -> tuple[list[str], int]:
    """An artifact with as many copies of a module as overflow L2. Returns their names, and the bytes of each."""
    names = [f"w{i}" for i in range(copies(max(data.nbytes for data in tensors.values())))]
    spec = artifact.module_spec(spec, {"format": "benchmark"})
    entries = [
        Entry(f"{name}.{suffix}", dtype_name(data.dtype), data.shape, lambda data=data: [data])
        for name in names
        for suffix, data in tensors.items()
    ]
    write_safetensors(path, entries, artifact.metadata(Checkpoint(path, {}), dict.fromkeys(names, spec)))
    return names, sum(data.nbytes for data in tensors.values())


def error(y: Any, x: Any, reference: np.ndarray) -> float:
    """Relative to the float64 product, on the features and rows that are checked."""
    rows = min(CHECKED_ROWS, x.shape[0])
    exact = x[:rows].astype(np.float64) @ reference.T
    got = y[:rows, : len(reference)].astype(np.float64)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact)) if np.isfinite(got).all() else float("inf")


def read_time(nbytes: int) -> float:
    """The speed of light: microseconds to read so many bytes once."""
    import cupy

    kernel = cupy.RawKernel((HERE / "read.cu").read_text(), "read_all")
    words = nbytes // 16
    buffers = [cupy.random.randint(0, 2**31, (words, 4), dtype=cupy.int32) for _ in range(copies(nbytes))]
    out = cupy.zeros(1, cupy.uint32)
    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    best = float("inf")
    for blocks in (2, 4):
        launch = lambda i, b=blocks: kernel((sms * b,), (512,), (buffers[i % len(buffers)], np.int64(words), out))  # noqa: E731
        best = min(best, graph_time(launch, max(20, len(buffers))))
    return best


def ours(
    session: Session, names: list[str], x: np.ndarray, m: int, dtype: str, numerics: str | None = None
) -> tuple[float, np.ndarray, str]:
    session.prepare(m, dtype, names, numerics)
    device_x = as_device(x)
    outs = [as_device(np.zeros((m, session.module(names[0]).n), DTYPES[dtype])) for _ in range(2)]
    call = lambda i: session.linear(names[i % len(names)], device_x, out=outs[i % 2], numerics=numerics)  # noqa: E731
    call(0)
    y = to_host(outs[0])
    how = next(line for line in session.explain(names[0], m, dtype, numerics).lines if line.startswith("why"))
    clock = torch_graph_time if dtype == "bfloat16" else graph_time  # each captures the stream its arrays bring
    return clock(call, max(20, len(names))), y, how.removeprefix("why: ").split(":")[0]


def as_device(a: np.ndarray) -> Any:
    """cupy has no bfloat16: those arrays live in torch."""
    import cupy

    if a.dtype != DTYPES["bfloat16"]:
        return cupy.asarray(a)
    import torch

    return torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)


def to_host(a: Any) -> np.ndarray:
    if hasattr(a, "get"):
        return np.asarray(a.get())
    import torch

    return a.view(torch.int16).cpu().numpy().view(DTYPES["bfloat16"])


def cublas(shape: Shape, x: np.ndarray) -> float:
    """The 16-bit product without quantisation, for the same x."""
    import torch

    dtype = torch.float16 if x.dtype == np.float16 else torch.bfloat16
    device_x = torch.from_numpy(x.astype(np.float32)).cuda().to(dtype)
    weights = [torch.randn(shape.n, shape.k, device="cuda", dtype=dtype) for _ in range(copies(2 * shape.n * shape.k))]
    return torch_graph_time(lambda i: device_x @ weights[i % len(weights)].T, max(20, len(weights)))


def humming(shape: Shape, element: str, group: int, x: np.ndarray, layers: list[Any]) -> float | None:
    """The peer, from its wheel; None where it is not installed. ``layers`` is filled once for each shape."""
    try:
        import torch
        from humming.layer import HummingLayer
    except ImportError:
        return None
    dtype = torch.float16 if x.dtype == np.float16 else torch.bfloat16
    bits = ELEMENTS[element].bits
    if not layers:
        weight = torch.randn(shape.n, shape.k, device="cuda", dtype=dtype) * 0.05
        config = {"dtype": f"int{bits}", "group_size": max(group, 0)}
        for _ in range(copies(shape.n * shape.k * bits // 8)):
            layer = HummingLayer(shape.n, shape.k, weight_config=dict(config), torch_dtype=dtype).cuda()
            layer.load_from_unquantized(weight)
            layer.transform()
            layers.append(layer)
    device_x = torch.from_numpy(x.astype(np.float32)).cuda().to(dtype)
    return torch_graph_time(lambda i: layers[i % len(layers)](device_x), max(20, len(layers)))


def measure(shape: Shape, args: argparse.Namespace, record: dict[str, Any]) -> list[dict[str, Any]]:
    import cupy
    import torch

    rows = []
    tensors, spec, head = packed(shape, args)
    reference = dequantize(head, np.float64)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copies.safetensors"
        names, nbytes = write_copies(path, tensors, spec)
        session = stack.enter_context(Session(path))
        weights_read = read_time(nbytes)
        layers: list[Any] = []
        for m in args.m:
            x = np.random.default_rng(m).standard_normal((m, shape.k)).astype(DTYPES[args.dtype])
            time, y, how = ours(session, names, x, m, args.dtype, args.numerics)
            row = {
                **record, "n": shape.n, "k": shape.k, "m": m, "element": spec["element"], "group": spec["group"],
                "dtype": args.dtype, **({"kind": args.kind} if args.kind else {}),
                **({"numerics": args.numerics} if args.numerics else {}),
                "us": round(time, 2), "error": error(y, x, reference), "how": how,
                "read_us": round(weights_read, 2), "cublas_us": None, "humming_us": None,
            }  # fmt: skip
            if "cublas" in args.peers:
                row["cublas_us"] = round(cublas(shape, x), 2)
            wanted = "humming" in args.peers and args.kind is None and m in args.humming_m
            if wanted and (peer := humming(shape, args.element, args.group, x, layers)) is not None:
                row["humming_us"] = round(peer, 2)
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()
            rows.append(row)
            print(line(row), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


HEADER = "     N      K     M |  read  cuBLAS  Humming |   ours   error  TFLOP/s | how"


def line(r: dict[str, Any]) -> str:
    def peer(key: str) -> str:
        return "-" if r[key] is None else f"{r[key]:.1f}"

    rate = 2 * r["m"] * r["n"] * r["k"] / r["us"] / 1e6
    return (
        f"{r['n']:6d} {r['k']:6d} {r['m']:5d} | {r['read_us']:5.1f} {peer('cublas_us'):>7} {peer('humming_us'):>8} | "
        f"{r['us']:6.1f} {r['error']:.1e} {rate:8.0f} | {r['how']}"
    )


def plot(results: Path, picture: Path) -> None:
    """Time over the roof by M, a panel for each shape, from the newest run of int4 group 128 in a results file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(text) for text in results.read_text().splitlines()]
    rows = [r for r in rows if (r["element"], r["group"], r["dtype"]) == ("u4b8", 128, "float16") and "what" not in r]
    newest: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for r in rows:
        point = newest[r["n"], r["k"]].setdefault(r["m"], {})
        point.update({key: value for key, value in r.items() if value is not None or key not in point})
    figure, axes = pyplot.subplots(1, len(newest), figsize=(5 * len(newest), 4), sharey=True, squeeze=False)
    for ax, ((n, k), by_m) in zip(axes[0], sorted(newest.items()), strict=True):
        ms = sorted(by_m)
        roof = [max(by_m[m]["read_us"], 2 * m * n * k / PEAK / 1e6) for m in ms]
        for key, label, colour in LINES:
            points = [(m, by_m[m][key] / r) for m, r in zip(ms, roof, strict=True) if by_m[m].get(key)]
            if points:
                width = 2.5 if key == "us" else 1.2
                ax.plot(*zip(*points, strict=True), marker="o", label=label, color=colour, linewidth=width)
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set(xscale="log", yscale="log", title=f"{n} x {k}", xlabel="M (rows of x)")
        ax.set_xticks(ms, [str(m) for m in ms], rotation=60, fontsize=7)
        ax.set_xticks([], minor=True)
    axes[0][0].set_ylabel("time / roof  (1 = speed of light)")
    axes[0][0].set_yticks([1, 1.5, 2, 3, 4, 6], ["1", "1.5", "2", "3", "4", "6"])
    axes[0][-1].legend()
    figure.suptitle("int4, group 128, fp16 activations, NVIDIA H200: lower is better")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


LINES = (("cublas_us", "cuBLAS fp16", "tab:blue"), ("humming_us", "Humming", "tab:orange"), ("us", "warptile", "black"))

PEAK = 750
"""TFLOP/s of an 8192^3 fp16 product on an H200 (680-750 measured 2026-11-29): the roof of large M."""


def about(commit: str | None) -> dict[str, Any]:
    """What every row records of its run."""
    import cupy

    if commit is None:
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {"date": date.today().isoformat(), "device": name, "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--element", default="u4b8", choices=["u4b8", "u4", "u8b128", "u8", "e4m3", "e2m1"])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--kind", choices=list(mmq.KINDS), help="strips of this kind instead of Marlin tiles")
    parser.add_argument("--numerics", help="exact, int8, e4m3; by default what the plan takes")
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES), help="activations")
    parser.add_argument("--scale", choices=list(SCALE_DTYPES), help="scales, by default the activations' type")
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=list(MS))
    parser.add_argument("--shape", action="append", type=lambda s: Shape(*map(int, s.split("x"))), help="NxK")
    parser.add_argument("--humming-m", type=lambda text: [int(m) for m in text.split(",")], default=list(MS))
    parser.add_argument("--peers", default="cublas,humming", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--commit", help="recorded; by default what git says")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULTS", "PNG"), help="draw instead of measuring")
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    record = about(args.commit)
    what = f"{args.kind} strips" if args.kind else f"{args.element} group {args.group}"
    print(*record.values(), f"{what}, {args.dtype}; us\n{HEADER}", sep=", ")
    rows = [row for shape in args.shape or SHAPES for row in measure(shape, args, record)]
    bound = ROUNDED_X if args.kind else 3e-3 if args.dtype == "bfloat16" else 1e-3
    if any(not row["error"] <= bound for row in rows):
        sys.exit("an error is out of bounds")


if __name__ == "__main__":
    main()
