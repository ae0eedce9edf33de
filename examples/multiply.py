"""Multiply with converted weights and compare with a float64 product of the quantising tool's own decoded weights.

python examples/multiply.py ARTIFACT EXPECTED.npz
"""

from __future__ import annotations

import sys

import numpy as np
from warptile.runtime import Session


def main(artifact: str, expected: str) -> None:
    rng = np.random.default_rng(0)
    weights = np.load(expected)
    with Session(artifact) as session:
        for name in weights.files:
            w = weights[name]  # [n, k] float32, as the quantising tool decodes them
            exact = np.array_equal(session.dequantize(name), w)
            x = rng.standard_normal((4, w.shape[1])).astype(np.float16)
            y = session.linear(name, x)
            reference = x.astype(np.float64) @ w.T.astype(np.float64)
            error = np.linalg.norm(y.astype(np.float64) - reference) / np.linalg.norm(reference)
            print(f"{name}  [{w.shape[0]} x {w.shape[1]}]  weights {'bit for bit' if exact else 'DIFFER'}")
            print(f"  y = x @ W.T  x {x.dtype} {list(x.shape)}  error against float64 {error:.1e}")
            print(f"  {session.explain(name, m=4)}")
            if not exact or error > 1e-3:
                sys.exit(f"{name}: not the weights that were converted")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
