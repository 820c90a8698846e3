"""python train.py model=qwen2.5-32b quant=nvfp4: teach a model by reinforcement learning.

Options: conf/ (one folder a group), `python train.py --help` prints them all.
"""

import os
import sys

import hydra
from omegaconf import DictConfig

from qerl import build


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run one configuration; the value is what a hyper-parameter search maximises."""
    try:
        outcome = build.train(cfg)
    except build.EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {build.one_line(error)}", file=sys.stderr)
        sys.exit(1)
    print(f"\n{outcome.text}")
    if outcome.interrupted:
        sys.exit(130)
    return outcome.objective


if __name__ == "__main__":
    main()
