from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl.rollout.pages import PagePool
from qerl.rollout.scheduler import Scheduler

SPEC = SimpleNamespace(layers=1, kv_heads=1, head_dim=1)


def _pool(pages: int, page_size: int) -> PagePool:
    return PagePool(
        SPEC, pages=pages, page_size=page_size, dtype=torch.float32, device=torch.device("cpu")
    )


def _pages_of_tree(prompts: list[tuple[int, ...]], size: int) -> int:
    """Distinct (prefix up to the end of a page) of all prompts."""
    return len({p[: min(end + size, len(p))] for p in prompts for end in range(0, len(p), size)})


# Two letters and up to nine tokens: most prompts share a beginning, many are equal.
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1)


@given(
    prompts=PROMPTS,
    group_size=st.integers(1, 3),
    size=st.integers(1, 4),
    own_pages=st.integers(0, 3),
    rows=st.integers(1, 5),
    spare=st.integers(0, 8),
    data=st.data(),
)
def test_every_call_that_fits_one_sequence_runs_to_its_end(
    prompts, group_size, size, own_pages, rows, spare, data
):
    smallest = max(-(-len(p) // size) for p in prompts) + own_pages
    pool = _pool(smallest + spare, size)
    scheduler = Scheduler(prompts, group_size, pool=pool, max_sequences=rows, own_pages=own_pages)
    finished, computed, prefilled = [], set(), 0
    while scheduler.unfinished:
        _, prefills = scheduler.admit()
        for prefill in prefills:
            tokens, table = prefill.prompt.tokens, prefill.prompt.pages()
            assert prefill.start % size == 0
            assert len(table) == -(-len(tokens) // size)
            assert all(tokens[:end] in computed for end in range(size, prefill.start + 1, size))
            for end in range(prefill.start, len(tokens), size):
                prefix = tokens[: end + size]
                assert prefix not in computed, "computed twice"
                computed.add(prefix)
            prefilled += -(-(len(tokens) - prefill.start) // size)
        assert len(scheduler.running) <= rows
        held = [page for s in scheduler.running for page in s.pages]
        assert len(set(held)) == len(held) == own_pages * len(scheduler.running)
        shared = {page for s in scheduler.running for page in s.prompt.pages()}
        assert not shared & set(held)
        assert all(pool.holders(page) > 0 for page in shared | set(held))
        for sequence in data.draw(st.permutations(scheduler.running)):
            if data.draw(st.booleans()) or sequence is scheduler.running[-1]:
                scheduler.finish(sequence)
                finished.append((sequence.row, sequence.prompt.tokens))
    rows_of = [(row, prompts[row // group_size]) for row in range(len(prompts) * group_size)]
    assert sorted(finished) == rows_of
    assert prefilled == _pages_of_tree(prompts, size)
    assert pool.used == 0


def test_running_rows_of_a_prompt_are_neighbours():
    prompts = [(1, 2, 3), (1, 1), (1, 2, 3), (5,), (1, 1)]
    scheduler = Scheduler(prompts, 2, pool=_pool(50, 2), max_sequences=64, own_pages=1)
    admitted, _ = scheduler.admit()
    order = [s.prompt.tokens for s in admitted]
    assert order == sorted(order)


def test_equal_prompts_share_all_pages_and_similar_ones_their_full_pages():
    prompts = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2, 3, 9), (1, 2)]
    pool = _pool(50, 2)
    scheduler = Scheduler(prompts, 4, pool=pool, max_sequences=64, own_pages=0)
    _, prefills = scheduler.admit()
    assert [(p.prompt.tokens, p.start) for p in prefills] == [
        ((1, 2), 0),
        ((1, 2, 3, 4, 5), 2),
        ((1, 2, 3, 9), 2),
    ]
    assert pool.used == 4  # (1 2), (3 4), (5), (3 9)


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="3 prompt pages and 2 of its own, the pool has 4 of 2"):
        Scheduler([(1,) * 5], 1, pool=_pool(4, 2), max_sequences=1, own_pages=2)
