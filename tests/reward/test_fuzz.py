"""Any text gets a verdict, and none an exception."""

from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.reward.clean import clean
from qerl.reward.equality import compare, judge
from qerl.reward.parse import extract

GOLDS = st.sampled_from(
    [
        *("42", r"\frac12", "x+1", "(1,2)", "[0,3)", r"(-\infty,3)\cup(3,\infty)", "2,-2"),
        *(r"\{1,2\}", "x=3", "y=2x+1", r"\begin{pmatrix}1\\2\end{pmatrix}", "A", r"\text{Friday}"),
        *("3:5", "1011_2", r"50\%", r"\$5", r"s^2\le 8r^2", "x>3", r"\infty", r"8:34 \text{ p.m.}"),
    ]
)
_WORDS = (
    r"\frac \sqrt { } ( ) [ ] 1 2 42 x ^ _ ! + - * / = < \le \pm \cup \infty \text{ , ; : % "
    r"\degree \begin{pmatrix} \end{pmatrix} & \\ | \{ \} \pi e i \sin \log . ' \left \mathbb{R} "
    r"\setminus \in \approx million $ \$ \ ~ \overline{3} 0. \binom and or cm #### Answer: "
    r"<answer> </answer> \boxed{ </think>"
)
WORDS = (*_WORDS.split(" "), "\x00", "\u202e", "\n", " ", "\ud800")
SOUP = st.lists(st.sampled_from(WORDS), max_size=40).map("".join)
ANY = st.text(max_size=200) | SOUP


@given(ANY, GOLDS)
@settings(max_examples=400, deadline=None)
def test_any_answer_gets_a_verdict(answer: str, gold: str) -> None:
    correct, reason = compare(gold, answer)
    assert correct in (True, False)
    assert reason


@given(ANY, ANY)
@settings(max_examples=200, deadline=None)
def test_any_reference_gets_a_verdict(answer: str, gold: str) -> None:
    correct, reason = compare(gold, answer)
    assert reason
    assert correct is None or isinstance(correct, bool)


@given(ANY, GOLDS)
@settings(max_examples=200, deadline=None)
def test_any_completion_gets_a_verdict_and_credit_only_with_an_answer(text: str, gold: str) -> None:
    verdict = judge(text, gold)
    if extract(text) is None:
        assert verdict == (False, "no answer", None)


@given(ANY)
@settings(max_examples=300, deadline=None)
def test_cleaning_twice_changes_nothing_that_cleaning_once_left(text: str) -> None:
    once = clean(text)
    assert "\x00" not in once
    assert once == once.strip()


@given(SOUP)
@settings(max_examples=200, deadline=None)
def test_an_answer_equals_itself(text: str) -> None:
    if clean(text):
        assert compare(text, text)[0] is True
