"""Training problems that a benchmark also contains, by shared n-grams of words.

Source: GPT-3 (arXiv:2005.14165), appendix C: 13-grams, and n-grams that occur more than 10 times
in the training set count as boilerplate, not as overlap. On MATH against AIME 2024 that rule takes
70 hits down to 27, the rest still turns of phrase (``where m and n are relatively prime ...``):
the search errs on the side of dropping.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qerl.data.problems import Loaded, Problem

WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much two questions may share."""

    words: int | None = 13
    """Length of the n-grams, in words; null compares whole questions only."""

    common: int = 10
    """An n-gram in more training questions than this is boilerplate and counts no longer."""

    def __post_init__(self) -> None:
        if self.words is not None and self.words < 2:
            raise ValueError(f"words={self.words}: n-grams of at least 2 words, or null for none")
        if self.common < 1:
            raise ValueError(f"common={self.common}: at least 1")

    def find(
        self, problems: Sequence[Problem], benchmarks: Iterable[Loaded]
    ) -> dict[str, tuple[str, ...]]:
        """Ids of `problems` that each benchmark contains, under the benchmark's name.

        Whole questions are compared without regard to case and white space, but with their signs:
        ``2 + 3`` is not ``2 * 3``. A problem is listed under the first benchmark that has it.
        """
        known = [_Fingerprints.of(benchmark, self.words) for benchmark in benchmarks]
        if not known:
            return {}
        every = set().union(*(one.grams for one in known))
        # Only what some benchmark has is kept: all n-grams of 100,000 questions take gigabytes.
        shared = [ngrams(problem.question, self.words) & every for problem in problems]
        counts = Counter(gram for own in shared for gram in own)
        found: dict[str, tuple[str, ...]] = {}
        for problem, own in zip(problems, shared, strict=True):
            telling = {gram for gram in own if counts[gram] <= self.common}
            question = normalised(problem.question)
            for one in known:
                if question in one.questions or telling & one.grams:
                    found[one.name] = (*found.get(one.name, ()), problem.id)
                    break
        return found


@dataclass(frozen=True, slots=True)
class _Fingerprints:
    """What a benchmark is recognised by."""

    name: str
    questions: frozenset[str]
    grams: frozenset[str]

    @classmethod
    def of(cls, benchmark: Loaded, words: int | None) -> "_Fingerprints":
        questions = [problem.question for problem in benchmark.problems]
        return cls(
            benchmark.name,
            frozenset(map(normalised, questions)),
            frozenset().union(*(ngrams(question, words) for question in questions)),
        )


def normalised(question: str) -> str:
    """`question` in lower case with single spaces, all signs kept."""
    return " ".join(unicodedata.normalize("NFKC", question).lower().split())


def ngrams(question: str, words: int | None) -> set[str]:
    """Runs of `words` words of `question`, letters and digits only; empty for shorter ones."""
    if words is None:
        return set()
    found = WORD.findall(unicodedata.normalize("NFKC", question).lower())
    return {" ".join(found[start : start + words]) for start in range(len(found) - words + 1)}
