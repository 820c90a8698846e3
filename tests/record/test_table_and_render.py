"""Tables: which records a cell takes, its mean ± s.e. and n, and the rendered bytes."""

import math

import pytest
import yaml

from qerl.record.render import cell_text, latex, markdown, render, stale
from qerl.record.table import Cell, Column, Row, TableSpec, cells, missing, spec_from

SPEC = """
title: GSM8K, GRPO, LoRA rank 32
stub: [Weights, Training]
where: {config.algorithm: grpo}
note: One harness for every cell
rows:
  - labels: [BF16, none]
    where: {config.quant: bf16, config.trained: false}
    paper: {3B: 61.2, 7B: 76.3}
  - labels: [NVFP4, LoRA_AQN]
    where: {config.quant: nvfp4, config.trained: true}
    overrides: [quant=nvfp4, noise=aqn]
    paper: {3B: 83.7}
columns:
  - {label: 3B, metric: mean_at_k, scale: 100, where: {config.model: qwen2.5-3b},
     overrides: [model=qwen2.5-3b]}
  - {label: 7B, metric: mean_at_k, scale: 100, where: {config.model: qwen2.5-7b},
     overrides: [model=qwen2.5-7b]}
  - {label: Avg, average: true}
"""


@pytest.fixture
def spec() -> TableSpec:
    return spec_from("table1", yaml.safe_load(SPEC))


@pytest.fixture
def records(make_record):
    def evaluation(quant: str, trained: bool, model: str, seed: int, mean: float, **changes):
        return make_record(
            kind="eval",
            seed=seed,
            config={"algorithm": "grpo", "quant": quant, "trained": trained, "model": model},
            summary={"mean_at_k": mean, "mean_at_k_stderr": 0.0131},
            **changes,
        )

    return [
        evaluation("bf16", False, "qwen2.5-3b", 0, 0.612),
        evaluation("bf16", False, "qwen2.5-7b", 0, 0.7634),
        *(
            evaluation("nvfp4", True, "qwen2.5-3b", seed, mean)
            for seed, mean in enumerate((0.83, 0.84, 0.829))
        ),
        evaluation("nvfp4", True, "qwen2.5-7b", 0, 0.99, status="interrupted"),
        make_record(kind="run", config={"algorithm": "grpo", "quant": "bf16", "trained": False}),
    ]


def test_a_cell_is_the_mean_over_runs_with_its_standard_error(spec, records) -> None:
    (base, base_7b, _), (trained, absent, average) = cells(spec, records)
    assert trained.n == 3
    assert trained.mean == pytest.approx(83.3)
    assert trained.stderr == pytest.approx(100 * 0.00608276 / math.sqrt(3), rel=1e-4)
    assert (base.n, base.mean, base.stderr) == (1, pytest.approx(61.2), pytest.approx(1.31))
    assert base_7b.mean == pytest.approx(76.34)
    assert absent.n == 0
    assert average.n == 0


def test_an_average_takes_the_cells_to_its_left(spec, records) -> None:
    average = cells(spec, records)[0][2]
    assert average.mean == pytest.approx((61.2 + 76.34) / 2)
    assert average.stderr == pytest.approx(math.hypot(1.31, 1.31) / 2)


def test_an_average_leaves_other_averages_out(records) -> None:
    document = yaml.safe_load(SPEC)
    document["columns"].append({"label": "Avg again", "average": True})
    line = cells(spec_from("t", document), records)[0]
    assert (line[3].mean, line[3].stderr) == (line[2].mean, line[2].stderr)


def test_quoted_numbers_keep_their_decimals() -> None:
    spec = TableSpec(
        name="t",
        title="t",
        stub=("s",),
        rows=(Row(labels=("a",), paper={"c": 90.0}),),
        columns=(Column(label="c", metric="m"),),
    )
    assert "90.0 |" in markdown(spec, cells(spec, []))


def test_missing_cells_name_the_command_that_fills_them(spec, records) -> None:
    (gap,) = missing(spec, records)
    assert gap.overrides == ("quant=nvfp4", "noise=aqn", "model=qwen2.5-7b")


def test_markdown_is_rendered_to_the_byte(spec, records) -> None:
    assert markdown(spec, cells(spec, records)) == (
        "**GSM8K, GRPO, LoRA rank 32**\n"
        "\n"
        "| Weights   | Training   |               3B |   3B (paper) |               7B |"
        "   7B (paper) |              Avg |\n"
        "|:----------|:-----------|-----------------:|-------------:|-----------------:|"
        "-------------:|-----------------:|\n"
        "| BF16      | none       | 61.2 ± 1.3 (n=1) |         61.2 | 76.3 ± 1.3 (n=1) |"
        "         76.3 | 68.8 ± 0.9 (n=1) |\n"
        "| NVFP4     | LoRA_AQN   | 83.3 ± 0.4 (n=3) |         83.7 |                – |"
        "            – |                – |\n"
        "\n"
        "<sub>One harness for every cell</sub>  \n"
        "<sub>2 of 6 cells have no record</sub>  \n"
        "<sub>mean ± s.e. over n runs; for n=1 the s.e. is the run's own (over its problems); "
        "– no record</sub>  \n"
    )


def test_latex_is_rendered_to_the_byte(spec, records) -> None:
    assert latex(spec, cells(spec, records)) == (
        r"""\begin{table}
\centering
\caption{GSM8K, GRPO, LoRA rank 32. One harness for every cell. """
        r"""mean $\pm$ s.e. over n runs; for n=1 the s.e. is the run's own (over its problems); """
        r"""-- no record.}
\label{tab:table1}
\begin{tabular}{llrrrrr}
\toprule
Weights & Training & 3B & 3B (paper) & 7B & 7B (paper) & Avg \\
\midrule
BF16 & none & 61.2 $\pm$ 1.3 (n=1) & 61.2 & 76.3 $\pm$ 1.3 (n=1) & 76.3 & """
        r"""68.8 $\pm$ 0.9 (n=1) \\
NVFP4 & LoRA\_AQN & 83.3 $\pm$ 0.4 (n=3) & 83.7 & -- & -- & -- \\
\bottomrule
\end{tabular}
\end{table}
"""
    )


def test_rendering_twice_changes_nothing(spec, records, tmp_path) -> None:
    changed = render(spec, records, tmp_path)
    assert [path.name for path in changed] == ["table1.md", "table1.tex"]
    assert render(spec, list(reversed(records)), tmp_path) == []
    assert stale(spec, records, tmp_path) == []
    assert [p.name for p in stale(spec, records[1:], tmp_path)] == ["table1.md", "table1.tex"]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell(), "–"),
        (Cell(mean=2091.8, n=1, digits=0), "2092 (n=1)"),
        (Cell(mean=0.5, stderr=0.0449, n=4, digits=2), "0.50 ± 0.04 (n=4)"),
        (Cell(mean=float("nan"), n=2), "–"),
    ],
)
def test_a_cell_shows_what_it_knows(cell: Cell, text: str) -> None:
    assert cell_text(cell) == text


def test_special_characters_reach_latex_escaped() -> None:
    spec = TableSpec(
        name="t",
        title="50% & more",
        stub=("A_B",),
        rows=(Row(labels=("x | σ",)),),
        columns=(Column(label="#", metric="m"),),
    )
    text = latex(spec, cells(spec, []))
    assert r"50\% \& more" in text
    assert r"A\_B & \# \\" in text
    assert r"x | $\sigma$ & --" in text
    assert r"x \| σ" in markdown(spec, cells(spec, []))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": []}, "table t: needs at least one row"),
        ({"rows": [{"labels": ["a", "b"]}]}, "has 2 labels for the 1 headings"),
        ({"rows": [{"labels": ["a"], "paper": {"9B": 1.0}}]}, r"quotes the paper for \['9B'\]"),
        ({"rows": [{"labels": ["a"], "were": {}}]}, r"table t.rows\[0\].were: no such key; known:"),
        ({"columns": [{"label": "x"}]}, "column 'x' needs a metric or average"),
        (
            {"columns": [{"label": "x", "metric": "m", "average": True}]},
            "column 'x' needs a metric or average",
        ),
        ({"columns": [{"metric": "m"}]}, r"table t.columns\[0\]: .*label"),
        ({"titel": "x"}, "table t.titel: no such key"),
    ],
)
def test_a_wrong_specification_is_named(change, message) -> None:
    document = {
        "title": "x",
        "stub": ["s"],
        "rows": [{"labels": ["a"]}],
        "columns": [{"label": "c", "metric": "m"}],
    }
    with pytest.raises(ValueError, match=message):
        spec_from("t", document | change)
