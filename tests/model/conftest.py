"""Builders shared by the model room's tests: tiny Hugging Face models and packed forests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qerl.model import toy
from qerl.model.source import DictWeights
from qerl.model.spec import ModelSpec, eos_ids
from qerl.types import Packed, Segment

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}


@dataclass
class ModelSource:
    """A Hugging Face model in memory as a source."""

    model: PreTrainedModel
    name: str = "tiny"

    def tokenizer(self) -> Any:
        return toy.build_tokenizer()

    def config(self) -> PretrainedConfig:
        return self.model.config

    def generation_eos_ids(self) -> tuple[int, ...]:
        return eos_ids(self.model.generation_config.eos_token_id)

    def geometry(self) -> ModelSpec:
        return ModelSpec.from_hf(self.model.config)

    def weights(self) -> DictWeights:
        return DictWeights(self.model.state_dict())

    def folder(self) -> None:
        """In memory."""


def make_model(config_class: type[PretrainedConfig], **settings: Any) -> PreTrainedModel:
    """A random model in fp32 whose weights bf16 holds exactly; norms and biases are not trivial."""
    config = config_class(**(SIZES | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


Tree = Sequence[tuple[int | None, int, bool]]
"""Segments as (parent, length, scored)."""


def make_forest(tree: Tree, vocab: int = 100) -> tuple[Packed, list[tuple[Tensor, int, int]]]:
    """A packed forest of random tokens, and for each scored segment its full sequence.

    The latter holds (tokens of root..segment, length of the segment, first row in N).
    """
    segments: list[Segment] = []
    positions: list[Tensor] = []
    start = 0
    for parent, length, _ in tree:
        first = 0 if parent is None else int(positions[parent][-1]) + 1
        segments.append(Segment(start=start, length=length, parent=parent))
        positions.append(torch.arange(first, first + length))
        start += length
    tokens = torch.randint(3, vocab, (start,))
    predictors, targets, sequence, offset = [], [], [], []
    full: list[tuple[Tensor, int, int]] = []
    for index, (parent, length, scored) in enumerate(tree):
        if not scored:
            continue
        assert parent is not None
        own = segments[index]
        last = segments[parent].start + segments[parent].length - 1
        rows = torch.arange(own.start, own.start + length)
        chain, at = [rows], parent
        while at is not None:
            s = segments[at]
            chain.insert(0, torch.arange(s.start, s.start + s.length))
            at = s.parent
        full.append((tokens[torch.cat(chain)], length, sum(len(x) for x in targets)))
        predictors.append(torch.cat([torch.tensor([last]), rows[:-1]]))
        targets.append(tokens[rows])
        sequence.append(torch.full((length,), len(full) - 1))
        offset.append(torch.arange(length))
    packed = Packed(
        tokens=tokens,
        positions=torch.cat(positions),
        segments=tuple(segments),
        predictors=torch.cat(predictors),
        targets=torch.cat(targets),
        sequence=torch.cat(sequence),
        offset=torch.cat(offset),
    )
    return packed, full


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture(scope="session")
def source_of() -> Callable[[PreTrainedModel], ModelSource]:
    return ModelSource


@pytest.fixture(scope="session")
def forest() -> Callable[..., tuple[Packed, list[tuple[Tensor, int, int]]]]:
    return make_forest
