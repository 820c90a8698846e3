"""QLoRA beside ours, on a geometry small enough for a CPU."""

from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from qerl.model.random_source import geometry_spec
from qerl.rollout import bench_qlora
from qerl.rollout.bench_qlora import QloraBench, qlora_model

SIZES = {"hidden_size": 256, "mlp_size": 512, "heads": 2, "kv_heads": 2, "vocab_size": 512}
SMALL = replace(geometry_spec("3b", layers=1), **SIZES)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_qlora, "geometry_spec", lambda *_: SMALL)


def test_every_linear_is_nf4_under_an_adapter_that_acts() -> None:
    model = qlora_model(SMALL, 8, "cpu")
    packed = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(packed) >= 7
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        with model.disable_adapter():
            plain = model(ids).logits
    assert (adapted - plain).abs().max() > 1e-3


def test_both_sides_are_timed_on_the_same_lengths() -> None:
    rows: list[dict[str, Any]] = []
    bench = QloraBench(
        geometries=("3b",), batches=(4,), group=2, rank=8, prompt=8, new_tokens=5, device="cpu"
    )
    bench.run(rows)
    (row,) = rows
    assert row["qlora_tok_per_s"] > 0
    assert row["ratio"] == round(row["qerl_tok_per_s"] / row["qlora_tok_per_s"], 2)
