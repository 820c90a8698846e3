from collections.abc import Callable

import pytest
import torch

from qerl.algorithm.selection import (
    DynamicSampling,
    concat_rollouts,
    concat_scored,
    group_waste,
    select_groups,
    select_scored,
    suggested_group_size,
)
from qerl.types import Rollouts, Scored

MakeRollouts = Callable[..., Rollouts]
MakeScored = Callable[[torch.Tensor], Scored]
PROMPTS = [(1, 2), (3,), (4, 5, 6)]


def same(a: Rollouts, b: Rollouts) -> bool:
    return a.prompts == b.prompts and all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("completions", "lengths", "sampler_logprobs", "truncated")
    )


def test_selected_groups_keep_every_field_of_their_rows(make_rollouts: MakeRollouts) -> None:
    rollouts = make_rollouts(
        PROMPTS, [3, 1, 9, 2, 4, 4], group_size=2, truncated=[False] * 5 + [True]
    )
    chosen = select_groups(rollouts, [2, 0])
    assert chosen.prompts.ids == (rollouts.prompts.ids[2], rollouts.prompts.ids[0])
    assert chosen.lengths.tolist() == [4, 4, 3, 1]
    assert chosen.truncated.tolist() == [False, True, False, False]
    assert [chosen.completion(b) for b in range(4)] == [
        rollouts.completion(b) for b in (4, 5, 0, 1)
    ]
    assert torch.equal(chosen.sampler_logprobs[0, :4], rollouts.sampler_logprobs[4, :4])


def test_selected_groups_are_no_wider_than_their_longest_completion(
    make_rollouts: MakeRollouts,
) -> None:
    rollouts = make_rollouts(PROMPTS, [3, 1, 9, 2, 4, 4], group_size=2)
    assert select_groups(rollouts, [0, 2]).completions.shape == (4, 4)


def test_no_group_can_be_selected(make_rollouts: MakeRollouts, make_scored: MakeScored) -> None:
    rollouts = make_rollouts(PROMPTS, [3, 1, 9, 2, 4, 4], group_size=2)
    assert len(select_groups(rollouts, []).prompts) == 0
    assert select_scored(make_scored(torch.rand(3, 2)), []).rewards.shape == (0, 2)


def test_what_is_split_joins_to_the_same_rollouts(
    make_rollouts: MakeRollouts, make_scored: MakeScored
) -> None:
    rollouts = make_rollouts(PROMPTS, [3, 1, 9, 2, 4, 4], group_size=2)
    scored = make_scored(torch.rand(3, 2))
    parts = [[0], [1, 2]]
    assert same(concat_rollouts([select_groups(rollouts, part) for part in parts]), rollouts)
    joined = concat_scored([select_scored(scored, part) for part in parts])
    assert torch.equal(joined.rewards, scored.rewards)
    assert joined.texts == scored.texts
    assert joined.verdicts == scored.verdicts
    assert torch.equal(joined.components["answer"], scored.components["answer"])


def test_joined_rollouts_are_padded_with_zeros_to_the_longest(make_rollouts: MakeRollouts) -> None:
    short = make_rollouts([(1,)], [2, 1], group_size=2, seed=1)
    long = make_rollouts([(2,)], [5, 4], group_size=2, seed=2)
    joined = concat_rollouts([short, long])
    assert joined.completions.shape == (4, 5)
    assert not joined.completions[:2, 2:].any()
    assert not joined.sampler_logprobs[:2, 2:].any()


@pytest.mark.parametrize("other", [{"sigma": 0.01}, {"step": 1}])
def test_draws_of_different_noise_or_step_do_not_join(
    make_rollouts: MakeRollouts, other: dict[str, float]
) -> None:
    parts = [make_rollouts([(1,)], [2, 1], group_size=2, **kind) for kind in ({}, other)]
    with pytest.raises(ValueError, match="do not make one step"):
        concat_rollouts(parts)


def test_draws_of_different_group_size_do_not_join(make_rollouts: MakeRollouts) -> None:
    parts = [make_rollouts([(1,)], [1] * size, group_size=size) for size in (2, 3)]
    with pytest.raises(ValueError, match="do not make one step"):
        concat_rollouts(parts)


def test_scored_parts_with_different_components_do_not_join(make_scored: MakeScored) -> None:
    first = make_scored(torch.rand(1, 2))
    second = Scored(
        rewards=first.rewards, components={}, verdicts=first.verdicts, texts=first.texts
    )
    with pytest.raises(ValueError, match="components"):
        concat_scored([first, second])


# --- dynamic sampling


class Draws:
    """Rollouts of 4 prompts with 2 completions each, `mixed` groups of which are mixed."""

    def __init__(self, rollouts: MakeRollouts, scored: MakeScored) -> None:
        self.rollouts, self.scored = rollouts, scored

    def __call__(self, *mixed: int) -> list[tuple[Rollouts, Scored]]:
        draws = []
        for seed, count in enumerate(mixed):
            rewards = torch.ones(4, 2)
            rewards[4 - count :, 1] = 0.0
            lengths = [seed + 1] * 8
            prompts = [(1, 2)] * 4
            drawn = self.rollouts(prompts, lengths, group_size=2, seed=seed)
            draws.append((drawn, self.scored(rewards)))
        return draws


@pytest.fixture
def draws(make_rollouts: MakeRollouts, make_scored: MakeScored) -> Draws:
    return Draws(make_rollouts, make_scored)


def test_a_full_step_holds_exactly_the_prompts_of_a_step_all_of_them_mixed(draws: Draws) -> None:
    selection = DynamicSampling().select(draws(1, 3, 4), prompts_per_step=4)
    assert selection.status == "full"
    assert len(selection.rollouts.prompts) == 4
    assert (selection.scored.rewards.std(1) > 0).all()
    assert selection.rollouts.lengths.tolist() == [1] * 2 + [2] * 6
    assert selection.groups_drawn == 12
    assert selection.groups_mixed == 8


def test_too_few_mixed_groups_ask_for_another_draw(draws: Draws) -> None:
    selection = DynamicSampling(max_rollouts=3).select(draws(1, 2), prompts_per_step=4)
    assert selection.status == "drawing"
    assert len(selection.rollouts.prompts) == 3


def test_a_data_set_that_is_always_wrong_ends_with_a_status_that_says_so(draws: Draws) -> None:
    selection = DynamicSampling(max_rollouts=3).select(draws(0, 0, 0), prompts_per_step=4)
    assert selection.status == "exhausted"
    assert len(selection.rollouts.prompts) == 0
    assert "0 of 12 groups are mixed after 3 draws" in selection.describe()
    assert selection.metrics()["rollout/groups_mixed_fraction"] == 0.0


def test_the_last_allowed_draw_can_still_fill_the_step(draws: Draws) -> None:
    selection = DynamicSampling(max_rollouts=2).select(draws(2, 2), prompts_per_step=4)
    assert selection.status == "full"


def test_completions_stay_with_their_rewards(draws: Draws) -> None:
    drawn = draws(2, 4)
    selection = DynamicSampling().select(drawn, prompts_per_step=6)
    rollouts, scored = drawn[0]
    assert selection.rollouts.completion(0) == rollouts.completion(4)
    assert selection.scored.texts[:4] == scored.texts[4:]


def test_a_limit_below_one_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="max_rollouts"):
        DynamicSampling(max_rollouts=0)


# --- waste


def test_a_pair_at_pass_rate_018_wastes_seventy_percent_of_groups() -> None:
    assert group_waste(0.18, 2) == pytest.approx(0.7048)


def test_waste_matches_the_share_of_equal_groups_in_simulation() -> None:
    draws = torch.rand(20_000, 8) < 0.8
    equal = (draws.all(1) | ~draws.any(1)).float().mean()
    assert group_waste(0.8, 8) == pytest.approx(float(equal), abs=0.01)


def test_the_suggested_group_is_the_smallest_within_the_limit() -> None:
    size = suggested_group_size(0.18, limit=0.25)
    assert size is not None
    assert group_waste(0.18, size) <= 0.25 < group_waste(0.18, size - 1)


def test_no_group_is_large_enough_for_prompts_that_are_always_solved() -> None:
    assert suggested_group_size(1.0) is None


def test_a_pass_rate_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="pass rate"):
        group_waste(1.1, 8)
