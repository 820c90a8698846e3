from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from qerl.noise.aqn import Noise
from qerl.noise.schedule import Schedule

CONF = Path(__file__).parents[2] / "conf" / "noise"


def schedule(**fields: Any) -> Schedule:
    defaults = {"sigma_start": 1e-2, "sigma_end": 1e-4, "stages": 10, "total_steps": 100}
    return Schedule(**{**defaults, **fields})


def norms() -> list[nn.RMSNorm]:
    return [nn.RMSNorm(32) for _ in range(3)]


def built(name: str) -> Noise:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        option = OmegaConf.to_container(compose(name), resolve=False)
    config = OmegaConf.create({"noise": option, "seed": 17, "trainer": {"max_steps": 600}})
    made = instantiate(config.noise)
    assert isinstance(made, Noise)
    return made


def test_every_option_builds() -> None:
    none, aqn, both = built("none"), built("aqn"), built("aqn_both")
    assert none.schedule is None
    assert aqn.schedule == both.schedule
    assert aqn.schedule is not None
    assert aqn.schedule.total_steps == 600
    assert (aqn.scope, both.scope) == ("sampler", "both")
    assert none.seed == aqn.seed == both.seed == 17


def test_the_published_option_has_the_range_of_the_hyperparameter_table() -> None:
    noise = built("aqn")
    assert [noise.sigma(step) for step in (0, 60, 599)] == [0.0, 1e-2, 5e-4]


def test_the_sampler_s_norms_carry_the_noise_of_the_schedule() -> None:
    made, noise = norms(), Noise(schedule=schedule())
    with noise.sampling(made, 10) as report:
        assert report.sigma == 1e-2
        assert (made[0].weight != 1).any()
    assert (made[0].weight == 1).all()


def test_the_clean_stage_is_clean() -> None:
    made = norms()
    with Noise(schedule=schedule()).sampling(made, 9) as report:
        assert report.sigma == 0.0
        assert (made[0].weight == 1).all()


def test_published_noise_never_reaches_the_learning_passes() -> None:
    made = norms()
    with Noise(schedule=schedule()).learning(made, 50) as report:
        assert report.sigma == 0.0
        assert (made[0].weight == 1).all()


def test_the_seed_of_the_run_decides_the_draw() -> None:
    drawn = []
    for seed in (1, 2, 1):
        made = norms()
        with Noise(schedule=schedule(), seed=seed).sampling(made, 50):
            drawn.append(made[0].weight.clone())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_both_gives_the_learning_passes_the_very_noise_of_the_rollout() -> None:
    sampler, trainer, noise = norms(), norms(), Noise(schedule=schedule(), scope="both")
    with noise.sampling(sampler, 50):
        sampled = [norm.weight.clone() for norm in sampler]
    with noise.learning(trainer, 50):
        learned = [norm.weight.clone() for norm in trainer]
    assert all(torch.equal(a, b) for a, b in zip(sampled, learned, strict=True))
    assert (sampled[0] != 1).any()


def test_without_a_schedule_nothing_is_touched_nor_asked_for() -> None:
    noise = Noise(scope="both")
    with noise.sampling([], 0) as sampling, noise.learning([], 0) as learning:
        assert sampling.tensors == learning.tensors == 0
    assert noise.sigma(10**6) == 0.0


def test_a_schedule_without_norms_fails_at_the_first_step() -> None:
    with pytest.raises(ValueError, match="no norm"), Noise(schedule=schedule()).sampling([], 0):
        pass


def test_an_unknown_scope_is_refused() -> None:
    made = object.__new__(Noise)
    for name, value in {"schedule": None, "scope": "trainer", "seed": 0}.items():
        object.__setattr__(made, name, value)
    with pytest.raises(ValueError, match="scope="):
        made.__post_init__()


def test_a_checkpoint_of_the_same_noise_is_accepted_after_a_round_trip(tmp_path: Path) -> None:
    noise = Noise(schedule=schedule(), seed=3)
    torch.save(noise.state_dict(), tmp_path / "noise.pt")
    noise.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    Noise().load_state_dict(Noise().state_dict())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Noise(schedule=schedule(total_steps=200), seed=3), "schedule.total_steps 100 -> 200"),
        (Noise(schedule=schedule(kind="linear"), seed=3), "schedule.kind"),
        (Noise(schedule=schedule(), seed=4), "seed 3 -> 4"),
        (Noise(schedule=schedule(), seed=3, scope="both"), "scope"),
        (Noise(seed=3), "schedule"),
    ],
)
def test_a_checkpoint_of_another_noise_is_refused_by_name(other: Noise, named: str) -> None:
    state = Noise(schedule=schedule(), seed=3).state_dict()
    with pytest.raises(ValueError, match=named):
        other.load_state_dict(state)
