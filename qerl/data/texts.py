"""Whole conversations, question and worked answer: what calibration and perplexity read.

The stream of a source is every conversation, rendered by the chat template and set end to end; it
is cut into sequences of one length. Paper: 256 sequences of 2048 tokens of OpenThoughts-114k
(arXiv:2510.11696, section 4). Where the hub is out of reach, the training problems of any data set
of this project do: their questions with their answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from qerl.data.files import Row
from qerl.data.hub import HubProblems
from qerl.data.problems import ProblemSource
from qerl.data.prompt import Message, PromptBuilder

_HELD = 1024  # conversations in memory at a time
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class TextSource(Protocol):
    """Conversations in a fixed order. Construction reads nothing."""

    def conversations(self) -> Iterator[list[Message]]:
        """Each a list of turns with ``role`` and ``content``."""
        ...

    def checksum(self) -> str | None:
        """SHA-256 of the files that hold the text; None where there are none."""
        ...


@dataclass(frozen=True, kw_only=True)
class RowTexts:
    """Rows of a data set, with the worked answers that problems leave out."""

    rows: HubProblems
    """Where the rows are: local files or the hub."""

    question: Sequence[str] = ("question", "problem")
    """Candidates for the user's turn; the first that a row has counts."""

    answer: Sequence[str] = ("solution", "answer")
    """Candidates for the assistant's turn."""

    turns: str | None = None
    """A field with whole conversations instead, as ``[{from, value}, ...]`` (OpenThoughts)."""

    system: str | None = None
    """A field with the system turn of such conversations."""

    def conversations(self) -> Iterator[list[Message]]:
        """One a row."""
        return map(self._turns if self.turns else self._pair, self.rows.rows())

    def checksum(self) -> str | None:
        """Of the local files, end to end."""
        digest, files = sha256(), self.rows.files()
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest() if files else None

    def _pair(self, row: Row) -> list[Message]:
        asked, answered = (_first(row, names) for names in (self.question, self.answer))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]

    def _turns(self, row: Row) -> list[Message]:
        turns: Any = row.values.get(str(self.turns))
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{row.place}: no turns in {self.turns!r}; the row has {_names(row)}")
        messages = [] if self.system is None else [_message("system", _first(row, [self.system]))]
        for turn in turns:
            role = turn.get("from", turn.get("role"))
            if role not in _ROLES:
                raise ValueError(f"{row.place}: a turn of {role!r}; known are {', '.join(_ROLES)}")
            messages.append(_message(_ROLES[role], str(turn.get("value", turn.get("content")))))
        return messages


@dataclass(frozen=True, kw_only=True)
class ProblemTexts:
    """Problems of any source, as the policy is asked them, with the bare gold answer."""

    problems: ProblemSource
    prompt: PromptBuilder

    def conversations(self) -> Iterator[list[Message]]:
        """One a problem, shots included."""
        for problem in self.problems.load().problems:
            yield [*self.prompt.messages(problem.question), _message("assistant", problem.gold)]

    def checksum(self) -> str | None:
        """None: problems may be generated."""
        return None


def token_sequences(
    source: TextSource, tokenizer: Any, *, sequences: int, length: int, seed: int | None
) -> Int[Tensor, "sequences length"]:
    """The first tokens of the stream of conversations, cut into sequences.

    Args:
        source: of the conversations.
        tokenizer: with a chat template.
        sequences: how many.
        length: tokens of each.
        seed: of the order of the conversations; None keeps that of the source.

    Raises:
        ValueError: the source has fewer tokens, or the tokenizer no chat template.
    """
    if sequences < 1 or length < 1:
        raise ValueError(f"{sequences} sequences of {length} tokens: at least 1 of at least 1")
    if not tokenizer.chat_template:
        raise ValueError(
            "this tokenizer has no chat template, which renders calibration text; take an "
            "instruction-tuned model"
        )
    wanted = sequences * length
    stream: list[int] = []
    for messages in _ordered(source, seed):
        # Rendered and encoded apart: not every tokenizer returns bare ids from its template.
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        stream += tokenizer.encode(text, add_special_tokens=False)
        if len(stream) >= wanted:
            return torch.tensor(stream[:wanted]).view(sequences, length)
    raise ValueError(
        f"{sequences} sequences of {length} tokens: the text has only {len(stream)} tokens; take "
        f"{max(1, len(stream) // length)} sequences, or more text"
    )


def _ordered(source: TextSource, seed: int | None) -> Iterator[list[Message]]:
    """The conversations, shuffled; the source is read again rather than held whole."""
    if seed is None:
        yield from source.conversations()
        return
    count = sum(1 for _ in source.conversations())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, count, _HELD):
        part = order[start : start + _HELD]
        wanted = set(part)
        found = {i: m for i, m in enumerate(source.conversations()) if i in wanted}
        yield from (found[i] for i in part)


def _first(row: Row, names: Sequence[str]) -> str:
    for name in names:
        value = row.values.get(name)
        if isinstance(value, str) and value.strip():
            return value
    raise ValueError(f"{row.place}: no text in {' or '.join(names)}; the row has {_names(row)}")


def _names(row: Row) -> str:
    return ", ".join(map(repr, row.values))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
