"""The loop learns, refuses samples of another policy, and says when nothing teaches."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from qerl import build
from qerl.rollout.parity import SamplerIsNotPolicyError
from qerl.training.learner import PolicyLearner

Compose = Callable[..., DictConfig]

SMALL = (
    "experiment=smoke",
    "trainer.evaluation.problems=0",
    "trainer.max_steps=2",
    "logger=none",
    "trainer=cpu",
)


def _record() -> dict[str, object]:
    found: dict[str, object] = json.loads(next(Path("out").glob("*/*/record.json")).read_text())
    return found


def test_the_toy_task_is_learned_and_held_out_problems_with_it(composed: Compose) -> None:
    outcome = build.train(
        composed(
            "experiment=smoke",
            "trainer.max_steps=40",
            "algorithm.prompts_per_step=8",
            "algorithm.group_size=8",
            "optimizer.schedule.peak=5e-3",
            "optimizer.schedule.decay=constant",
            "optimizer.schedule.warmup_share=0",
            "trainer.grad_clip=1.0",
            "trainer.evaluation.problems=8",
            "trainer.evaluation.samples=4",
            "trainer.checkpoint_every=40",
            "noise=none",
        )
    )
    curves = _record()["curves"]
    rewards = curves["train/reward"]["values"]  # type: ignore[index]
    peaks = curves["memory/peak_gib"]["values"]  # type: ignore[index]
    assert peaks[-1] - peaks[9] < 0.02, "memory grows with the steps"
    assert sum(rewards[:4]) / 4 < 0.4
    assert sum(rewards[-4:]) / 4 > 0.9
    summary = _record()["summary"]
    assert summary["held_out_after/mean_at_k"] > summary["held_out_before/mean_at_k"] + 0.4  # type: ignore[index]
    assert outcome.objective is not None
    assert outcome.objective > 0.9


def test_the_same_seed_repeats_and_another_differs(composed: Compose) -> None:
    curves = []
    for seed in (0, 0, 1):
        build.train(composed(*SMALL, f"seed={seed}", "trainer.evaluation.problems=0"))
        newest = max(
            Path("out").glob("*/*/completions.jsonl"), key=lambda path: path.stat().st_mtime
        )
        curves.append(newest.read_text())
    assert curves[0] == curves[1] != curves[2]


def test_the_base_is_the_same_bytes_after_training(composed: Compose) -> None:
    learner, _ = build.assemble(composed(*SMALL))
    before, adapters = learner.policy.base_hash(), learner.policy.adapter_state()
    learner.settings = replace(learner.settings, max_steps=1)
    trainer = _bare_trainer()
    trainer.fit(learner)
    learner.parts.reward.close()
    assert learner.policy.base_hash() == before
    moved = learner.policy.adapter_state()
    assert any(not torch.equal(moved[name], adapters[name]) for name in adapters)


def test_engine_and_trainer_hold_the_same_packed_storage(composed: Compose) -> None:
    learner, _ = build.assemble(composed(*SMALL))
    trained = {name: w.packed.data_ptrs() for name, w in learner.policy.linears().items()}
    sampled = {
        name: w.packed.data_ptrs()
        for name, w in learner.parts.engine._policy.linears().items()  # type: ignore[attr-defined]
    }
    learner.parts.reward.close()
    assert trained == sampled
    assert learner.policy.linear_bits_per_weight() == pytest.approx(4.5, abs=0.01)


def test_samples_of_another_policy_stop_the_run_before_an_update(composed: Compose) -> None:
    learner, _ = build.assemble(composed(*SMALL, "noise=none", "data.reward.answers=whole"))
    draw = learner._draw

    def stale(number: int):  # type: ignore[no-untyped-def]
        rollouts, scored, metrics = draw(number)
        wrong = replace(rollouts, sampler_logprobs=rollouts.sampler_logprobs - 0.5)
        mixed = torch.zeros_like(scored.rewards)
        mixed[:, 0] = 1.0
        return wrong, replace(scored, rewards=mixed), metrics

    learner._draw = stale  # type: ignore[method-assign]
    before = learner.policy.adapter_state()
    with pytest.raises(SamplerIsNotPolicyError, match=r"differ by 0\.5 nats"):
        _bare_trainer().fit(learner)
    learner.parts.reward.close()
    after = learner.policy.adapter_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dynamic_sampling_without_one_mixed_group_ends_with_a_clear_status(
    composed: Compose,
) -> None:
    cfg = composed(
        *SMALL,
        "algorithm=dapo",
        "algorithm.group_size=2",
        "algorithm.prompts_per_step=2",
        "algorithm.dynamic_sampling.max_rollouts=2",
        "data.max_new_tokens=1",  # one character: never an answer and its end
    )
    with pytest.raises(RuntimeError, match="exhausted: 0 of 4 groups are mixed after 2 draws"):
        build.train(cfg)


def test_reference_pass_and_several_updates_run(composed: Compose) -> None:
    build.train(
        composed(
            *SMALL,
            "algorithm.objective.kl_coef=0.05",
            "algorithm.updates_per_rollout=2",
            "algorithm.credit.mask_truncated=false",
            "trainer.max_steps=1",
        )
    )
    curves = _record()["curves"]
    assert curves["train/updates"]["values"] == [2.0]  # type: ignore[index]
    assert curves["train/kl_ref"]["values"][0] >= 0.0  # type: ignore[index]
    assert abs(curves["train/mismatch_mean_abs"]["values"][0]) < 1e-4  # type: ignore[index]


def test_both_scopes_of_noise_report_it_and_only_the_sampler_scope_mismatches(
    composed: Compose,
) -> None:
    gaps = {}
    for noise in ("aqn", "aqn_both"):
        build.train(
            composed(
                *SMALL,
                f"noise={noise}",
                "noise.schedule.stages=3",
                "trainer.max_steps=3",
                "noise.schedule.sigma_start=0.2",
                "noise.schedule.sigma_end=0.1",
                "algorithm.credit.mask_truncated=false",
            )
        )
        newest = max(Path("out").glob("*/*/record.json"), key=lambda path: path.stat().st_mtime)
        curves = json.loads(newest.read_text())["curves"]
        assert curves["noise/sigma"]["values"][:2] == [0.0, pytest.approx(0.2)]
        assert curves["noise/applied_std"]["values"][1] == pytest.approx(0.2, rel=0.2)
        gaps[noise] = curves["train/mismatch_mean_abs"]["values"][1]
    assert gaps["aqn_both"] < 1e-4 < gaps["aqn"]


def _bare_trainer():  # type: ignore[no-untyped-def]
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_what_a_checkpoint_holds_is_the_adapters_and_not_the_base(composed: Compose) -> None:
    learner, _ = build.assemble(composed(*SMALL))
    assert isinstance(learner, PolicyLearner)
    state = learner.state_dict()
    learner.parts.reward.close()
    assert state
    assert all(name.endswith((".lora_a", ".lora_b")) for name in state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_a_sampler_that_does_not_follow_stops_the_run_before_the_first_step(
    composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = build.assemble(composed(*SMALL, "rollout=hf"))
    engine = learner.parts.engine
    monkeypatch.setattr(type(engine), "sync", lambda self: None)
    with pytest.raises(SamplerIsNotPolicyError, match=r"rollout step 0, \w+ adapters disturbed"):
        _bare_trainer().fit(learner)
    learner.parts.reward.close()
    assert learner.rollout_step == 0
