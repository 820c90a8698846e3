"""Evaluation: one harness for base and adapted models, in training and after it."""

from qerl.evaluate.harness import EVALUATION_STEP, Evaluation, evaluate
from qerl.evaluate.held_out import Best, HeldOut, Validation

__all__ = ["EVALUATION_STEP", "Best", "Evaluation", "HeldOut", "Validation", "evaluate"]
