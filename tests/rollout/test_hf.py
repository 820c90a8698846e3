import pytest
import torch

from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.source import SmolLM2Gguf
from qerl.quant.nvfp4 import NVFP4
from qerl.rollout.hf import HfEngine
from qerl.rollout.native import NativeEngine
from qerl.types import Sampling


def test_adapters_are_copied_at_sync_in_place_and_only_then(policy, prompts):
    engine = HfEngine(policy)
    sampling = Sampling(group_size=1, max_new_tokens=4, temperature=0.0)

    def logprobs() -> torch.Tensor:
        return engine.generate(prompts, sampling, seed=0, rollout_step=0).sampler_logprobs

    addresses = {name: p.data_ptr() for name, p in engine._adapters.items()}
    before = logprobs()
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.mul_(3)
    assert torch.equal(before, logprobs())
    for _ in range(3):
        engine.sync()
    assert not torch.equal(before, logprobs())
    assert {name: p.data_ptr() for name, p in engine._adapters.items()} == addresses
    names = {name for name, _ in engine._model.named_parameters() if "lora_" in name}
    assert len(names) == 2 * len(policy.adapters()), "exactly one adapter"


def test_the_policys_norms_stand_in_the_model(policy):
    engine = HfEngine(policy)
    for index, layer in enumerate(engine._model.model.layers):
        assert layer.input_layernorm is policy.noisy_norms[2 * index]
        assert layer.post_attention_layernorm is policy.noisy_norms[2 * index + 1]


def test_greedy_agrees_with_native_on_smollm2_under_nvfp4(make_prompts):
    source = SmolLM2Gguf()
    try:
        tokenizer = source.tokenizer()
    except ValueError as absent:
        pytest.skip(str(absent))
    policy = load_policy(source, NVFP4(), LoRAConfig(rank=4, alpha=8), shadow=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.copy_(torch.randn(adapter.lora_b.shape, generator=generator) * 0.01)
    texts = ["7 + 5 =", "The capital of France is", "Write the number after nine."]
    prompts = make_prompts(
        [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
    )
    sampling = Sampling(group_size=1, max_new_tokens=12, temperature=0.0)
    native, hf = (
        engine.generate(prompts, sampling, seed=0, rollout_step=0)
        for engine in (NativeEngine(policy), HfEngine(policy))
    )
    assert torch.equal(native.completions, hf.completions)
    torch.testing.assert_close(native.sampler_logprobs, hf.sampler_logprobs, atol=1e-3, rtol=0)
