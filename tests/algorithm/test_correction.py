import math
from collections.abc import Callable

import pytest
import torch

from qerl.algorithm.correction import ImportanceCorrection, sequence_mean

SEQUENCE = torch.tensor([0, 0, 0, 1])
SAMPLER = torch.full((4,), -1.0)


def log(*ratios: float) -> torch.Tensor:
    return SAMPLER + torch.tensor([math.log(ratio) for ratio in ratios])


def test_without_correction_there_is_no_weight() -> None:
    assert ImportanceCorrection()(log(1, 2, 3, 4), SAMPLER, SEQUENCE) is None


def test_truncation_caps_the_ratio_of_trainer_to_sampler() -> None:
    weight = ImportanceCorrection(kind="truncate", cap=2.0)(
        log(0.1, 1.0, 1.5, 9.0), SAMPLER, SEQUENCE
    )
    torch.testing.assert_close(weight, torch.tensor([0.1, 1.0, 1.5, 2.0]))


def test_the_mask_drops_ratios_on_both_sides_and_keeps_the_others_as_they_are() -> None:
    weight = ImportanceCorrection(kind="mask", cap=2.0)(log(0.4, 0.6, 1.9, 2.1), SAMPLER, SEQUENCE)
    torch.testing.assert_close(weight, torch.tensor([0.0, 0.6, 1.9, 0.0]))


def test_an_exact_sampler_needs_no_correction() -> None:
    for kind in ("truncate", "mask"):
        for level in ("token", "sequence"):
            weight = ImportanceCorrection(kind=kind, level=level)(SAMPLER, SAMPLER, SEQUENCE)
            assert torch.equal(weight, torch.ones(4))


def test_the_sequence_level_is_the_geometric_mean_of_each_completion() -> None:
    weight = ImportanceCorrection(kind="truncate", cap=100.0, level="sequence")(
        log(1.0, 2.0, 4.0, 3.0), SAMPLER, SEQUENCE
    )
    torch.testing.assert_close(weight, torch.tensor([2.0, 2.0, 2.0, 3.0]))


@pytest.mark.parametrize("length", [10, 1000])
def test_the_sequence_level_does_not_grow_with_length(length: int) -> None:
    sampler = torch.full((length,), -1.0)
    trainer = sampler + math.log(1.05)
    weight = ImportanceCorrection(kind="mask", cap=2.0, level="sequence")(
        trainer, sampler, torch.zeros(length, dtype=torch.long)
    )
    torch.testing.assert_close(weight, torch.full((length,), 1.05))


def test_the_weight_carries_no_gradient() -> None:
    trainer = log(1.0, 1.1, 1.2, 1.3).requires_grad_()
    weight = ImportanceCorrection(kind="truncate")(trainer, SAMPLER, SEQUENCE)
    assert not weight.requires_grad


def test_a_huge_gap_stays_finite() -> None:
    weight = ImportanceCorrection(kind="truncate")(SAMPLER + 1e4, SAMPLER, SEQUENCE)
    assert torch.equal(weight, torch.full((4,), 2.0))


def test_the_mean_over_a_sequence_ignores_the_order_of_tokens() -> None:
    values = torch.tensor([1.0, 10.0, 3.0, 20.0])
    mixed = sequence_mean(values, torch.tensor([5, 2, 5, 2]))
    assert mixed.tolist() == [2.0, 15.0, 2.0, 15.0]


@pytest.mark.parametrize("fields", [{"kind": "icepop"}, {"level": "word"}, {"cap": 1.0}])
def test_an_unknown_correction_is_refused(
    fields: dict[str, object], unchecked: Callable[..., ImportanceCorrection]
) -> None:
    with pytest.raises(ValueError, match="="):
        unchecked(ImportanceCorrection, **fields)
