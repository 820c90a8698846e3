"""Export what a run trained: its adapter, base and adapter merged, or its packed base.

python scripts/export.py run=out/<name>/<run> what=adapter out=/models/mine-adapter
python scripts/export.py run=out/<name>/<run> what=merged out=/models/mine
python scripts/export.py run=out/<name>/<run> what=base out=/models/mine-nvfp4

Memory holds one decoder layer at a time. A stopped export goes on when the same line is given
again; the folder appears when it is whole.
"""

import hydra
from omegaconf import DictConfig

from qerl.build.command import run_job
from qerl.build.export import export


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
def main(cfg: DictConfig) -> None:
    """Export from one run."""
    print(run_job("scripts/export.py", export, cfg))


if __name__ == "__main__":
    main()
