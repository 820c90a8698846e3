from collections.abc import Callable

import pytest
import torch

from qerl.algorithm.weights import token_weights

KINDS = ["token", "sequence", "constant"]


def lengths_mask(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def all_of(mask: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(mask), dtype=torch.bool)


def test_token_and_sequence_means_differ_as_computed_by_hand() -> None:
    mask = lengths_mask([1, 100], 100)
    token = token_weights(mask, all_of(mask), "token", max_new_tokens=200)
    sequence = token_weights(mask, all_of(mask), "sequence", max_new_tokens=200)
    constant = token_weights(mask, all_of(mask), "constant", max_new_tokens=200)
    assert token[0, 0] == pytest.approx(1 / 101)
    assert token[1, 99] == pytest.approx(1 / 101)
    assert sequence[0, 0] == pytest.approx(1 / 2)
    assert sequence[1, 99] == pytest.approx(1 / 200)
    assert constant[0, 0] == pytest.approx(1 / 400)
    assert constant[1, 99] == pytest.approx(1 / 400)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_weights_of_a_mean_sum_to_one(kind: str) -> None:
    mask = lengths_mask([3, 7, 1, 5], 9)
    weights = token_weights(mask, all_of(mask), kind, max_new_tokens=9)
    assert float(weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_weighs_nothing(kind: str) -> None:
    mask = lengths_mask([3, 7], 9)
    weights = token_weights(mask, all_of(mask), kind, max_new_tokens=9)
    assert torch.equal(weights != 0, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_dropping_half_the_sequences_gives_the_weights_of_the_other_half_alone(kind: str) -> None:
    mask = lengths_mask([3, 7, 1, 5], 9)
    keep = torch.tensor([True, False, True, False])
    weights = token_weights(mask, keep, kind, max_new_tokens=9)
    alone = token_weights(mask[keep], all_of(mask[keep]), kind, max_new_tokens=9)
    assert torch.equal(weights[keep], alone)
    assert not weights[~keep].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_tokens_does_not_count(kind: str) -> None:
    with_empty, without = lengths_mask([3, 0, 5], 9), lengths_mask([3, 5], 9)
    weights = token_weights(with_empty, all_of(with_empty), kind, max_new_tokens=9)
    expected = token_weights(without, all_of(without), kind, max_new_tokens=9)
    assert torch.equal(weights[[0, 2]], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_denominator_is_that_of_all_ranks(kind: str) -> None:
    mask = lengths_mask([3, 7, 1, 5], 9)
    whole = token_weights(mask, all_of(mask), kind, max_new_tokens=9)
    ranks = [mask[:1], mask[1:]]
    asked: list[float] = []

    def record(value: float) -> float:
        asked.append(value)
        return value

    for rank in ranks:
        token_weights(rank, all_of(rank), kind, max_new_tokens=9, reduce_sum=record)
    total = sum(asked)
    parts = [
        token_weights(rank, all_of(rank), kind, max_new_tokens=9, reduce_sum=lambda _: total)
        for rank in ranks
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[0, 0], [3, 4], []])
def test_every_rank_joins_the_sum_once_even_with_nothing_to_add(
    kind: str, lengths: list[int]
) -> None:
    calls: list[float] = []

    def count(value: float) -> float:
        calls.append(value)
        return value

    mask = lengths_mask(lengths, 4) if lengths else torch.zeros(0, 4, dtype=torch.bool)
    keep = torch.zeros(len(mask), dtype=torch.bool)
    weights = token_weights(mask, keep, kind, max_new_tokens=4, reduce_sum=count)
    assert calls == [0.0]
    assert not weights.any()
    assert weights.isfinite().all()


def test_an_unknown_mean_is_refused() -> None:
    mask = lengths_mask([1], 1)
    unchecked: Callable[..., torch.Tensor] = token_weights.__wrapped__  # past beartype
    with pytest.raises(ValueError, match="reduce="):
        unchecked(mask, all_of(mask), "prompt", max_new_tokens=1)
