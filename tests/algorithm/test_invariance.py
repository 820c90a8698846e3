"""The loss of a step and its gradient do not depend on how the step is cut up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl.algorithm.algorithm import Algorithm
from qerl.algorithm.correction import ImportanceCorrection
from qerl.algorithm.credit import Credit, OverlongPenalty
from qerl.algorithm.diagnostics import Diagnostics
from qerl.algorithm.objective import ClippedObjective
from qerl.algorithm.packing import pack
from qerl.algorithm.reference import reference_loss
from qerl.algorithm.selection import select_groups, select_scored
from qerl.types import Experience, Packed, Rollouts, Scored

Step = tuple[Rollouts, Scored]
Policy = Any

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"reduce": "sequence"},
    "dapo": {
        "reduce": "token",
        "credit": Credit(equal_groups="drop"),
        "overlong": OverlongPenalty(max_new_tokens=9, cache=4, weight=0.5),
    },
    "dr_grpo": {
        "reduce": "constant",
        "credit": Credit(scale="none", mask_truncated=False),
        "objective": ClippedObjective(clip_high=0.2),
    },
    "population deviation": {"credit": Credit(ddof=0, eps=0.1)},
    "skip equal groups": {"reduce": "sequence", "credit": Credit(equal_groups="skip")},
    "kl": {"objective": ClippedObjective(kl_coef=0.3)},
    "sequence ratio": {
        "reduce": "sequence",
        "objective": ClippedObjective(ratio="sequence", clip_low=0.02, clip_high=0.03),
    },
    "dual clip": {"objective": ClippedObjective(clip_high=0.1, dual_clip=1.2)},
    "truncated correction": {"correction": ImportanceCorrection(kind="truncate")},
    "masked correction": {
        "correction": ImportanceCorrection(kind="mask", level="sequence", cap=1.5)
    },
    "two updates": {"reduce": "token", "updates_per_rollout": 2},
    "four updates": {"reduce": "sequence", "updates_per_rollout": 4},
}


def algorithm_of(name: str, **changes: Any) -> Algorithm:
    fields = {"group_size": 4, "prompts_per_step": 4, "max_new_tokens": 9}
    return Algorithm(**{**fields, **SETTINGS[name], **changes})


def perturbed(policy: Policy, scale: float) -> Policy:
    """A policy some distance away: on both sides of the trust region."""
    other = type(policy)()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight, source in zip(other.parameters(), policy.parameters(), strict=True):
            noise = torch.randn(source.shape, generator=generator, dtype=source.dtype)
            weight.copy_(source + scale * noise)
    return other


def experience_of(
    algorithm: Algorithm,
    step: Step,
    policy: Policy,
    reduce_sum: Callable[[float], float] | None = None,
) -> Experience:
    rollouts, scored = step
    options = {} if reduce_sum is None else {"reduce_sum": reduce_sum}
    experience = algorithm.experience(rollouts, scored, **options)
    with torch.no_grad():
        return replace(
            experience,
            old_logprobs=perturbed(policy, 0.15).dense(rollouts),
            ref_logprobs=perturbed(policy, 0.4).dense(rollouts),
        )


def gradient(
    algorithm: Algorithm,
    experience: Experience,
    policy: Policy,
    packs: Sequence[Packed],
    chunk: int = 10_000,
) -> tuple[Tensor, float, Diagnostics]:
    """Gradient, loss and diagnostics accumulated over micro-batches, one backward each."""
    policy.zero_grad()
    loss, diagnostics = 0.0, Diagnostics.empty()
    for packed in packs:
        logprobs, entropy = policy.score(packed, chunk)
        out = algorithm.loss(packed, experience, logprobs, entropy)
        out.loss.backward()
        loss += out.loss.item()
        diagnostics = diagnostics + out.diagnostics
    grads = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
    return torch.cat(grads).clone(), loss, diagnostics


def all_packs(algorithm: Algorithm, experience: Experience, **options: Any) -> list[Packed]:
    """Micro-batches of all the step's updates, taken at the same parameters."""
    return [
        packed
        for rows in algorithm.minibatches(experience)
        for packed in pack(experience.rollouts, rows, **{"token_budget": 10_000, **options})
    ]


def agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)  # weights are fp32


@pytest.fixture(params=list(SETTINGS))
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_packed_micro_batches_give_loss_and_gradient_of_the_dense_formula(
    setting: str, step: Step, policy: Policy
) -> None:
    algorithm = algorithm_of(setting)
    experience = experience_of(algorithm, step, policy)
    grads, loss, seen = gradient(
        algorithm, experience, policy, all_packs(algorithm, experience, token_budget=20)
    )
    assert 0 < seen.metrics()["train/clip_fraction"] < 1  # both branches of the clip take part
    policy.zero_grad()
    dense = reference_loss(
        algorithm,
        step[0],
        step[1].rewards,
        policy.dense(step[0]),
        experience.old_logprobs,
        experience.ref_logprobs,
    )
    dense.backward()
    expected = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    assert loss == pytest.approx(dense.item(), rel=1e-5, abs=1e-7)
    assert expected.abs().max() > 1e-3
    agree(grads, expected)


def test_on_policy_the_packed_gradient_is_that_of_the_dense_formula(
    step: Step, policy: Policy
) -> None:
    algorithm = algorithm_of("grpo")
    experience = replace(experience_of(algorithm, step, policy), old_logprobs=None)
    grads, _, _ = gradient(algorithm, experience, policy, all_packs(algorithm, experience))
    policy.zero_grad()
    reference_loss(algorithm, step[0], step[1].rewards, policy.dense(step[0])).backward()
    agree(grads, torch.cat([weight.grad.flatten() for weight in policy.parameters()]))


@pytest.mark.parametrize("budget", [1, 13, 25, 60])
@pytest.mark.parametrize("share", [True, False])
def test_the_gradient_does_not_depend_on_micro_batch_size_or_sharing(
    setting: str, step: Step, policy: Policy, budget: int, share: bool
) -> None:
    algorithm = algorithm_of(setting)
    experience = experience_of(algorithm, step, policy)
    whole, loss, seen = gradient(algorithm, experience, policy, all_packs(algorithm, experience))
    packs = all_packs(algorithm, experience, token_budget=budget, share_prompts=share, min_shared=3)
    cut, cut_loss, cut_seen = gradient(algorithm, experience, policy, packs)
    agree(cut, whole)
    assert cut_loss == pytest.approx(loss, rel=1e-6, abs=1e-9)
    assert cut_seen.metrics() == pytest.approx(seen.metrics(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("padding", [1, 20])
def test_the_gradient_does_not_depend_on_padding(
    setting: str, step: Step, policy: Policy, padding: int
) -> None:
    algorithm = algorithm_of(setting)
    rollouts, scored = step
    wide = replace(
        rollouts,
        completions=torch.nn.functional.pad(rollouts.completions, (0, padding)),
        sampler_logprobs=torch.nn.functional.pad(rollouts.sampler_logprobs, (0, padding)),
    )
    results = []
    for each in (rollouts, wide):
        experience = experience_of(algorithm, (each, scored), policy)
        results.append(gradient(algorithm, experience, policy, all_packs(algorithm, experience)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_poisoned_padding_reaches_neither_loss_nor_gradient(
    setting: str, step: Step, policy: Policy
) -> None:
    algorithm = algorithm_of(setting)
    clean = experience_of(algorithm, step, policy)
    hole = ~step[0].mask
    sampler = step[0].sampler_logprobs.masked_fill(hole, torch.nan)
    poisoned = replace(
        clean,
        rollouts=replace(step[0], sampler_logprobs=sampler),
        old_logprobs=clean.old_logprobs.masked_fill(hole, torch.nan),
        ref_logprobs=clean.ref_logprobs.masked_fill(hole, torch.nan),
    )
    expected = gradient(algorithm, clean, policy, all_packs(algorithm, clean))
    actual = gradient(algorithm, poisoned, policy, all_packs(algorithm, poisoned))
    assert torch.equal(actual[0], expected[0])
    assert actual[2].metrics() == expected[2].metrics()


def test_the_gradient_does_not_depend_on_the_order_of_sequences(
    setting: str, step: Step, policy: Policy
) -> None:
    algorithm = algorithm_of(setting)
    experience = experience_of(algorithm, step, policy)
    whole, _, _ = gradient(algorithm, experience, policy, all_packs(algorithm, experience))
    rows = [row for part in algorithm.minibatches(experience) for row in part]
    mixed = [rows[i] for i in torch.randperm(len(rows)).tolist()]
    packs = pack(experience.rollouts, mixed, token_budget=20)
    agree(gradient(algorithm, experience, policy, packs)[0], whole)


def test_one_backward_for_all_micro_batches_gives_the_gradient_of_one_each(
    setting: str, step: Step, policy: Policy
) -> None:
    algorithm = algorithm_of(setting)
    experience = experience_of(algorithm, step, policy)
    packs = all_packs(algorithm, experience, token_budget=20)
    each, _, _ = gradient(algorithm, experience, policy, packs)
    policy.zero_grad()
    losses = [algorithm.loss(packed, experience, *policy.score(packed)).loss for packed in packs]
    torch.stack(losses).sum().backward()
    agree(torch.cat([weight.grad.flatten() for weight in policy.parameters()]), each)


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_gradient_does_not_depend_on_the_chunks_of_the_head(
    step: Step, policy: Policy, chunk: int
) -> None:
    algorithm = algorithm_of("dapo")
    experience = experience_of(algorithm, step, policy)
    packs = all_packs(algorithm, experience)
    whole, _, _ = gradient(algorithm, experience, policy, packs)
    agree(gradient(algorithm, experience, policy, packs, chunk=chunk)[0], whole)


@pytest.mark.parametrize("name", [name for name in SETTINGS if "updates" not in name])
def test_ranks_that_share_their_denominators_add_up_to_one_rank(
    name: str, step: Step, policy: Policy
) -> None:
    algorithm = algorithm_of(name)
    whole = experience_of(algorithm, step, policy)
    expected, loss, seen = gradient(algorithm, whole, policy, all_packs(algorithm, whole))
    shares = [[0], [1, 2, 3]]
    steps = [(select_groups(step[0], keep), select_scored(step[1], keep)) for keep in shares]
    sums: list[float] = []

    def record(value: float) -> float:
        sums.append(value)
        return value

    for share in steps:
        algorithm.experience(*share, reduce_sum=record)
    total, total_loss, total_seen = torch.zeros_like(expected), 0.0, Diagnostics.empty()
    for share in steps:
        experience = experience_of(algorithm, share, policy, reduce_sum=lambda _: sum(sums))
        grads, part, part_seen = gradient(
            algorithm, experience, policy, all_packs(algorithm, experience)
        )
        total, total_loss, total_seen = total + grads, total_loss + part, total_seen + part_seen
    agree(total, expected)
    assert total_loss == pytest.approx(loss, rel=1e-5, abs=1e-9)
    assert total_seen.metrics() == pytest.approx(seen.metrics(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("reduce", ["token", "sequence", "constant"])
@pytest.mark.parametrize("updates", [2, 4])
def test_each_update_has_the_gradient_of_a_step_of_its_own_prompts(
    step: Step, policy: Policy, reduce: str, updates: int
) -> None:
    algorithm = algorithm_of("grpo", reduce=reduce, updates_per_rollout=updates)
    alone = algorithm_of("grpo", reduce=reduce)
    experience = experience_of(algorithm, step, policy)
    size = 4 // updates
    for part, rows in enumerate(algorithm.minibatches(experience)):
        keep = list(range(part * size, (part + 1) * size))
        own = (select_groups(step[0], keep), select_scored(step[1], keep))
        single = experience_of(alone, own, policy)
        packs = pack(experience.rollouts, rows, token_budget=20)
        actual, _, _ = gradient(algorithm, experience, policy, packs)
        expected, _, _ = gradient(alone, single, policy, all_packs(alone, single))
        agree(actual, expected)


def test_skipping_equal_groups_leaves_the_gradient_as_it_is(step: Step, policy: Policy) -> None:
    results, scored_rows = [], []
    for equal_groups in ("keep", "skip"):
        algorithm = algorithm_of("grpo", credit=Credit(equal_groups=equal_groups))
        experience = experience_of(algorithm, step, policy)
        packs = all_packs(algorithm, experience, token_budget=15)
        results.append(gradient(algorithm, experience, policy, packs)[0])
        scored_rows.append(len(experience.rows))
    agree(results[1], results[0])
    assert scored_rows[1] < scored_rows[0]


@pytest.mark.parametrize("reduce", ["token", "sequence", "constant"])
def test_dropped_sequences_leave_the_loss_of_the_kept_half_alone(
    step: Step, policy: Policy, reduce: str
) -> None:
    rollouts, scored = step
    rewards = scored.rewards.nan_to_num(0.0)
    kept = [0, 2]
    absent = rewards.clone()
    absent[[1, 3]] = torch.nan
    algorithm = algorithm_of("grpo", reduce=reduce)
    half = experience_of(algorithm, (rollouts, replace(scored, rewards=absent)), policy)
    own_scored = select_scored(replace(scored, rewards=rewards), kept)
    alone = experience_of(algorithm, (select_groups(rollouts, kept), own_scored), policy)
    actual, loss, _ = gradient(algorithm, half, policy, all_packs(algorithm, half))
    expected, own_loss, _ = gradient(algorithm, alone, policy, all_packs(algorithm, alone))
    agree(actual, expected)
    assert loss == pytest.approx(own_loss, rel=1e-6)


def test_an_abstention_leaves_the_gradient_of_a_group_without_that_completion(
    make_rollouts: Callable[..., Rollouts], make_scored: Callable[[Tensor], Scored], policy: Policy
) -> None:
    algorithm = algorithm_of("grpo", prompts_per_step=1)
    rollouts = make_rollouts([(1, 2)], [3, 5, 2, 4], group_size=4)
    judged = [0, 2, 3]
    fewer = replace(
        rollouts,
        group_size=3,
        completions=rollouts.completions[judged],
        lengths=rollouts.lengths[judged],
        sampler_logprobs=rollouts.sampler_logprobs[judged],
        truncated=rollouts.truncated[judged],
    )
    results = []
    for drawn, rewards in [(rollouts, [1.0, torch.nan, 0.0, 0.0]), (fewer, [1.0, 0.0, 0.0])]:
        own = experience_of(algorithm, (drawn, make_scored(torch.tensor([rewards]))), policy)
        results.append(gradient(algorithm, own, policy, all_packs(algorithm, own))[0])
    agree(results[0], results[1])
