"""The gradient of the real decoder and its adapters does not depend on how a step is cut up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qerl.algorithm.algorithm import Algorithm
from qerl.algorithm.packing import pack
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Toy
from qerl.noise.aqn import Noise
from qerl.noise.schedule import Schedule
from qerl.quant.nvfp4 import NVFP4
from qerl.types import Experience, Packed, Rollouts, Scored

ALGORITHM = Algorithm(group_size=4, prompts_per_step=4, max_new_tokens=9, reduce="sequence")


@pytest.fixture(scope="module")
def decoder() -> Policy:
    """A quantised toy with adapters away from their start, so that every gradient is non-zero."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    policy = load_policy(Toy(), NVFP4(), LoRAConfig(rank=4, alpha=8, targets=targets))
    generator = torch.Generator().manual_seed(5)
    state = {
        name: matrix + 0.05 * torch.randn(matrix.shape, generator=generator)
        for name, matrix in policy.adapter_state().items()
    }
    policy.load_adapter_state(state)
    return policy


def gradient(policy: Policy, experience: Experience, packs: list[Packed]) -> tuple[Tensor, float]:
    policy.zero_grad()
    loss = 0.0
    for packed in packs:
        logprobs, entropy = policy.score(packed, 1.0)
        out = ALGORITHM.loss(packed, experience, logprobs, entropy)
        out.loss.backward()
        loss += out.loss.item()
    trainable = [weight for weight in policy.parameters() if weight.requires_grad]
    return torch.cat([weight.grad.flatten() for weight in trainable]), loss


@pytest.mark.parametrize("budget", [1, 25, 40])
@pytest.mark.parametrize("share", [True, False])
def test_the_adapters_gradient_does_not_depend_on_micro_batches_or_sharing(
    decoder: Policy, step: tuple[Rollouts, Scored], budget: int, share: bool
) -> None:
    experience = ALGORITHM.experience(*step)
    whole, loss = gradient(decoder, experience, pack(step[0], experience.rows, token_budget=10_000))
    packs = pack(step[0], experience.rows, token_budget=budget, share_prompts=share, min_shared=3)
    cut, cut_loss = gradient(decoder, experience, packs)
    assert len(packs) > 1
    assert whole.abs().max() > 1e-4
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-6)
    assert cut_loss == pytest.approx(loss, abs=1e-6)


def test_the_decoder_scores_a_padded_step_as_it_scores_the_bare_one(
    decoder: Policy, step: tuple[Rollouts, Scored]
) -> None:
    rollouts, scored = step
    hole = torch.nn.functional.pad(~rollouts.mask, (0, 5), value=True)
    wide = replace(
        rollouts,
        completions=torch.nn.functional.pad(rollouts.completions, (0, 5)).masked_fill(hole, 77),
        sampler_logprobs=torch.nn.functional.pad(rollouts.sampler_logprobs, (0, 5)),
    )
    results = []
    for each in (rollouts, wide):
        experience = ALGORITHM.experience(each, scored)
        packs = pack(each, experience.rows, token_budget=40)
        results.append(gradient(decoder, experience, packs))
    assert torch.equal(results[0][0], results[1][0])


def test_each_logprob_is_that_of_the_token_after_its_predictor(
    decoder: Policy, make_rollouts: Callable[..., Rollouts]
) -> None:
    """Packed scores against one plain causal pass over each whole sequence."""
    rollouts = make_rollouts([(5, 6, 7), (5, 6, 8, 9)], [4, 1, 6, 3], group_size=2)
    shared = torch.zeros(rollouts.completions.shape)
    for packed in pack(rollouts, [0, 1, 2, 3], token_budget=100, min_shared=2):
        logprobs, _ = decoder.score(packed, 1.0)
        shared[packed.sequence, packed.offset] = logprobs.detach()
    for b in range(4):
        prompt = rollouts.prompts.tokens[b // 2]
        (alone,) = pack(rollouts, [b], token_budget=1, share_prompts=False)
        attended = torch.tensor([*prompt, *rollouts.completion(b)])
        assert torch.equal(alone.tokens, attended[:-1])
        logprobs, _ = decoder.score(alone, 1.0)
        length = int(rollouts.lengths[b])
        torch.testing.assert_close(shared[b, :length], logprobs, rtol=1e-4, atol=1e-5)


def test_noise_moves_the_decoder_s_logprobs_and_leaves_no_trace(
    decoder: Policy, step: tuple[Rollouts, Scored]
) -> None:
    schedule = Schedule(sigma_start=0.05, sigma_end=0.01, stages=3, total_steps=3)
    noise = Noise(schedule=schedule)
    packed = pack(step[0], [0, 1], token_budget=100)[0]
    with torch.no_grad():
        clean, _ = decoder.score(packed, 1.0)
        with noise.sampling(decoder.noisy_norms, 1) as report:
            noisy, _ = decoder.score(packed, 1.0)
        after, _ = decoder.score(packed, 1.0)
    assert report.tensors == 2 * len(decoder.decoder.layers)
    assert (noisy - clean).abs().max() > 1e-3
    assert torch.equal(after, clean)
