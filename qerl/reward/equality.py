r"""Is an answer the reference answer: the reference's type decides, exactly, with a reason.

The reference is read as one of the types of `kinds` (number, percentage, expression, interval or
union, tuple, set, list, matrix, equation, ratio, numeral with a base, text, choice), and the answer
must be readable as something that can equal that type; what cannot be read is wrong.

==================  ============================================================================
number              exact: 0.5 = 1/2 = 50\%, ``2^{10}`` = 1024, 1/2006! is not 1/2004!, and 0.3333
                    is not 1/3: nothing is rounded. Units and currency: `units`
expression          equal as a function (`numeric`): ``(x+1)^2`` is ``x^2+2x+1``, R is not r
interval, union     the same set of reals: open and closed ends count, order does not;
                    ``x \ge 3`` and ``x \in [3, \infty)`` state intervals
tuple               the same brackets, the same order; ``(1,2)`` is neither ``1,2`` nor ``[1,2]``
list                ``2,-2``, ``-2 or 2``, ``\pm 2``, ``x=2, x=-2``: any order, each as often
set                 any order, repetition does not matter; the braces may be missing
matrix              entry by entry; round and square brackets are one, a determinant is none
equation            the same up to a constant factor; ``x=3`` and 3 are equal in both directions,
                    ``x=3`` and ``y=3`` are not
ratio               3:5, 6:10 and 3/5 are equal
numeral, base       the same digits, and the same base where one is stated
text                the same words, without case and punctuation; "four" is 4
choice              the letter: ``A``, ``(a)``, ``A)``, "A) 15 apples"
==================  ============================================================================

What the grammar does not know (sums, integrals, limits) goes to math-verify (`symbolic`). This
module imports neither torch nor, before it is needed, sympy: worker processes start with it.
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from qerl.reward.clean import clean
from qerl.reward.expression import Node, number
from qerl.reward.intervals import are_same_set
from qerl.reward.kinds import (
    WORDS,
    Answer,
    Based,
    Bracketed,
    Choice,
    FiniteSet,
    Infinity,
    Listing,
    Matrix,
    Named,
    Ratio,
    RealSet,
    Relation,
    Scalar,
    Text,
)
from qerl.reward.numeric import (
    TooLargeError,
    UndefinedError,
    are_equal,
    are_proportional,
    evaluate,
)
from qerl.reward.parse import extract
from qerl.reward.read import as_real_set, as_text, option, read
from qerl.reward.symbolic import (
    DIGITS,
    agree_to_digits,
    math_verify_agrees,
    math_verify_value,
    needs_math_verify,
)

MAX_CHARACTERS = 2000
"""Of an answer. The longest reference of MATH has 186."""

MAX_SHOWN = 1000
"""Characters of an answer that a verdict carries."""


class Outcome(NamedTuple):
    """A verdict without the carrier's type, which a worker process does not load."""

    correct: bool | None
    reason: str
    answer: str | None


class _Gold(NamedTuple):
    text: str
    answer: Answer
    any_words: bool


def judge(completion: str, gold: str) -> Outcome:
    """The verdict on a whole completion."""
    found = extract(completion)
    if found is None:
        return Outcome(False, "no answer", None)
    correct, reason = compare(gold, found.answer)
    return Outcome(correct, reason, shorten(found.answer, MAX_SHOWN))


def compare(gold: str, answer: str) -> tuple[bool | None, str]:
    """Whether `answer` equals `gold`, and why; None where there is no reference to compare with.

    Args:
        gold: The reference as the data set states it, without a box.
        answer: What was found in a completion, without its box.
    """
    if not clean(gold[:MAX_CHARACTERS]):
        return None, "the reference answer is empty"
    if answer.strip() == gold.strip():
        return True, "identical"
    if len(answer) > MAX_CHARACTERS:
        return False, f"an answer of {len(answer)} characters, above {MAX_CHARACTERS}"
    reference = _read_gold(gold)
    text = clean(answer)
    if text == reference.text:
        return True, "identical"
    try:
        correct = bool(text) and _matches(reference, text)
    except TooLargeError as error:
        return False, f"{shorten(answer)}: {error}"
    except RecursionError:
        return False, f"{shorten(answer)}: nested too deeply"
    kind = WORDS[type(reference.answer)]
    sign = "=" if correct else "!="
    return correct, f"{shorten(answer)} {sign} {shorten(gold)} ({kind})"


def shorten(text: str, most: int = 60) -> str:
    """`text` on one line, printable, and cut to about `most` characters."""
    line = "".join(char if char.isprintable() else " " for char in text[: most + 1])
    return line if len(text) <= most else line[: most - 3] + "..."


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> _Gold:
    text = clean(gold)
    answer = read(text, any_words=False)
    return _Gold(text, answer, not _has_symbols(answer))


def _has_symbols(answer: Answer) -> bool:
    if isinstance(answer, Scalar):
        return bool(answer.tree.symbols())
    if isinstance(answer, Named):
        return any(_has_symbols(value) for value in answer.values)
    if isinstance(answer, Bracketed | Listing | FiniteSet):
        return any(_has_symbols(item) for item in answer.items)
    return isinstance(answer, Relation | Text)


def _matches(reference: _Gold, text: str) -> bool:
    gold = reference.answer
    if isinstance(gold, Choice):
        return _matches_choice(gold, text)
    if isinstance(gold, Based):
        return _matches_based(gold, text)
    if _same_words(gold, text):
        return True
    if isinstance(gold, Scalar) and not gold.tree.symbols() and needs_math_verify(text):
        return _matches_constant(gold, text)
    if needs_math_verify(reference.text):
        return math_verify_agrees(reference.text, text)
    return equal(gold, read(text, any_words=reference.any_words))


def _same_words(gold: Answer, text: str) -> bool:
    """Words that are equal, or a small number in words against its figures."""
    words = as_text(text).words
    if isinstance(gold, Scalar):
        return words in _NUMERALS and gold.source == str(_NUMERALS.index(words))
    if not isinstance(gold, Text) or not words:
        return False
    numeral = gold.words in _NUMERALS and words == str(_NUMERALS.index(gold.words))
    return numeral or words == gold.words


def _matches_constant(gold: Scalar, text: str) -> bool:
    """Our value of the reference against math-verify's of an answer beyond the grammar."""
    value = math_verify_value(text)
    try:
        return value is not None and agree_to_digits(evaluate(gold.tree, {}, DIGITS), value)
    except UndefinedError:
        return False


def _matches_choice(gold: Choice, text: str) -> bool:
    letter = option(text)
    # Letters of options may be small; any other capital is a symbol, whose case counts.
    return letter == gold.letter or (gold.letter <= "H" and letter == gold.letter.lower())


def _matches_based(gold: Based, text: str) -> bool:
    answer = read(text, any_words=False)
    if isinstance(answer, Named) and answer.values:
        answer = answer.values[-1]
    if isinstance(answer, Based):
        return answer == gold
    return isinstance(answer, Scalar) and answer.source.replace(" ", "") == gold.digits


def equal(gold: Answer, answer: Answer) -> bool:
    """Whether two typed answers are equal; not symmetric, since `gold` decides what may be missing.

    Raises:
        TooLargeError: a number does not fit the bounds of `numeric`.
    """
    if isinstance(gold, Named):
        return _equal_named(gold, answer)
    if isinstance(answer, Named):
        return all(equal(gold, value) for value in answer.values)
    if isinstance(answer, FiniteSet) and len(answer.items) == 1 and isinstance(gold, Scalar):
        return equal(gold, answer.items[0])
    if isinstance(gold, Scalar | Ratio | Infinity | Based | Choice | Text):
        return _equal_leaf(gold, answer)
    if isinstance(gold, Listing | FiniteSet):
        return _equal_collection(gold, answer)
    if isinstance(gold, Bracketed) and isinstance(answer, Bracketed):
        brackets = (gold.opening, gold.closing) == (answer.opening, answer.closing)
        return brackets and _pairwise(gold.items, answer.items)
    if isinstance(gold, Bracketed | RealSet):
        left, right = as_real_set(gold), as_real_set(answer)
        if left is None or right is None or len({left.name, right.name} - {""}) > 1:
            return False
        return are_same_set(left, right)
    if isinstance(gold, Matrix):
        return isinstance(answer, Matrix) and _equal_matrices(gold, answer)
    return isinstance(answer, Relation) and _equal_relations(gold, answer)


def _equal_named(gold: Named, answer: Answer) -> bool:
    if (
        isinstance(answer, Named)
        and "" not in (gold.name, answer.name)
        and gold.name != answer.name
    ):
        return _equal_relations(gold.relation, answer.relation)
    if isinstance(answer, Relation):
        return _equal_relations(gold.relation, answer)
    stated = answer.values if isinstance(answer, Named) else (answer,)
    return all(any(equal(value, side) for value in gold.values) for side in stated)


def _equal_leaf(gold: Answer, answer: Answer) -> bool:
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _equal_scalars(gold, answer)
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        return _equal_ratios(gold, answer)
    if isinstance(gold, Ratio | Scalar) and isinstance(answer, Ratio | Scalar):
        left, right = _quotient(gold), _quotient(answer)
        return left is not None and right is not None and are_equal(left, right)
    if isinstance(gold, Scalar) and isinstance(answer, Based):
        return gold.source == answer.digits
    return gold == answer


def _equal_scalars(gold: Scalar, answer: Scalar) -> bool:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if are_equal(gold.tree, answer.tree):
        return True
    if gold.unit == answer.unit or "%" not in (gold.unit, answer.unit):
        return False
    part = gold.tree if gold.unit == "%" else answer.tree
    whole = answer.tree if gold.unit == "%" else gold.tree
    return are_equal(Node("mul", (part, _HUNDREDTH)), whole)


def _quotient(answer: Ratio | Scalar) -> Node | None:
    if isinstance(answer, Scalar):
        return None if answer.unit else answer.tree
    if len(answer.parts) != 2 or answer.half:
        return None
    return Node("mul", (answer.parts[0], Node("inv", (answer.parts[1],))))


def _equal_ratios(gold: Ratio, answer: Ratio) -> bool:
    halves = {gold.half, answer.half} - {None}
    if len(gold.parts) != len(answer.parts) or len(halves) > 1:
        return False
    if all(are_equal(a, b) for a, b in zip(gold.parts, answer.parts, strict=True)):
        return True
    return not halves and all(
        are_equal(Node("mul", (gold.parts[0], b)), Node("mul", (answer.parts[0], a)))
        for a, b in zip(gold.parts[1:], answer.parts[1:], strict=True)
    )


def _equal_collection(gold: Listing | FiniteSet, answer: Answer) -> bool:
    if isinstance(answer, Listing | FiniteSet):
        items = answer.items
    elif isinstance(answer, Scalar | Bracketed | RealSet) and len(gold.items) == 1:
        items = (answer,)
    else:
        return False
    wanted = gold.items
    names = {item.name for item in wanted if isinstance(item, Named)}
    if len(names) > 1 and not all(isinstance(item, Named) for item in items):
        return False  # "4, 9" does not say which of AB and CD is which
    if isinstance(gold, FiniteSet) or isinstance(answer, FiniteSet):
        wanted, items = _distinct(wanted), _distinct(items)
    return _is_permutation(wanted, items)


def _distinct(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    kept: list[Answer] = []
    for item in items:
        if not any(equal(other, item) for other in kept):
            kept.append(item)
    return tuple(kept)


def _is_permutation(wanted: tuple[Answer, ...], items: tuple[Answer, ...]) -> bool:
    if len(wanted) != len(items):
        return False
    left = list(items)
    for item in wanted:
        match = next((i for i, other in enumerate(left) if equal(item, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _pairwise(golds: tuple[Answer, ...], answers: tuple[Answer, ...]) -> bool:
    return len(golds) == len(answers) and all(
        equal(gold, answer) for gold, answer in zip(golds, answers, strict=True)
    )


def _equal_matrices(gold: Matrix, answer: Matrix) -> bool:
    return len(gold.rows) == len(answer.rows) and all(
        len(a) == len(b) and all(are_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(gold.rows, answer.rows, strict=True)
    )


def _equal_relations(gold: Relation | None, answer: Relation | None) -> bool:
    if gold is None or answer is None or gold.sign != answer.sign:
        return False
    directed = gold.sign.startswith(">")
    return are_proportional(gold.difference, answer.difference, positive=directed)


_HUNDREDTH = number(Fraction(1, 100))
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
_NUMERALS = _NUMBER_WORDS.split()
