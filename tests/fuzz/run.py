"""Coverage-guided fuzzing of what reads other people's files: ``python tests/fuzz/run.py --seconds 60``.

All targets in turn, each in a process of its own, or those that are named. A finding ends its target, leaves its input
under ``--findings`` and makes the exit code 1; ``--replay FILE TARGET`` runs one input with a plain traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

LIMITS = ("-timeout=10", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=1")
INSTRUMENTED = ["warptile.formats", "warptile.kernels", "warptile.convert", "warptile.runtime"]
COMPILED = ["warptile.formats._compiled"]
"""What numba compiles cannot be instrumented."""
GRACE = 120
"""Seconds beyond its own that a target may take, compiling loops included: then it hangs, which is a finding."""


def fuzz(name: str, corpus: Path, seconds: int, seed: int, findings: Path) -> None:
    """Run one target in this process; libFuzzer ends it."""
    import atheris

    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    os.environ |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(findings.absolute() / "numba")}
    with atheris.instrument_imports(include=INSTRUMENTED, exclude=COMPILED):
        from fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for i, start in enumerate(target.seeds()):
        (corpus / f"seed{i:03d}").write_bytes(start)
        target.run(start)  # loops are compiled when they are first used: libFuzzer's limits of time should not see it
    flags = (
        "-len_control=20",
        f"-seed={seed}",
        f"-max_total_time={seconds}",
        f"-max_len={target.max_len}",
        f"-artifact_prefix={findings}/{name}-",
    )
    kept = kept_input(findings / f"{name}-last", target.max_len)

    def run(data: bytes) -> None:
        kept[:4] = len(data).to_bytes(4, "little")
        kept[4 : 4 + len(data)] = data
        target.run(data)

    atheris.Setup([name, *LIMITS, *flags, str(corpus)], run)
    atheris.Fuzz()


def kept_input(path: Path, size: int) -> mmap.mmap:
    """A file that holds an input's length and bytes, whatever becomes of this process."""
    path.write_bytes(bytes(4 + size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def campaign(names: list[str], seconds: int, seed: int, corpora: Path, findings: Path) -> int:
    """Each target in a process of its own; prints a row for each. Returns the number of findings."""
    found = total = 0
    for name in names:
        start = time.monotonic()
        command = [sys.executable, __file__, "--in-process", "--seconds", str(seconds), "--seed", str(seed)]
        command += ["--corpus", str(corpora), "--findings", str(findings), name]
        # Sets in another order would be another sequence of inputs: with a seed, one that is the same each time.
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)} if seed else None
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environment, timeout=seconds + 2 * GRACE
            )
        except subprocess.TimeoutExpired:
            print(f"{name:20} hangs; its last input is in {findings / name}-last", flush=True)
            found += 1
            continue
        executed = re.search(r"number_of_executed_units: (\d+)", run.stderr)
        count = int(executed[1]) if executed else 0
        total += count
        print(f"{name:20} {count:10} executions {time.monotonic() - start:6.0f} s", flush=True)
        if run.returncode:
            found += 1
            print(run.stdout[-3000:] + run.stderr[-3000:], flush=True)
    print(f"{'in all':20} {total:10} executions, {found} findings", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=10, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="0: a new one each time")
    parser.add_argument("--corpus", type=Path, help="a directory that is kept; default: a new one")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--replay", type=Path)
    args = parser.parse_args()
    args.findings.mkdir(parents=True, exist_ok=True)
    if args.replay:
        from fuzz.targets import TARGETS

        TARGETS[args.targets[0]].run(args.replay.read_bytes())
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        corpora = args.corpus or Path(scratch)
        if args.in_process:
            fuzz(args.targets[0], corpora / args.targets[0], args.seconds, args.seed, args.findings)
        try:
            import atheris  # noqa: F401
        except ImportError:
            print(f"NOT FUZZED: there is no atheris for Python {sys.version.split()[0]}", file=sys.stderr)
            return 0
        from fuzz.targets import TARGETS

        return 1 if campaign(args.targets or list(TARGETS), args.seconds, args.seed, corpora, args.findings) else 0


if __name__ == "__main__":
    sys.exit(main())
