"""The order of prompts: each once per epoch, none lost at borders, ranks, kills or changes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.data.problems import Problem
from qerl.data.prompt import PromptBuilder
from qerl.data.prompt_set import PromptSet
from qerl.model.toy import build_tokenizer
from qerl.types import Prompts

TOKENIZER = build_tokenizer()
PLAIN = PromptBuilder(form="plain")


def make_set(size: int, seed: int = 0, limit: int | None = None) -> PromptSet:
    problems = [Problem(id=f"p/{n}", question=f"{n}=", gold=str(n)) for n in range(size)]
    return PromptSet(problems, PLAIN, TOKENIZER, max_prompt_tokens=limit, seed=seed)


def bare(ids: tuple[str, ...]) -> list[str]:
    return [name.partition("+")[0] for name in ids]


def consume(prompts: PromptSet, sizes: list[int], start: int = 0) -> list[str]:
    """Bare ids of consecutive batches."""
    seen: list[str] = []
    for n in sizes:
        seen += bare(prompts.batch(start, n).ids)
        start += n
    return seen


@given(size=st.integers(1, 40), seed=st.integers(0, 9), sizes=st.lists(st.integers(1, 50)))
def test_each_prompt_comes_once_per_epoch_whatever_the_batches(
    size: int, seed: int, sizes: list[int]
) -> None:
    seen = consume(make_set(size, seed), sizes)
    everything = {f"p/{n}" for n in range(size)}
    for start in range(0, len(seen) - size + 1, size):
        assert set(seen[start : start + size]) == everything
    tail = seen[len(seen) - len(seen) % size :]
    assert len(set(tail)) == len(tail)


@given(
    size=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 20), min_size=1),
    kill=st.integers(0, 100),
)
def test_run_killed_anywhere_meets_the_same_prompts(size: int, sizes: list[int], kill: int) -> None:
    straight = consume(make_set(size), sizes)
    step = kill % len(sizes)
    first, then = sizes[:step], sizes[step:]
    resumed = consume(make_set(size), first) + consume(make_set(size), then, sum(first))
    assert resumed == straight


@given(size=st.integers(1, 30), cursor=st.integers(0, 100), world=st.integers(1, 4))
def test_ranks_share_the_global_batch_without_gap_or_repeat(
    size: int, cursor: int, world: int
) -> None:
    prompts = make_set(size)
    whole = prompts.batch(cursor, 4 * world)
    shares = [prompts.batch(cursor, 4 * world, rank=r, world=world) for r in range(world)]
    for rank, share in enumerate(shares):
        rows = list(range(rank, 4 * world, world))
        assert share.ids == tuple(whole.ids[row] for row in rows)
        assert share.tokens == tuple(whole.tokens[row] for row in rows)
        assert share.golds == tuple(whole.golds[row] for row in rows)
    assert Counter(name for share in shares for name in share.ids) == Counter(whole.ids)


@given(size=st.integers(1, 12), cursor=st.integers(0, 50), n=st.integers(1, 40))
def test_ids_differ_within_a_batch(size: int, cursor: int, n: int) -> None:
    assert len(set(make_set(size).batch(cursor, n).ids)) == n


def test_fields_of_a_prompt_stay_together() -> None:
    batch = make_set(20).batch(15, 10)
    for row, name in enumerate(bare(batch.ids)):
        number = name.removeprefix("p/")
        assert batch.golds[row] == number
        assert batch.questions[row] == f"{number}="
        assert TOKENIZER.decode(batch.tokens[row]) == f"{number}="


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    prompts = make_set(50, seed=0)
    first, second = prompts.batch(0, 50).ids, prompts.batch(50, 50).ids
    assert first != second
    assert first != make_set(50, seed=1).batch(0, 50).ids
    assert list(first) != [f"p/{n}" for n in range(50)]
    assert first == make_set(50, seed=0).batch(0, 50).ids


def test_order_is_the_same_on_every_machine() -> None:
    order = ("p/0", "p/3", "p/2", "p/4", "p/5", "p/1")
    assert make_set(6, seed=3).batch(0, 6).ids == order


def test_dropped_prompt_does_not_move_the_others() -> None:
    whole = make_set(30).batch(0, 30).ids
    fewer = make_set(30, limit=2).batch(0, 10).ids  # one-digit questions only
    assert fewer == tuple(name for name in whole if len(name) == len("p/0"))


def test_overlong_prompts_are_left_out_never_cut() -> None:
    prompts = make_set(12, limit=2)
    assert prompts.overlong == ("p/10", "p/11")
    assert len(prompts) == 10
    assert all(len(tokens) == 2 for tokens in prompts.all().tokens)


def test_all_keeps_the_order_of_the_source() -> None:
    everything = make_set(12).all()
    assert isinstance(everything, Prompts)
    assert everything.ids == tuple(f"p/{n}" for n in range(12))


def test_set_without_a_prompt_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_prompt_tokens=1: no prompt of 3 .* has 2 tokens"):
        make_set(3, limit=1)


def test_ids_that_repeat_are_refused() -> None:
    twice = [Problem(id="same", question=f"{n}=", gold="1") for n in range(2)]
    with pytest.raises(ValueError, match="'same'"):
        PromptSet(twice, PLAIN, TOKENIZER, max_prompt_tokens=None, seed=0)


@pytest.mark.parametrize(("rank", "world", "n"), [(0, 4, 6), (4, 4, 8), (-1, 4, 8)])
def test_uneven_ranks_are_refused(rank: int, world: int, n: int) -> None:
    with pytest.raises(ValueError, match="every rank takes the same number"):
        make_set(10).batch(0, n, rank=rank, world=world)


@pytest.mark.parametrize(("cursor", "n"), [(-1, 4), (0, 0)])
def test_cursor_and_size_out_of_range_are_refused(cursor: int, n: int) -> None:
    with pytest.raises(ValueError, match="cursor from 0"):
        make_set(10).batch(cursor, n)


def test_epoch_counts_passes() -> None:
    assert make_set(10).epoch(25) == 2.5
