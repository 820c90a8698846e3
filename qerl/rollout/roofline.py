"""The least time of a decode step on an H200, from bytes and operations alone.

    floor = Σ over parts of max(bytes / bandwidth, operations / rate)

Parts: linears of all layers with their adapters, head, attention. What is left out: prefill,
drawing, every launch. Bandwidth and rate are measured ones, not those of a data sheet.
"""

from qerl.kernels.timing import FLOPS_PER_US, READ_BYTES_PER_US
from qerl.model.spec import Geometry


def step_floor_us(
    geometry: Geometry, bits: float, *, rows: int, group: int, prompt: int, own: float, rank: int
) -> float:
    """Least time of one decode step, us.

    Args:
        geometry: of the model; its head is bf16.
        bits: stored bits a weight of the linears.
        rows: B, sequences that run together.
        group: sequences that share a prompt; its keys and values are read once for all of them.
        prompt: tokens of a prompt.
        own: tokens that a sequence has drawn, on average over the steps.
        rank: LoRA rank on all linears, bf16; 0 for none.
    """
    weights = geometry.linear_weights
    low = rank * geometry.layers * sum(n + k for n, k in geometry.linear_shapes().values())
    head = geometry.vocab_size * geometry.hidden_size
    cached = rows // group * prompt + rows * own  # tokens
    kv_bytes = 4 * geometry.layers * geometry.kv_heads * geometry.head_dim * cached
    parts = (
        (weights * bits / 8 + 2 * low, 2 * rows * (weights + low)),
        (2 * head, 2 * rows * head),
        (kv_bytes, 0),
    )
    return sum(max(b / READ_BYTES_PER_US, f / FLOPS_PER_US) for b, f in parts)


def floor_tok_per_s(
    geometry: Geometry, bits: float, *, rows: int, group: int, prompt: int, new: int, rank: int
) -> float:
    """Tokens per second if every step of a rollout took its floor and nothing else took time.

    Args:
        geometry: of the model.
        bits: stored bits a weight of the linears.
        rows: sequences that run together.
        group: sequences that share a prompt.
        prompt: tokens of a prompt.
        new: tokens of a completion.
        rank: LoRA rank on all linears.
    """
    sizes = {"rows": rows, "group": group, "prompt": prompt, "rank": rank}
    return rows / step_floor_us(geometry, bits, own=new / 2, **sizes) * 1e6
