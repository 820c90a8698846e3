"""Turn a checkpoint into a folder of packed weights that transformers, vLLM and qerl load.

python scripts/quantize.py model=qwen2.5-7b quant=nvfp4
python scripts/quantize.py model=qwen2.5-7b quant=nvfp4 quant.method=awq
python scripts/quantize.py model=smollm2-135m quant=mxfp4 quant.method=mse out=/models/smollm2-mxfp4

Memory holds one decoder layer at a time. A stopped conversion goes on when the same line is given
again; the folder appears when it is whole.
"""

import hydra
from omegaconf import DictConfig

from qerl.build.command import run_job
from qerl.build.conversion import quantize


@hydra.main(version_base="1.3", config_path="../conf", config_name="quantize")
def main(cfg: DictConfig) -> None:
    """Convert one checkpoint."""
    print(run_job("scripts/quantize.py", quantize, cfg))


if __name__ == "__main__":
    main()
