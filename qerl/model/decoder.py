"""The Qwen2.5 / Qwen3 / Llama decoder, once, for training and for the native engine.

    x ← x + o(attend(rotate(q(n₁ x)), rotate(k(n₁ x)), v(n₁ x)))
    x ← x + down(silu(gate(n₂ x)) · up(n₂ x))

Tokens lie on one flat axis [S] without a batch axis; which of them see each other is the business
of the `attend` argument (see `attention`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from qerl.model.attention import Attend
from qerl.model.head import project
from qerl.model.layers import RMSNorm, RotaryEmbedding, SwiGLU, rotate
from qerl.model.linear import Linear
from qerl.model.spec import ModelSpec


class Attention(nn.Module):
    """Projections, optional per-head norms, rotary embedding; then whatever `attend` does."""

    def __init__(
        self,
        spec: ModelSpec,
        linears: dict[str, Linear],
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.q_proj = linears["q_proj"]
        self.k_proj = linears["k_proj"]
        self.v_proj = linears["v_proj"]
        self.o_proj = linears["o_proj"]
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim

    def forward(
        self, layer: int, x: Float[Tensor, "S D"], cos: Tensor, sin: Tensor, attend: Attend
    ) -> Float[Tensor, "S D"]:
        """Attention of normed rows `x`; cos and sin are [S, 1, Dh/2] fp32."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))  # [S, H, Dh]
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))  # [S, Hk, Dh]
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))  # [S, Hk, Dh]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)  # [S, H, Dh]
        out: Tensor = self.o_proj(mixed.flatten(1))  # [S, D]
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: Attention,
        post_attention_norm: RMSNorm,
        mlp: SwiGLU,
    ) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def forward(
        self, layer: int, x: Float[Tensor, "S D"], cos: Tensor, sin: Tensor, attend: Attend
    ) -> Float[Tensor, "S D"]:
        """The residual stream after this layer."""
        x = x + self.attention(layer, self.input_norm(x), cos, sin, attend)
        x = x + self.mlp(self.post_attention_norm(x))
        return x

    def linears(self) -> dict[str, Linear]:
        """The seven linears by name, in checkpoint order."""
        a, m = self.attention, self.mlp
        return {
            "q_proj": a.q_proj,
            "k_proj": a.k_proj,
            "v_proj": a.v_proj,
            "o_proj": a.o_proj,
            "gate_proj": m.gate_proj,
            "up_proj": m.up_proj,
            "down_proj": m.down_proj,
        }


class Decoder(nn.Module):
    """Token ids to final-normed hidden states to logits."""

    embed: Tensor
    untied_head: Tensor | None

    def __init__(
        self,
        spec: ModelSpec,
        embed: Float[Tensor, "V D"],
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: Float[Tensor, "V D"] | None,
    ) -> None:
        """Assemble filled layers.

        Args:
            spec: the architecture.
            embed: in the compute dtype, which the whole residual stream takes over.
            layers: L of them.
            final_norm: the norm before the head.
            head: None where it is tied to `embed`; then both are one tensor.
        """
        super().__init__()
        if spec.tied != (head is None):
            raise ValueError(f"tied={spec.tied}: {'drop' if spec.tied else 'pass'} the head weight")
        self.spec = spec
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("untied_head", head, persistent=False)
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.rotary = RotaryEmbedding(spec, embed.device)
        self.checkpoint_layers = False
        """Recompute each layer in the backward instead of keeping its activations."""

    @property
    def head(self) -> Float[Tensor, "V D"]:
        """The matrix that turns hidden states into logits."""
        return self.embed if self.untied_head is None else self.untied_head

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype: that of the embedding and the residual stream."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    def forward(
        self, tokens: Int[Tensor, " S"], positions: Int[Tensor, " S"], attend: Attend
    ) -> Float[Tensor, "S D"]:
        """Final-normed hidden states in the compute dtype.

        Args:
            tokens: ids, on the decoder's device.
            positions: of each token in its own sequence, from 0.
            attend: which keys each query sees.
        """
        x = functional.embedding(tokens, self.embed)  # [S, D]
        cos, sin = self.rotary(positions)  # [S, 1, Dh/2]
        recompute = self.checkpoint_layers and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            if recompute:
                x = checkpoint(
                    layer, index, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(index, x, cos, sin, attend)
        normed: Tensor = self.final_norm(x)  # [S, D]
        return normed

    def logits(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Unscaled fp32 logits of final-normed rows; for training use `head.chosen_logprobs`."""
        return project(hidden, self.head)
