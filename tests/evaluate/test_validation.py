"""Validation during a run: figures in the curves, the best adapters kept, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from qerl import build
from qerl.evaluate import Evaluation, held_out

Compose = Callable[..., DictConfig]

SMALL = (
    "experiment=smoke",
    "trainer=cpu",
    "logger=csv",
    "trainer.max_steps=4",
    "noise.schedule.stages=4",
    "data.max_new_tokens=1",
    "algorithm.group_size=16",
    "optimizer.schedule.peak=3e-3",
    "trainer.evaluation.before=false",
    "trainer.evaluation.after=false",
    "trainer.evaluation.samples=8",
)


def run_dir() -> Path:
    (path,) = Path("out").glob("*/*/record.json")
    return path.parent


def record() -> Any:
    return json.loads((run_dir() / "record.json").read_text())


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(run_dir() / folder / "adapter_model.safetensors")


def test_validation_is_in_the_record_s_curves_and_the_log(composed: Compose) -> None:
    build.train(composed(*SMALL, "trainer.evaluation.every=2"))
    curves = record()["curves"]
    assert curves["val/mean_at_k"]["steps"] == [1, 3]
    assert all(0 <= value <= 1 for value in curves["val/mean_at_k"]["values"])
    assert len(curves["val/mean_at_k_stderr"]["values"]) == 2
    assert "val/mean_at_k" in next(run_dir().glob("csv/*/metrics.csv")).read_text()
    assert len(curves["time/step_s"]["values"]) == 4
    assert not (run_dir() / "adapter_best").exists()


def test_without_it_nothing_is_validated(composed: Compose) -> None:
    build.train(composed(*SMALL))
    assert not any(name.startswith("val/") for name in record()["curves"])


def test_validation_does_not_change_what_is_learned(composed: Compose) -> None:
    finals = []
    for every in ("null", "1"):
        outcome = build.train(composed(*SMALL, f"trainer.evaluation.every={every}"))
        newest = max(Path("out").glob("*/*/adapter"), key=lambda path: path.stat().st_mtime)
        finals.append((outcome.objective, load_file(newest / "adapter_model.safetensors")))
    assert finals[0][0] == finals[1][0]
    for name, tensor in finals[0][1].items():
        assert torch.equal(tensor, finals[1][1][name])


def test_the_best_adapters_are_kept(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    means = iter([0.25, 0.75, 0.75, 0.5])
    seen: list[dict[str, torch.Tensor]] = []
    original = held_out.evaluate

    def scripted(engine, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(engine._policy.adapter_state())
        result = original(engine, *args, **kwargs)
        return Evaluation(
            rollouts=result.rollouts,
            scored=result.scored,
            correct=torch.full_like(result.correct, next(means)),
        )

    monkeypatch.setattr(held_out, "evaluate", scripted)
    outcome = build.train(
        composed(*SMALL, "trainer.evaluation.every=1", "trainer.evaluation.keep_best=true")
    )
    assert "adapter_best" in outcome.text
    assert record()["curves"]["val/best_mean_at_k"]["values"] == [0.25, 0.75, 0.75, 0.75]
    best = {
        name: t for name, t in weights("adapter_best").items() if "layers.0.self_attn.q" in name
    }
    for name, tensor in best.items():
        part = "lora_a" if "lora_A" in name else "lora_b"
        assert torch.equal(tensor, seen[1][f"layers.0.q_proj.{part}"]), (
            name
        )  # of equals the earlier
    last = weights("adapter")
    assert any(not torch.equal(tensor, last[name]) for name, tensor in best.items())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.evaluation.keep_best=true"], "keep_best=true without trainer.evaluation.every"),
        (["trainer.evaluation.every=0"], "every=0: at least 1 rollout step"),
        (
            ["trainer.evaluation.every=1", "trainer.evaluation.problems=0"],
            "nothing to validate on",
        ),
    ],
)
def test_what_cannot_be_validated_is_refused(
    composed: Compose, overrides: list[str], says: str
) -> None:
    keys = {override.split("=")[0] for override in overrides}
    base = [override for override in SMALL if override.split("=")[0] not in keys]
    with pytest.raises(ValueError, match=says):
        build.train(composed(*base, *overrides))
