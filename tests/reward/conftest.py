"""A pool that the room's tests share, and answers made to hurt a verifier."""

import random
from collections.abc import Callable, Iterator

import pytest

from qerl.reward.pool import VerifierPool

_TOKENS = (
    r"\frac \sqrt \boxed { } ( ) [ ] 1 2 42 x ^ _ ! + - * / = < \le \pm \cup \infty \text{ , ; : "
    r"% \degree \begin{pmatrix} \end{pmatrix} & \\ | \{ \} \pi e i \sin \log . ' \left \right "
    r"\mathbb{R} \setminus \in \approx million $ \$ \ ~ \overline{3} 0. \binom and or cm # "
    r"<answer> </answer> </think>"
)
TOKENS = tuple(_TOKENS.split(" "))
ODD = ("\x00", "\u202e", "\u200f", "\u200b", "\ud800", "\u00bd", "\u0664", "\n", " ")
SLOW = (
    r"\int_0^1 x^{x^{x^x}} dx",
    r"\int_0^\pi \sin(\sin(\sin(x^x))) dx",
    r"\lim_{x\to\infty} \frac{x^{x^x}}{\sin(x)^{x}}",
)


def _tower(rng: random.Random) -> str:
    base = rng.choice(["9", "10", "2", "e", "x", r"\pi", "(-3)", "0.5"])
    height = rng.randrange(3, 40)
    return "^{".join([base] * height) + "}" * (height - 1)


def _factorials(rng: random.Random) -> str:
    return "(" * 9 + str(rng.randrange(3, 10**6)) + "!)" * 9 + "!" * rng.randrange(5)


def _nested(rng: random.Random) -> str:
    opening, closing = rng.choice(
        [
            ("{", "}"),
            ("(", ")"),
            (r"\sqrt{", "}"),
            (r"\boxed{", "}"),
            (r"\frac{1}{", "}"),
            ("|", "|"),
        ]
    )
    return opening * 10_000 + "42" + closing * rng.choice([10_000, 9_999])


def _long(rng: random.Random) -> str:
    return rng.choice(
        ["9", "x", " ", "{", r"\boxed{", "#### 1\n", "1+", "-", "1,000,", r"\pm", "\\"]
    ) * (100_000 // rng.choice([1, 2, 8]))


def _soup(rng: random.Random) -> str:
    words = rng.choices(TOKENS + ODD, k=rng.choice([3, 10, 60]))
    return rng.choice(["", " "]).join(words)


@pytest.fixture(scope="session")
def hostile() -> Callable[[int], list[str]]:
    """Completions that attack a verifier; every fiftieth is one that only the budget ends."""

    def make(count: int) -> list[str]:
        rng = random.Random(count)
        kinds = (_tower, _factorials, _nested, _long, _soup, _soup)
        answers = [kinds[row % len(kinds)](rng) for row in range(count)]
        answers[::50] = [rng.choice(SLOW) for _ in answers[::50]]
        return [
            rf"So the answer is $\boxed{{{answer}}}$." if rng.random() < 0.9 else answer
            for answer in answers
        ]

    return make


@pytest.fixture(scope="session")
def pool() -> Iterator[VerifierPool]:
    """Two workers, for every test that does not measure a pool of its own."""
    with VerifierPool(workers=2) as shared:
        yield shared
