"""FrozenLinear over a PackedWeight, and LoRALinear over that.

    y = x Wᵀ + b + (alpha / rank) · (x Aᵀ) Bᵀ

W stays packed: the forward and the backward each unpack it, use it and drop it, and autograd keeps
only the packed bytes. Where they lie in tile order (`resident`), a kernel unpacks them. A and B are
fp32 masters (an update of 1e-6 would round away in bf16) that are cast to the compute dtype on each
use.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from qerl.model.resident import Packed, TiledPacked
from qerl.model.spec import LINEARS
from qerl.quant.packed import PackedWeight


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Which linears carry an adapter, and its size.

    There is no dropout: the policy that is trained has to be the policy that sampled.
    Source: LoRA (arXiv:2106.09685), section 4.1.
    """

    rank: int
    """R."""

    alpha: float
    """The adapter's output is multiplied by alpha / rank."""

    targets: Sequence[str] = field(default=LINEARS)
    """Names of linears inside a layer, for example q_proj."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank < 1:
            raise ValueError(f"lora rank={self.rank}: at least 1; lora=null trains nothing")
        if self.alpha <= 0:
            raise ValueError(f"lora alpha={self.alpha}: above 0")
        if "lm_head" in self.targets:
            raise ValueError("lora target lm_head: the chunked head has no adapter; leave it out")
        unknown = [name for name in self.targets if name not in LINEARS]
        if unknown or not self.targets:
            raise ValueError(
                f"lora targets={list(self.targets)}: each must be one of {', '.join(LINEARS)}, "
                "and there must be at least one"
            )

    @property
    def scale(self) -> float:
        """The adapter's weight, alpha / rank."""
        return self.alpha / self.rank


class FrozenLinear(nn.Module):
    """y = x Wᵀ + b with W packed and frozen."""

    bias: Tensor | None
    shadow: Tensor | None

    def __init__(self, packed: Packed, bias: Float[Tensor, " N"] | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("shadow", None, persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.packed.shape

    def set_shadow(self, dtype: torch.dtype | None) -> None:
        """Keep a dense copy of W in `dtype` beside the packed bytes, or drop it with None.

        The copy holds the values of the packed weight, so it changes time and memory, not
        results. For CPUs, which have no 4-bit matmul.
        """
        self.shadow = None if dtype is None else self.packed.dequantize(dtype)

    def hold(self, packed: Packed) -> None:
        """Hold the same weight where `packed` has it; a dense copy that was its tensor follows."""
        aliased = self.shadow is not None and self.shadow_bytes == 0
        self.packed = packed
        if aliased and self.shadow is not None:
            self.set_shadow(self.shadow.dtype)

    @property
    def shadow_bytes(self) -> int:
        """Bytes the dense copy takes; 0 without one, and where it is the stored tensor itself."""
        if self.shadow is None or self.shadow.data_ptr() in self.packed.data_ptrs().values():
            return 0
        return self.shadow.nbytes

    def forward(self, x: Float[Tensor, "S K"]) -> Float[Tensor, "S N"]:
        """The rows x Wᵀ + b in the dtype of `x`, which is the compute dtype."""
        if self.shadow is not None:
            return functional.linear(x, self.shadow, self.bias)
        if isinstance(self.packed, TiledPacked):
            y = self.packed.matmul(x)
        else:
            y = packed_matmul(x, self.packed)
        return y if self.bias is None else y + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> "FrozenLinear":
        """Follow a move to another device; the packed bytes have no dtype to convert."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        here = self.packed.device
        there = fn(torch.empty(0, device=here)).device
        if there != here:
            self.packed = self.packed.to(there)
        return self


class LoRALinear(nn.Module):
    """A frozen linear plus a trainable low-rank term; with `enabled` off, the frozen linear."""

    def __init__(self, base: FrozenLinear, config: LoRAConfig, generator: torch.Generator) -> None:
        """B starts at zero and A as peft starts it: uniform within ±1/sqrt(K).

        `generator` is a CPU one, so that the draw does not depend on the device.
        """
        super().__init__()
        N, K = base.shape
        if config.rank > min(N, K):
            raise ValueError(f"lora rank={config.rank}: at most {min(N, K)} on a [{N}, {K}] linear")
        self.base = base
        self.scale = config.scale
        self.enabled = True
        device = base.packed.device
        a = torch.empty(config.rank, K).uniform_(-1, 1, generator=generator) / math.sqrt(K)
        self.lora_a = nn.Parameter(a.to(device))  # [R, K] fp32
        self.lora_b = nn.Parameter(torch.zeros(N, config.rank, device=device))  # [N, R] fp32

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.base.shape

    @property
    def packed(self) -> Packed:
        """The frozen weight."""
        return self.base.packed

    def forward(self, x: Float[Tensor, "S K"]) -> Float[Tensor, "S N"]:
        """The rows of base and adapter in the dtype of `x`."""
        y: Tensor = self.base(x)  # [S, N]
        if not self.enabled:
            return y
        down = functional.linear(x, self.lora_a.to(x.dtype))  # [S, R]
        # In place, inside the matmul: y is ours, and a second [S, N] would be written and read.
        return y.addmm_(down, self.lora_b.to(x.dtype).T, alpha=self.scale)  # [S, N]


Linear = FrozenLinear | LoRALinear


def frozen(linear: Linear) -> FrozenLinear:
    """The frozen part of a linear."""
    return linear.base if isinstance(linear, LoRALinear) else linear


def adapter_generator(seed: int, name: str) -> torch.Generator:
    """A generator for one adapter, so that its start does not depend on which others exist."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def packed_matmul(x: Float[Tensor, "S K"], packed: PackedWeight) -> Float[Tensor, "S N"]:
    """The product x Wᵀ; between forward and backward autograd keeps only packed bytes."""
    out: Tensor = _PackedMatmul.apply(x, packed)  # type: ignore[no-untyped-call]
    return out


class _PackedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: PackedWeight) -> Tensor:
        ctx.format, ctx.shape, ctx.names = packed.format, packed.shape, tuple(packed.tensors)
        ctx.save_for_backward(*packed.tensors.values())
        return functional.linear(x, packed.dequantize(x.dtype))  # [S, N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads  # [S, N]
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        packed = PackedWeight(format=ctx.format, shape=ctx.shape, tensors=tensors)
        return grad @ packed.dequantize(grad.dtype), None  # [S, K]
