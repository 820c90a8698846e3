import pytest
import torch

from qerl.algorithm.diagnostics import Diagnostics, k3


def measured(values: torch.Tensor, counted: torch.Tensor | None = None) -> Diagnostics:
    every = torch.ones(len(values), dtype=torch.bool) if counted is None else counted
    return Diagnostics.measure(every, {"train/entropy_nats": values}, {"train/ratio_max": values})


def test_sums_over_uneven_splits_give_the_metrics_of_the_whole() -> None:
    values = torch.rand(100, dtype=torch.float64)
    whole = measured(values).metrics()
    for sizes in ([1, 99], [50, 50], [10, 0, 90]):
        parts = [measured(part) for part in values.split(sizes)]
        total = sum(parts, start=Diagnostics.empty()).metrics()
        assert total == pytest.approx(whole, rel=1e-12)


def test_the_mean_is_over_tokens_and_not_over_micro_batches() -> None:
    total = measured(torch.tensor([0.0])) + measured(torch.ones(99))
    assert total.metrics()["train/entropy_nats"] == pytest.approx(0.99)
    assert total.metrics()["train/tokens"] == 100


def test_the_maximum_is_that_of_all_micro_batches_in_any_order() -> None:
    parts = [measured(torch.tensor(values)) for values in ([5.0, 1.0], [2.0], [4.0])]
    for order in (parts, parts[::-1]):
        total = sum(order, start=Diagnostics.empty())
        assert total.metrics()["train/ratio_max"] == 5.0


def test_what_does_not_count_may_be_anything() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf, 3.0])
    metrics = measured(values, torch.tensor([True, False, False, True])).metrics()
    assert metrics["train/entropy_nats"] == 2.0
    assert metrics["train/ratio_max"] == 3.0


def test_what_was_not_measured_is_not_reported() -> None:
    assert set(measured(torch.ones(2)).metrics()) == {
        "train/entropy_nats",
        "train/ratio_max",
        "train/tokens",
    }
    assert Diagnostics.empty().metrics() == {"train/tokens": 0.0}


def test_a_name_outside_the_list_is_refused() -> None:
    with pytest.raises(ValueError, match="train/entropi"):
        Diagnostics.measure(torch.ones(1, dtype=torch.bool), {"train/entropi": torch.ones(1)}, {})


def test_ranks_reduce_to_the_metrics_of_all_tokens() -> None:
    ranks = [measured(torch.tensor([0.0, 4.0])), measured(torch.tensor([5.0]))]
    sums = sum(torch.stack([rank.sums, rank.counts]) for rank in ranks)
    maxima = torch.stack([rank.maxima for rank in ranks]).amax(0)
    reduced = ranks[0].reduced(lambda _: sums, lambda _: maxima).metrics()
    assert reduced["train/entropy_nats"] == 3.0
    assert reduced["train/ratio_max"] == 5.0
    assert reduced["train/tokens"] == 3.0


def test_a_rank_without_tokens_reduces_with_the_same_shapes() -> None:
    empty, full = Diagnostics.empty(), measured(torch.ones(3))
    assert empty.sums.shape == full.sums.shape
    assert empty.maxima.shape == full.maxima.shape


def test_k3_estimates_the_divergence_from_the_distribution_that_was_sampled() -> None:
    sampled = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    other = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    gap = other.log() - sampled.log()
    exact = (sampled * -gap).sum()
    torch.testing.assert_close((sampled * k3(gap)).sum(), exact)
    assert (k3(gap) >= 0).all()
