"""What the host's threads, copies and wgmma are for: kernels with a fault do not pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_kernels import COMPILER, sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

WAIT = "barrier_wait(shared_address(&shared."
FAULTS = {
    "nothing": ("", "", ""),
    "a slice is not waited for": ("wgmma_wait<0>();", "wgmma_wait<1>();", "nobody waited for a wgmma"),
    "a stage is given back before it is read": ("wgmma_wait<0>();", "if (ends) wgmma_wait<0>();", "differ"),
    "a fence is missing": ("wgmma_fence();", "", "a wgmma without a fence"),
    "x is not waited for": (f"{WAIT}full[", f"if (0) {WAIT}full[", "arrivals at the mbarrier"),
    "a stage is filled while it is read": (f"{WAIT}empty[", f"if (0) {WAIT}empty[", "arrivals at the mbarrier"),
    "bytes are miscounted": ("sizeof(shared.x[0]) + (K", "sizeof(shared.x[0]) / 2 + (K", "no thread can run"),
    "blocks copy the same part": ("rank * (sizeof", "0 * (sizeof", "differ"),
    "a block does not wait for the other": ("barrier_arrive_at(empty, lane)", "barrier_arrive(empty)", "differ"),
    "a cluster does not end together": ("meet_cluster(); // nobody", "(void)0; // nobody", "of a block that has ended"),
    "a part is added before it is there": ("const u32 others = tail - head", "const u32 others = 0", "differ"),
    "a turn is not given": ("report(TURN_OF + 1 - group, 256)", "(void)0", "no thread can run"),
    "a store goes beyond the last column": ("columns - 1);", "columns);", "a write beside y"),
}
"""Text of wgmma.cuh, what it becomes, and what is then said."""

PRODUCTS = """
import sys
from pathlib import Path
import numpy as np
from dataclasses import replace
from hopper_cases import multiplied, weights_of
from linears import Case, random_quant
from warptile.kernels import marlin
from warptile.kernels.wgmma_plan import Wgmma

q = random_quant(Case(scale="f16", low=0.25, high=0.25, n=499, k=1024))
x = np.random.default_rng(0).integers(-2, 3, (150, q.k)).astype(np.float16)
tile = Wgmma(128, 128, 1, cluster=2)
for seed in range(4):
    y = multiplied(marlin, q, x, replace(tile, cut=seed > 1), Path(sys.argv[1]), seed=seed, ldy=504)
    if not np.array_equal(y, np.float64(x) @ weights_of(q).T):
        sys.exit("products differ")
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_does_not_pass(fault: str, tmp_path: Path) -> None:
    right, wrong, said = FAULTS[fault]
    text = (sources(tmp_path) / "wgmma.cuh").read_text()
    assert right in text
    (tmp_path / "wgmma.cuh").write_text(text.replace(right, wrong) if right else text)
    path = os.pathsep.join(filter(None, sys.path))
    command = (sys.executable, "-c", PRODUCTS, str(tmp_path))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert said in done.stderr, done.stderr
    assert (done.returncode == 0) == (fault == "nothing"), done.stderr
