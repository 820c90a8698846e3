"""The matrices of a decode step: linears that share an input as one, adapters beside them.

A stack is a view of the bytes that the policy trains over (`model.resident`); adapters are bf16
copies in fixed buffers, so that a captured graph sees the ones of the last `refresh`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.layout_nf4 import Tiled
from qerl.model.decoder import DecoderLayer
from qerl.model.linear import Linear, LoRALinear, frozen
from qerl.model.policy import Policy
from qerl.model.resident import settle, stacked

STACKS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linears of a layer by the input they share, in the order of the step."""

_LEAST_RANK = 16  # a tensor-core product has 16 columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Linears of one input as one matrix [N, K], with one adapter of N columns."""

    linears: tuple[Linear, ...]

    weight: Tiled | Float[Tensor, "N K"]

    widths: tuple[int, ...]
    """N of each linear."""

    bias: Float[Tensor, " N"] | None

    lora_a: Float[Tensor, "Rs K"] | None
    """The linears' A below each other, each padded with zero rows to a power of two R; None where
    none of them has an adapter."""

    lora_b: Float[Tensor, "N R"] | None
    """Their B below each other, times alpha / rank; columns past a linear's own rank are zero."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(self.widths), frozen(self.linears[0]).shape[1]

    @staticmethod
    def of(linears: Sequence[Linear], dtype: torch.dtype) -> "Stack | None":
        """The stack of linears of one input, which are laid side by side if they are not yet.

        None where they are neither whole tiles nor dense. On a CPU weights are copied: for tests.
        """
        weights = [frozen(linear).packed for linear in linears]
        if weights[0].device.type == "cpu":
            weight: Tiled | Tensor | None = torch.cat([w.dequantize(dtype) for w in weights])
        else:
            weight = _side_by_side(linears, dtype)
        if weight is None:
            return None
        widths = tuple(w.shape[0] for w in weights)
        device, columns = weights[0].device, weights[0].shape[1]
        biases = [frozen(linear).bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
        ranks = [linear.lora_a.shape[0] for linear in linears if isinstance(linear, LoRALinear)]
        a = b = None
        if ranks:
            rank = max(_LEAST_RANK, 1 << (max(ranks) - 1).bit_length())
            a = torch.zeros(len(linears) * rank, columns, dtype=dtype, device=device)
            b = torch.zeros(sum(widths), rank, dtype=dtype, device=device)
        return Stack(
            linears=tuple(linears), weight=weight, widths=widths, bias=bias, lora_a=a, lora_b=b
        )

    def refresh(self) -> None:
        """Copy the adapters as they are into the buffers."""
        if self.lora_a is None or self.lora_b is None:
            return
        rank, start = self.lora_b.shape[1], 0
        for place, (linear, width) in enumerate(zip(self.linears, self.widths, strict=True)):
            if isinstance(linear, LoRALinear):
                own = linear.lora_a.shape[0]
                self.lora_a[place * rank : place * rank + own].copy_(linear.lora_a)
                scaled = linear.lora_b * linear.scale  # [N, own]
                self.lora_b[start : start + width, :own].copy_(scaled)
            start += width


def _side_by_side(
    linears: Sequence[Linear], dtype: torch.dtype
) -> Tiled | Float[Tensor, "N K"] | None:
    """One matrix over the bytes of `linears`, which hold parts of it from here on.

    Where weights are not whole tiles, dense copies that are kept anyway (`Policy.set_shadow`)
    serve.
    """
    bases = [frozen(linear) for linear in linears]
    found = stacked([base.packed for base in bases])
    if found is None:
        for base, packed in zip(bases, settle([base.packed for base in bases], dtype), strict=True):
            base.hold(packed)
        found = stacked([base.packed for base in bases])
    dense = [base.shadow for base in bases if base.shadow is not None]
    if found is None and len(dense) == len(bases):
        found = torch.cat(dense)  # [sum N, K]
        for base, part in zip(bases, found.split([len(d) for d in dense]), strict=True):
            base.shadow = part
    return found


def layer_stacks(layer: DecoderLayer, dtype: torch.dtype) -> dict[str, Stack] | None:
    """The four stacks of a layer, or None where its weights lie apart."""
    linears = layer.linears()
    stacks = {}
    for name, members in STACKS.items():
        stack = Stack.of([linears[member] for member in members], dtype)
        if stack is None:
            return None
        stacks[name] = stack
    return stacks


def policy_stacks(policy: Policy) -> list[dict[str, Stack]] | None:
    """The stacks of every layer, or None where a weight cannot be read where it lies."""
    found = []
    for layer in policy.layers():
        stacks = layer_stacks(layer, policy.decoder.dtype)
        if stacks is None:
            return None
        found.append(stacks)
    return found
