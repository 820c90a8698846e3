"""The rollout steps still to do, in the shape that Lightning's loop counts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from qerl.training.learner import PolicyLearner


class RemainingSteps(IterableDataset[int]):
    """Numbers of steps; the learner draws its own prompts."""

    def __init__(self, learner: "PolicyLearner") -> None:
        self._learner = learner

    def __iter__(self) -> Iterator[int]:
        yield from range(self._learner.rollout_step, self._learner.settings.max_steps)
