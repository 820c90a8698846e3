"""The grammar of closed forms, and exact equality of what it reads."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.reward.clean import clean
from qerl.reward.expression import MAX_DEPTH, UnreadableError, parse
from qerl.reward.numeric import TooLargeError, UndefinedError, are_equal, evaluate, symbol_values


def value(text: str) -> object:
    return evaluate(parse(clean(text)), {}, 30)


def equal(left: str, right: str) -> bool:
    return are_equal(parse(clean(left)), parse(clean(right)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"3\frac{3}{2}", Fraction(9, 2)),  # improper: a product
        ("3 1/2", Fraction(7, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{29}4", Fraction(29, 4)),
        (r"\frac 92", Fraction(9, 2)),
        ("-2^2", Fraction(-4)),
        ("2^-2", Fraction(1, 4)),
        ("2^3^2", Fraction(64)),
        ("6/2/3", Fraction(1)),
        ("1/2(3)", Fraction(3, 2)),
        ("2(3)", Fraction(6)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("1.5e-3", Fraction(3, 2000)),
        ("3!!", Fraction(720)),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        (r"|{-3}|", Fraction(3)),
    ],
)
def test_readings_are_exact(text: str, expected: Fraction) -> None:
    assert value(text) == expected
    assert isinstance(value(text), Fraction)


@pytest.mark.parametrize(
    "text", ["", "5 6", "x2", "(1", "1)", r"\frac{1}", "1..2", r"\foo", "1+", "|1", "a=b"]
)
def test_what_is_no_expression_is_unreadable(text: str) -> None:
    with pytest.raises(UnreadableError):
        parse(text)


def test_nesting_beyond_the_limit_is_unreadable_and_no_crash() -> None:
    assert parse("(" * (MAX_DEPTH - 1) + "1" + ")" * (MAX_DEPTH - 1))
    for opening, closing in (
        ("(", ")"),
        (r"\sqrt{", "}"),
        ("2^{", "}"),
        (r"\frac{1}{", "}"),
        (r"\sin", ""),
    ):
        with pytest.raises(UnreadableError):
            parse(opening * 450 + "1" + closing * 450)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "10^{10^{10}}",
        "(9!)!",
        "10000!",
        "e^{e^{e^{10}}}",
        r"\sin(10^{1000})",
        r"\pi^{10^9}",
    ],
)
def test_numbers_beyond_the_bounds_are_never_computed(text: str) -> None:
    with pytest.raises(TooLargeError):
        value(text)


@pytest.mark.parametrize("text", ["1/0", "0^{-1}", r"\ln 0", r"(\frac12)!", r"\log_1 5", "(-1)!"])
def test_what_has_no_value_says_so(text: str) -> None:
    with pytest.raises(UndefinedError):
        value(text)


def test_unequal_numbers_however_close_are_unequal() -> None:
    assert not equal(r"\frac{1}{2006!}", r"\frac{1}{2004!}")
    assert not equal(r"\frac{\sqrt2}{2006!}", r"\frac{\sqrt2}{2004!}")
    assert not equal(r"\sqrt2", r"\sqrt2+10^{-150}")
    assert not equal("0", r"\frac{\sqrt2}{2004!}")
    assert not equal("10^{300}", "10^{300}+1")


def test_equal_numbers_are_equal_however_they_cancel() -> None:
    assert equal("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt6}")
    assert equal("0", r"\sqrt{7+4\sqrt3}-2-\sqrt3")
    assert equal(r"\ln 6-\ln 2-\ln 3", "0")
    assert equal(r"10^{-200}\sqrt2", r"\frac{2}{10^{200}\sqrt2}")
    assert equal("-1", r"e^{i\pi}")


def test_functions_are_equal_only_if_they_are_so_for_every_sign() -> None:
    assert equal(r"\sqrt{x^2}", "|x|")
    assert not equal("|x|", "x")
    assert not equal("|xy|", "xy")
    assert not equal("|xyz|", "xyz")


def test_a_root_of_a_symbol_is_compared_where_it_is_real() -> None:
    assert equal(r"42x\sqrt{5x}", r"42\sqrt{5x^3}")


def test_every_pair_of_symbols_takes_opposite_signs_somewhere() -> None:
    names = frozenset("abcdefgh")
    points = [symbol_values(names, index) for index in range(8)]
    for left in names:
        for right in names - {left}:
            assert any(point[left] * point[right] < 0 for point in points), (left, right)


def render(number: Fraction) -> list[str]:
    sign, size = ("-" if number < 0 else ""), abs(number)
    over, under = size.numerator, size.denominator
    forms = [
        f"{sign}{over}/{under}",
        rf"{sign}\frac{{{over}}}{{{under}}}",
        rf"\dfrac{{{sign}{over}}}{{{under}}}",
        rf"{sign}{3 * over}/{3 * under}",
        rf"{sign}\frac{{{over}}}{{{under}}} \text{{ cm}}",
    ]
    whole, rest = divmod(over, under)
    if whole and rest:
        forms.append(rf"{sign}{whole}\frac{{{rest}}}{{{under}}}")
        forms.append(f"{sign}{whole} {rest}/{under}")
    if under in (1, 2, 4, 5, 8, 10, 20):
        forms.append(f"{sign}{over / under:.6f}" if over < 10**9 else f"{sign}{over}/{under}")
    return forms


@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=40))
@settings(max_examples=150, deadline=None)
def test_every_spelling_of_a_rational_is_that_rational(number: Fraction) -> None:
    from qerl.reward.equality import compare

    gold = f"{number.numerator}/{number.denominator}" if number.denominator > 1 else str(number)
    for form in render(number):
        assert compare(gold, form)[0], form
    for form in render(number + 1):
        assert not compare(gold, form)[0], form


LEAVES = st.sampled_from(["x", "y", "2", "3", "0.5", r"\pi", r"\sqrt{2}"])
TERMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: (f"({p[0]}+{p[1]})", f"({p[1]}+{p[0]})")[0]),
        st.tuples(inner, inner).map(lambda p: rf"({p[0]})\cdot({p[1]})"),
        inner.map(lambda p: f"({p})^2"),
        inner.map(lambda p: rf"\frac{{{p}}}{{3}}"),
    ),
    max_leaves=6,
)


@given(TERMS, TERMS)
@settings(max_examples=100, deadline=None)
def test_algebra_keeps_equality_and_adding_one_breaks_it(left: str, right: str) -> None:
    assert equal(f"({left}+{right})^2", f"({left})^2+2({left})({right})+({right})^2")
    assert equal(rf"{left} - ({right})", rf"-({right}) + {left}")
    assert not equal(f"{left}+{right}", f"{right}+{left}+1")
