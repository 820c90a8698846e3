"""RMSNorm, rotary embedding and the SwiGLU MLP.

Norms and rotary tables are fp32 whatever the compute dtype: they are small, noise is added to the
norms' weights at 1e-4, and a bf16 table loses whole positions beyond a few hundred tokens.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from qerl.model.linear import Linear
from qerl.model.spec import ModelSpec, RopeScaling


class RMSNorm(nn.Module):
    """y = x / rms(x) · weight over the last axis.

    Source: arXiv:1910.07467, Eq. 4. The weight is fp32, frozen, and may be perturbed in place.
    """

    weight: nn.Parameter

    def __init__(self, weight: Float[Tensor, " D"], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().clone(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """The normed rows: computed in fp32, returned in the dtype of `x`."""
        out: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _Norm(torch.autograd.Function):
    """Keeps `x` as it came, where autograd would keep fp32 copies of it. The weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [*rows, 1]
        ctx.save_for_backward(x, scale, weight)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, scale, weight = ctx.saved_tensors
        unit = x.float() * scale  # [*rows, D]
        slope = grads[0].float() * weight  # [*rows, D]
        along = (slope * unit).mean(-1, keepdim=True)  # [*rows, 1]
        return ((slope - unit * along) * scale).to(x.dtype), None, None


class RotaryEmbedding(nn.Module):
    """Rotates the pair (i, i + Dh/2) of every head by position · frequency[i].

    Source: RoFormer (arXiv:2104.09864), Eq. 34, in the half-split order of Hugging Face.
    """

    frequencies: Tensor

    def __init__(self, spec: ModelSpec, device: torch.device | str = "cpu") -> None:
        super().__init__()
        frequencies, self.magnitude = rotary_frequencies(
            spec.head_dim, spec.rope_theta, spec.rope_scaling
        )
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(
        self, positions: Int[Tensor, " S"]
    ) -> tuple[Float[Tensor, "S 1 Dh2"], Float[Tensor, "S 1 Dh2"]]:
        """The cos and sin of each position's angles, fp32; Dh2 = Dh / 2."""
        angles = positions.float()[:, None] * self.frequencies  # [S, Dh/2] radians
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return cos[:, None], sin[:, None]  # [S, 1, Dh/2]


def rotate(
    x: Float[Tensor, "S H Dh"], cos: Float[Tensor, "S 1 Dh2"], sin: Float[Tensor, "S 1 Dh2"]
) -> Float[Tensor, "S H Dh"]:
    """Heads of `x` turned by the angles of their position; fp32 inside, the dtype of `x` out."""
    left, right = x.float().chunk(2, dim=-1)  # [S, H, Dh/2]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x.dtype)  # [S, H, Dh]


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Tensor, " Dh2"], float]:
    """Radians per position of each pair, fp32, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [Dh/2]
    plain = 1.0 / theta**exponents  # [Dh/2]
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between.

    Source: meta-llama/llama-models, `apply_scaling`.
    """
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divided, 1: kept
    return plain / scaling.factor * (1 - kept) + plain * kept


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """NTK-by-parts interpolation and its attention factor.

    Source: YaRN (arXiv:2309.00071), section 3, with the border rounding of Hugging Face.
    """

    def dimension(turns: float) -> float:  # the pair that makes `turns` turns
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0
    return plain / scaling.factor * ramp + plain * (1 - ramp), magnitude


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)). Source: arXiv:2002.05202, Eq. 6."""

    def __init__(self, gate_proj: Linear, up_proj: Linear, down_proj: Linear) -> None:
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj

    def forward(self, x: Float[Tensor, "S D"]) -> Float[Tensor, "S D"]:
        """One row for each row of `x`."""
        gated = _Gate.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore[no-untyped-call]
        out: Tensor = self.down_proj(gated)  # [S, D]
        return out


class _Gate(torch.autograd.Function):
    """silu(gate) · up, keeping the two inputs and recomputing silu(gate) in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)  # [S, F]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)  # [S, F]
        return to_gate, functional.silu(gate).mul_(grads[0])
