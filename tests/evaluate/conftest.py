"""A toy evaluation that takes a moment: sums of a random model, drawn and judged for real."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from qerl.record.schema import Commit, Record

Compose = Callable[..., DictConfig]

TOY = (
    "model=toy",
    "quant=bf16",
    "data=toy",
    "trainer=cpu",
    "record_dir=rec",
    "data.max_new_tokens=1",  # a random model then writes the one answer, 7, now and then
    "data.reward.pool.workers=1",
    "evaluate.samples=64",
    "evaluate.chunk=3",
    "evaluate.temperature=1.0",
    "evaluate.top_p=1.0",
)


@pytest.fixture
def toy(composed: Compose) -> Callable[..., DictConfig]:
    """`toy("evaluate.limit=3")`: the configuration of a small evaluation."""

    def make(*overrides: str) -> DictConfig:
        changed = {override.split("=")[0] for override in overrides}
        base = [override for override in TOY if override.split("=")[0] not in changed]
        return composed(*base, *overrides, config="evaluate")

    return make


@pytest.fixture
def eval_record() -> Callable[..., Record]:
    """`eval_record("a", greedy=[1, 0], sampled=[0.5, None])`: a record of those problem values."""

    def make(name: str = "a", problem_set: str = "same", **values: list[Any]) -> Record:
        n = len(next(iter(values.values())))
        metric = {"greedy": "pass_at_1", "sampled": "mean_at_k"}
        summary = {}
        for mode, column in values.items():
            known = [value for value in column if value is not None]
            summary[f"{mode}/{metric[mode]}"] = sum(known) / len(known)
            summary |= {f"{mode}/{metric[mode]}_{end}": 0.0 for end in ("stderr", "low", "high")}
            shares = ("samples", "truncated_share", "no_answer_share")
            summary |= {f"{mode}/{share}": 0.0 for share in shares}
        return Record(
            kind="eval",
            name=name,
            status="completed",
            seed=0,
            config={
                "evaluation": {
                    "model": "toy",
                    "quant": "bf16",
                    "adapter": "base",
                    "adapter_sha256": None,
                    "benchmark": "toy",
                    "problem_set": problem_set,
                    "fingerprint": name,
                    "drawn": {"sampled.temperature": 0.6},
                }
            },
            command="python scripts/evaluate.py",
            commit=Commit(sha="abcdef0123456789", dirty=False),
            versions={"torch": "2.11.0"},
            device={"name": "cpu"},
            started="2025-01-31T09:30:00+00:00",
            ended="2025-01-31T10:30:00+00:00",
            summary=summary,
            rows=tuple(
                {"prompt": f"p{i}", **{mode: column[i] for mode, column in values.items()}}
                for i in range(n)
            ),
        )

    return make


@pytest.fixture
def completions() -> Callable[[], list[str]]:
    """The lines of the one evaluation below the working folder."""

    def read() -> list[str]:
        (path,) = Path("out/evals").glob("*/*/completions.jsonl")
        return path.read_text(encoding="utf-8").splitlines()

    return read
