"""One way to time everything: a CUDA graph of many calls over weight copies larger than L2, median of its replays.

An H200 has 60 MB of L2; copies that together exceed 240 MB are never served from it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

COLD_BYTES = 240_000_000


def copies(bytes_each: int) -> int:
    """How many copies of the weights make every call read device memory."""
    return max(2, -(-COLD_BYTES // bytes_each))


def graph_time(call: Callable[[int], Any], calls: int, replays: int = 9) -> float:
    """Microseconds per call of ``call(i)``, i in 0..calls-1, captured once on a CuPy stream and replayed."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call(0)
        stream.synchronize()
        stream.begin_capture()
        for i in range(calls):
            call(i)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        times = []
        for _ in range(replays):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
    return median(times)


def torch_graph_time(call: Callable[[int], Any], calls: int, replays: int = 9) -> float:
    """The same for peers that launch on PyTorch's stream."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        graph.replay()
        stream.synchronize()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return median(times)
