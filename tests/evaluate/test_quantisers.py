"""The bench of quantisers on a toy: its rows, its figures, and the configuration that makes it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from qerl.build.config import make
from qerl.evaluate.quantisers import QuantisersBench, _Reading, likelihood

Compose = Callable[..., DictConfig]


def test_the_bench_measures_every_variant_of_the_configuration(
    composed: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        lines = [{"question": f"{split} {i}?", "answer": "x" * 30} for i in range(40)]
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(text)
    monkeypatch.setenv("QERL_DATA_DIR", str(tmp_path))
    cfg = composed(
        "bench=quantisers",
        "model=toy",
        "bench.variants=[bf16/rtn,nf4/rtn,mxfp4/mse,nvfp4/awq,nvfp4-pow2/gptq]",
        "bench.problems.size=2",
        "bench.max_new_tokens=2",
        "bench.windows=2",
        "bench.window=32",
        "bench.divergence_windows=1",
        "bench.calibration_sequences=2",
        "bench.calibration_length=32",
        config="bench",
    )
    rows: list[dict[str, Any]] = []
    make(cfg.bench).run(rows)
    text_row, *rest = rows
    assert text_row["held_out_tokens"] == 64
    assert text_row["held_out_sha256"] != text_row["calibration_sha256"]
    found = {row["variant"]: row for row in rest if row["section"] == "quantiser"}
    assert list(found) == list(cfg.bench.variants)
    dense = found["bf16/rtn"]
    assert dense["divergence_nats"] == dense["nll_above_baseline_nats"] == 0
    assert dense["perplexity"] == pytest.approx(math.exp(dense["nll_nats"]))
    for name, row in found.items():
        if name != "bf16/rtn":
            assert row["divergence_nats"] > 0
            assert 0 < row["output_error_mean"] < 0.2
            assert 4 < row["bits_per_weight"] < 5
    assert len([row for row in rest if row["section"] == "linear"]) == 7 * len(found)


def test_divergence_and_paired_errors_are_those_of_two_tokens_by_hand() -> None:
    def reading(p: float) -> _Reading:
        log_probs = torch.tensor([[[p, 1 - p]], [[p, 1 - p]]]).log()  # [2, 1, 2]
        return _Reading(nll=-log_probs[..., 0], log_probs=log_probs.flatten(0, 1))

    figures = likelihood(reading(0.25), reading(0.5))
    assert figures["perplexity"] == pytest.approx(4)
    assert figures["nll_above_baseline_nats"] == pytest.approx(math.log(2))
    assert figures["nll_above_baseline_nats_stderr"] == pytest.approx(0, abs=1e-7)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert figures["divergence_nats"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"variants": ["nvfp4/rtn"]}, {"variants": ["bf16/rtn", "nvfp5/rtn"]}, {"dtype": "int8"}],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bench\.(variants|dtype)="):
        QuantisersBench(
            source=None, calibration=None, held_out=None, problems=None, prompt=None, reward=None,
            **change,
        )  # fmt: skip
