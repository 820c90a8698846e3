"""Policy: a frozen decoder plus its adapters, and the reference policy within it.

The reference policy is the same object with the adapters off, so there is no second copy that
could fall out of step.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qerl.model.attention import ForestAttend
from qerl.model.decoder import Decoder, DecoderLayer
from qerl.model.head import chosen_logprobs
from qerl.model.layers import RMSNorm
from qerl.model.linear import FrozenLinear, LoRAConfig, LoRALinear, frozen
from qerl.model.spec import ModelSpec
from qerl.types import Packed


class Policy(nn.Module):
    """What is trained (adapters, fp32) over what is not (everything else)."""

    def __init__(self, decoder: Decoder, lora: LoRAConfig | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.lora = lora
        if lora is not None and not self.adapters():
            raise ValueError(f"lora targets={list(lora.targets)} match no linear of the decoder")

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return self.decoder.spec

    def score(
        self, packed: Packed, temperature: float
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-probability of every target and the entropy at its place, in nats, fp32.

        Args:
            packed: a micro-batch on the decoder's device (`packed.to(device)`).
            temperature: divides the logits; that of sampling, above 0.

        Returns:
            Log-probabilities, with gradient to the adapters, and entropies, without.
        """
        attend = ForestAttend(packed.segments, self.decoder.device)
        hidden = self.decoder(packed.tokens, packed.positions, attend)  # [S, D]
        rows = hidden.index_select(0, packed.predictors)  # [N, D]
        return chosen_logprobs(rows, self.decoder.head, packed.targets, temperature)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the adapters are off: the policy is the base it started from."""
        adapters = list(self.adapters().values())
        before = [adapter.enabled for adapter in adapters]
        try:
            for adapter in adapters:
                adapter.enabled = False
            yield
        finally:
            for adapter, enabled in zip(adapters, before, strict=True):
                adapter.enabled = enabled

    def layers(self) -> list[DecoderLayer]:
        """The decoder's layers with their type."""
        return list(self.decoder.layers)  # type: ignore[arg-type]

    @property
    def noisy_norms(self) -> list[RMSNorm]:
        """The norms before q/k/v and before gate/up of every layer, 2L of them, layer by layer."""
        return [n for layer in self.layers() for n in (layer.input_norm, layer.post_attention_norm)]

    def linears(self) -> dict[str, FrozenLinear]:
        """The frozen linears by name, for example ``layers.0.q_proj``."""
        return {
            f"layers.{index}.{name}": frozen(linear)
            for index, layer in enumerate(self.layers())
            for name, linear in layer.linears().items()
        }

    def adapters(self) -> dict[str, LoRALinear]:
        """The linears that carry an adapter, by the same names."""
        return {
            f"layers.{index}.{name}": linear
            for index, layer in enumerate(self.layers())
            for name, linear in layer.linears().items()
            if isinstance(linear, LoRALinear)
        }

    def adapter_state(self) -> dict[str, Tensor]:
        """Copies of every adapter matrix: ``layers.0.q_proj.lora_a`` [R, K], ``.lora_b`` [N, R].

        fp32, on the CPU.
        """
        return {
            f"{name}.{part}": getattr(adapter, part).detach().to("cpu", copy=True)
            for name, adapter in self.adapters().items()
            for part in ("lora_a", "lora_b")
        }

    def load_adapter_state(self, state: Mapping[str, Tensor]) -> None:
        """Set every adapter matrix in place, so that optimizers and engines keep their tensors.

        Raises:
            ValueError: where a matrix is missing, unknown or of another shape; nothing is set then.
        """
        own = {
            f"{name}.{part}": getattr(adapter, part)
            for name, adapter in self.adapters().items()
            for part in ("lora_a", "lora_b")
        }
        if own.keys() != state.keys():
            missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(
                f"adapter state: {len(missing)} missing {missing[:3]}, {len(unknown)} unknown "
                f"{unknown[:3]}; the LoRA targets of both sides must agree"
            )
        for name, parameter in own.items():
            if parameter.shape != state[name].shape:
                raise ValueError(
                    f"adapter {name} is {list(state[name].shape)}, the policy has "
                    f"{list(parameter.shape)}; the LoRA ranks of both sides must agree"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def set_shadow(self, shadow: bool) -> None:
        """Keep a dense copy of every packed linear in the compute dtype, or drop the copies."""
        for linear in self.linears().values():
            linear.set_shadow(self.decoder.dtype if shadow else None)

    def linear_bits_per_weight(self) -> float:
        """Packed bits of the decoder's linears over their weights, scales included."""
        linears = self.linears().values()
        weights = sum(N * K for N, K in (linear.shape for linear in linears))
        return 8 * sum(linear.packed.nbytes for linear in linears) / weights

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held by each part, on whatever device the policy is."""
        linears = self.linears().values()
        head = self.decoder.untied_head
        norms = [module.weight for module in self.modules() if isinstance(module, RMSNorm)]
        return {
            "packed": sum(linear.packed.nbytes for linear in linears),
            "shadow": sum(linear.shadow_bytes for linear in linears),
            "embeddings": self.decoder.embed.nbytes + (0 if head is None else head.nbytes),
            "norms_and_biases": sum(weight.nbytes for weight in norms)
            + sum(linear.bias.nbytes for linear in linears if linear.bias is not None),
            "adapters": sum(p.nbytes for p in self.parameters() if p.requires_grad),
        }

    def base_hash(self) -> str:
        """SHA-256 over every frozen byte: equal before and after training, by contract."""
        digest = hashlib.sha256()
        tensors = [self.decoder.embed, self.decoder.head]
        tensors += [m.weight.detach() for m in self.modules() if isinstance(m, RMSNorm)]
        for linear in self.linears().values():
            tensors += list(linear.packed.tensors.values())
            tensors += [] if linear.bias is None else [linear.bias]
        for tensor in tensors:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def _apply(self, fn: Any, recurse: bool = True) -> "Policy":
        """Moves pass; a change of dtype is refused, since adapters and norms must stay fp32."""
        if fn(torch.zeros(1)).dtype != torch.float32:
            raise ValueError(
                "policy.to(dtype): adapters and norms stay fp32; choose the compute dtype with "
                "load_policy(dtype=...)"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self
