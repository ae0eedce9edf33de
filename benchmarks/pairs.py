"""A gate/up pair with SwiGLU in one launch against two products and an elementwise kernel, all in one run.

    python benchmarks/pairs.py                                   int4, group 128, fp16, 14336 x 4096
    python benchmarks/pairs.py --element u4 --group 32 --m 1,8 --out benchmarks/results/h200.jsonl

Method: timing.py; copies of both matrices together exceed L2. The bits of both ways must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matmul import about, random_linear, read_time, write_copies
from shapes import Shape
from timing import graph_time
from warptile.kernels import marlin
from warptile.runtime import Session

SILU = "float v = gate; y = (v >= 0 ? v / (1 + expf(-v)) : v * expf(v) / (1 + expf(v))) * (float)up"


def measure(shape: Shape, args: argparse.Namespace, record: dict[str, Any]) -> list[dict[str, Any]]:
    import cupy

    third = cupy.ElementwiseKernel("float16 gate, float16 up", "float16 y", SILU, "silu_times")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copies.safetensors"
        names, nbytes = write_copies(path, *marlin.pack(random_linear(shape, args.element, args.group, "f16")))
        names = names[: len(names) // 2 * 2]
        pairs = [(names[i], names[i + 1]) for i in range(0, len(names), 2)]
        with Session(path) as session:
            reads = read_time(2 * nbytes)
            for m in args.m:
                session.prepare(m, "float16", names, swiglu=pairs)
                x = cupy.asarray(np.random.default_rng(m).standard_normal((m, shape.k)).astype(np.float16))
                y, gate, up = (cupy.empty((m, shape.n), cupy.float16) for _ in range(3))

                def one(i: int, x: Any = x, y: Any = y) -> None:
                    session.swiglu(*pairs[i % len(pairs)], x, out=y)

                def two(i: int, x: Any = x, gate: Any = gate, up: Any = up) -> None:
                    session.linear(pairs[i % len(pairs)][0], x, out=gate)
                    session.linear(pairs[i % len(pairs)][1], x, out=up)

                def three(i: int, y: Any = y, gate: Any = gate, up: Any = up, two: Any = two) -> None:
                    two(i)
                    third(gate, up, y)

                calls = max(20, len(pairs))
                row = {
                    **record, "n": shape.n, "k": shape.k, "m": m, "element": args.element, "group": args.group,
                    "dtype": "float16", "what": "swiglu", "us": round(graph_time(one, calls), 2),
                    "separate_us": round(graph_time(three, calls), 2), "read_us": round(reads, 2),
                }  # fmt: skip
                one(0), two(0)
                g, u, got = (a.get().astype(np.float64) for a in (gate, up, y))
                row["error"] = float(np.linalg.norm(g / (1 + np.exp(-g)) * u - got) / np.linalg.norm(got))
                rows.append(row)
                ratio = row["separate_us"] / row["us"]
                what = f"{shape.n} x {shape.k}, m = {m}: one launch {row['us']}, three {row['separate_us']} us"
                print(f"{what} ({ratio:.2f} x), read {row['read_us']}, error {row['error']:.1e}", flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--element", default="u4b8", choices=["u4b8", "u4", "u8b128", "u8"])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=[1, 8])
    parser.add_argument(
        "--shape", type=lambda s: Shape(*map(int, s.split("x"))), default=Shape(14336, 4096), help="NxK"
    )
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--commit", help="recorded; by default what git says")
    args = parser.parse_args()
    rows = measure(args.shape, args, about(args.commit))
    if any(not row["error"] <= 1e-3 for row in rows):
        sys.exit("an error is out of bounds")


if __name__ == "__main__":
    main()
