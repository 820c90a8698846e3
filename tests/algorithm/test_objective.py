import math
from collections.abc import Callable

import pytest
import torch

from qerl.algorithm.objective import ClippedObjective


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_tokens_match_the_hand_computation() -> None:
    # ratio 1.1 with A = 2: inside, gain 2.2. ratio 0.5 with A = -1: clipped to 0.8, gain -0.8.
    old = tokens(-1.0, -2.0)
    logprobs = old + tokens(math.log(1.1), math.log(0.5))
    out = ClippedObjective()(logprobs, old, tokens(2.0, -1.0), tokens(0.25, 0.75))
    assert out.loss.item() == pytest.approx(-(0.25 * 2.2 + 0.75 * -0.8))


def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_weight_times_advantage() -> None:
    logprobs = tokens(-1.0, -30.0, -0.1).requires_grad_()
    advantages, weights = tokens(2.0, -1.0, 0.5), tokens(0.1, 0.2, 0.3)
    out = ClippedObjective(clip_low=0.0, clip_high=0.0)(logprobs, None, advantages, weights)
    out.loss.backward()
    assert torch.equal(logprobs.grad, -weights * advantages)
    assert out.loss.item() == pytest.approx(-float((weights * advantages).sum()))
    assert out.diagnostics.metrics()["train/ratio_max"] == 1.0
    assert out.diagnostics.metrics()["train/clip_fraction"] == 0.0


def test_an_old_policy_equal_to_the_policy_gives_the_on_policy_gradient() -> None:
    advantages, weights = tokens(2.0, -1.0), tokens(0.5, 0.5)
    on_policy = tokens(-1.0, -2.0).requires_grad_()
    ClippedObjective()(on_policy, None, advantages, weights).loss.backward()
    ratio = tokens(-1.0, -2.0).requires_grad_()
    ClippedObjective()(ratio, ratio.detach().clone(), advantages, weights).loss.backward()
    torch.testing.assert_close(ratio.grad, on_policy.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (1.29, -1.0, True),
        (0.79, -1.0, False),
        (0.79, 1.0, 1),
    ],
)
def test_the_clip_stops_the_gradient_only_where_the_ratio_has_moved_far_enough(
    ratio: float, advantage: float, learns: bool
) -> None:
    logprobs = tokens(math.log(ratio)).requires_grad_()
    out = ClippedObjective(clip_low=0.2, clip_high=0.28)(
        logprobs, tokens(0.0), tokens(advantage), tokens(1.0)
    )
    out.loss.backward()
    assert bool(logprobs.grad[0] != 0) == bool(learns)
    assert out.diagnostics.metrics()["train/clip_fraction"] == (0.0 if learns else 1.0)


def test_the_clip_fractions_tell_the_two_sides_apart() -> None:
    logprobs = tokens(math.log(1.5), math.log(0.5), 0.0, 0.0)
    out = ClippedObjective()(logprobs, tokens(0, 0, 0, 0), tokens(1, -1, 1, 1), tokens(1, 1, 1, 1))
    metrics = out.diagnostics.metrics()
    assert metrics["train/clip_fraction"] == 0.5
    assert metrics["train/clip_fraction_high"] == 0.25
    assert metrics["train/clip_fraction_low"] == 0.25


def test_tokens_of_weight_zero_enter_neither_loss_nor_diagnostics() -> None:
    logprobs = tokens(math.log(1.5), -0.3)
    out = ClippedObjective()(logprobs, tokens(0.0, -0.3), tokens(1.0, 1.0), tokens(0.0, 1.0))
    assert out.loss.item() == -1.0
    assert out.diagnostics.metrics()["train/clip_fraction"] == 0.0
    assert out.diagnostics.metrics()["train/tokens"] == 1.0


def test_the_kl_term_is_k3_with_the_gradient_of_one_minus_the_ratio() -> None:
    logprobs = tokens(-1.0).requires_grad_()
    ref = tokens(-1.5)
    objective = ClippedObjective(kl_coef=0.04)
    out = objective(logprobs, None, tokens(0.0), tokens(1.0), ref_logprobs=ref)
    out.loss.backward()
    expected = math.exp(-0.5) + 0.5 - 1
    assert out.loss.item() == pytest.approx(0.04 * expected)
    assert float(logprobs.grad) == pytest.approx(0.04 * (1 - math.exp(-0.5)))
    assert out.diagnostics.metrics()["train/kl_ref"] == pytest.approx(expected)


def test_a_policy_equal_to_its_reference_has_no_kl_and_no_kl_gradient() -> None:
    logprobs = tokens(-1.0, -7.0).requires_grad_()
    objective = ClippedObjective(kl_coef=1.0)
    out = objective(logprobs, None, tokens(0, 0), tokens(1, 1), ref_logprobs=logprobs.detach())
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert not logprobs.grad.any()


def test_a_kl_term_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        ClippedObjective(kl_coef=0.1)(tokens(-1.0), None, tokens(1.0), tokens(1.0))


@pytest.mark.parametrize("gap", [1e3, -1e3, 90.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_huge_log_ratio_neither_overflows_nor_poisons_the_gradient(
    gap: float, advantage: float, ratio: str
) -> None:
    logprobs = torch.tensor([-1.0, -1.0 + gap]).requires_grad_()
    out = ClippedObjective(kl_coef=0.1, ratio=ratio)(
        logprobs,
        torch.tensor([-1.0, -1.0]),
        torch.full((2,), advantage),
        torch.full((2,), 0.5),
        ref_logprobs=torch.tensor([-1.0, -1.0]),
        sequence=torch.tensor([0, 1]),
    )
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprobs.grad.isfinite().all()


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_grew() -> None:
    logprobs = tokens(math.log(10.0), math.log(2.0)).requires_grad_()
    out = ClippedObjective(dual_clip=3.0)(logprobs, tokens(0, 0), tokens(-1, -1), tokens(1, 1))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(3.0 + 2.0)
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1] != 0


def test_the_dual_clip_leaves_good_tokens_alone() -> None:
    arguments = (tokens(math.log(10.0)), tokens(0.0), tokens(1.0), tokens(1.0))
    assert ClippedObjective(dual_clip=3.0)(*arguments).loss == ClippedObjective()(*arguments).loss


def test_a_sequence_ratio_is_the_geometric_mean_and_clips_whole_sequences() -> None:
    # sequence 0: log-ratios 0.3 and -0.1, geometric mean exp(0.1); sequence 1: exp(0.4), clipped
    old = tokens(-1, -1, -1)
    logprobs = (old + tokens(0.3, -0.1, 0.4)).requires_grad_()
    objective = ClippedObjective(ratio="sequence", clip_high=0.28)
    out = objective(
        logprobs, old, tokens(1, 1, 1), tokens(0.25, 0.25, 0.5), sequence=torch.tensor([7, 7, 2])
    )
    out.loss.backward()
    mean = math.exp(0.1)
    assert out.loss.item() == pytest.approx(-(0.5 * mean + 0.5 * 1.28))
    torch.testing.assert_close(logprobs.grad, tokens(-0.25 * mean, -0.25 * mean, 0.0))


def test_on_policy_a_sequence_ratio_has_the_gradient_of_a_token_ratio() -> None:
    advantages, weights = tokens(1, 1, -1), tokens(0.25, 0.25, 0.5)
    grads = []
    for ratio in ("token", "sequence"):
        logprobs = tokens(-1, -2, -3).requires_grad_()
        ClippedObjective(ratio=ratio)(
            logprobs, None, advantages, weights, sequence=torch.tensor([0, 0, 1])
        ).loss.backward()
        grads.append(logprobs.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_a_sequence_ratio_without_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence of each token"):
        ClippedObjective(ratio="sequence")(tokens(-1.0), None, tokens(1.0), tokens(1.0))


def test_a_correction_scales_the_gain_and_not_the_kl() -> None:
    logprobs, ref = tokens(-1.0, -1.0), tokens(-2.0, -2.0)
    objective = ClippedObjective(kl_coef=1.0)
    arguments = (logprobs, None, tokens(1, 1), tokens(1, 1))
    plain = objective(*arguments, ref_logprobs=ref)
    corrected = objective(*arguments, ref_logprobs=ref, correction=tokens(0.5, 0.0))
    assert float(corrected.loss - plain.loss) == pytest.approx(1.5)
    metrics = corrected.diagnostics.metrics()
    assert metrics["train/correction_mean"] == 0.25
    assert metrics["train/correction_kept"] == 0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"kl_coef": -1.0},
        {"ratio": "word"},
        {"dual_clip": 1.1},
    ],
)
def test_an_impossible_objective_is_refused(
    fields: dict[str, object], unchecked: Callable[..., ClippedObjective]
) -> None:
    with pytest.raises(ValueError, match="="):
        unchecked(ClippedObjective, **fields)
