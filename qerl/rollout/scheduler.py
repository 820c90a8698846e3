"""Who runs: distinct prompts as chains of shared pages, admission, and the end of sequences.

A prompt is cut into pages of `page_size` tokens, the last one partial. Two prompts that begin
with the same full pages share them, and sequences of equal prompts share all of them: a page is
identified by its tokens and the page before it. A sequence's own tokens start on a fresh page, so
nothing shared is ever written twice and no partial page is copied.

Sequences wait in the lexicographic order of their prompts, in which all prompts that share a page
are neighbours. A page is held by every unfinished sequence of its prompts, waiting ones too, so it
is computed once; and because of the order, when nothing runs, the pages still held belong to the
prompt that is next. A sequence is admitted only with all the pages it can ever need. Therefore a
call whose every single sequence fits in the pool never stops for want of pages.
"""

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from torch import Tensor

from qerl.rollout.pages import PagePool


@dataclass(eq=False, slots=True)
class PromptPage:
    """Up to `page_size` tokens of a prompt at one place of the tree of prompts."""

    tokens: tuple[int, ...]

    holders: int = 0
    """Sequences whose prompt contains it."""

    page: int | None = None
    """Where its keys and values are; None before it is computed."""


@dataclass(eq=False, slots=True)
class PromptState:
    """A distinct prompt of the call."""

    tokens: tuple[int, ...]

    chain: list[PromptPage]

    waiting: int = 0
    """Sequences not yet admitted."""

    hidden: Tensor | None = None
    """Final hidden state of its last token, from which first tokens are drawn. [D]"""

    def missing(self) -> list[PromptPage]:
        """Its pages without keys and values: always the end of the chain."""
        return [part for part in self.chain if part.page is None]

    def pages(self) -> list[int]:
        """Its pages in order, all of them computed."""
        return [part.page for part in self.chain if part.page is not None]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The part of a prompt that has to go through the model: tokens from `start` on."""

    prompt: PromptState
    start: int


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion in the making."""

    row: int
    """b, in the order of the caller's prompts."""

    prompt: PromptState

    pages: list[int] = field(default_factory=list)
    """Its own pages, for the tokens it generates."""

    length: int = 0
    """Tokens drawn so far."""


class Scheduler:
    """Admits waiting sequences while rows and pages are free; gives pages back when they end."""

    def __init__(
        self,
        prompts: Rows[tuple[int, ...]],
        group_size: int,
        *,
        pool: PagePool,
        max_sequences: int,
        own_pages: int,
    ) -> None:
        """Queue every sequence; nothing is taken from the pool yet.

        Args:
            prompts: token ids of each prompt, in the caller's order.
            group_size: sequences of each.
            pool: with no page taken.
            max_sequences: most sequences that run at a time.
            own_pages: pages for the tokens of one completion of the longest length.

        Raises:
            ValueError: a single sequence needs more pages than the pool has.
        """
        self._pool = pool
        self._max_sequences = max_sequences
        self._own_pages = own_pages
        self.running: list[Sequence] = []
        self.prompts = _distinct(prompts, pool.page_size)
        self._waiting: deque[Sequence] = deque()
        for p in sorted(range(len(prompts)), key=lambda p: prompts[p]):
            prompt = self.prompts[prompts[p]]
            prompt.waiting += group_size
            for part in prompt.chain:
                part.holders += group_size
            rows = range(p * group_size, (p + 1) * group_size)
            self._waiting.extend(Sequence(row, prompt) for row in rows)
        longest = max(len(prompt.chain) for prompt in self.prompts.values())
        if longest + own_pages > pool.pages:
            raise ValueError(
                f"one sequence needs {longest} prompt pages and {own_pages} of its own, the pool "
                f"has {pool.pages} of {pool.page_size} tokens: raise rollout.kv_budget_gib or "
                "lower max_new_tokens"
            )

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + len(self._waiting)

    def admit(self) -> tuple[list[Sequence], list[Prefill]]:
        """Start as many waiting sequences as rows and pages allow, in order.

        Returns:
            The sequences, which hold all the pages they can need; and what the caller has to
            prefill, in one pass or in this order, before it draws their first tokens.
        """
        admitted: list[Sequence] = []
        prefills: list[Prefill] = []
        while self._waiting and len(self.running) + len(admitted) < self._max_sequences:
            sequence = self._waiting[0]
            missing = sequence.prompt.missing()
            if len(missing) + self._own_pages > self._pool.free:
                break
            if missing:
                start = (len(sequence.prompt.chain) - len(missing)) * self._pool.page_size
                prefills.append(Prefill(sequence.prompt, start))
            for part in missing:
                (part.page,) = self._pool.take(1, holders=part.holders)
            sequence.pages = self._pool.take(self._own_pages)
            sequence.prompt.waiting -= 1
            admitted.append(self._waiting.popleft())
        assert admitted or self.running or not self._waiting, "admission is stuck"
        self.running += admitted
        return admitted, prefills

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out and drop the pages it holds."""
        self.running.remove(sequence)
        self._pool.drop(sequence.pages)
        self._pool.drop(sequence.prompt.pages())
        if sequence.prompt.waiting == 0:
            sequence.prompt.hidden = None


def _distinct(prompts: Rows[tuple[int, ...]], page_size: int) -> dict[tuple[int, ...], PromptState]:
    """Each distinct prompt with its chain of pages; prompts that begin alike share `PromptPage`s.

    Keys of the tree are the tokens themselves, so no two contents can be taken for one another.
    """
    tree: dict[tuple[int, tuple[int, ...]], PromptPage] = {}
    states: dict[tuple[int, ...], PromptState] = {}
    for tokens in prompts:
        if tokens in states:
            continue
        chain: list[PromptPage] = []
        for start in range(0, len(tokens), page_size):
            part = tokens[start : start + page_size]
            parent = id(chain[-1]) if chain else 0
            chain.append(tree.setdefault((parent, part), PromptPage(part)))
        states[tokens] = PromptState(tokens, chain)
    return states
