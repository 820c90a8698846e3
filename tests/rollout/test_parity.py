"""The sampler is seen to be the policy, or not to be."""

import pytest
import torch

from qerl.rollout.hf import HfEngine
from qerl.rollout.native import NativeEngine
from qerl.rollout.parity import Gap, ParityProbe, SamplerIsNotPolicyError, gap
from qerl.types import Sampling

PROBE = ParityProbe(bound_nats=0.01)


@pytest.mark.parametrize("make", [NativeEngine, HfEngine])
def test_an_engine_that_follows_passes_and_the_adapters_keep_their_bits(make_policy, prompts, make):
    policy = make_policy()
    engine = make(policy)
    engine.sync()
    before = {name: value.clone() for name, value in policy.adapter_state().items()}
    found = PROBE.check_targets(policy, engine, prompts, rollout_step=3)
    assert sorted(found) == sorted(policy.lora.targets)
    assert all(g.mean < 1e-4 for g in found.values())
    assert all(torch.equal(before[name], value) for name, value in policy.adapter_state().items())
    assert PROBE.check(policy, engine, prompts, rollout_step=3).mean < 1e-4


class Deaf(HfEngine):
    """Takes over every adapter but those of one kind."""

    def sync(self) -> None:
        kept = {n: p.detach().clone() for n, p in self._deaf()}
        super().sync()
        for name, parameter in self._deaf():
            parameter.data.copy_(kept[name])

    def _deaf(self):
        return [(n, p) for n, p in self._model.named_parameters() if "up_proj.lora_B" in n]


def test_a_sampler_that_misses_one_kind_of_adapter_is_named(make_policy, prompts):
    policy = make_policy()
    engine = HfEngine(policy)
    engine.sync()
    engine.__class__ = Deaf
    with pytest.raises(SamplerIsNotPolicyError, match="up_proj adapters disturbed"):
        PROBE.check_targets(policy, engine, prompts, rollout_step=0)


def test_a_sampler_of_other_weights_is_seen_without_a_disturbance(make_policy, prompts):
    ours, other = make_policy(), make_policy()
    with torch.no_grad():
        for norm in other.noisy_norms:
            norm.weight.mul_(1.1)
    with pytest.raises(SamplerIsNotPolicyError, match="rollout step 7: log-probabilities"):
        PROBE.check(ours, NativeEngine(other), prompts, rollout_step=7)


def test_the_gap_is_over_drawn_tokens_alone(make_policy, prompts):
    policy = make_policy()
    rollouts = NativeEngine(policy).generate(
        prompts, Sampling(group_size=2, max_new_tokens=6), seed=0, rollout_step=0
    )
    found = gap(policy, rollouts)
    assert found.mean <= found.max < 1e-4
    shifted = Gap.between(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert (shifted.mean, shifted.max) == (0.25, 0.5)
