import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.algorithm.credit import Credit, OverlongPenalty, group_advantages, mixed_groups

NAN = torch.nan


def test_one_right_of_four_matches_the_hand_computation() -> None:
    # mean 1/4, sum of squares 3/4, sample variance 1/4, std 1/2
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25]]) / (0.5 + 1e-4)
    torch.testing.assert_close(advantages, expected)


def test_a_pair_gets_plus_and_minus_one_over_root_two() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0]]), eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[1.0, -1.0]]) / math.sqrt(2))


def test_the_deviation_divides_by_n_minus_one_unless_told_otherwise() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    sample = group_advantages(rewards, eps=0.0)
    population = group_advantages(rewards, eps=0.0, ddof=0)
    torch.testing.assert_close(population / sample, torch.full((1, 4), math.sqrt(4 / 3)))


def test_eps_is_added_to_the_deviation_not_to_the_variance() -> None:
    rewards = torch.tensor([[1.0, 0.0]])
    std = math.sqrt(0.5)
    assert float(group_advantages(rewards, eps=0.5)[0, 0]) == pytest.approx(0.5 / (std + 0.5))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7 + 0.1])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_zero_advantage(reward: float, scale: str) -> None:
    assert torch.equal(
        group_advantages(torch.full((3, 7), reward), scale, eps=0.0), torch.zeros(3, 7)
    )


def test_rewards_equal_but_for_rounding_give_exactly_zero_advantage() -> None:
    rewards = torch.tensor([[1.2, 1.0 + 0.2, 1.2 + 1.2e-7, 0.9 + 0.3]])
    assert len(rewards.unique()) > 1
    assert torch.equal(group_advantages(rewards), torch.zeros(1, 4))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 completions"):
        group_advantages(torch.ones(4, 1))


def test_an_infinite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(torch.tensor([[1.0, torch.inf]]))


def test_an_abstention_leaves_its_siblings_as_if_it_were_not_there() -> None:
    with_abstention = group_advantages(torch.tensor([[1.0, NAN, 0.0, 0.0]]))
    without = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.equal(with_abstention[0, [0, 2, 3]], without[0])
    assert float(with_abstention[0, 1]) == 0.0


def test_an_abstention_is_not_a_reward_of_zero() -> None:
    abstained = group_advantages(torch.tensor([[1.0, NAN, 1.0, 0.0]]))
    zero = group_advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
    assert not torch.allclose(abstained, zero)


@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 1.0, NAN]])
def test_a_group_with_at_most_one_judged_completion_teaches_nothing(row: list[float]) -> None:
    assert torch.equal(group_advantages(torch.tensor([row])), torch.zeros(1, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.2, 1.0, 1.2, NAN]), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_advantages_are_finite_and_sum_to_zero_in_each_group(rows: list[list[float]]) -> None:
    advantages = group_advantages(torch.tensor(rows))
    assert advantages.isfinite().all()
    torch.testing.assert_close(advantages.sum(1), torch.zeros(len(rows)), atol=2e-6, rtol=0)


def test_scaled_advantages_do_not_depend_on_the_unit_of_reward() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.2, 1.2]])
    torch.testing.assert_close(
        group_advantages(10 * rewards + 3, eps=0.0), group_advantages(rewards, eps=0.0)
    )


def test_unscaled_advantages_are_the_distance_from_the_mean() -> None:
    advantages = group_advantages(torch.tensor([[2.0, 0.0, 1.0]]), scale="none")
    torch.testing.assert_close(advantages, torch.tensor([[1.0, -1.0, 0.0]]))


def test_only_groups_with_two_different_rewards_are_mixed() -> None:
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, NAN], [NAN, NAN], [0.2, 0.2]])
    assert mixed_groups(rewards).tolist() == [False, True, False, False, False]


# --- overlong penalty


def test_the_overlong_penalty_ramps_over_the_cache() -> None:
    penalty = OverlongPenalty(max_new_tokens=100, cache=20)
    lengths = torch.tensor([1, 80, 81, 90, 100, 100])
    truncated = torch.tensor([False, False, False, False, False, True])
    expected = torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    torch.testing.assert_close(penalty(lengths, truncated), expected)


def test_a_truncated_completion_gets_the_whole_penalty_whatever_its_length() -> None:
    penalty = OverlongPenalty(max_new_tokens=100, cache=20, weight=0.5)
    assert penalty(torch.tensor([10]), torch.tensor([True])).tolist() == [-0.5]


def test_a_length_beyond_the_cap_gets_the_whole_penalty_once() -> None:
    penalty = OverlongPenalty(max_new_tokens=100, cache=20)
    assert penalty(torch.tensor([170]), torch.tensor([False])).tolist() == [-1.0]


def test_the_cache_is_a_fifth_of_the_cap_by_default() -> None:
    assert OverlongPenalty(max_new_tokens=20480).ramp == 4096
    assert OverlongPenalty(max_new_tokens=3).ramp == 1


@pytest.mark.parametrize("fields", [{"cache": 0}, {"cache": 101}, {"weight": -1.0}])
def test_an_impossible_penalty_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="="):
        OverlongPenalty(**{"max_new_tokens": 100, **fields})


# --- who counts

REWARDS = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [NAN, 1.0, 0.0]])
TRUNCATED = torch.tensor([False, True, False, False, False, True, False, False, False])


def test_a_truncated_completion_does_not_count_but_its_reward_stays_in_the_statistics() -> None:
    credited = Credit()(REWARDS, TRUNCATED)
    assert credited.counted.tolist() == [True, False, True, True, True, False, False, True, True]
    torch.testing.assert_close(credited.advantages, group_advantages(REWARDS).flatten())


def test_truncated_completions_count_when_they_are_not_masked() -> None:
    credited = Credit(mask_truncated=False)(REWARDS, TRUNCATED)
    assert credited.counted.tolist() == [True] * 6 + [False, True, True]


def test_an_abstained_completion_never_counts() -> None:
    credited = Credit(mask_truncated=False)(REWARDS, torch.zeros(9, dtype=torch.bool))
    assert not credited.counted[6]
    assert credited.advantages[6] == 0


def test_equal_groups_are_kept_skipped_or_dropped() -> None:
    group = slice(3, 6)
    nothing = torch.zeros(9, dtype=torch.bool)
    kept = Credit(equal_groups="keep")(REWARDS, nothing)
    skipped = Credit(equal_groups="skip")(REWARDS, nothing)
    dropped = Credit(equal_groups="drop")(REWARDS, nothing)
    assert kept.counted[group].all()
    assert kept.learned[group].all()
    assert skipped.counted[group].all()
    assert not skipped.learned[group].any()
    assert not dropped.counted[group].any()
    assert not dropped.learned[group].any()
    for other in (skipped, dropped):
        assert torch.equal(other.learned[:3], kept.learned[:3])


@pytest.mark.parametrize(
    "fields", [{"scale": "max"}, {"eps": -1.0}, {"ddof": 2}, {"equal_groups": "forget"}]
)
def test_an_unknown_credit_setting_is_refused(
    fields: dict[str, object], unchecked: Callable[..., Credit]
) -> None:
    with pytest.raises(ValueError, match="="):
        unchecked(Credit, **fields)
