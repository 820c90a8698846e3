"""Turn a checkpoint into a folder of packed weights that transformers, vLLM and qerl load.

python scripts/quantize.py model=qwen2.5-7b quant=nvfp4
python scripts/quantize.py model=qwen2.5-7b quant=nvfp4 quant.method=awq
python scripts/quantize.py model=smollm2-135m quant=mxfp4 quant.method=mse out=/models/smollm2-mxfp4

Memory holds one decoder layer at a time. A stopped conversion goes on when the same line is given
again; the folder appears when it is whole.
"""

import os
import shlex
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qerl.build import EXPECTED_ERRORS, one_line
from qerl.build.conversion import quantize


@hydra.main(version_base="1.3", config_path="../conf", config_name="quantize")
def main(cfg: DictConfig) -> None:
    """Convert one checkpoint."""
    try:
        told = quantize(cfg)
    except EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        line = shlex.join(["python", "scripts/quantize.py", *HydraConfig.get().overrides.task])
        print(f"\nstopped; to go on: {line}", file=sys.stderr)
        sys.exit(130)
    print(told)


if __name__ == "__main__":
    main()
