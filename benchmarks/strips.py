"""Products with MMQ strips, x in 8 bits and x as it is, the rounding of x included.

    python benchmarks/strips.py --kind q4_0,q4_k,q8_0,q6_k,mxfp4 --m 1,8,16,64,256,2048

Method: timing.py. Beside each time NMSE and ||y - ref|| / ||ref|| against a float64 product with the decoded weights,
on the first 512 features and at most 64 rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from matmul import CHECKED_FEATURES, CHECKED_ROWS, DTYPES, as_device, head_of, to_host
from shapes import SHAPES, Shape
from timing import copies, graph_time, torch_graph_time
from warptile.formats import artifact
from warptile.formats.canonical import ELEMENTS, SCALE_DTYPES, Level, QuantTensor, dequantize
from warptile.formats.container import Checkpoint, Entry, dtype_name, write_safetensors
from warptile.kernels import mmq
from warptile.kernels.mmq_strips import KINDS
from warptile.runtime import Session

RANGES = {"u6": (1, 64), "s8": (-128, 128), "e8m0": (115, 123), "e4m3": (0x20, 0x48)}


def random_linear(shape: Shape, name: str) -> QuantTensor:
    """Random codes and factors of a kind of strip; weights of about 0.01 to 1."""
    rng, kind = np.random.default_rng(0), KINDS[name]
    element = ELEMENTS[next(iter(kind.elements))]

    def level(dtype: str, own: int, size: float) -> Level:
        grid = shape.n, -(-shape.k // own)
        if dtype in RANGES:
            return Level(rng.integers(*RANGES[dtype], grid).astype(np.int8).view(SCALE_DTYPES[dtype]), (1, own))
        return Level((rng.random(grid) * size + size).astype(SCALE_DTYPES[dtype]), (1, own))

    def levels(of: tuple[tuple[str, int], ...]) -> tuple[Level, ...]:
        return tuple(level(dtype, own, size) for (dtype, own), size in zip(of, (0.01, 0.0005), strict=False))

    codes = rng.integers(0, 2**element.bits, (shape.n, shape.k), dtype=np.uint8)
    return QuantTensor(element, codes, levels(kind.scales), offsets=levels(kind.minima))


def write_copies(path: Path, q: QuantTensor) -> tuple[list[str], int]:
    """An artifact with as many copies of the module as overflow L2. Returns their names, and the bytes of each."""
    tensors, spec = mmq.pack(q)
    nbytes = sum(data.nbytes for data in tensors.values())
    names = [f"w{i}" for i in range(copies(nbytes))]
    spec = artifact.module_spec(spec, {"format": "benchmark"})
    entries = [
        Entry(f"{name}.{suffix}", dtype_name(data.dtype), data.shape, lambda data=data: [data])
        for name in names
        for suffix, data in tensors.items()
    ]
    write_safetensors(path, entries, artifact.metadata(Checkpoint(path, {}), dict.fromkeys(names, spec)))
    return names, nbytes


def measure(shape: Shape, kind: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    q = random_linear(shape, kind)
    head = head_of(q, CHECKED_FEATURES)
    head = QuantTensor(head.element, head.codes, head.scales, offsets=tuple(
        Level(level.data[:CHECKED_FEATURES], level.block) for level in q.offsets))  # fmt: skip
    reference = dequantize(head, np.float64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copies.safetensors"
        names, nbytes = write_copies(path, q)
        with Session(path) as session:
            for m in args.m:
                for numerics in args.numerics:
                    x = np.random.default_rng(m).standard_normal((m, shape.k)).astype(DTYPES[args.dtype])
                    session.prepare(m, args.dtype, names, numerics)
                    on_device = as_device(x)
                    outs = [as_device(np.zeros((m, shape.n), DTYPES[args.dtype])) for _ in range(2)]

                    def call(i: int, on_device: Any = on_device, outs: Any = outs, numerics: str = numerics) -> None:
                        session.linear(names[i % len(names)], on_device, out=outs[i % 2], numerics=numerics)

                    call(0)
                    rows = min(m, CHECKED_ROWS)
                    got = to_host(outs[0])[:rows, :CHECKED_FEATURES].astype(np.float64)
                    exact = x[:rows].astype(np.float64) @ reference.T
                    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
                    lines = session.explain(names[0], m, args.dtype, numerics).lines
                    how = next((line for line in lines if line.startswith("why")), lines[0])
                    clock = torch_graph_time if args.dtype == "bfloat16" else graph_time
                    us = clock(call, max(20, len(names)))
                    yield {
                        "layout": "mmq", "kind": kind, "n": shape.n, "k": shape.k, "m": m, "dtype": args.dtype,
                        "numerics": numerics, "us": round(us, 2), "error": error, "nmse": error**2, "bytes": nbytes,
                        "how": how.removeprefix("why: ").split(":")[0],
                    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", type=lambda text: text.split(","), default=["q4_0", "q4_k", "q8_0", "q6_k", "mxfp4"])
    parser.add_argument("--numerics", type=lambda text: text.split(","), default=["int8", "exact"])
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=[1, 8, 16, 64, 256, 2048])
    parser.add_argument("--shape", action="append", type=lambda s: Shape(*map(int, s.split("x"))), help="NxK")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--commit", required=True, help="recorded")
    args = parser.parse_args()
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    record = {"date": date.today().isoformat(), "device": name, "commit": args.commit}
    for shape in args.shape or SHAPES[-2:]:
        for kind in args.kind:
            for row in measure(shape, kind, args):
                print(
                    f"{row['n']:6d} {row['k']:6d} {row['m']:5d} {kind:7} {row['numerics']:6} {row['us']:8.1f} us  "
                    f"NMSE {row['nmse']:.1e}  error {row['error']:.1e}  {row['how']}",
                    flush=True,
                )
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps({**record, **row}) + "\n")


if __name__ == "__main__":
    main()
