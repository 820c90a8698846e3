"""The bench of agreement sees equal engines as equal, and a fork where there is one."""

import dataclasses
from typing import Any

import pytest

from qerl.rollout import bench_agreement
from qerl.rollout.bench_agreement import AgreementBench

SMALL = AgreementBench(formats=("nvfp4", "bf16"), prompts=3, tokens=6, model="toy", device="cpu")


def test_engines_of_one_policy_agree_in_every_token() -> None:
    rows: list[dict[str, Any]] = []
    SMALL.run(rows)
    assert [row["format"] for row in rows] == ["nvfp4", "bf16"]
    for row in rows:
        assert row["greedy_equal"] == 3
        assert row["drawn_alone_equal"] == 4
        assert row["forks"] == 0
        assert 0 <= row["policy_mean_nats"] <= row["policy_max_nats"] < 1e-4


def test_a_completion_that_differs_is_a_fork_with_its_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(bench_agreement.HfEngine):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            drawn = super().generate(*arguments, **options)
            changed = drawn.completions.clone()
            changed[1, 2] = (changed[1, 2] + 1) % 90
            return dataclasses.replace(drawn, completions=changed)

    monkeypatch.setattr(bench_agreement, "HfEngine", Other)
    rows: list[dict[str, Any]] = []
    with pytest.raises(ValueError, match="part where no tie is"):
        SMALL.run(rows)
    assert rows[0]["greedy_equal"] == 2
    (fork,) = rows[0]["fork_list"]
    assert fork.startswith("sum/1 @2: +")  # the greedy token is the likelier one
