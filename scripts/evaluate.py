"""Evaluate a base or adapted model: greedy pass@1 and mean@k with their intervals.

python scripts/evaluate.py model=smollm2-135m quant=bf16,nvfp4 -m data=gsm8k evaluate.limit=64
python scripts/evaluate.py run=out/smollm2-135m_nvfp4_aqn_grpo_arithmetic/<run>
python scripts/evaluate.py adapter=/path/of/a/peft/folder data=benchmark_math500 data.path=/data

Prints the table of every evaluation on the same problems and writes a record under results/evals.
A stopped evaluation goes on when the same line is given again; two records are compared by
`python scripts/compare.py`.
"""

import sys

import hydra
from omegaconf import DictConfig

from qerl.build.command import run_job
from qerl.build.evaluation import evaluate


@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
def main(cfg: DictConfig) -> float | None:
    """Run one evaluation; the value is its greedy pass@1, or mean@k without one."""
    report = run_job("scripts/evaluate.py", evaluate, cfg)
    print(f"\n{report.text}")
    summary = report.record.summary
    return summary.get("greedy/pass_at_1", summary.get("sampled/mean_at_k"))


def flags_first(arguments: list[str]) -> list[str]:
    """The arguments with ``-m`` at the front: argparse takes no override behind it otherwise."""
    flags = ("-m", "--multirun")
    return [a for a in arguments if a in flags] + [a for a in arguments if a not in flags]


if __name__ == "__main__":
    sys.argv[1:] = flags_first(sys.argv[1:])
    main()
