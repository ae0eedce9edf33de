"""Conversion against a file copy: a synthetic checkpoint, ``cp`` and fsync of it, then the conversion, in one run.

    python benchmarks/convert.py --directory DIR [--size 4] [--only gptq-to-marlin ..] [--repeat 3]

Prints seconds, GB/s of source bytes, the ratio to the copy and the peak of anonymous memory; appends a JSON line for
each to benchmarks/results/convert.jsonl, or to --results. ``pack`` is the same work without writing, read from the
system's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from warptile.formats.container import Entry, nbytes, write_safetensors

Array = NDArray[Any]
Fields = dict[str, tuple[str, tuple[int, ...], Callable[[], Iterator[Array]]]]

RESULTS = Path(__file__).parent / "results" / "convert.jsonl"
N = 16384
WEIGHTS = 250_000_000 // (N * 1024) * 1024 * N
"""Weights of one byte in the largest tensor, about 250 MB."""
GROUP = 128

# What a conversion does, but for writing: "seconds processor-seconds peak".
PACK = """
import resource, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from warptile.convert.jobs import Job, buffers
from warptile.convert.plan import make
from warptile.convert.workers import threads
from warptile.formats.container import open_checkpoint
plan = make(open_checkpoint(sys.argv[1]), None, sys.argv[2])
owner = {m.tensors[0].name: m for m in plan.converted}
pieces = [(owner.get(piece[0].name), piece) for piece in plan.pieces]
def pack(pieces):
    job = Job("", Path(), "", plan.checkpoint, plan.layout, tuple(pieces), {}, 0)
    with ThreadPoolExecutor(threads(0)) as pool:
        for _ in buffers(job, pool):
            pass
def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
pack(pieces[:1])
start, before = time.perf_counter(), processor()
pack(pieces)
print(time.perf_counter() - start, processor() - before)
"""


def random(*shape: int) -> Array:
    """uint8, the same each time."""
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def repeated(size: int, block: Array) -> Callable[[], Iterator[Array]]:
    """``size`` bytes of a block over and over."""

    def data() -> Iterator[Array]:
        flat = block.reshape(-1).view(np.uint8)
        for first in range(0, size, flat.size):
            yield flat[: size - first]

    return data


def gptq() -> Fields:
    k = 2 * WEIGHTS // N
    return {
        "qweight": ("I32", (k // 8, N), repeated(WEIGHTS, random(1 << 24))),
        "qzeros": ("I32", (k // GROUP, N // 8), repeated(k // GROUP * N // 2, np.full(1 << 16, 0x77, np.uint8))),
        "scales": ("F16", (k // GROUP, N), repeated(k // GROUP * N * 2, np.full(1 << 16, 0.01, np.float16))),
    }


def awq() -> Fields:
    k = 2 * WEIGHTS // N
    return {
        "qweight": ("I32", (k, N // 8), repeated(WEIGHTS, random(1 << 24))),
        "qzeros": ("I32", (k // GROUP, N // 8), repeated(k // GROUP * N // 2, random(1 << 16))),
        "scales": ("F16", (k // GROUP, N), repeated(k // GROUP * N * 2, np.full(1 << 16, 0.01, np.float16))),
    }


def fp8() -> Fields:
    k = WEIGHTS // N
    codes = random(1 << 24)
    codes[codes & 0x7F == 0x7F] = 0
    grid = -(-N // 128), -(-k // 128)
    return {
        "weight": ("F8_E4M3", (N, k), repeated(WEIGHTS, codes)),
        "weight_scale_inv": ("F32", grid, repeated(grid[0] * grid[1] * 4, np.full(1 << 10, 0.01, np.float32))),
    }


SAFETENSORS: dict[str, tuple[Callable[[], Fields], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "checkpoint_format": "gptq"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}
# ggml type -> (bytes of a block, weights of one, its f16 factors at the front)
GGUF = {"Q4_0": (18, 32, 1), "Q4_K": (144, 256, 2), "Q8_0": (34, 32, 1)}
# Name -> (what makes the source, source, layout)
CASES = {f"{name}-to-marlin": (name, name, "marlin") for name in SAFETENSORS} | {
    f"gguf-to-mmq {kind}": (kind, "gguf", "mmq") for kind in GGUF
}


def make(kind: str, directory: Path, size: float) -> Path:
    """A checkpoint of about ``size`` GB whose tensors have about 250 MB."""
    if kind in GGUF:
        return make_gguf(kind, directory / f"{kind}.gguf", size)
    fields, quantization = SAFETENSORS[kind]
    parts = fields()
    count = max(1, round(size * 1e9 / sum(nbytes(dtype, shape) for dtype, shape, _ in parts.values())))
    model = directory / kind
    model.mkdir()
    entries = [Entry(f"layers.{i}.linear.{s}", *part) for i in range(count) for s, part in parts.items()]
    write_safetensors(model / "model.safetensors", entries, {"format": "pt"})
    (model / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return model


def make_gguf(kind: str, path: Path, size: float) -> Path:
    length, weights, factors = GGUF[kind]
    k = WEIGHTS // N * weights // length // 1024 * 1024
    rows = random(N, k // weights, length)
    rows[..., : 2 * factors] = np.frombuffer(np.float16([0.01] * factors).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(path, "none")
    for i in range(max(1, round(size * 1e9 / rows.nbytes))):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", rows.reshape(N, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def copy(src: Path, dst: Path) -> float:
    """Seconds of ``cp`` and fsync of the weights."""
    start = time.perf_counter()
    subprocess.run(["cp", str(src), str(dst)], check=True)
    flush(dst)
    seconds = time.perf_counter() - start
    dst.unlink()
    return seconds


@dataclass(frozen=True)
class Run:
    """A program that ended well."""

    wall: float
    processor: float
    """Seconds of all its threads, the system's for them too."""
    peak: int
    """Bytes of anonymous memory, looked at every 10 ms."""
    output: str


def measured(args: list[str]) -> Run:
    start, peak = time.perf_counter(), 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
    while run.poll() is None:
        try:
            status = Path(f"/proc/{run.pid}/status").read_text()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in status.splitlines() if "RssAnon" in line)])
        time.sleep(0.01)
    output, _ = run.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode:
        raise SystemExit(f"{args}: {run.returncode}")
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Run(time.perf_counter() - start, used, peak, output)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":")[1].strip() for line in lines if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def bench(name: str, directory: Path, size: float, repeat: int) -> Iterator[dict[str, Any]]:
    kind, source, layout = CASES[name]
    src = make(kind, directory, size)
    weights = src if src.is_file() else src / "model.safetensors"
    nbytes_in, dst = weights.stat().st_size, directory / "out"
    convert = [sys.executable, "-m", "warptile.convert"]
    try:
        for _ in range(repeat):
            load = os.getloadavg()[0]
            os.sync()
            cp = copy(weights, directory / "copy")
            os.sync()
            run = measured([*convert, f"{source}-to-{layout}", str(src), str(dst), "--quiet"])
            check = measured([*convert, "verify", str(dst), "--against", str(src), "--quiet"])
            shutil.rmtree(dst)
            pack = measured([sys.executable, "-c", PACK, str(src), layout])
            pack_wall, pack_processor = map(float, pack.output.split())
            yield {
                "case": name,
                "gb": round(nbytes_in / 1e9, 3),
                "cp_s": round(cp, 2),
                "convert_s": round(run.wall, 2),
                "cpu_s": round(run.processor, 2),
                "ratio": round(run.wall / cp, 2),
                "convert_gbps": round(nbytes_in / run.wall / 1e9, 2),
                "pack_gbps": round(nbytes_in / pack_wall / 1e9, 2),
                "pack_cpu_s": round(pack_processor, 2),
                "verify_gbps": round(nbytes_in / check.wall / 1e9, 2),
                "verify_cpu_s": round(check.processor, 2),
                "peak_mb": round(run.peak / 1e6),
                "verify_peak_mb": round(check.peak / 1e6),
                "load": round(load, 2),
            }
    finally:
        shutil.rmtree(src) if src.is_dir() else src.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="On the disk to measure; made and removed.")
    parser.add_argument("--size", type=float, default=4, help="GB of each checkpoint.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.directory.mkdir()
    args.results.parent.mkdir(exist_ok=True)
    try:
        for name in args.only:
            for row in bench(name, args.directory, args.size, args.repeat):
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                with args.results.open("a") as out:
                    out.write(json.dumps({**row, "machine": machine(), "date": time.strftime("%Y-%m-%d")}) + "\n")
    finally:
        shutil.rmtree(args.directory)


if __name__ == "__main__":
    main()
