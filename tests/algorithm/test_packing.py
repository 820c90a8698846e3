from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.algorithm.packing import common_prefix, pack
from qerl.types import Packed, Rollouts

MakeRollouts = Callable[..., Rollouts]


def ancestry(packed: Packed, row: int) -> list[int]:
    """Tokens that `row` of S sees, in order: its ancestors whole, its own segment up to it."""
    index = next(i for i, s in enumerate(packed.segments) if s.start <= row < s.start + s.length)
    own = packed.segments[index]
    tokens = packed.tokens[own.start : row + 1].tolist()
    parent = own.parent
    while parent is not None:
        assert parent < index
        segment = packed.segments[parent]
        tokens = packed.tokens[segment.start : segment.start + segment.length].tolist() + tokens
        index, parent = parent, segment.parent
    return tokens


def check(rollouts: Rollouts, rows: list[int], packs: list[Packed]) -> None:
    """Every token of `rows` is predicted exactly once, from exactly what came before it."""
    seen: set[tuple[int, int]] = set()
    for packed in packs:
        assert all(s.length > 0 for s in packed.segments)
        assert sum(s.length for s in packed.segments) == len(packed.tokens) == len(packed.positions)
        for at in range(len(packed.targets)):
            b, c = int(packed.sequence[at]), int(packed.offset[at])
            assert (b, c) not in seen
            seen.add((b, c))
            completion = rollouts.completion(b)
            assert int(packed.targets[at]) == completion[c]
            before = [*rollouts.prompts.tokens[b // rollouts.group_size], *completion[:c]]
            row = int(packed.predictors[at])
            assert ancestry(packed, row) == before
            assert int(packed.positions[row]) == len(before) - 1
    assert seen == {(b, c) for b in rows for c in range(int(rollouts.lengths[b]))}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_token_is_predicted_once_from_exactly_what_came_before(
    data: st.DataObject, make_rollouts: MakeRollouts
) -> None:
    token = st.integers(0, 2)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4))
    size = len(prompts) * 2
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))
    rollouts = make_rollouts([tuple(prompt) for prompt in prompts], lengths, group_size=2)
    rows = data.draw(st.permutations(range(size)))[: data.draw(st.integers(0, size))]
    packs = pack(
        rollouts,
        rows,
        token_budget=data.draw(st.integers(1, 40)),
        share_prompts=data.draw(st.booleans()),
        min_shared=data.draw(st.integers(1, 3)),
    )
    check(rollouts, rows, packs)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_micro_batch_exceeds_the_budget_only_for_a_single_sequence(
    data: st.DataObject, make_rollouts: MakeRollouts
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=6, max_size=6))
    rollouts = make_rollouts([(1, 2, 3), (1, 2, 4)], lengths, group_size=3)
    budget = data.draw(st.integers(1, 30))
    for packed in pack(rollouts, list(range(6)), token_budget=budget, min_shared=2):
        assert len(packed.tokens) <= budget or len(packed.sequence.unique()) == 1


def test_a_prompt_is_stored_once_for_its_group(make_rollouts: MakeRollouts) -> None:
    rollouts = make_rollouts([(7, 8, 9)], [3, 2, 4], group_size=3)
    (packed,) = pack(rollouts, [0, 1, 2], token_budget=100)
    assert len(packed.tokens) == 3 + 2 + 1 + 3
    assert [s.parent for s in packed.segments] == [None, 0, 0, 0]
    (apart,) = pack(rollouts, [0, 1, 2], token_budget=100, share_prompts=False)
    assert len(apart.tokens) == 3 * 3 + 2 + 1 + 3


def test_a_prefix_of_several_prompts_is_stored_once_when_it_is_long_enough(
    make_rollouts: MakeRollouts,
) -> None:
    common = tuple(range(10))
    rollouts = make_rollouts([(*common, 1), (*common, 2), (*common, 2, 3)], [2] * 6, group_size=2)
    (shared,) = pack(rollouts, list(range(6)), token_budget=100, min_shared=10)
    assert shared.segments[0].length == 10
    assert sum(s.parent is None for s in shared.segments) == 1
    assert len(shared.tokens) == 10 + 1 + 1 + 2 + 6
    (apart,) = pack(rollouts, list(range(6)), token_budget=100, min_shared=11)
    assert sum(s.parent is None for s in apart.segments) == 3
    assert len(apart.tokens) == 11 + 11 + 12 + 6


@pytest.mark.parametrize(
    "prompts", [[(1, 2, 3), (1, 2, 3)], [(1, 2), (1, 2, 3)], [(1, 2, 3), (1, 2)]]
)
def test_a_prompt_that_begins_or_equals_another_keeps_a_segment_of_its_own(
    make_rollouts: MakeRollouts, prompts: list[tuple[int, ...]]
) -> None:
    rollouts = make_rollouts(prompts, [2] * 4, group_size=2)
    packs = pack(rollouts, [0, 1, 2, 3], token_budget=100, min_shared=1)
    assert sum(s.parent is None for s in packs[0].segments) == 1
    check(rollouts, [0, 1, 2, 3], packs)


def test_shared_tokens_are_charged_to_the_budget_once(make_rollouts: MakeRollouts) -> None:
    common = tuple(range(10))
    rollouts = make_rollouts([(*common, 1), (*common, 2), (*common, 3)], [2] * 6, group_size=2)
    rows = list(range(6))
    (shared,) = pack(rollouts, rows, token_budget=10 + 3 + 6, min_shared=10)
    assert len(shared.tokens) == 19
    assert len(pack(rollouts, rows, token_budget=18, min_shared=10)) == 2


def test_the_last_token_of_a_completion_has_no_row(make_rollouts: MakeRollouts) -> None:
    rollouts = make_rollouts([(7, 8)], [1, 1], group_size=2)
    (packed,) = pack(rollouts, [0, 1], token_budget=100)
    assert packed.tokens.tolist() == [7, 8]
    assert packed.predictors.tolist() == [1, 1]
    assert len(packed.targets) == 2


@pytest.mark.parametrize("lengths", [[0, 1], [1, 5], [5, 5], [0, 5]])
def test_completions_of_length_zero_one_and_full_width_are_scored_whole(
    make_rollouts: MakeRollouts, lengths: list[int]
) -> None:
    rollouts = make_rollouts([(7, 8)], lengths, group_size=2)
    packs = pack(rollouts, [0, 1], token_budget=100)
    check(rollouts, [0, 1], packs)
    assert sum(len(packed.targets) for packed in packs) == sum(lengths)


def test_only_empty_completions_make_no_micro_batch(make_rollouts: MakeRollouts) -> None:
    rollouts = make_rollouts([(7, 8)], [0, 0], group_size=2)
    assert pack(rollouts, [0, 1], token_budget=10) == []


def test_an_end_token_equal_to_the_padding_is_scored_and_the_padding_is_not(
    make_rollouts: MakeRollouts,
) -> None:
    rollouts = make_rollouts([(7, 8)], [3, 2], group_size=2, padding=4)
    completions = rollouts.completions.clone()
    completions[0, 2] = 0  # the end-of-sequence token, of the same id as the padding
    rollouts = replace(rollouts, completions=completions)
    (packed,) = pack(rollouts, [0, 1], token_budget=100)
    assert packed.targets.tolist()[2] == 0
    assert len(packed.targets) == 5


def test_nothing_beyond_a_length_is_ever_read(make_rollouts: MakeRollouts) -> None:
    clean = make_rollouts([(7, 8)], [3, 2], group_size=2, padding=4)
    poisoned = torch.where(clean.mask, clean.completions, -999)
    packs = pack(replace(clean, completions=poisoned), [0, 1], token_budget=100)
    check(clean, [0, 1], packs)


def test_a_group_larger_than_the_budget_is_split_and_its_prompt_repeated(
    make_rollouts: MakeRollouts,
) -> None:
    rollouts = make_rollouts([(7, 8, 9)], [4] * 4, group_size=4)
    packs = pack(rollouts, [0, 1, 2, 3], token_budget=9)
    assert [len(packed.tokens) for packed in packs] == [9, 9]
    check(rollouts, [0, 1, 2, 3], packs)


def test_packing_twice_gives_the_same_micro_batches(make_rollouts: MakeRollouts) -> None:
    rollouts = make_rollouts([(7, 8, 9), (7, 8, 1)], [4, 2, 6, 3], group_size=2)
    first, second = (pack(rollouts, [3, 0, 2, 1], token_budget=12) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.sequence, b.sequence)
        assert a.segments == b.segments


def test_a_prompt_without_tokens_is_refused(make_rollouts: MakeRollouts) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        pack(make_rollouts([()], [1, 1], group_size=2), [0], token_budget=10)


def test_a_row_named_twice_is_refused(make_rollouts: MakeRollouts) -> None:
    with pytest.raises(ValueError, match="twice"):
        pack(make_rollouts([(1,)], [1, 1], group_size=2), [0, 0], token_budget=10)


@pytest.mark.parametrize("limits", [{"token_budget": 0}, {"token_budget": 9, "min_shared": 0}])
def test_limits_below_one_token_are_refused(
    make_rollouts: MakeRollouts, limits: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack(make_rollouts([(1,)], [1, 1], group_size=2), [0], **limits)


def test_the_common_prefix_ends_at_the_first_difference_or_the_shorter_end() -> None:
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 4)) == 2
    assert common_prefix((2,), (1,)) == 0
