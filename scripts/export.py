"""Export what a run trained: its adapter, base and adapter merged, or its packed base.

python scripts/export.py run=out/<name>/<run> what=adapter out=/models/mine-adapter
python scripts/export.py run=out/<name>/<run> what=merged out=/models/mine
python scripts/export.py run=out/<name>/<run> what=base out=/models/mine-nvfp4

Memory holds one decoder layer at a time. A stopped export goes on when the same line is given
again; the folder appears when it is whole.
"""

import os
import shlex
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qerl.build import EXPECTED_ERRORS, one_line
from qerl.build.export import export


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
def main(cfg: DictConfig) -> None:
    """Export from one run."""
    try:
        told = export(cfg)
    except EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        line = shlex.join(["python", "scripts/export.py", *HydraConfig.get().overrides.task])
        print(f"\nstopped; to go on: {line}", file=sys.stderr)
        sys.exit(130)
    print(told)


if __name__ == "__main__":
    main()
