"""The reward nodes of conf/data build what they say."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from qerl.reward.components import Correctness, Format, TagEquality
from qerl.reward.reward import Reward

CONF = Path(__file__).parents[2] / "conf" / "data"


def build(name: str) -> Reward:
    merged = OmegaConf.load(CONF / "_reward_default.yaml")
    if name != "default":
        merged = OmegaConf.merge(merged, OmegaConf.load(CONF / f"_reward_{name}.yaml"))
    return instantiate(merged.reward)


@pytest.mark.parametrize(
    ("name", "components", "required", "answers"),
    [
        (
            "default",
            (Correctness(weight=1.0), Format(weight=0.1, kind="boxed")),
            ("correct",),
            "marked",
        ),
        ("whole", (Correctness(weight=1.0),), ("correct",), "whole"),
        ("paper", (Correctness(weight=1.0), Format(weight=0.2, kind="think_soft")), (), "marked"),
        (
            "released_code",
            (
                TagEquality(weight=2.0),
                Format(weight=0.2, kind="think_soft"),
                Correctness(weight=0.0),
            ),
            (),
            "marked",
        ),
    ],
)
def test_presets_build_their_components(
    name: str, components: tuple[object, ...], required: tuple[str, ...], answers: str
) -> None:
    reward = build(name)
    assert reward.components == components
    assert (reward.required, reward.answers) == (required, answers)
    assert reward.pool.pids == []  # building starts no process
    assert (reward.pool.workers, reward.pool.answer_budget_s) == (4, 2.0)
