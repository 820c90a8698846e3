"""A saved adapter: its shape, its identity, and the check that it does something."""

import hashlib
import json
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.model.adapter_io import CONFIG_FILE, WEIGHTS_FILE
from qerl.model.attention import ForestAttend
from qerl.model.linear import LoRAConfig
from qerl.model.policy import Policy
from qerl.types import Prompts, Segment

PROBES = 4


def read_lora(folder: Path) -> LoRAConfig:
    """Rank, scale and targets of an adapter in the format of peft.

    Raises:
        ValueError: there is none.
    """
    path = folder / CONFIG_FILE
    if not path.is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(
            f"adapter={folder}: no {CONFIG_FILE} and {WEIGHTS_FILE} there; name the folder that a "
            "run left (out/.../adapter) or that peft saved"
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    return LoRAConfig(
        rank=config["r"], alpha=config["lora_alpha"], targets=sorted(config["target_modules"])
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 of the adapter's file of matrices."""
    return hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()


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
