from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from qerl.model.attention import ForestAttend
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Toy
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.types import Segment

THETA = {"rope_theta": 10000.0}
ARCHITECTURES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-untied": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": False}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama-llama3": (
        LlamaConfig,
        {
            "rope_parameters": THETA
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2-yarn": (
        Qwen2Config,
        {
            "rope_parameters": THETA
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        },
    ),
    "qwen2-yarn-settings": (
        Qwen2Config,
        {
            "rope_parameters": THETA
            | {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            }
        },
    ),
}


def logits(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of one sequence."""
    attend = ForestAttend([Segment(start=0, length=len(tokens), parent=None)])
    hidden = policy.decoder(tokens, torch.arange(len(tokens)), attend)
    return policy.decoder.logits(hidden)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_those_of_transformers(
    name: str,
    hf_model: Callable[..., PreTrainedModel],
    source_of: Callable[[PreTrainedModel], Any],
) -> None:
    config_class, settings = ARCHITECTURES[name]
    model = hf_model(config_class, **settings)
    policy = load_policy(source_of(model), BF16(), None)
    tokens = torch.randint(0, 100, (300,))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
        got = logits(policy, tokens)
    assert wanted.std() > 0.5  # a flat model would agree with anything
    assert (got - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("format", [NVFP4(), MXFP4(), NF4()], ids=lambda f: f.name)
@pytest.mark.parametrize("shadow", [False, True])
def test_packed_logits_equal_a_dense_model_of_the_dequantised_weights(
    format: Format,
    shadow: bool,
    hf_model: Callable[..., PreTrainedModel],
    source_of: Callable[[PreTrainedModel], Any],
) -> None:
    model = hf_model(Qwen2Config, tie_word_embeddings=False)
    policy = load_policy(source_of(model), format, None, shadow=shadow)
    tokens = torch.randint(0, 100, (40,))
    with torch.no_grad():
        got = logits(policy, tokens)
        original = model(tokens[None]).logits[0]
        for name, linear in policy.linears().items():
            dense = _hf_linear(model, name)
            dense.weight.copy_(linear.packed.dequantize(torch.float32))
        wanted = model(tokens[None]).logits[0]
    assert (got - wanted).abs().max() < 1e-4
    assert (original - wanted).abs().max() > 0.05  # quantisation moved something


def _hf_linear(model: PreTrainedModel, name: str) -> nn.Linear:
    _, index, linear = name.split(".")
    layer = model.model.layers[int(index)]
    block = layer.mlp if linear in ("gate_proj", "up_proj", "down_proj") else layer.self_attn
    return getattr(block, linear)


def test_positions_not_row_numbers_drive_the_rotary_embedding() -> None:
    policy = load_policy(Toy(), BF16(), None)
    tokens = torch.randint(3, 100, (12,))
    attend = ForestAttend([Segment(start=0, length=12, parent=None)])
    with torch.no_grad():
        near = policy.decoder(tokens, torch.arange(12), attend)
        far = policy.decoder(tokens, torch.arange(12) + 1000, attend)
        stretched = policy.decoder(tokens, torch.arange(12) * 2, attend)
    assert (near - far).abs().max() < 1e-3  # only differences of positions count
    assert (near - stretched).abs().max() > 1e-2


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied = load_policy(Toy(tied=True), BF16(), None).decoder
    untied = load_policy(Toy(tied=False), BF16(), None).decoder
    assert tied.head.data_ptr() == tied.embed.data_ptr()
    assert untied.head.data_ptr() != untied.embed.data_ptr()


def test_bf16_compute_stays_near_fp32() -> None:
    tokens = torch.randint(3, 100, (30,))
    wide = load_policy(Toy(), NVFP4(), None)
    narrow = load_policy(Toy(), NVFP4(), None, dtype=torch.bfloat16)
    with torch.no_grad():
        a, b = logits(wide, tokens), logits(narrow, tokens)
    assert b.dtype == torch.float32
    relative = ((a - b).norm() / a.norm()).item()
    assert 1e-4 < relative < 3e-2  # 2^-9 a rounding, some tens of roundings
