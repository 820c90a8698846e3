"""Every option of conf/data builds, and one wording serves training and benchmarks."""

import functools
import json
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from qerl.data.prepare import LoadReport, prepare
from qerl.data.prompt_set import PromptSet

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(path.stem for path in (CONF / "data").glob("[!_]*.yaml"))
BENCHMARKS = [name for name in OPTIONS if name.startswith("benchmark_")]
GENERATED = ["arithmetic", "products", "toy"]
WORDING = {"bigmath_tags": "gsm8k_tags", "gsm8k_tags": "bigmath_tags"}
FILES = (
    *("gsm8k/train", "gsm8k/test", "svamp/train", "svamp/test", "math/train", "math500/test"),
    *("aime24/test", "aime25/test", "amc23/test", "bigmath/train", "dapo_math/train"),
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four rows of every set that conf/data names."""
    folder = tmp_path_factory.mktemp("sets")
    for name in FILES:
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        rows = [
            {"question": f"{name}: what is {n} + {n}?", "answer": str(2 * n), "level": 3}
            for n in range(4)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@functools.cache  # 0.1 s each, and no test changes a node
def compose(option: str, *overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(version_base=None, config_dir=str(CONF)):
        node: DictConfig = hydra.compose(f"data/{option}", overrides=list(overrides)).data
    return node


def make(node: DictConfig) -> Any:
    return instantiate(node, _convert_="all")


def build(
    node: DictConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptSet, LoadReport, PromptSet | None]:
    """What a run builds of a data node: training prompts, their report, held-out prompts."""
    builder = make(node.prompt)
    apart = [make(benchmark).load() for benchmark in node.benchmarks.values()]
    held_out = None
    if node.held_out is not None:
        loaded = make(node.held_out).load()
        apart.append(loaded)
        held_out, _ = prepare(
            loaded, builder, tokenizer, max_prompt_tokens=node.max_prompt_tokens, seed=node.seed
        )
    prompts, report = prepare(
        make(node.problems).load(),
        builder,
        tokenizer,
        max_prompt_tokens=node.max_prompt_tokens,
        seed=node.seed,
        apart_from=apart,
        overlap=make(node.overlap),
    )
    return prompts, report, held_out


def test_the_options_are_those_documented() -> None:
    assert set(OPTIONS) == {
        *("arithmetic", "products", "toy", "gsm8k", "math", "svamp"),
        *("bigmath", "bigmath_hard", "dapo_math", "gsm8k_tags", "bigmath_tags"),
        *("benchmark_gsm8k_test", "benchmark_math500"),
        *("benchmark_aime24", "benchmark_aime25", "benchmark_amc23"),
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_option_builds(option: str, sets: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    node = compose(option, f"data.path={sets}")
    prompts, report, held_out = build(node, tokenizer)
    assert report.kept == report.rows
    assert prompts.batch(0, 4).golds
    assert node.max_new_tokens > 0
    assert node.reward["_target_"] == "qerl.reward.reward.Reward"
    if held_out is not None:
        asked = set(held_out.all().questions)
        assert asked
        assert asked.isdisjoint(prompts.all().questions)


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in GENERATED])
def test_published_sets_and_benchmarks_share_one_wording(option: str) -> None:
    assert compose(option).prompt == compose(WORDING.get(option, "gsm8k")).prompt


def test_wording_and_reward_ask_for_the_same_form() -> None:
    for option in OPTIONS:
        node = compose(option)
        forms = {c.kind for c in node.reward.components if "kind" in c}
        system = node.prompt.system or ""
        assert ("boxed" in forms) == (r"\boxed{}" in system), option
        assert ("think_soft" in forms) == ("<answer>" in system), option


def test_benchmarks_follow_the_path_of_the_run(sets: Path) -> None:
    node = compose("bigmath", f"data.path={sets}")
    assert {name: benchmark.path for name, benchmark in node.benchmarks.items()} == {
        name: str(sets) for name in ("math500", "aime24", "aime25", "amc23")
    }


@pytest.mark.parametrize("option", ["arithmetic", "products"])
def test_arithmetic_sizes_and_separation(option: str, tokenizer: PreTrainedTokenizerBase) -> None:
    node = compose(option)
    prompts, _, held_out = build(node, tokenizer)
    assert held_out is not None
    assert (len(prompts), len(held_out)) == (
        node.problems.size,
        {"arithmetic": 64, "products": 16}[option],
    )
    left, sign, right = node.problems.shown[0].split()
    assert f"{left} {sign} {right}" in make(node.prompt).shots[0][0]
    for question in (*prompts.all().questions, *held_out.all().questions):
        assert f" {left} {sign} {right}" not in question
        assert f" {right} {sign} {left}" not in question


def test_arithmetic_without_held_out_problems_still_builds(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    prompts, _, held_out = build(compose("arithmetic", "data.held_out=null"), tokenizer)
    assert held_out is None
    assert len(prompts) == 256


def test_default_prompt_fits_its_limit_in_smollm2_tokens(smollm2: PreTrainedTokenizerBase) -> None:
    _, report, _ = build(compose("arithmetic"), smollm2)
    assert (report.shortest_tokens, report.longest_tokens) == (90, 92)


@pytest.mark.parametrize("option", ["gsm8k", "math", "svamp", *BENCHMARKS])
def test_whole_local_sets_build_with_few_losses(
    option: str, data_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    node = compose(option, f"data.path={data_dir}", "data.max_prompt_tokens=null")
    _, report, held_out = build(node, tokenizer)
    assert report.checksum == "verified"
    assert report.kept >= 0.97 * report.rows
    assert not report.unreadable_golds
    if option in BENCHMARKS:
        assert report.kept == report.rows
        assert held_out is None


def test_training_set_for_its_own_held_out_file_is_refused(
    sets: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text((sets / "gsm8k/train.jsonl").read_text())
    with pytest.raises(ValueError, match=r"gsm8k/train: none of 4 problems .* 4 in gsm8k/test"):
        build(compose("gsm8k", f"data.path={file}"), tokenizer)
