"""Every option of every group builds, every experiment takes one step, and typos are refused."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from qerl import build

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
Compose = Callable[..., DictConfig]

# Whatever an experiment chooses, this makes one step of it small enough for a test.
TINY = (
    "model=toy",
    "trainer=cpu",
    "logger=none",
    "record_dir=null",
    "trainer.max_steps=1",
    "trainer.evaluation.problems=2",
    "trainer.evaluation.samples=2",
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=2",
    "data=toy",
)


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def targets(node: object) -> Iterator[DictConfig]:
    """The outermost nodes that describe an object."""
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield node
        else:
            for key in node:
                if not OmegaConf.is_missing(node, key):
                    yield from targets(node[key])


@pytest.mark.parametrize("option", options("quant"))
def test_every_format_builds_and_packs(composed: Compose, option: str) -> None:
    format = instantiate(composed(f"quant={option}").quant)
    packed = format.quantize(torch.randn(64, 128))
    assert packed.dequantize(torch.float32).shape == (64, 128)
    assert format.name == option


@pytest.mark.parametrize("option", ["nvfp4", "mxfp4"])
def test_scales_are_searched_while_a_model_loads(composed: Compose, option: str) -> None:
    def squared_error(method: str) -> float:
        format = instantiate(composed(f"quant={option}", f"quant.method={method}").quant)
        weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        return float((format.quantize(weight).dequantize(torch.float32) - weight).square().sum())

    assert squared_error("mse") < squared_error("rtn")


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (group, option)
        for group in ("noise", "algorithm", "model", "logger", "optimizer", "rollout")
        for option in options(group)
        if option != "adamw_8bit"  # its target is the bitsandbytes extra; built in the test below
    ],
)
def test_every_option_builds(composed: Compose, group: str, option: str) -> None:
    needed = ["model.source.path=/nowhere"] if option == "folder" else []
    cfg = composed(f"{group}={option}", *needed)
    nodes = list(targets(cfg[group]))
    assert nodes
    for node in nodes:
        assert instantiate(node, _convert_="all") is not None


def test_the_8_bit_optimizer_builds_and_steps(composed: Compose) -> None:
    pytest.importorskip("bitsandbytes")
    factory = instantiate(composed("optimizer=adamw_8bit").optimizer.factory, _convert_="all")
    weight = torch.nn.Parameter(torch.ones(64, 128))
    optimizer = factory([weight], lr=1e-2)
    weight.sum().backward()
    optimizer.step()
    assert bool((weight < 1).all())


@pytest.mark.parametrize("option", [o for o in options("trainer") if o not in ("gpu",)])
def test_every_trainer_composes(composed: Compose, option: str) -> None:
    cfg = composed(f"trainer={option}")
    assert instantiate(cfg.trainer.compute).torch_dtype() is not None


def test_a_gpu_that_is_not_there_is_one_clear_line(composed: Compose) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(build.EXPECTED_ERRORS) as caught:
        instantiate(composed("trainer=gpu").trainer.compute)
    assert "no CUDA device is visible; use trainer=cpu" in build.one_line(caught.value)


@pytest.mark.parametrize("option", options("experiment"))
def test_every_experiment_takes_one_step(composed: Compose, option: str) -> None:
    # One token and a larger group: even a random model then has groups with mixed rewards.
    small = ("data.max_new_tokens=1", "algorithm.group_size=16", "algorithm.prompts_per_step=4")
    outcome = build.train(composed(f"experiment={option}", *TINY, *small))
    assert "completed" in outcome.text
    assert len(list(Path("out").glob("*/*/record.json"))) == 1


@pytest.mark.parametrize("engine", options("rollout"))
@pytest.mark.parametrize("algorithm", options("algorithm"))
def test_every_engine_runs_every_algorithm(composed: Compose, engine: str, algorithm: str) -> None:
    if algorithm == "dapo":  # a single step of a random model may hold no mixed group
        pytest.skip("dynamic sampling is covered in tests/training")
    outcome = build.train(composed(*TINY, f"rollout={engine}", f"algorithm={algorithm}"))
    assert "completed" in outcome.text


@pytest.mark.parametrize("option", options("sweep") + options("hparams_search"))
def test_every_sweep_names_settings_that_exist(composed: Compose, option: str) -> None:
    group = "sweep" if option in options("sweep") else "hparams_search"
    # The file is read plainly: its `hydra:` node is the sweeper's, not a run's.
    params = OmegaConf.load(CONF / group / f"{option}.yaml").hydra.sweeper.params
    for key, values in params.items():
        first = str(values).split(",")[0] if group == "sweep" else "1.0e-3"
        composed(f"{key}={first}")


@pytest.mark.parametrize(
    ("typo", "names"),
    [("sede=1", "sede"), ("algorithm.group_sise=4", "group_sise"), ("noise.sgma=1", "sgma")],
)
def test_an_unknown_key_is_refused_and_named(composed: Compose, typo: str, names: str) -> None:
    with pytest.raises(ConfigCompositionException, match=names):
        composed(typo)


def test_an_unknown_option_is_refused_with_those_there_are(composed: Compose) -> None:
    with pytest.raises(MissingConfigException, match=r"nvfp5(.|\n)*nvfp4"):
        composed("quant=nvfp5")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.group_size=1"], r"group_size=1: .*at least 2.*group_size=8"),
        (
            ["trainer.devices=2", "trainer.backend=gloo", "algorithm.prompts_per_step=3"],
            r"prompts_per_step=3 .*devices=2",
        ),
        (["resume=out/nowhere"], r"resume=out/nowhere: no such run folder"),
        (["trainer.checkpoint_every=0"], r"checkpoint_every=0: a whole number, at least 1"),
        (["algorithm.group_size=four"], r"group_size=four: a whole number"),
        (["trainer.max_steps=2.5"], r"max_steps=2.5: a whole number"),
        (["trainer.grad_clip=nan"], r"grad_clip=nan"),
        (["trainer=ddp"], r"backend=nccl: .*none is visible; use trainer\.backend=gloo"),
        (["noise.schedule.stages=2"], r"stages=2"),
        (["quant.method=awq"], r"quant\.method=awq: .*scripts/quantize\.py quant=nvfp4"),
        (["quant=mxfp4", "quant.method=gptq"], r"method=gptq: .*scripts/quantize\.py quant=mxfp4"),
        (["quant=nf4", "quant.method=mse"], r"method=mse: nf4 has no method but rtn"),
        (["algorithm.temperature=0.0"], r"temperature=0\.0: above 0"),
        (["data=gsm8k", "data.path=/nowhere"], r"/nowhere"),
        (["model=qwen2.5-32b", "model.source.path=/nowhere"], r"/nowhere|qwen2.5-32b|GB"),
        (["model=folder"], r"Missing mandatory value: model\.source\.path"),
    ],
)
def test_known_wrong_settings_are_one_line_with_a_cure(
    composed: Compose, overrides: list[str], says: str
) -> None:
    base = [o for o in TINY if o.split("=")[0] not in {x.split("=")[0] for x in overrides}]
    with pytest.raises(build.EXPECTED_ERRORS) as caught:
        build.train(composed(*base, *overrides))
    line = build.one_line(caught.value)
    assert "\n" not in line
    assert re.search(says, line), line


def test_the_paper_s_large_model_composes_anywhere(composed: Compose) -> None:
    cfg = composed("model=qwen2.5-32b", "quant=nvfp4")
    assert cfg.model.source.id == "Qwen/Qwen2.5-32B-Instruct"
    assert cfg.name == "qwen2.5-32b_nvfp4_aqn_grpo_arithmetic"
