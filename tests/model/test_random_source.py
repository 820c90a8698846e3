import dataclasses

import torch

from qerl.model.load import load_policy
from qerl.model.random_source import RandomSource
from qerl.model.source import Toy
from qerl.quant.nvfp4 import NVFP4


def _policy(seed: int):
    source = RandomSource(dataclasses.replace(Toy().spec, vocab_size=300), "cpu", seed)
    return load_policy(source, NVFP4(), None)


def test_random_weights_load_as_a_checkpoint_does_and_follow_their_seed():
    first, again, other = _policy(0), _policy(0), _policy(1)
    assert first.base_hash() == again.base_hash() != other.base_hash()
    assert first.decoder.embed.shape == (300, 128)
    linears = first.linears()
    a, b = (linears[f"layers.{i}.q_proj"].packed.dequantize(torch.float32) for i in (0, 1))
    assert not torch.equal(a, b)
    assert 0.8 < float(a.std() * 128**0.5) < 1.2


def test_a_name_always_draws_the_same_tensor():
    source = RandomSource(dataclasses.replace(Toy().spec, vocab_size=300), "cpu", 0)
    weights, again = source.weights(), source.weights()
    name = "model.layers.1.self_attn.q_proj.weight"
    again.get("model.embed_tokens.weight")
    assert torch.equal(weights.get(name), again.get(name))
    assert torch.equal(weights.get(name), weights.get(name))
    assert weights.fingerprint() == again.fingerprint()
    assert RandomSource(source.geometry(), "cpu", 1).weights().fingerprint() != again.fingerprint()
    entry = weights.entry(name)
    assert (entry.shape, entry.dtype) == (weights.get(name).shape, torch.bfloat16)
