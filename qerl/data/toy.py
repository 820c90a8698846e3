"""Sums with a known optimum, for a random model of one token per character.

Every question has the same answer, so the best policy says one thing whatever it is asked and
earns 1.0. That is what adapters on a random base learn within 40 steps: with 8 prompts, 8
completions, 2 new tokens and AdamW at 3e-3 the mean reward is below 0.1 in the first five steps and
above 0.95 from step 20 on, over three seeds. Sums with several answers stay at the share of the
most frequent one, and so few random completions end by themselves within two tokens that a run
which masks truncated ones learns nothing.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from qerl.data.problems import Loaded, Problem

HELD_OUT_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySums:
    """All sums of two or three digits with one total: ``1+6=``, ``2+0+5=``."""

    total: int = 7
    """The answer to every question, 0 to 9 so that it is a single token."""

    split: Literal["train", "held_out"] = "train"
    """Every fifth sum is held out."""

    def __post_init__(self) -> None:
        if not 0 <= self.total <= 9:
            raise ValueError(f"total={self.total}: 0 to 9, so that the answer is one character")
        if self.split not in ("train", "held_out"):
            raise ValueError(f"split={self.split!r}: train or held_out")

    def load(self) -> Loaded:
        """Enumerate the sums of this split."""
        sums = [
            "+".join(map(str, digits))
            for terms in (2, 3)
            for digits in product(range(10), repeat=terms)
            if sum(digits) == self.total
        ]
        problems = tuple(
            Problem(id=f"toy/{expression}", question=f"{expression}=", gold=str(self.total))
            for place, expression in enumerate(sums)
            if (place % HELD_OUT_EVERY == 0) == (self.split == "held_out")
        )
        return Loaded(
            name=f"toy/{self.split}",
            problems=problems,
            origin=f"all sums of two or three digits that make {self.total}",
            rows=len(problems),
        )
