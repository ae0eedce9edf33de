"""A run that dies is carried on by the same command: the same bytes, finished shards kept, nothing left over."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from warptile.convert import convert, executors, jobs, pipeline, verify
from warptile.formats import bits, output
from warptile.formats.errors import UsageError, WarptileError

# The command line; after the second shard it prints a line and waits.
HALTING = """
import signal, sys, time
from warptile.convert import manifest
from warptile.convert.cli import main
publish, done = manifest.publish, []
def halt(*args):
    publish(*args)
    done.append(args)
    if len(done) == 2:
        print("two", flush=True)
        time.sleep(60)
manifest.publish = halt
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
sys.exit(main(sys.argv[1:]))
"""
LIMIT = ("--max-shard-size", "4KB")


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def shards(directory: Path) -> dict[str, tuple[int, int]]:
    """{file: what no rewriting leaves as it was}"""
    found = sorted(directory.rglob("*.safetensors"))
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


@pytest.fixture
def src(make_directory) -> Path:
    return make_directory(shards=2)


@pytest.fixture
def want(src: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a run that nothing happens to writes."""
    return files(convert(src, tmp_path / "want", to="marlin", max_shard_size="4KB").dst)


def killed(src: Path, number: int = signal.SIGKILL) -> Path:
    """The partial of a run that was stopped after two shards."""
    args = [sys.executable, "-c", HALTING, "gptq-to-marlin", str(src), *LIMIT]
    run = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "two\n"
    run.send_signal(number)
    run.communicate(timeout=30)
    return src.with_name("model-marlin.partial")


def again(src: Path, **options: object) -> Path:
    dst = convert(src, to="marlin", **{"max_shard_size": "4KB", **options}).dst
    assert sorted(p.name for p in src.parent.iterdir() if p.name.startswith("model")) == ["model", "model-marlin"]
    return dst


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_finished_shards_are_kept(src, want, number):
    before = shards(killed(src, number))
    dst = again(src)
    assert files(dst) == want
    assert len(before) == 2
    assert shards(dst).items() >= before.items()
    verify(dst, src)


def test_a_finished_shard_that_was_changed_since_is_made_again(src, want):
    partial = killed(src)
    first, second = sorted(partial.rglob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    before = shards(partial)
    dst = again(src)
    assert files(dst) == want
    assert shards(dst)[second.name] == before[second.name]


def test_another_source_makes_everything_anew(src, want):
    partial = killed(src)
    before = shards(partial)
    file = sorted(src.glob("*.safetensors"))[0]
    os.utime(file, ns=(0, 0))
    dst = again(src)
    assert files(dst) == want
    assert not shards(dst).items() & before.items()


def test_other_options_make_everything_anew(src, want):
    before = shards(killed(src))
    dst = again(src, max_shard_size="6KB")
    assert not shards(dst).items() & before.items()
    verify(dst, src)


def test_a_full_disk_keeps_what_is_finished_and_says_so(src, want, monkeypatch):
    write, headers = output._write_all, []

    def fill(descriptor: int, data: memoryview) -> None:
        if bytes(data[8:9]) == b"{":
            headers.append(descriptor)
        if len(headers) == 3:
            raise OSError(28, "No space left on device")
        write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(output, "_write_all", fill)
        with pytest.raises(WarptileError, match=r"No space left.*goes on after \d finished shards"):
            convert(src, to="marlin", max_shard_size="4KB")
    partial = src.with_name("model-marlin.partial")
    assert not list(partial.glob(".tmp-*"))
    before = shards(partial)
    dst = again(src)
    assert files(dst) == want
    assert before
    assert shards(dst).items() >= before.items()


def test_a_source_that_vanishes_is_one_line(src, monkeypatch):
    opened = jobs._open

    def vanish(job, module, unit):
        for file in src.glob("*.safetensors"):
            file.unlink()
        return opened(job, module, unit)

    monkeypatch.setattr(jobs, "_open", vanish)
    with pytest.raises(WarptileError, match="No such file"):
        convert(src, to="marlin")


def test_a_run_that_was_replaced_publishes_nothing(src, monkeypatch):
    finish = jobs.write_safetensors

    def replaced(path, *args):
        digest = finish(path, *args)
        (path.parent / ".manifest" / "run").write_text("another")
        return digest

    monkeypatch.setattr(jobs, "write_safetensors", replaced)
    with pytest.raises(WarptileError, match="another run has replaced this one"):
        convert(src, to="marlin")


def test_killed_at_any_moment(src, want):
    """kill -9 after random times; each run adds to what the one before it finished."""
    args = [sys.executable, "-m", "warptile.convert", "gptq-to-marlin", str(src), *LIMIT]
    start = time.perf_counter()
    subprocess.run([*args, "--dry-run"], check=True, capture_output=True)
    usual = time.perf_counter() - start
    for _ in range(4):
        run = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(usual * random.uniform(0.7, 1.1))
        run.kill()
        run.wait()
        if src.with_name("model-marlin").exists():
            break
    assert files(again(src, overwrite=True)) == want


MEMORY = """
import os, sys, threading, time
from pathlib import Path
from warptile.convert import convert
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if "RssAnon" in line)
peak = []
def watch():
    while True:
        peak.append(anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
result = convert(sys.argv[1], to="marlin", workers=2)
print(max(peak), result.plan.peak)
"""


def test_anonymous_memory_of_the_process_does_not_grow_with_a_tensor(make_file, module_tensors):
    parts = module_tensors(k=16384, n=8192, group=128)
    src = make_file(tensors={f"layer.{suffix}": array for suffix, array in parts.items()})
    codes = 16384 * 8192
    out = subprocess.run([sys.executable, "-c", MEMORY, str(src)], check=True, capture_output=True, text=True)
    peak, foretold = map(int, out.stdout.split())
    base = 120_000_000  # interpreter, NumPy, numba
    assert peak < base + foretold
    assert peak < base + codes


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    distributed = pytest.importorskip("distributed", reason="the extra distributed is not installed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
    ) as started:
        yield started.scheduler_address


@pytest.mark.filterwarnings("default")
def test_a_cluster_writes_the_same_bytes(src, want, cluster):
    dst = convert(src, to="marlin", max_shard_size="4KB", scheduler=cluster).dst
    assert files(dst) == want


@pytest.mark.filterwarnings("default")
def test_no_scheduler_is_one_line(src, monkeypatch):
    pytest.importorskip("distributed", reason="the extra distributed is not installed")
    monkeypatch.setattr(executors, "CONNECT", "0.2s")
    with pytest.raises(WarptileError, match="no scheduler answers"):
        convert(src, to="marlin", scheduler="tcp://127.0.0.1:1")


def test_without_the_package_a_scheduler_is_a_usage_error(src, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match="needs the package distributed"):
        convert(src, to="marlin", scheduler="tcp://127.0.0.1:1")


def test_without_numba_the_bytes_are_the_same_and_a_note_says_it(src, want, monkeypatch):
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    monkeypatch.setattr(bits, "_compiled", lambda: None)
    result = convert(src, to="marlin", max_shard_size="4KB")
    assert files(result.dst) == want
    assert any("numba" in text for _, text in result.notes)


def test_records_tell_sizes_and_checksums(src):
    partial = killed(src)
    for record in (partial / ".manifest").glob("*.json"):
        shard = partial / "model-marlin" / record.stem
        said = json.loads(record.read_text())
        checksum = jobs.manifest.checksum(shard)
        assert (said["nbytes"], said["xxh3"]) == (shard.stat().st_size, checksum)


# In a worker: tells of every shard it publishes; one that is to die does so when its second shard is written, unnamed.
MORTAL = """
import os, signal, time
from warptile.convert import manifest
publish, count = manifest.publish, []
def tell(written, shard, *rest):
    count.append(shard)
    if {dies} and len(count) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    publish(written, shard, *rest)
    time.sleep(0.3)  # so that each worker gets some
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}} {{shard.name}} {{shard.stat().st_ino}}\\n")
manifest.publish = tell
"""


@pytest.mark.filterwarnings("default")
def test_a_killed_worker_costs_its_shard_and_no_other(src, want, tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra distributed is not installed")
    log = tmp_path / "published"
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = client.run(os.getpid)
        for worker, dies in zip(pids, (True, False), strict=True):
            client.run(exec, MORTAL.format(dies=dies, log=str(log)), {}, workers=[worker])
        dst = convert(src, to="marlin", max_shard_size="4KB", scheduler=cluster.scheduler_address).dst
        left = client.run(os.getpid)
    assert files(dst) == want
    victim, other = map(str, pids.values())
    assert int(victim) not in left.values()
    assert int(other) in left.values()
    published = [line.split() for line in log.read_text().splitlines()]
    assert [pid for pid, _, _ in published].count(victim) == 1
    assert len({shard for _, shard, _ in published}) == len(published) >= 2
    for _, shard, inode in published:
        assert (dst / shard).stat().st_ino == int(inode), f"{shard} was made again"
