"""A set of prompts in a fixed order: what step k sees is a function of the cursor alone.

Epoch e is one permutation of the set, made of `seed` and e; the cursor counts prompts from the
start of epoch 0. A run that is stopped anywhere and continued from its cursor meets the same
prompts as one that was not.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from qerl.data.problems import Problem
from qerl.data.prompt import PromptBuilder, PromptTokenizer
from qerl.types import Prompts


class PromptSet:
    """Problems with their tokens, over-long ones left out."""

    def __init__(
        self,
        problems: Sequence[Problem],
        builder: PromptBuilder,
        tokenizer: PromptTokenizer,
        *,
        max_prompt_tokens: int | None,
        seed: int,
    ) -> None:
        """Tokenize every problem.

        Args:
            problems: Ids must differ.
            builder: Wording of the prompts.
            tokenizer: Of the model that will read them.
            max_prompt_tokens: Longer prompts are left out, never cut; null keeps all.
            seed: Of the order.

        Raises:
            ValueError: two problems share an id, or none is left.
        """
        twice = [name for name, count in Counter(p.id for p in problems).items() if count > 1]
        if twice:
            raise ValueError(f"{len(twice)} problem ids occur more than once, such as {twice[0]!r}")
        rows = builder.encode([problem.question for problem in problems], tokenizer)
        limit = (
            max_prompt_tokens if max_prompt_tokens is not None else max(map(len, rows), default=0)
        )
        kept = [row for row, tokens in enumerate(rows) if len(tokens) <= limit]
        if not kept:
            shortest = min(map(len, rows), default=0)
            raise ValueError(
                f"max_prompt_tokens={max_prompt_tokens}: no prompt of {len(rows)} is left, the "
                f"shortest has {shortest} tokens; raise it"
            )
        self.seed = seed
        self.overlong: tuple[str, ...] = tuple(
            problem.id
            for problem, tokens in zip(problems, rows, strict=True)
            if len(tokens) > limit
        )
        """Ids of the prompts that exceed `max_prompt_tokens`."""
        self._prompts = Prompts(
            ids=tuple(problems[row].id for row in kept),
            questions=tuple(problems[row].question for row in kept),
            tokens=tuple(rows[row] for row in kept),
            golds=tuple(problems[row].gold for row in kept),
        )
        # Two epochs: a batch may begin in one and end in the next.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._prompts)

    def all(self) -> Prompts:
        """Every prompt once, in the order of the source; for evaluation."""
        return self._prompts

    def epoch(self, cursor: int) -> float:
        """Passes over the set that `cursor` prompts amount to."""
        return cursor / len(self)

    def batch(self, cursor: int, n: int, *, rank: int = 0, world: int = 1) -> Prompts:
        """The `n` prompts from `cursor` on, or the share of one rank of them.

        A prompt that comes twice in one batch (the batch spans two epochs, or is larger than the
        set) carries ``+1`` behind its id the second time: seeds derive from ids, and the same seed
        would draw the same completions again.

        Args:
            cursor: Prompts consumed before, over all ranks, since the start of the run.
            n: Prompts of the whole step, over all ranks; a multiple of `world`.
            rank: This process; takes rows ``rank::world``.
            world: Processes.
        """
        if cursor < 0 or n < 1:
            raise ValueError(f"cursor={cursor}, n={n}: cursor from 0 and at least 1 prompt")
        if not 0 <= rank < world or n % world:
            raise ValueError(
                f"{n} prompts over {world} processes (rank {rank}): every rank takes the same "
                "number; make prompts_per_step a multiple of the number of processes"
            )
        rows, ids = [], []
        times: Counter[int] = Counter()
        for position in range(cursor, cursor + n):
            epoch, place = divmod(position, len(self))
            row = self._order(epoch)[place]
            again = f"+{times[row]}" if times[row] else ""
            times[row] += 1
            rows.append(row)
            ids.append(self._prompts.ids[row] + again)
        share = self._prompts.take(rows[rank::world])
        return Prompts(
            ids=tuple(ids[rank::world]),
            questions=share.questions,
            tokens=share.tokens,
            golds=share.golds,
        )

    def _permutation(self, epoch: int) -> tuple[int, ...]:
        """Rows in the order of epoch `epoch`, sorted by a hash of (seed, epoch, id).

        Unlike a random generator's shuffle the order is the same on every machine and version, and
        a prompt that is left out does not move the others past one another.
        """
        keys = [
            blake2b(f"{self.seed}\0{epoch}\0{name}".encode(), digest_size=8).digest()
            for name in self._prompts.ids
        ]
        return tuple(sorted(range(len(keys)), key=lambda row: (keys[row], self._prompts.ids[row])))
