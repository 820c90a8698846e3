"""From a loaded source to a set of prompts: everything that is left out, and an account of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from qerl.data.overlap import Overlap, normalised
from qerl.data.problems import Checksum, Loaded, Problem
from qerl.data.prompt import PromptBuilder, PromptTokenizer
from qerl.data.prompt_set import PromptSet

Verify = Callable[[list[tuple[str, str]]], list[bool]]
"""Whether each answer verifies against its gold; pairs are (answer, gold)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of every row of a source; `rows` is `kept` plus all that is left out."""

    name: str
    origin: str
    rows: int
    kept: int

    checksum: Checksum
    warnings: tuple[str, ...]

    other_levels: int
    """Rows of difficulties that were not asked for."""

    beyond_limit: int
    """Rows after the first `limit`."""

    unreadable_golds: tuple[str, ...]
    """Rows whose answer field holds no answer, by place."""

    as_shots: tuple[str, ...]
    """Ids whose question the prompt itself answers as a shot."""

    duplicates: tuple[str, ...]
    """Ids whose question occurs earlier in the set."""

    unverified_golds: tuple[str, ...]
    """Ids whose gold does not verify against itself, so that no completion could earn a reward."""

    overlaps: Mapping[str, tuple[str, ...]]
    """Ids that a benchmark contains, under the benchmark's name."""

    overlong: tuple[str, ...]
    """Ids whose prompt exceeds `max_prompt_tokens`."""

    max_prompt_tokens: int | None

    shortest_tokens: int
    median_tokens: int
    longest_tokens: int

    def dropped(self) -> dict[str, int]:
        """How many rows were left out, by reason, reasons without rows omitted."""
        counts = {
            "of other levels": self.other_levels,
            "beyond the limit": self.beyond_limit,
            "with an unreadable gold": len(self.unreadable_golds),
            "shown as shots": len(self.as_shots),
            "duplicates": len(self.duplicates),
            "whose gold fails against itself": len(self.unverified_golds),
            **{f"also in {name}": len(ids) for name, ids in self.overlaps.items()},
            f"over {self.max_prompt_tokens} tokens": len(self.overlong),
        }
        return {reason: count for reason, count in counts.items() if count}

    def summary(self) -> str:
        """One line for the log: what was read, what is left and why, and any warning."""
        parts = [f"{self.name}: {self.kept:,} of {self.rows:,} problems from {self.origin}"]
        if self.dropped():
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped().items())
            parts.append(f"left out {reasons}")
        parts.append(
            f"prompts of {self.shortest_tokens}-{self.longest_tokens} tokens "
            f"(median {self.median_tokens})"
        )
        if self.checksum == "verified":
            parts.append("sha256 verified")
        parts += [f"WARNING {warning}" for warning in self.warnings]
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def prepare(
    loaded: Loaded,
    builder: PromptBuilder,
    tokenizer: PromptTokenizer,
    *,
    max_prompt_tokens: int | None = None,
    seed: int = 0,
    verify: Verify | None = None,
    apart_from: Sequence[Loaded] = (),
    overlap: Overlap | None = None,
) -> tuple[PromptSet, LoadReport]:
    """A set of prompts that is fit to train or evaluate on, and what was left out of it.

    Args:
        loaded: From a source's `load`.
        builder: Wording of the prompts.
        tokenizer: Of the model that will read them.
        max_prompt_tokens: Longer prompts are left out, never cut; null keeps all.
        seed: Of the order in training.
        verify: Checks each distinct gold against itself; null skips the check.
        apart_from: Benchmarks and held-out sets whose problems must not be trained on.
        overlap: What counts as the same problem; null takes the default of 13 words.

    Raises:
        ValueError: nothing is left; says where the rows went.
    """
    problems = list(loaded.problems)
    shown = {normalised(question) for question, _ in builder.shots}
    as_shots = tuple(p.id for p in problems if normalised(p.question) in shown)
    problems = _without(problems, as_shots)
    duplicates = _duplicates(problems)
    problems = _without(problems, duplicates)
    unverified = _unverified(problems, verify)
    problems = _without(problems, unverified)
    overlaps = (overlap or Overlap()).find(problems, apart_from)
    for ids in overlaps.values():
        problems = _without(problems, ids)
    if not problems:
        raise ValueError(
            f"{loaded.name}: none of {loaded.rows} problems from {loaded.origin} is left "
            f"({len(loaded.unreadable_golds)} unreadable golds, {loaded.other_levels} of other "
            f"levels, {len(as_shots)} shots, {len(unverified)} golds that fail, "
            f"{sum(map(len, overlaps.values()))} in {', '.join(overlaps) or 'no benchmark'}); "
            "check data.path and data.problems"
        )
    prompts = PromptSet(
        problems, builder, tokenizer, max_prompt_tokens=max_prompt_tokens, seed=seed
    )
    lengths = [len(tokens) for tokens in prompts.all().tokens]
    return prompts, LoadReport(
        name=loaded.name,
        origin=loaded.origin,
        rows=loaded.rows,
        kept=len(prompts),
        checksum=loaded.checksum,
        warnings=loaded.warnings,
        other_levels=loaded.other_levels,
        beyond_limit=loaded.beyond_limit,
        unreadable_golds=loaded.unreadable_golds,
        as_shots=as_shots,
        duplicates=duplicates,
        unverified_golds=unverified,
        overlaps=overlaps,
        overlong=prompts.overlong,
        max_prompt_tokens=max_prompt_tokens,
        shortest_tokens=min(lengths),
        median_tokens=median_low(lengths),
        longest_tokens=max(lengths),
    )


def _without(problems: list[Problem], ids: Sequence[str]) -> list[Problem]:
    gone = set(ids)
    return [problem for problem in problems if problem.id not in gone]


def _duplicates(problems: list[Problem]) -> tuple[str, ...]:
    seen: set[str] = set()
    twice: list[str] = []
    for problem in problems:
        question = normalised(problem.question)
        if question in seen:
            twice.append(problem.id)
        seen.add(question)
    return tuple(twice)


def _unverified(problems: list[Problem], verify: Verify | None) -> tuple[str, ...]:
    if verify is None:
        return ()
    golds = list(dict.fromkeys(problem.gold for problem in problems))
    verdicts = dict(zip(golds, verify([(gold, gold) for gold in golds]), strict=True))
    return tuple(problem.id for problem in problems if not verdicts[problem.gold])
