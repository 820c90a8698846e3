"""Arithmetic of reasoning-gym: endless small problems that a 135M model can learn to solve.

Two draws never share a problem when one is given to the other as `apart_from`. Seeds alone do not
separate them: reasoning-gym makes item i from ``Random(seed + i)``, so the sets of seeds 7 and 123
are the same problems 116 items apart, and one-digit problems are so few that any two sets meet.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import reasoning_gym

from qerl.data.problems import Loaded, Problem

Task = Literal["chain_sum", "products", "basic_arithmetic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Distinct problems of one task, in the wording of reasoning-gym.

    All questions differ. reasoning-gym draws one digit count for all operands of a problem, and
    each count equally often; distinctness thins out the small ones (200 one-digit sums exist), the
    more so the larger `size`.
    """

    size: int
    """Problems."""

    seed: int

    split: str = "train"
    """Last part of the name, for reports."""

    task: Task = "chain_sum"
    """``chain_sum`` adds and subtracts, ``products`` multiplies, ``basic_arithmetic`` mixes the
    four operations with parentheses."""

    min_terms: int = 2
    max_terms: int = 2

    min_digits: int = 1
    """Digits of every operand, at least."""

    max_digits: int = 2
    """Digits of every operand, at most."""

    apart_from: "Arithmetic | None" = None
    """Problems that must not occur: neither their text nor the same operands in another order."""

    shown: Sequence[str] = ()
    """Expressions that the prompt solves as shots, such as ``21 + 34``; left out likewise."""

    def load(self) -> Loaded:
        """Draw the problems; the same fields give the same problems.

        Raises:
            ValueError: fewer distinct problems exist than `size`; says how many were found.
        """
        held_out = self.apart_from.load().problems if self.apart_from else ()
        taken = {_operands(self.task, expression) for expression in self.shown}
        taken |= {_operands(self.task, problem.meta["expression"]) for problem in held_out}
        # Coupon collector: a full set of 100 takes about 500 draws. Past this limit it is hopeless.
        draws = 100 * self.size + 1000
        items = reasoning_gym.create_dataset(
            self.task,
            seed=self.seed,
            size=draws,
            min_terms=self.min_terms,
            max_terms=self.max_terms,
            min_digits=self.min_digits,
            max_digits=self.max_digits,
        )
        problems: dict[str, Problem] = {}
        for index in range(draws):
            if len(problems) == self.size:
                break
            problem = self._problem(items[index])
            if _operands(self.task, problem.meta["expression"]) not in taken:
                problems.setdefault(problem.question, problem)
        self._check_enough(len(problems))
        return Loaded(
            name=f"{self.task}/{self.split}",
            problems=tuple(problems.values()),
            origin=f"reasoning-gym {self.task}, seed {self.seed}",
            rows=len(problems),
        )

    def _problem(self, item: dict) -> Problem:  # type: ignore[type-arg]
        expression = str(item["metadata"]["expression"])
        return Problem(
            id=f"{self.task}/{''.join(expression.split())}",
            question=str(item["question"]),
            gold=str(item["answer"]),
            meta={"expression": expression},
        )

    def _check_enough(self, found: int) -> None:
        if found == self.size:
            return
        beside = f" beside the {self.apart_from.size} held out" if self.apart_from else ""
        raise ValueError(
            f"size={self.size}: {self.task} of {self.min_terms}-{self.max_terms} terms and "
            f"{self.min_digits}-{self.max_digits} digits has only {found} distinct problems"
            f"{beside}; lower size or raise max_digits"
        )


def _operands(task: Task, expression: str) -> tuple[str, ...]:
    """What makes two problems the same: the operands with their signs, in any order.

    Parentheses and mixed operations do not commute, so there the expression itself counts.
    """
    bare = expression.replace(" ", "")
    if task == "chain_sum":
        return tuple(sorted(re.findall(r"[+-]\d+", f"+{bare}")))
    if task == "products":
        return tuple(sorted(bare.split("*")))
    return (bare,)
