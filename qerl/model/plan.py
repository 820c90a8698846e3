"""What a model takes in memory, from its sizes alone; and a clear refusal where it does not fit.

    linears = weights · bits / 8        embeddings = V · D · 2, twice where the head is not tied

The plan covers the policy and its optimizer. Activations and the KV cache scale with the workload
and come on top. GB is 10⁹ bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from qerl.model.head import CHUNK_CELLS
from qerl.model.linear import LoRAConfig
from qerl.model.spec import Geometry
from qerl.quant.packed import Format

OPTIMIZER_BYTES = 4 + 8
"""A trained weight's fp32 gradient and the two fp32 moments of AdamW (arXiv:1711.05101)."""

LOGITS_COPIES = 2
"""The chunked head holds a chunk's logits and its probabilities, both fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part."""

    linears: int
    """Packed linears of all layers, scales included."""

    embeddings: int
    """Embedding and untied head, dense in the compute dtype."""

    norms: int
    """fp32, biases left out."""

    adapters: int
    """LoRA masters, fp32."""

    optimizer: int
    """Gradients and moments of the adapters, fp32."""

    shadow: int
    """Dense copies of the linears in the compute dtype; 0 without `shadow`."""

    unpacked: int
    """The largest linear, dense while it is used; 0 with `shadow`."""

    logits: int
    """One chunk of the head."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """One line: the total and the parts above 0.05 GB."""
        parts = [f"{n} {b / 1e9:.1f}" for n, b in self.parts().items() if b >= 5e7]
        return f"{self.total / 1e9:.1f} GB ({', '.join(parts)})"


def memory_plan(
    geometry: Geometry,
    format: Format,
    lora: LoRAConfig | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shadow: bool = False,
    linear_bytes: int | None = None,
) -> MemoryPlan:
    """What `load_policy` with the same arguments and AdamW will hold.

    Args:
        geometry: of a spec, or declared where no config is at hand.
        format: of the linears.
        lora: adapters; None for none.
        dtype: compute dtype.
        shadow: dense copies of the linears beside the packed ones.
        linear_bytes: of the packed linears, where a checkpoint decides (`packing.linear_bytes`);
            None where all are in `format`.
    """
    shapes = geometry.linear_shapes()
    largest = max(N * K for N, K in shapes.values())
    trained = 0
    if lora is not None:
        trained = geometry.layers * sum(lora.rank * sum(shapes[name]) for name in lora.targets)
    return MemoryPlan(
        linears=linear_bytes or int(geometry.linear_weights * format.bits_per_weight / 8),
        embeddings=geometry.embedding_weights * dtype.itemsize,
        norms=(2 * geometry.layers + 1) * geometry.hidden_size * 4,
        adapters=trained * 4,
        optimizer=trained * OPTIMIZER_BYTES,
        shadow=geometry.linear_weights * dtype.itemsize if shadow else 0,
        unpacked=0 if shadow else largest * dtype.itemsize,
        logits=max(CHUNK_CELLS, geometry.vocab_size) * 4 * LOGITS_COPIES,
    )


def check_fits(
    plan: MemoryPlan,
    available_bytes: int,
    device_name: str,
    alternatives: Mapping[str, MemoryPlan] | None = None,
) -> None:
    """Raise unless the plan is below what the device has free.

    Args:
        plan: of the chosen model and format.
        available_bytes: free on the device.
        device_name: as a person knows it.
        alternatives: plans of other choices by the override that takes them, for example
            ``quant=nvfp4``; those that fit are named in the message.

    Raises:
        ValueError: needed, there, and what would fit.
    """
    if plan.total < available_bytes:
        return
    fitting = [key for key, other in (alternatives or {}).items() if other.total < available_bytes]
    cure = f"would fit: {', '.join(fitting)}" if fitting else "take a smaller model or more memory"
    raise ValueError(
        f"the model needs {plan} before activations and KV cache, {device_name} has "
        f"{available_bytes / 1e9:.1f} GB free; {cure}"
    )
