"""A whole evaluation of the toy model: figures, resume, refusals, report."""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import save_file

from qerl.build import EXPECTED_ERRORS, one_line
from qerl.build.evaluation import evaluate
from qerl.evaluate import benchmark
from qerl.evaluate.estimate import estimate
from qerl.evaluate.store import Store
from qerl.model.adapter_io import save_peft
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.source import Toy
from qerl.model.toy import build_tokenizer, random_weights
from qerl.quant.bf16 import BF16
from qerl.record.schema import load

ROOT = Path(__file__).parent.parent.parent
Compose = Callable[..., DictConfig]
Lines = Callable[[], list[str]]


def figures(cfg: DictConfig) -> dict[str, float]:
    return dict(evaluate(cfg).record.summary)


def write_adapter(folder: Path, scale: float) -> Path:
    """An adapter of the toy model; at scale 0 one that does nothing."""
    source = Toy(
        family="qwen2",
        layers=2,
        hidden_size=128,
        mlp_size=256,
        heads=4,
        kv_heads=2,
        tied=True,
        seed=0,
    )
    policy = load_policy(source, BF16(), LoRAConfig(rank=4, alpha=12))
    for adapter in policy.adapters().values():
        torch.nn.init.normal_(adapter.lora_b, std=scale)
    save_peft(policy, folder, "toy")
    return folder


def test_the_record_says_what_the_completions_say(toy: Compose, completions: Lines) -> None:
    report = evaluate(toy())
    rows = [json.loads(line) for line in completions()]
    sampled = [row for row in rows if row["mode"] == "sampled"]
    greedy = [row for row in rows if row["mode"] == "greedy"]
    assert (len(greedy), len(sampled)) == (9, 9 * 64)
    assert all(row["verdict"] and row["reason"] and "completion" in row for row in rows)
    right = [row["verdict"] == "correct" for row in sampled]
    assert 0 < sum(right) < len(right), "the example would show nothing"
    means = [sum(right[i : i + 64]) / 64 for i in range(0, len(right), 64)]
    expected, summary = estimate(means, 64), report.record.summary
    assert summary["sampled/mean_at_k"] == pytest.approx(expected.mean)
    assert summary["sampled/mean_at_k_stderr"] == pytest.approx(expected.standard_error)
    assert summary["sampled/mean_at_k_low"] == pytest.approx(expected.low)
    assert summary["sampled/mean_at_k_high"] == pytest.approx(expected.high)
    assert summary["sampled/problems"] == 9
    cut = sum(row["truncated"] for row in sampled) / len(sampled)
    assert summary["sampled/truncated_share"] == pytest.approx(cut)
    silent = sum(row["answer"] is None for row in sampled) / len(sampled)
    assert summary["sampled/no_answer_share"] == pytest.approx(silent)
    assert [row["sampled"] for row in report.record.rows] == pytest.approx(means)


def test_the_record_is_found_by_model_quant_adapter_and_benchmark(toy: Compose) -> None:
    report = evaluate(toy("evaluate.samples=2", "evaluate.limit=4"))
    (path,) = Path("rec").rglob("*.json")
    assert path.parent.name == "toy_bf16_base_toy-held_out-first4"
    assert load(path) == report.record
    assert report.record.kind == "eval"
    assert len(report.record.rows) == 4


def test_without_a_place_for_records_each_stays_in_its_folder(toy: Compose) -> None:
    evaluate(toy("record_dir=null"))
    text = evaluate(toy("record_dir=null", "quant=nvfp4")).text
    assert "/record.json" in text
    assert "| bf16" in text, "the one before stands in the table"
    assert "| nvfp4" in text


def test_figures_do_not_depend_on_chunks(toy: Compose) -> None:
    results = [
        figures(toy(f"evaluate.chunk={chunk}", f"evaluate.folder=out/evals/x/{chunk}"))
        for chunk in (1, 4, 64)
    ]
    assert results[0] == results[1] == results[2]


def test_an_evaluation_that_dies_goes_on_to_the_same_figures(
    toy: Compose, completions: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = figures(toy("evaluate.folder=elsewhere"))
    drawn: list[str] = []
    original = benchmark.evaluate

    def dying(engine, prompts, *args, **kwargs):  # type: ignore[no-untyped-def]
        if len(drawn) == 7:
            raise OSError("the machine is gone")
        drawn.extend(prompts.ids[:1])
        return original(engine, prompts, *args, **kwargs)

    monkeypatch.setattr(benchmark, "evaluate", dying)
    cfg = toy("evaluate.chunk=1")
    with pytest.raises(OSError, match="the machine is gone"):
        evaluate(cfg)
    kept = completions()
    assert len(kept) == 7
    monkeypatch.setattr(benchmark, "evaluate", original)
    assert figures(toy("evaluate.chunk=1")) == straight
    assert completions()[:7] == kept


@pytest.mark.parametrize("when", ["before", "after", "within"])
def test_an_evaluation_that_is_killed_goes_on_to_the_same_figures(
    toy: Compose, completions: Lines, when: str
) -> None:
    straight = figures(toy("evaluate.folder=elsewhere"))
    expected = Path("elsewhere/completions.jsonl").read_text().splitlines()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        add, calls = Store.add, [0]

        def dying(self, rows):  # type: ignore[no-untyped-def]
            calls[0] += 1
            if calls[0] < 5:
                return add(self, rows)
            if when == "after":
                add(self, rows)
            if when == "within":
                with (self.folder / "completions.jsonl").open("a") as file:
                    file.write(json.dumps(rows[0]) + "\n" + json.dumps(rows[1])[:50])
            os.kill(os.getpid(), signal.SIGKILL)

        Store.add = dying  # type: ignore[method-assign]
        try:
            evaluate(toy())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert 0 < len(completions()) < len(expected)
    assert figures(toy()) == straight
    assert completions() == expected


def test_a_finished_evaluation_is_read_and_not_drawn_again(
    toy: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(toy("evaluate.samples=2")).record

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(benchmark, "evaluate", never)
    assert evaluate(toy("evaluate.samples=2")).record == first
    assert len(list(Path("rec").rglob("*.json"))) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("evaluate.samples=3", r"sampled\.group_size: 2 -> 3"),
        ("seed=1", r"seed: 0 -> 1"),
        ("quant=nvfp4", r"quant\._target_: .*BF16.* -> .*NVFP4"),
        ("evaluate.limit=5", r"benchmark: 'toy-held_out-first4' -> 'toy-held_out-first5'"),
    ],
)
def test_a_changed_setting_is_refused_in_the_same_folder(
    toy: Compose, change: str, says: str
) -> None:
    same = ["evaluate.samples=2", "evaluate.limit=4", "evaluate.folder=one"]
    evaluate(toy(*same))
    key = change.split("=")[0]
    changed = [setting for setting in same if setting.split("=")[0] != key]
    with pytest.raises(ValueError, match=says):
        evaluate(toy(*changed, change))


def test_an_adapter_without_effect_is_refused(toy: Compose, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "idle", scale=0.0)
    with pytest.raises(ValueError, match=r"adapter=.*idle changes no logit of 4 prompts"):
        evaluate(toy(f"adapter={folder}", "evaluate.samples=2"))


def test_an_adapter_that_is_not_applied_is_refused(
    toy: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "lost", scale=0.5)
    monkeypatch.setattr("qerl.build.evaluation.load_peft", lambda policy, folder: None)
    with pytest.raises(ValueError, match="changes no logit"):
        evaluate(toy(f"adapter={folder}", "evaluate.samples=2"))


def test_an_adapter_of_another_rank_than_the_model_s_default_counts(
    toy: Compose, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "busy", scale=0.5)
    base, adapted = evaluate(toy()), evaluate(toy(f"adapter={folder}"))
    assert adapted.record.name == "toy_bf16_busy_toy-held_out"
    assert adapted.record.summary != base.record.summary
    assert "| toy     | bf16    | base " in adapted.text
    assert "| toy     | bf16    | busy " in adapted.text
    assert Path("out/evals/tables/toy-held_out.png").stat().st_size > 5000


def test_wrong_settings_are_one_line_with_a_cure(toy: Compose, tmp_path: Path) -> None:
    for overrides, says in (
        (["adapter=/nowhere"], "adapter=/nowhere: no adapter_config.json"),
        (["adapter=a", "run=b"], "name one of the two"),
        (["run=/nowhere"], "run=/nowhere: no config.yaml there"),
        (["evaluate.greedy=false", "evaluate.samples=0"], "nothing to draw"),
        (["evaluate.temperature=0.0"], "evaluate.temperature=0.0: above 0"),
        (["evaluate.limit=0"], "evaluate.limit=0: at least 1"),
        (["evaluate.chunk=0"], "evaluate.chunk=0: at least 1"),
        (["data=bigmath"], "data=bigmath holds no problems out; evaluate on one of"),
    ):
        with pytest.raises(EXPECTED_ERRORS) as caught:
            evaluate(toy(*overrides))
        line = one_line(caught.value)
        assert says in line
        assert "\n" not in line


@pytest.mark.timeout(120)
def test_the_command_lines_print_table_and_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "data=toy trainer=cpu record_dir=rec evaluate.samples=2 data.reward.pool.workers=1"
    script = str(ROOT / "scripts" / "evaluate.py")
    done = subprocess.run(
        [sys.executable, script, "model=toy", "quant=bf16,nvfp4", "-m", *settings.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stdout.rpartition("**toy-held_out**")[2]
    assert "| toy     | bf16    | base " in table
    assert "| toy     | nvfp4   | base " in table

    records = sorted(map(str, (tmp_path / "rec").rglob("*.json")))
    monkeypatch.setattr(sys, "argv", ["compare.py", *records])
    runpy.run_path(str(ROOT / "scripts" / "compare.py"), run_name="__main__")
    assert "| greedy/pass_at_1" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["compare.py", records[0], "/nowhere"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts" / "compare.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith("error: /nowhere: no record there")


def test_two_folders_are_two_rows_with_their_names(toy: Compose, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        spec = Toy(seed=seed).spec
        spec.to_hf_config().save_pretrained(tmp_path / name)
        build_tokenizer().save_pretrained(tmp_path / name)
        save_file(random_weights(spec, seed), tmp_path / name / "model.safetensors")
        report = evaluate(toy("model=folder", f"model.source.path={tmp_path / name}"))
    for name in ("one", "two"):
        assert f"| folder ({name}) | bf16" in report.text
