"""What several processes agree on: the step's denominators and the summed gradient.

Losses are sums whose weights hold the global normalisation (see `qerl.types.Experience`), so the
gradients of the processes are summed, not averaged, and nothing depends on how the prompts were
split between them.
"""

import hashlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

ReduceSum = Callable[[float], float]


def is_distributed() -> bool:
    """Whether this run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_processes(value: float) -> float:
    """The sum of a host scalar over all processes; the value itself in a run of one."""
    if not is_distributed():
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its sum over all processes; a process without one adds zeros."""
    if not is_distributed():
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def gather_objects(item: object) -> list[object]:
    """The item of every process, in rank order."""
    if not is_distributed():
        return [item]
    items: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if not is_distributed():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def all_max(tensor: Tensor) -> Tensor:
    """The elementwise maximum of a tensor over all processes."""
    if not is_distributed():
        return tensor
    highest = tensor.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


# Counts and rates of which every process has its own share; all other metrics are means.
_SHARES = (
    "rollout/tokens",
    "rollout/tok_per_s",
    "rollout/prefill_tokens",
    "rollout/groups_drawn",
    "rollout/peak_kv_gib",
)


def merged_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The run's metrics out of each process's: shares are added, the others averaged.

    Processes hold equal numbers of prompts, so the mean of their means is the mean.
    """
    if not is_distributed():
        return metrics
    every = [item for item in gather_objects(metrics) if isinstance(item, dict)]
    names = list(dict.fromkeys(name for item in every for name in item))
    found = {name: [item[name] for item in every if name in item] for name in names}
    return {
        name: sum(values) / (1 if name in _SHARES else len(values))
        for name, values in found.items()
    }


def assert_equal(tensors: Iterable[Tensor], what: str) -> None:
    """Stop where the processes hold different values of what must be one thing."""
    if not is_distributed():
        return
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    digests = gather_objects(digest.hexdigest())
    if any(other != digests[0] for other in digests):
        raise RuntimeError(f"{what} differ between processes: {digests}")
