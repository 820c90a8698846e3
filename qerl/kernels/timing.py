"""Geometries of decoder layers, and the time of a captured step."""

from collections.abc import Callable

import torch

READ_BYTES_PER_US = 4.62e6  # measured read-only bandwidth of an H200
FLOPS_PER_US = 790e6  # measured bf16 matrix rate of an H200

GEOMETRIES = {  # Qwen2.5: hidden, key and value heads x head width, MLP
    "3b": (2048, 256, 11008),
    "7b": (3584, 512, 18944),
    "14b": (5120, 1024, 13824),
    "32b": (5120, 1024, 27648),
}


def shapes(geometry: str) -> dict[str, tuple[int, int]]:
    """(N, K) of the four linears of a decoder layer."""
    width, kv, mlp = GEOMETRIES[geometry]
    return {
        "qkv": (width + 2 * kv, width),
        "o": (width, width),
        "gate_up": (2 * mlp, width),
        "down": (width, mlp),
    }


def graph_us(fn: Callable[[], object], replays: int = 20) -> float:
    """Median time of a replay of `fn`'s CUDA graph, us."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    for _ in range(2):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in events)
    return times[len(times) // 2]
