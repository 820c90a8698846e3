"""python train.py model=qwen2.5-32b quant=nvfp4: teach a model by reinforcement learning.

Options: conf/ (one folder a group), `python train.py --help` prints them all.
"""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from qerl import build

refused: list[str] = []
"""Jobs of a sweep that could not run; the others run all the same."""


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run one configuration; the value is what a hyper-parameter search maximises."""
    try:
        outcome = build.train(cfg)
    except build.EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {build.one_line(error)}", file=sys.stderr)
        if HydraConfig.get().mode == RunMode.RUN:
            sys.exit(1)
        refused.append(" ".join(HydraConfig.get().overrides.task))
        return None
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays", file=sys.stderr)
        sys.exit(130)
    if outcome.text:
        print(f"\n{outcome.text}")
    if outcome.exit_status:
        sys.exit(outcome.exit_status)
    return outcome.objective


if __name__ == "__main__":
    main()
    if refused:
        sys.exit(f"error: {len(refused)} jobs of the sweep did not run: {'; '.join(refused)}")
