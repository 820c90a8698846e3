"""Measure on the device at hand and write a record.

python scripts/bench.py bench=kernels
python scripts/bench.py bench=kernels bench.peers=[cublas,humming] bench.geometries=[7b]
python scripts/bench.py bench=layers
python scripts/bench.py bench=rollout bench.geometries=[7b,32b]
python scripts/bench.py bench=agreement
python scripts/bench.py bench=qlora
python scripts/bench.py bench=quantisers                              on a CPU
python scripts/bench.py bench=convert                                 on a CPU, 21 GB of disk
python scripts/bench.py bench=vllm_load                               with the vllm extra
python scripts/bench.py bench=vllm_rollout                            with the vllm extra
"""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tabulate import tabulate

from qerl.record import provenance
from qerl.record.schema import Commit, Record, Status

logger = logging.getLogger(__name__)


# Section of a row -> what names its measurement, and its figures; None: all numbers.
FIGURES: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "layer": (("geometry", "batch", "rank"), ("layer_us",)),
    "rollout": (("geometry", "format", "batch"), ("tok_per_s",)),
    "agreement": (("format",), ("greedy_equal", "forks", "policy_mean_nats", "policy_max_nats")),
    "qlora": (("geometry", "batch"), ("qlora_tok_per_s", "qerl_tok_per_s", "ratio")),
    "quantiser": (("variant",), None),
    "convert": (("geometry", "format", "method"), ("peak_rss_gib", "seconds", "cpu_s")),
    "vllm": (("model", "format"), ("mean_abs_nats", "max_abs_nats")),
}


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """One number a measurement, named by what was measured and its unit."""
    summary = {}
    for row in rows:
        if row["section"] == "linears":
            name = row["kernel"].replace(", ", "_")
            summary[f"{row['geometry']}/{row['tokens']}/{name}_us"] = row["us"]
        elif row["section"] in FIGURES:
            keys, figures = FIGURES[row["section"]]
            name = "/".join(str(row[key]) for key in keys)
            for figure in figures or [key for key in row if isinstance(row[key], float)]:
                if figure in row:
                    summary[f"{name}/{figure}"] = row[figure]
    return summary


def settings(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration; the folder of data sets by its variable, not by its place."""
    text = json.dumps(OmegaConf.to_container(cfg, resolve=True))
    folder = os.environ.get("QERL_DATA_DIR")
    plain = text.replace(json.dumps(folder), json.dumps("$QERL_DATA_DIR")) if folder else text
    found: dict[str, Any] = json.loads(plain)
    return found


@hydra.main(version_base=None, config_path="../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Run the chosen bench and write its record."""
    device = str(cfg.bench.get("device", "cuda"))  # only a bench that may choose has the key
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench: no CUDA device; these numbers exist on a GPU only")
    torch.manual_seed(cfg.seed)
    started, rows = provenance.now(), list[dict[str, Any]]()
    status: Status = "completed"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        instantiate(cfg.bench).run(rows)
    except KeyboardInterrupt:
        if not rows:
            raise
        status = "interrupted"  # what is measured stays
    choices = HydraConfig.get().runtime.choices
    place = device
    if device == "cuda":
        place = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    flat = [{k: json.loads(json.dumps(v)) for k, v in row.items()} for row in rows]
    record = Record(
        kind="bench",
        name=f"{place}/{choices['bench']}",
        status=status,
        seed=cfg.seed,
        config=settings(cfg),
        overrides=tuple(HydraConfig.get().overrides.task),
        command=provenance.command_line(),
        commit=Commit(sha=cfg.commit, dirty=True) if cfg.commit else provenance.commit(),
        versions=provenance.versions(),
        device=provenance.device_facts(device),
        started=started,
        ended=provenance.now(),
        summary=summarise(flat),
        rows=tuple(flat),
    )
    path = record.write(Path(cfg.record_dir))
    table = [row for row in flat if row["section"] not in ("check", "text", "linear")]
    checks = sum(row["section"] == "check" for row in flat)
    print(tabulate(table, headers="keys"))
    print(f"{checks} checks passed; {path}")


if __name__ == "__main__":
    main()
