r"""Parts of a reward: what each says of every completion, unweighted, None where it abstains."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from qerl.reward.parse import extract
from qerl.types import Verdict

_THINK_THEN_ANSWER = re.compile(r"</think>\s*<answer>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What a component may look at, one entry a completion, prompt-major. [B]."""

    texts: Sequence[str]
    """Decoded with special tokens, without the end-of-sequence token."""

    golds: Sequence[str]

    lengths: Sequence[int]
    """Tokens of the completion alone, its end-of-sequence token included."""

    verdicts: Sequence[Verdict]


class Component(Protocol):
    """One part of a reward."""

    @property
    def name(self) -> str:
        """Key in logs and in `Scored.components`; unique within a reward."""

    @property
    def weight(self) -> float:
        """What its values are multiplied by in the sum; 0 only logs it."""

    def __call__(self, completions: Completions) -> list[float | None]:
        """A value for each completion, None where it abstains. [B]."""


@dataclass(frozen=True, kw_only=True)
class Correctness:
    """1 where the verdict is correct, 0 where it is wrong; abstains with the verifier."""

    weight: float = 1.0

    name: str = "correct"

    def __call__(self, completions: Completions) -> list[float | None]:
        return [None if v.correct is None else float(v.correct) for v in completions.verdicts]


@dataclass(frozen=True, kw_only=True)
class Format:
    r"""1 where a completion has the form that the prompt asks for, else 0.

    ================  ==========================================================================
    ``boxed``         the answer that counts stands in a complete, non-empty ``\boxed{}`` after
                      the thinking
    ``think_soft``    somewhere a think block, white space, an answer block: the released code's
                      soft format (NVlabs/QeRL@e8c6e79 utils/rewards.py)
    ``think_strict``  the whole completion is a think block and an answer block, each tag once,
                      on lines of their own
    ================  ==========================================================================
    """

    weight: float = 0.1
    """Small against a correct answer: a wrong one in the right form must stay below a right one
    in the wrong form, while a group that solves nothing still learns the form."""

    kind: Literal["boxed", "think_soft", "think_strict"] = "boxed"

    think_opened: bool = False
    """Whether the prompt ends with ``<think>``, so that completions start inside the block."""

    name: str = "format"

    def __post_init__(self) -> None:
        if self.kind not in ("boxed", "think_soft", "think_strict"):
            raise ValueError(f"kind={self.kind!r}: one of boxed, think_soft, think_strict")

    def __call__(self, completions: Completions) -> list[float | None]:
        return [float(self._holds(text)) for text in completions.texts]

    def _holds(self, text: str) -> bool:
        if self.kind == "boxed":
            found = extract(text)
            return found is not None and found.form == "box"
        if self.think_opened:
            text = "<think>\n" + text.lstrip("\n")
        return _has_blocks(text) if self.kind == "think_soft" else _is_two_blocks(text)


@dataclass(frozen=True, kw_only=True)
class TagEquality:
    """1 where the text between the last ``<answer>`` and the next ``</answer>`` is the reference.

    Compared as strings, stripped; a completion without the tags is compared whole. It is what the
    released code pays for (NVlabs/QeRL@e8c6e79 utils/rewards.py), for runs that reproduce it:
    ``5.0`` is not 5 and ``1,000`` is not 1000.
    """

    weight: float = 2.0

    name: str = "tag_equality"

    def __call__(self, completions: Completions) -> list[float | None]:
        pairs = zip(completions.texts, completions.golds, strict=True)
        return [float(_tagged(text) == gold) for text, gold in pairs]


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """Soft punishment of length: 0 up to a point, then linear down to -1.

    With n tokens, L = `max_new_tokens` and c = `cache`::

        0                  n <= L - c
        (L - c - n) / c    L - c < n <= L
        -1                 n > L

    Source: DAPO (arXiv:2503.14476), Eq. 13. Length counts the completion's tokens alone.
    """

    max_new_tokens: int
    """L: the length cap of a completion, in tokens."""

    cache: int
    """c: the last tokens before the cap, over which the punishment grows."""

    weight: float = 1.0

    name: str = "overlong"

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_new_tokens:
            raise ValueError(
                f"cache={self.cache}: above 0 and at most max_new_tokens={self.max_new_tokens}"
            )

    def __call__(self, completions: Completions) -> list[float | None]:
        free = self.max_new_tokens - self.cache
        return [max(-1.0, min(0.0, (free - n) / self.cache)) for n in completions.lengths]


def _has_blocks(text: str) -> bool:
    """``<think>...</think>`` white space ``<answer>...</answer>`` anywhere, in linear time."""
    opened, closed = text.find("<think>"), text.rfind("</answer>")
    return opened >= 0 and any(
        match.start() >= opened + len("<think>") and match.end() <= closed
        for match in _THINK_THEN_ANSWER.finditer(text)
    )


def _is_two_blocks(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    body = text.strip("\n")
    middle = body.find("\n</think>\n<answer>\n")
    return (
        body.startswith("<think>\n")
        and body.endswith("\n</answer>")
        and body[len("<think>\n") : middle].strip() != ""
        and body[middle + len("\n</think>\n<answer>\n") : -len("\n</answer>")].strip() != ""
        and middle > 0
    )


def _tagged(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()
