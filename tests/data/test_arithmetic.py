"""Generated arithmetic: distinct, reproducible, and apart from what is held out."""

import pytest

from qerl.data.arithmetic import Arithmetic

HELD_OUT = Arithmetic(size=64, seed=7, split="held_out")


def operands(expression: str) -> tuple[str, ...]:
    return tuple(sorted(f"+ {expression}".replace("+ ", "+").replace("- ", "-").split()))


def test_same_fields_give_the_same_problems() -> None:
    assert HELD_OUT.load() == Arithmetic(size=64, seed=7, split="held_out").load()
    assert HELD_OUT.load().problems != Arithmetic(size=64, seed=8).load().problems


def test_questions_are_distinct_and_right() -> None:
    problems = Arithmetic(size=300, seed=1).load().problems
    assert len({p.question for p in problems}) == 300
    assert len({p.id for p in problems}) == 300
    for problem in problems:
        assert eval(problem.meta["expression"]) == int(problem.gold)
        assert problem.question.endswith(f"{problem.meta['expression']} =")


def test_training_shares_no_operands_with_the_held_out_set() -> None:
    held_out = HELD_OUT.load().problems
    train = Arithmetic(size=512, seed=8, apart_from=HELD_OUT).load().problems
    assert {p.question for p in held_out}.isdisjoint(p.question for p in train)
    seen = {operands(p.meta["expression"]) for p in held_out}
    assert seen.isdisjoint(operands(p.meta["expression"]) for p in train)


def test_seeds_alone_do_not_separate_sets() -> None:
    held_out = {p.question for p in HELD_OUT.load().problems}
    train = {p.question for p in Arithmetic(size=512, seed=8).load().problems}
    assert held_out & train, "apart_from would have nothing to do"


def test_factors_in_another_order_are_the_same_problem() -> None:
    held_out = Arithmetic(size=16, seed=7, task="products", max_digits=1)
    train = Arithmetic(size=64, seed=123, task="products", max_digits=1, apart_from=held_out)
    factors = {tuple(sorted(p.meta["expression"].split(" * "))) for p in held_out.load().problems}
    assert factors.isdisjoint(
        tuple(sorted(p.meta["expression"].split(" * "))) for p in train.load().problems
    )


def test_sum_is_its_reverse_but_a_difference_is_not() -> None:
    held_out = Arithmetic(size=60, seed=7, max_digits=1)
    train = Arithmetic(size=90, seed=10**6, max_digits=1, apart_from=held_out)
    held = {p.meta["expression"] for p in held_out.load().problems}
    trained = {p.meta["expression"] for p in train.load().problems}
    reverse = {" ".join(reversed(expression.split())) for expression in held}
    assert not {expression for expression in reverse if "+" in expression} & trained
    assert {expression for expression in reverse if "-" in expression} & trained


def test_too_large_a_set_says_how_many_problems_exist() -> None:
    with pytest.raises(ValueError, match=r"size=101: products .* has only 100 distinct problems"):
        Arithmetic(size=101, seed=0, task="products", max_digits=1).load()


def test_basic_arithmetic_is_drawn_too() -> None:
    held_out = Arithmetic(size=20, seed=0, task="basic_arithmetic", split="held_out")
    train = Arithmetic(size=50, seed=3, task="basic_arithmetic", apart_from=held_out)
    questions = {p.question for p in held_out.load().problems}
    assert questions.isdisjoint(p.question for p in train.load().problems)


def test_expressions_shown_as_shots_are_not_drawn() -> None:
    source = Arithmetic(size=98, seed=0, task="products", max_digits=1, shown=["7 * 5"])
    drawn = {p.meta["expression"] for p in source.load().problems}
    assert {f"{a} * {b}" for a in range(10) for b in range(10)} - drawn == {"7 * 5", "5 * 7"}
