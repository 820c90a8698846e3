"""The check that an adapter does something."""

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.model.attention import ForestAttend
from qerl.model.policy import Policy
from qerl.types import Prompts, Segment

PROBES = 4


@torch.no_grad()
def check_effect(policy: Policy, prompts: Prompts, name: str) -> None:
    """Refuse adapters that change no logit of the first prompts.

    Such an evaluation would report the base model under the adapter's name: matrices of zeros, or
    an adapter that was not applied.

    Raises:
        ValueError: every logit with the adapters is bitwise that without them.
    """
    for tokens in prompts.tokens[:PROBES]:
        adapted = _logits(policy, tokens)
        with policy.reference():
            base = _logits(policy, tokens)
        if not torch.equal(adapted, base):
            return
    raise ValueError(
        f"adapter={name} changes no logit of {min(PROBES, len(prompts))} prompts: its matrices "
        "are zero or were not applied; evaluate the base model with adapter=null run=null"
    )


def _logits(policy: Policy, tokens: tuple[int, ...]) -> Float[Tensor, "S V"]:
    decoder = policy.decoder
    attend = ForestAttend((Segment(start=0, length=len(tokens), parent=None),), decoder.device)
    ids = torch.tensor(tokens, device=decoder.device)  # [S]
    return decoder.logits(decoder(ids, torch.arange(len(tokens), device=decoder.device), attend))
