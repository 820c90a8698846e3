"""A conversion is measured in a process of its own, and leaves nothing behind."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.utils import instantiate

from qerl.convert import bench as bench_file
from qerl.convert.bench import ConvertBench
from qerl.model.source import Toy


class Here:
    """Stands for the pool with a fresh process, which would not know the small geometry."""

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def apply(self, function: Any, arguments: Any) -> Any:
        return function(*arguments)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_file, "geometry_spec", lambda name, layers: Toy().spec)
    context = SimpleNamespace(Pool=lambda count: Here())
    monkeypatch.setattr(bench_file.multiprocessing, "get_context", lambda kind: context)


@pytest.mark.parametrize("option", ["convert", "vllm_load"])
def test_the_options_build(composed: Callable[..., Any], option: str) -> None:
    bench = instantiate(composed(f"bench={option}", config="bench").bench)
    stated, defaults = (json.dumps(asdict(each)) for each in (bench, type(bench)()))
    assert stated == defaults


def test_a_row_a_conversion_and_no_folder_left(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    ConvertBench(
        formats=("nvfp4", "mxfp4"), methods=("rtn", "mse"), folder=str(tmp_path / "bench")
    ).run(rows)
    assert [(row["format"], row["method"]) for row in rows] == [
        ("nvfp4", "rtn"), ("nvfp4", "mse"), ("mxfp4", "rtn"), ("mxfp4", "mse"),
    ]  # fmt: skip
    for row in rows:
        assert row["weights"] == 308_864
        assert row["peak_rss_gib"] >= row["start_rss_gib"] > 0
        assert row["peak_rss_gib"] == pytest.approx(row["maxrss_gib"], rel=0.05)
    assert rows[1]["sqnr_mean_db"] > rows[0]["sqnr_mean_db"] + 1
    assert not list((tmp_path / "bench").iterdir())


def test_a_conversion_above_the_limit_fails_the_bench(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"32b-nvfp4-rtn: .* GiB, above 0\.001"):
        ConvertBench(folder=str(tmp_path / "bench"), limit_gib=0.001).run([])
