import itertools

import pytest
import torch

from qerl.rollout.sampler import draw, invert, sequence_seed, sequence_seeds, truncate, uniforms
from qerl.types import Sampling

MASK = 2**64 - 1


def _sampling(**options: float) -> Sampling:
    return Sampling(group_size=1, max_new_tokens=1, **options)


def _splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, in whole numbers."""
    outputs = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def test_seeds_are_those_of_every_machine_and_version():
    # A change here changes every rollout of a resumed run.
    assert sequence_seed(0, 0, "gsm8k/train/17", 0) == 4528986280401081736
    assert sequence_seed(1, 2, "a", 3) == 7385528657323497235


def test_every_argument_moves_the_seed():
    cases = itertools.product((0, 1, 11), (0, 1, 11), ("a", "b", "1/a"), (0, 1, 11))
    seeds = [sequence_seed(*case) for case in cases]
    assert len(set(seeds)) == len(seeds)


def test_a_prompt_that_comes_twice_in_a_step_gets_fresh_seeds():
    seeds = sequence_seeds(0, 0, ["a", "b", "a"], 4).tolist()
    assert len(set(seeds)) == 12
    assert seeds[:4] == sequence_seeds(0, 0, ["a"], 4).tolist()
    assert seeds[4:8] == sequence_seeds(0, 0, ["b"], 4).tolist()
    assert seeds[8:] == sequence_seeds(0, 0, ["a"], 8).tolist()[4:]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_uniforms_are_the_outputs_of_splitmix64(seed):
    expected = [(x >> 11) * 2.0**-53 for x in _splitmix64(seed & MASK, 50)]
    assert uniforms(torch.full((50,), seed), torch.arange(50)).tolist() == expected


def test_uniforms_do_not_depend_on_their_neighbours():
    seeds, counters = torch.randint(-(2**62), 2**62, (64,)), torch.randint(0, 4096, (64,))
    together = uniforms(seeds, counters)
    alone = [uniforms(seeds[i : i + 1], counters[i : i + 1]).item() for i in range(64)]
    assert together.tolist() == alone


def test_uniforms_fill_the_unit_interval_evenly_along_seeds_and_along_counters():
    seeds = sequence_seeds(0, 0, [f"p{i}" for i in range(100)], 8)  # [800]
    u = uniforms(seeds.repeat_interleave(50), torch.arange(50).repeat(800)).view(800, 50)
    counts = torch.histc(u, bins=100, min=0, max=1)  # 400 expected in each
    assert ((counts - 400) ** 2 / 400).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
    for x, y in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        correlation = torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]
        assert correlation.abs() < 4 / 40_000**0.5


@pytest.mark.parametrize("V", [1, 5, 127, 128, 129, 1000, 49152])
def test_inversion_finds_the_token_of_the_whole_distribution_function(V):
    weights = torch.rand(32, V) ** 8
    weights[:, 1::2] *= torch.rand(32, V // 2) > 0.5  # some weights are 0
    weights[:, 0] += 1e-3
    u = torch.rand(32, dtype=torch.float64)
    ids = invert(weights, u)
    cdf = weights.double().cumsum(-1)
    target = u * cdf[:, -1]
    above = cdf.gather(1, ids[:, None]).squeeze(1)
    below = above - weights.gather(1, ids[:, None]).squeeze(1).double()
    slack = 1e-6 * cdf[:, -1]  # sums of 128 weights are fp32
    assert (below <= target + slack).all()
    assert (target < above + slack).all()
    assert (weights.gather(1, ids[:, None]) > 0).all()


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_inversion_never_draws_a_token_of_weight_zero(u):
    weights = torch.zeros(3, 400)
    weights[0, 7] = 1e-30
    weights[1, 399] = 0.3
    weights[2, 130:140] = 0.1
    ids = invert(weights, torch.full((3,), u, dtype=torch.float64))
    assert ids[:2].tolist() == [7, 399]
    assert 130 <= int(ids[2]) < 140


def test_draws_follow_the_softmax_at_the_temperature():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    n = 40_000
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    drawn = draw(logits.repeat(n, 1), u, _sampling(temperature=0.7))
    expected = n * torch.softmax(logits / 0.7, -1)
    counts = torch.bincount(drawn.tokens, minlength=300)
    big = expected > 5
    chi = ((counts - expected)[big] ** 2 / expected[big]).sum()
    freedom = int(big.sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_logprobs_are_those_of_the_whole_distribution_at_the_temperature(temperature, cut):
    logits = torch.randn(16, 1000) * 5
    expected = (logits / temperature).log_softmax(-1)
    u = torch.rand(16, dtype=torch.float64)
    drawn = draw(logits.clone(), u, _sampling(temperature=temperature, **cut))
    chosen = expected.gather(1, drawn.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(drawn.logprobs, chosen, atol=2e-6, rtol=0)
    assert drawn.logprobs.dtype == torch.float32


def test_greedy_takes_the_lowest_of_equal_tokens_and_scores_it_at_temperature_one():
    logits = torch.zeros(2, 300)
    logits[0, [50, 60, 299]] = 3.0
    expected = logits.log_softmax(-1)
    drawn = draw(logits.clone(), torch.rand(2, dtype=torch.float64), _sampling(temperature=0.0))
    assert drawn.tokens.tolist() == [50, 0]
    torch.testing.assert_close(drawn.logprobs, expected[[0, 1], [50, 0]])


def test_top_k_keeps_the_k_most_likely_and_of_equals_the_lower_ids():
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.3]])
    assert torch.equal(truncate(probs, 3, 1.0), probs * torch.tensor([0, 1, 1, 0, 1]))


def test_top_p_keeps_the_smallest_set_that_reaches_its_mass():
    probs = torch.tensor([[0.05, 0.5, 0.3, 0.15]])
    assert (truncate(probs, 0, 0.49) > 0).tolist() == [[False, True, False, False]]
    assert (truncate(probs, 0, 0.51) > 0).tolist() == [[False, True, True, False]]
    assert (truncate(probs, 0, 1e-9) > 0).tolist() == [[False, True, False, False]]
    # Of the two that top_k leaves, 0.5 is already 62 %.
    assert (truncate(probs, 2, 0.6) > 0).tolist() == [[False, True, False, False]]


def test_without_a_cut_nothing_is_copied():
    probs = torch.rand(2, 10)
    assert truncate(probs, 0, 1.0) is probs
