"""The decoder's forward over whole prompts by fused kernels: what the policy computes, without it.

Norms with the residual sum before them, rotations and SwiGLU pass over memory once each, where the
policy's forward takes several fp32 passes that autograd needs. The linears are the policy's own
modules, and values are rounded where the policy rounds them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from qerl.kernels.norm import add_rms_norm
from qerl.kernels.parts import Parts
from qerl.kernels.rotate import rotate_
from qerl.kernels.swiglu import gate_mul_
from qerl.model.attention import Attend
from qerl.model.decoder import Attention, Decoder, DecoderLayer
from qerl.model.layers import RMSNorm, SwiGLU

Angles = tuple[Float[Tensor, "S 1 Dh2"], Float[Tensor, "S 1 Dh2"]]


@torch.no_grad()
def prefill_hidden(
    decoder: Decoder,
    tokens: Int[Tensor, " S"],
    positions: Int[Tensor, " S"],
    attend: Attend,
    ends: Int[Tensor, " P"],
) -> Float[Tensor, "P D"]:
    """Final-normed hidden states of the tokens at `ends`: those rows of the decoder's forward.

    Every layer attends over all tokens, so that their keys and values are kept; what follows the
    last attention is computed for `ends` alone.
    """
    residual = functional.embedding(tokens, decoder.embed)  # [S, D], ours to add to
    normed = torch.empty_like(residual)  # [S, D], the input of each block in turn
    angles = decoder.rotary(positions)
    out = None  # [S, D] of the block before
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        _norm(out, residual, layer.input_norm, normed)
        mixed = _mixed(layer.attention, index, normed, angles, attend)  # [S, H Dh]
        if index == len(decoder.layers) - 1:
            mixed, residual = mixed[ends], residual[ends]
            normed = torch.empty_like(residual)
        _norm(layer.attention.o_proj(mixed), residual, layer.post_attention_norm, normed)
        out = _mlp(layer.mlp, normed)
    return _norm(out, residual, decoder.final_norm, normed)


def _norm(
    out: Float[Tensor, "S D"] | None,
    residual: Float[Tensor, "S D"],
    norm: RMSNorm,
    normed: Float[Tensor, "S D"],
) -> Float[Tensor, "S D"]:
    """Add a block's output to `residual`, and leave the normed rows in `normed`."""
    parts = None if out is None else Parts.of(out)
    return add_rms_norm(parts, residual, norm.weight, norm.eps, normed, pdl=0)


def _mixed(
    attention: Attention, layer: int, x: Float[Tensor, "S D"], angles: Angles, attend: Attend
) -> Float[Tensor, "S N"]:
    """Attention of normed rows before the output projection; N = H Dh."""
    a = attention
    q = _rotated(a.q_proj(x).unflatten(-1, (a.heads, a.head_dim)), angles, a.q_norm)
    k = _rotated(a.k_proj(x).unflatten(-1, (a.kv_heads, a.head_dim)), angles, a.k_norm)
    v = a.v_proj(x).unflatten(-1, (a.kv_heads, a.head_dim))  # [S, Hk, Dh]
    return attend(layer, q, k, v).flatten(1)


def _rotated(
    heads: Float[Tensor, "S H Dh"], angles: Angles, norm: RMSNorm | None
) -> Float[Tensor, "S H Dh"]:
    """Heads normed, where the model does, and turned in place."""
    if norm is None:
        return rotate_(heads, *angles)
    return rotate_(heads, *angles, norm.weight, norm.eps)


def _mlp(mlp: SwiGLU, x: Float[Tensor, "S D"]) -> Float[Tensor, "S D"]:
    out: Tensor = mlp.down_proj(gate_mul_(mlp.gate_proj(x), mlp.up_proj(x)))
    return out
