"""Both attentions against softmax over gathered keys, one sequence at a time, in fp64."""

from types import SimpleNamespace

import pytest
import torch

from qerl.rollout.attend import DecodeAttend, Groups, PrefillAttend
from qerl.rollout.pages import PagePool
from qerl.rollout.scheduler import Scheduler

H, HK, DH = 6, 2, 8
SPEC = SimpleNamespace(layers=3, kv_heads=HK, head_dim=DH)
LAYER = 1
PROMPTS = [(1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 9), (8,), (1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7)]


def _reference(q, k, v):
    """Attention of the last len(q) tokens of a sequence, causal. [n, H, Dh]"""
    n, total = len(q), len(k)
    k, v = (x.double().repeat_interleave(H // HK, 1) for x in (k, v))  # [total, H, Dh]
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) / DH**0.5
    hidden = torch.arange(total) > torch.arange(total - n, total)[:, None]
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class _Keys:
    """Keys and values that depend on a token and what precedes it, as a model's do."""

    def __init__(self):
        self._known = {}

    def of(self, tokens):
        rows = []
        for end in range(1, len(tokens) + 1):
            if tokens[:end] not in self._known:
                self._known[tokens[:end]] = torch.randn(2, HK, DH)
            rows.append(self._known[tokens[:end]])
        return torch.stack(rows, 1)  # [2, n, Hk, Dh]


@pytest.fixture
def keys():
    return _Keys()


def _prefilled(keys, page_size, group_size=3):
    pool = PagePool(
        SPEC, pages=99, page_size=page_size, dtype=torch.float32, device=torch.device("cpu")
    )
    scheduler = Scheduler(PROMPTS, group_size, pool=pool, max_sequences=64, own_pages=7)
    running, prefills = scheduler.admit()
    k, v = torch.cat([keys.of(p.prompt.tokens)[:, p.start :] for p in prefills], 1)
    q = torch.randn(len(k), H, DH)
    out = PrefillAttend(pool, prefills)(LAYER, q, k, v)
    return pool, scheduler, running, prefills, q, out


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_prefill_sees_the_whole_prompt_whatever_part_of_it_is_shared(keys, page_size):
    _, _, _, prefills, q, out = _prefilled(keys, page_size)
    end = 0
    for prefill in prefills:
        tokens = prefill.prompt.tokens
        rows = slice(end, end + len(tokens) - prefill.start)
        end = rows.stop
        expected = _reference(q[rows], *keys.of(tokens))
        torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=0)
    assert end == len(q)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("gone", [(), (0, 4), (3, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)])
def test_decode_sees_the_prompt_and_its_own_tokens_as_rows_leave(keys, page_size, gone):
    pool, scheduler, running, *_ = _prefilled(keys, page_size)
    for place in gone:
        scheduler.finish(running[place])
    left = scheduler.running
    groups = Groups.of(left, torch.device("cpu"))
    texts = [s.prompt.tokens for s in left]
    # Rows are at different lengths: row i skips the steps before i % 3.
    lengths = torch.zeros(len(left), dtype=torch.int64)
    for step in range(7):
        moving = [i for i in range(len(left)) if step >= i % 3]
        if len(moving) < len(left):
            part = Groups.of([left[i] for i in moving], torch.device("cpu"))
        else:
            part = groups
        texts = [(*t, 100 * i + step) if i in moving else t for i, t in enumerate(texts)]
        lengths[moving] += 1
        k, v = torch.stack([keys.of(texts[i])[:, -1] for i in moving], 1)
        q = torch.randn(len(moving), H, DH)
        attend = DecodeAttend(pool, part, lengths[moving], int(lengths[moving].max()))
        out = attend(LAYER, q, k, v)
        for place, i in enumerate(moving):
            expected = _reference(q[place : place + 1], *keys.of(texts[i]))
            torch.testing.assert_close(out[place].double(), expected[0], atol=1e-5, rtol=0)


def test_a_layer_touches_no_other_layer(keys):
    pool, *_ = _prefilled(keys, 4)
    assert pool.keys[LAYER].any()
    assert not pool.keys[0].any()
    assert not pool.values[2].any()
