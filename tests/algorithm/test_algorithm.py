from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from qerl.algorithm.algorithm import Algorithm
from qerl.algorithm.credit import Credit, OverlongPenalty
from qerl.algorithm.objective import ClippedObjective
from qerl.types import Rollouts, Scored

Step = tuple[Rollouts, Scored]
CONF = Path(__file__).parents[2] / "conf" / "algorithm"


def small(**fields: Any) -> Algorithm:
    return Algorithm(**{"group_size": 4, "prompts_per_step": 4, "max_new_tokens": 9, **fields})


def option(name: str, max_new_tokens: int = 4096) -> Algorithm:
    node = OmegaConf.load(CONF / f"{name}.yaml")
    config = {"algorithm": node, "data": {"max_new_tokens": max_new_tokens}}
    made = instantiate(OmegaConf.create(config).algorithm)
    assert isinstance(made, Algorithm)
    return made


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_every_option_builds_and_states_every_field(name: str) -> None:
    assert isinstance(option(name), Algorithm)
    stated = set(OmegaConf.load(CONF / f"{name}.yaml")) - {"_target_"}
    assert stated == set(Algorithm.__dataclass_fields__)


def test_the_cap_of_the_data_reaches_sampler_and_penalty() -> None:
    algorithm = option("dapo", max_new_tokens=64)
    assert algorithm.overlong is not None
    assert algorithm.overlong.max_new_tokens == 64
    assert algorithm.sampling.max_new_tokens == 64


def test_the_options_are_the_algorithms_they_are_named_for() -> None:
    made = {name: option(name) for name in ("grpo", "dapo", "dr_grpo")}
    assert {name: each.reduce for name, each in made.items()} == {
        "grpo": "sequence",
        "dapo": "token",
        "dr_grpo": "constant",
    }
    assert made["dr_grpo"].credit.scale == "none"
    assert made["dapo"].dynamic_sampling is not None
    assert made["dapo"].overlong is not None
    assert all(each.objective.kl_coef == 0 for each in made.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"group_size": 1},
        {"updates_per_rollout": 3},
        {"updates_per_rollout": 0},
        {"prompts_per_step": 0},
        {"micro_batch_tokens": 0},
        {"temperature": 0.0},
        {"overlong": OverlongPenalty(max_new_tokens=10)},
        {
            "credit": Credit(equal_groups="skip"),
            "objective": ClippedObjective(kl_coef=0.1),
        },
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="="):
        small(**fields)


def test_a_batch_that_does_not_split_names_the_numbers_and_the_cure() -> None:
    with pytest.raises(ValueError, match=r"prompts_per_step=4 .*updates_per_rollout=3.* multiple"):
        small(updates_per_rollout=3)


def test_training_samples_the_whole_distribution() -> None:
    sampling = small(temperature=0.7).sampling
    assert (sampling.top_p, sampling.top_k, sampling.temperature) == (1.0, 0, 0.7)


def test_log_probabilities_are_asked_for_only_where_they_are_read() -> None:
    assert not small().needs_old_logprobs
    assert not small().needs_ref_logprobs
    assert small(updates_per_rollout=2).needs_old_logprobs
    assert small(objective=ClippedObjective(kl_coef=0.1)).needs_ref_logprobs


def test_several_updates_without_old_log_probabilities_are_refused(step: Step, policy: Any) -> None:
    algorithm = small(updates_per_rollout=2)
    experience = algorithm.experience(*step)
    packed = algorithm.micro_batches(experience, algorithm.minibatches(experience)[0])[0]
    with pytest.raises(ValueError, match="old_logprobs"):
        algorithm.loss(packed, experience, *policy.score(packed))


def test_minibatches_hold_every_counting_row_once_and_whole_groups(step: Step) -> None:
    algorithm = small(updates_per_rollout=2, reduce="sequence")
    experience = algorithm.experience(*step)
    parts = algorithm.minibatches(experience)
    assert sorted(row for part in parts for row in part) == experience.rows
    assert all(row < 8 for row in parts[0])
    assert all(row >= 8 for row in parts[1])


def test_the_weights_of_each_update_sum_to_one(step: Step) -> None:
    algorithm = small(updates_per_rollout=4, reduce="token")
    experience = algorithm.experience(*step)
    for part in algorithm.minibatches(experience):
        assert float(experience.weights[part].sum()) == pytest.approx(1)


def test_ranks_are_asked_for_their_sums_once_for_each_update(step: Step) -> None:
    rollouts, scored = step
    nothing = replace(scored, rewards=torch.full((4, 4), torch.nan))
    for each in (scored, nothing):
        calls: list[float] = []

        def count(value: float, calls: list[float] = calls) -> float:
            calls.append(value)
            return value

        small(updates_per_rollout=2).experience(rollouts, each, reduce_sum=count)
        assert len(calls) == 2


def test_a_step_without_a_verdict_has_no_rows_and_no_nan(step: Step) -> None:
    rollouts, scored = step
    experience = small().experience(
        rollouts, replace(scored, rewards=torch.full((4, 4), torch.nan))
    )
    assert experience.rows == []
    assert not experience.weights.any()
    assert experience.advantages.isfinite().all()


def test_the_overlong_penalty_enters_the_advantage_of_long_completions_only(
    make_rollouts: Callable[..., Rollouts], make_scored: Callable[[torch.Tensor], Scored]
) -> None:
    # a long prompt must not count: completions of 2 tokens stay free of penalty
    rollouts = make_rollouts([tuple(range(12)) * 3], [2, 9, 5, 6], group_size=4)
    scored = make_scored(torch.ones(1, 4))
    overlong = OverlongPenalty(max_new_tokens=9, cache=4)
    advantages = small(overlong=overlong).experience(rollouts, scored).advantages
    assert advantages[0] == advantages[2] > advantages[3] > advantages[1]
    assert not small().experience(rollouts, scored).advantages.any()


def test_the_group_meter_reports_what_teaches_and_what_g_predicts(step: Step) -> None:
    metrics = small().group_metrics(step[1])
    assert metrics["train/groups_mixed_fraction"] == 0.75
    assert metrics["train/abstained_fraction"] == 1 / 16
    rate = 10 / 15
    assert metrics["train/group_waste_expected"] == pytest.approx(rate**4 + (1 - rate) ** 4)


def test_the_mismatch_is_measured_against_the_adapters_that_sampled(
    step: Step, policy: Any
) -> None:
    algorithm = small(updates_per_rollout=2)
    experience = algorithm.experience(*step)
    exact = replace(experience, old_logprobs=step[0].sampler_logprobs)
    packed = algorithm.micro_batches(exact, algorithm.minibatches(exact)[0])[0]
    metrics = algorithm.loss(packed, exact, *policy.score(packed)).diagnostics.metrics()
    assert metrics["train/mismatch_max"] == 0
    assert metrics["train/mismatch_kl"] == 0
    assert metrics["train/kl_old"] > 0


def test_the_mismatch_is_positive_where_the_trainer_is_surer_than_the_sampler(
    step: Step, policy: Any
) -> None:
    algorithm = small()
    packed = algorithm.micro_batches(algorithm.experience(*step), [0, 1])[0]
    logprobs, entropy = policy.score(packed)
    sampler = torch.zeros_like(step[0].sampler_logprobs)
    sampler[packed.sequence, packed.offset] = logprobs.detach().float() - 0.5
    rollouts = replace(step[0], sampler_logprobs=sampler)
    experience = replace(algorithm.experience(*step), rollouts=rollouts)
    metrics = algorithm.loss(packed, experience, logprobs, entropy).diagnostics.metrics()
    assert metrics["train/mismatch_mean"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["train/mismatch_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["train/mismatch_kl"] == pytest.approx(0.5**2 / 2, rel=0.25)
    assert metrics["train/entropy_nats"] == pytest.approx(float(entropy.mean()))


@pytest.mark.gpu
def test_loss_and_metrics_on_a_gpu_are_those_on_the_cpu(step: Step, policy: Any) -> None:
    algorithm = small(updates_per_rollout=2, objective=ClippedObjective(kl_coef=0.1))
    maps = {"old_logprobs": step[0].sampler_logprobs, "ref_logprobs": step[0].sampler_logprobs}
    experience = replace(algorithm.experience(*step), **maps)
    packed = algorithm.micro_batches(experience, algorithm.minibatches(experience)[0])[0]
    scores = policy.score(packed)
    here = algorithm.loss(packed, experience, *scores)
    there = algorithm.loss(packed, experience, *(score.cuda() for score in scores))
    assert there.loss.device.type == "cuda"
    assert there.loss.item() == pytest.approx(here.loss.item(), rel=1e-5)
    assert there.diagnostics.metrics() == pytest.approx(here.diagnostics.metrics(), rel=1e-5)
