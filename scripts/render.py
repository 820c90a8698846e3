"""Render every table of conf/tables and the README's copies of them from the records.

python scripts/render.py            write results/tables, docs/img and the README's tables
python scripts/render.py --check    write nothing; exit 1 where something differs from the records
"""

import argparse
import sys
from pathlib import Path
from typing import Any, cast

from hydra.utils import instantiate
from omegaconf import OmegaConf
from tabulate import tabulate

from qerl.model.plan import memory_plan
from qerl.model.random_source import geometry_spec
from qerl.quant.bf16 import BF16
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.record.figure import plot_curves, plot_rates
from qerl.record.render import render, stale
from qerl.record.schema import Record, find
from qerl.record.table import TableSpec, spec_from
from qerl.rollout.roofline import floor_tok_per_s

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "results" / "tables"
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "img"


def specs() -> list[TableSpec]:
    """Every table that conf/tables describes."""
    return [
        spec_from(path.stem, cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))))
        for path in sorted((ROOT / "conf" / "tables").glob("*.yaml"))
    ]


def sizes() -> str:
    """Memory of each model with a declared geometry, by format: the plan that loading checks."""
    formats: list[Format] = [NVFP4(), NF4(), BF16()]
    rows = []
    for path in sorted((ROOT / "conf" / "model").glob("[!_]*.yaml")):
        node = OmegaConf.select(OmegaConf.load(path), "source.geometry")
        if node is not None:
            plans = [memory_plan(instantiate(node), format, None).parts() for format in formats]
            gigabytes = [f"{(plan['linears'] + plan['embeddings']) / 1e9:.2f}" for plan in plans]
            rows.append([f"`{path.stem}`", *gigabytes])
    headings = ["model, GB of weights", *(format.name for format in formats)]
    return tabulate(rows, headings, tablefmt="pipe", disable_numparse=True) + "\n"


def readme(tables: dict[str, str]) -> str:
    """The README with each table between its marks."""
    text = README.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            if end not in rest:
                raise ValueError(f"README.md: {begin.strip()} has no {end} after it")
            text = head + begin + table + end + rest.partition(end)[2]
    return text


def quickstart(records: list[Record]) -> list[Record]:
    """The runs that the README's picture shows."""
    name = "smollm2-135m_nvfp4_aqn_grpo_arithmetic"
    return [record for record in records if record.name == name and record.status == "completed"]


def rollout_figure(records: list[Record]) -> None:
    """Tokens per second against the batch, beside the floor of the hardware."""
    formats: dict[str, Format] = {"nvfp4": NVFP4(), "bf16": BF16()}
    series: dict[str, list[tuple[float, float]]] = {}
    floors: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.kind == "bench" and record.name in ("h200/rollout", "h200/vllm_rollout"):
            node = record.config["bench"]
            sizes = {key: node[key] for key in ("group", "prompt", "rank")}
            sizes["new"] = node["new_tokens"]
            for row in (row for row in record.rows if row["section"] == "rollout"):
                geometry, format = row["geometry"], row["format"]
                peer = f", {row['engine']}" if "engine" in row else ""
                name = f"{geometry.upper()}, {format}{peer}"
                series.setdefault(name, []).append((row["batch"], row["tok_per_s"]))
                bits = formats[format].bits_per_weight
                spec = geometry_spec(geometry)
                floor = floor_tok_per_s(spec, bits, rows=row["batch"], **sizes)
                if not peer:
                    floors.setdefault(name, []).append((row["batch"], floor))
    if series:
        plot_rates(
            series,
            IMAGES / "rollout.png",
            labels=("sequences that run together", "tokens/s"),
            limits=floors,
            title="Rollouts on one H200, LoRA r=32; dashed: the least time of bytes and operations",
        )


def main() -> None:
    """Render, or check that nothing needs rendering."""
    records = find(ROOT / "results")
    parser = argparse.ArgumentParser(description="Render tables and the README from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    changed: list[Path] = []
    tables = {"sizes": sizes()}
    for spec in specs():
        changed += stale(spec, records, TABLES) if check else render(spec, records, TABLES)
        rendered = TABLES / f"{spec.name}.md"
        tables[spec.name] = rendered.read_text(encoding="utf-8") if rendered.exists() else ""
    text = readme(tables)
    if text != README.read_text(encoding="utf-8"):
        changed.append(README)
        if not check:
            README.write_text(text, encoding="utf-8")
    runs = quickstart(records)
    if runs and not check:
        IMAGES.mkdir(parents=True, exist_ok=True)
        seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
        plot_curves({f"quickstart, seeds {seeds}": runs}, IMAGES / "quickstart.png")
        rollout_figure(records)
    for path in changed:
        print(f"{'differs from the records' if check else 'rendered'}: {path.relative_to(ROOT)}")
    if check and changed:
        print("run `make tables` and commit the result")
        sys.exit(1)
    print(f"{len(records)} records, {len(tables)} tables: up to date")


if __name__ == "__main__":
    main()
