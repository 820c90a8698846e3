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
