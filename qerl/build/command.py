"""How a job of a command line ends: with a result, one line of what is wrong, or how to go on."""

import os
import shlex
import sys
from collections.abc import Callable
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qerl.build.config import EXPECTED_ERRORS, one_line

Result = TypeVar("Result")


def run_job(script: str, job: Callable[[DictConfig], Result], cfg: DictConfig) -> Result:
    """Run a job that can be stopped and given again.

    Args:
        script: as a person calls it, for the line that goes on.
        job: what the script does.
        cfg: its configuration.

    Raises:
        SystemExit: 1 after a line for what the caller can mend (HYDRA_FULL_ERROR=1 raises the error
            itself), 130 after Ctrl-C.
    """
    try:
        return job(cfg)
    except EXPECTED_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.stderr.write(f"error: {one_line(error)}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        line = shlex.join(["python", script, *HydraConfig.get().overrides.task])
        sys.stderr.write(f"\nstopped; to go on: {line}\n")
        raise SystemExit(130) from None
