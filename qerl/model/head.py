"""Log-probability of the chosen token, and entropy, without an [N, V] tensor kept.

    log p(t | h) = z_t - logsumexp(z),    z = h Eᵀ / temperature
    entropy      = -Σ p log p

Rows go through in chunks; a chunk's logits live until the next chunk. The gradient of row n with
respect to its hidden state is one vector times the incoming scalar,

    ∂ log p / ∂ h = (E_t - Σ p E) / temperature,

so the forward stores that vector [N, D] and the backward is a product: no logits are kept and none
are computed twice. The head is frozen and gets no gradient.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_CELLS = 2**25
"""Logits of one chunk: 128 MiB in fp32."""


def chosen_logprobs(
    hidden: Float[Tensor, "N D"],
    head: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of each row, in nats, fp32.

    Args:
        hidden: final-normed rows; receives the gradient of the log-probabilities.
        head: frozen.
        targets: the chosen token of each row.
        temperature: divides the logits; above 0.
        chunk_rows: rows at a time; None takes as many as `CHUNK_CELLS` allows.

    Returns:
        Log-probabilities (differentiable in `hidden`) and entropies (not differentiable).
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: log-probabilities need one above 0")
    if chunk_rows is None:
        chunk_rows = max(1, CHUNK_CELLS // head.shape[0])
    outputs: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, chunk_rows
    )
    return outputs


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        N = hidden.shape[0]
        logprobs = hidden.new_empty(N, dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, N, chunk):
            rows = slice(start, start + chunk)
            z = project(hidden[rows], head)  # [c, V] fp32
            # log p first: logsumexp(z) - Σ p z would cancel to 1e-5 at logits of 30.
            log_p = (z if temperature == 1 else z.div_(temperature)).log_softmax(1)  # [c, V]
            del z
            logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
            p = log_p.exp()  # [c, V]
            entropy[rows] = -torch.linalg.vecdot(p, log_p)
            if slope is not None:
                mean = p.to(head.dtype) @ head  # [c, D]
                slope[rows] = (head[targets[rows]].float() - mean.float()) / temperature
        if slope is not None:
            ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors  # [N, D]
        return (slope * grads[0][:, None]).to(slope.dtype), None, None, None, None


def project(hidden: Float[Tensor, "N D"], head: Float[Tensor, "V D"]) -> Float[Tensor, "N V"]:
    """Logits hidden · headᵀ, accumulated and returned in fp32.

    On CUDA, 16-bit operands write fp32 results directly: rounding a logit of 20 to bf16 would move
    it by up to 0.06. That path has no autograd of its own; training takes `chosen_logprobs`.
    """
    if hidden.device.type == "cuda" and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden, head).float()
