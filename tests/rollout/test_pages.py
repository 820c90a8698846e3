from types import SimpleNamespace

import pytest
import torch

from qerl.rollout.pages import PagePool, page_bytes

SPEC = SimpleNamespace(layers=2, kv_heads=3, head_dim=8)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(SPEC, pages=5, page_size=4, dtype=torch.float32, device=torch.device("cpu"))


def test_the_arena_has_the_bytes_that_are_planned_for_it(pool):
    assert pool.nbytes == 6 * page_bytes(SPEC, 4, torch.float32)


def test_taken_pages_are_distinct_and_never_the_one_that_pads(pool):
    taken = pool.take(3) + pool.take(2)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert pool.free == 0


def test_a_page_comes_back_with_its_last_holder(pool):
    (page,) = pool.take(1, holders=3)
    pool.drop([page])
    pool.drop([page])
    assert (pool.used, pool.holders(page)) == (1, 1)
    pool.drop([page])
    assert (pool.used, pool.free) == (0, 5)


def test_dropping_a_free_page_or_taking_too_many_is_refused(pool):
    (page,) = pool.take(1)
    pool.drop([page])
    with pytest.raises(AssertionError):
        pool.drop([page])
    with pytest.raises(AssertionError):
        pool.take(6)


def test_peak_counts_pages_held_at_once(pool):
    pool.drop(pool.take(3))
    pool.take(2)
    assert (pool.peak, pool.used) == (3, 2)


def test_reset_frees_everything(pool):
    pool.take(4, holders=2)
    pool.reset()
    assert (pool.used, pool.free, pool.peak) == (0, 5, 0)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]


def test_both_views_of_a_layer_are_the_arena_itself(pool):
    keys, values = pool.layer_slots(1)
    keys[2, 3 * 4 + 1] = 7.0  # head 2, page 3, offset 1
    values[0, 5] = 8.0
    page_keys, page_values = pool.layer_pages(1)
    assert pool.keys[1, 2, 3, 1].eq(7).all()
    assert page_keys[2 * 6 + 3].view(4, 8)[1].eq(7).all()
    assert page_values[1].view(4, 8)[1].eq(8).all()
    assert pool.keys[0].eq(0).all()
