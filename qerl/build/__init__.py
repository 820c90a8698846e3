"""From a configuration to objects: the only package that sees a DictConfig."""

from qerl.build.config import EXPECTED_ERRORS, one_line
from qerl.build.training import Outcome, assemble, check, train

__all__ = ["EXPECTED_ERRORS", "Outcome", "assemble", "check", "one_line", "train"]
