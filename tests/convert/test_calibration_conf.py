"""The calibration group: every option builds, and a plan is the same for the same settings."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from qerl.build.calibration import calibration_plan
from qerl.build.config import make
from qerl.data.texts import ProblemTexts, RowTexts

CONF = Path(__file__).parents[2] / "conf" / "calibration"
OPTIONS = sorted(path.stem for path in CONF.glob("[!_]*.yaml"))

Compose = Callable[..., DictConfig]


@pytest.fixture
def settings(composed: Compose) -> Callable[..., DictConfig]:
    """An evaluation of the toy on a CPU with a calibration beside it."""

    def make_settings(*overrides: str) -> DictConfig:
        base = ("model=toy", "trainer=cpu", "+calibration=arithmetic")
        return composed(*base, *overrides, config="evaluate")

    return make_settings


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_names_a_text_and_the_paper_s_length(composed: Compose, option: str) -> None:
    cfg = composed(f"+calibration={option}", config="evaluate")
    assert isinstance(make(cfg.calibration.text), RowTexts | ProblemTexts)
    assert cfg.calibration.length == 2048
    assert cfg.calibration.sequences == (16 if option == "arithmetic" else 256)


def test_a_plan_begins_with_the_embedded_tokens(settings: Callable[..., DictConfig]) -> None:
    small = (
        "calibration.sequences=3",
        "calibration.length=64",
        "calibration.text.problems.size=20",
    )
    cfg = settings(*small)
    source, compute = make(cfg.model.source), make(cfg.trainer.compute)
    plan = calibration_plan(cfg, source, compute)
    assert plan.begin().hidden.shape == (3, 64, source.spec.hidden_size)
    assert plan.facts == calibration_plan(cfg, source, compute).facts
    other = calibration_plan(settings(*small, "calibration.seed=1"), source, compute).facts
    assert other["calibration"]["tokens_sha256"] != plan.facts["calibration"]["tokens_sha256"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("calibration.length=5000", r"length=5000: .*context of 4096 tokens; set calibration"),
        ("calibration.sequences=0", r"calibration\.sequences=0: a whole number, at least 1"),
        ("calibration.sequences=100000", r"has only \d+ tokens; take \d+ sequences"),
    ],
)
def test_settings_that_cannot_be_met_are_one_line(
    settings: Callable[..., DictConfig], override: str, says: str
) -> None:
    cfg = settings(override, "calibration.text.problems.size=20")
    with pytest.raises(ValueError, match=says):
        calibration_plan(cfg, make(cfg.model.source), make(cfg.trainer.compute))


def test_text_out_of_reach_names_the_setting_that_helps(
    composed: Compose,
) -> None:
    options = ("model=toy", "trainer=cpu", "+calibration=gsm8k", "calibration.length=64")
    cfg = composed(*options, "calibration.text.rows.path=/nowhere", config="evaluate")
    with pytest.raises(
        ValueError, match=r"; set calibration\.text\.rows\.path to a \.jsonl"
    ) as caught:
        calibration_plan(cfg, make(cfg.model.source), make(cfg.trainer.compute))
    assert "data.path" not in str(caught.value)
