import pytest
import torch

from qerl.rollout.native import NativeEngine
from qerl.rollout.pages import page_bytes
from qerl.types import Prompts, Rollouts, Sampling


def _draw(engine, prompts, *, seed=0, rollout_step=0, progress=None, **options) -> Rollouts:
    sampling = Sampling(**({"group_size": 4, "max_new_tokens": 24} | options))
    return engine.generate(
        prompts, sampling, seed=seed, rollout_step=rollout_step, progress=progress
    )


def _engine(policy, **options) -> NativeEngine:
    return NativeEngine(
        policy, **({"max_sequences": 64, "page_size": 8, "kv_budget_gib": 0.05} | options)
    )


def _assert_same_samples(a: Rollouts, b: Rollouts) -> None:
    assert torch.equal(a.completions, b.completions)
    assert torch.equal(a.truncated, b.truncated)
    torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_depend_neither_on_rows_nor_on_pages(policy, prompts, rows, page_size):
    expected = _draw(_engine(policy), prompts)
    engine = _engine(policy, max_sequences=rows, page_size=page_size)
    _assert_same_samples(expected, _draw(engine, prompts))
    assert len(set(expected.lengths.tolist())) > 3, "rows have to leave at different times"


def test_a_sample_is_the_same_alone_and_among_others(policy, prompts):
    together = _draw(_engine(policy), prompts, group_size=13)
    for place in range(len(prompts)):
        alone = _draw(_engine(policy), prompts.take([place]), group_size=1)
        row = 13 * place
        assert alone.completion(0) == together.completion(row)
        length = int(alone.lengths[0])
        torch.testing.assert_close(
            alone.sampler_logprobs[0], together.sampler_logprobs[row, :length], atol=2e-5, rtol=0
        )


def test_order_of_prompts_moves_rows_and_nothing_else(policy, prompts):
    order = [3, 0, 4, 2, 1]
    straight, turned = (_draw(_engine(policy), p) for p in (prompts, prompts.take(order)))
    for place, source in enumerate(order):
        for sample in range(4):
            row = turned.completion(4 * place + sample)
            assert row == straight.completion(4 * source + sample)


def test_chunks_of_prefill_change_no_sample(policy, prompts):
    expected = _draw(_engine(policy), prompts)
    for tokens in (1, 50):
        _assert_same_samples(expected, _draw(_engine(policy, prefill_tokens=tokens), prompts))


def test_a_pass_of_prefill_stays_within_its_tokens(policy, prompts):
    sizes: list[int] = []
    policy.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    # Parts of 3, 40, 20, 2 and 5 tokens, in the order of admission.
    for limit, largest, passes in ((1000, 70, 1), (50, 43, 2), (1, 40, 5)):
        sizes.clear()
        _draw(_engine(policy, prefill_tokens=limit), prompts, max_new_tokens=1)
        assert (max(sizes), len(sizes), sum(sizes)) == (largest, passes, 70)


def test_each_shared_token_is_computed_once(policy, prompts):
    # Four prompts share 40 tokens, which are 5 full pages; they go on for 5, 20, 0 and 2 tokens,
    # and the fifth prompt has 3.
    for rows in (64, 3):
        engine = _engine(policy, max_sequences=rows)
        _draw(engine, prompts)
        assert engine.stats.prefill_tokens == 40 + 5 + 20 + 0 + 2 + 3
        assert engine.stats.prompt_tokens == 4 * (45 + 60 + 40 + 42 + 3)


def test_equal_prompts_share_their_pages_but_not_their_samples(policy, make_prompts):
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    engine = _engine(policy)
    rollouts = _draw(engine, make_prompts([tokens, tokens]))
    assert engine.stats.prefill_tokens == 9
    assert not torch.equal(rollouts.completions[:4], rollouts.completions[4:])


def test_every_page_is_free_after_a_call(policy, prompts):
    engine = _engine(policy)
    assert engine.pool is None
    _draw(engine, prompts)
    assert engine.pool.used == 0
    # 5 shared pages, then 1, 3, 0, 1 and 1 of single prompts; 3 for 23 tokens of each of 20 rows.
    assert engine.stats.peak_pages == 5 + 1 + 3 + 0 + 1 + 1 + 3 * 20
    expected = engine.stats.peak_pages * page_bytes(policy.spec, 8, torch.float32)
    assert engine.stats.peak_kv_bytes == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_every_page_is_free_after_an_error_in_the_middle(policy, prompts, error):
    engine = _engine(policy)
    held = []

    def fail(done: int, total: int) -> None:
        held.append(engine.pool.used)
        raise error

    with pytest.raises(error):
        _draw(engine, prompts, progress=fail)
    assert held[0] > 0
    assert engine.pool.used == 0
    engine.release()
    assert engine.pool is None
    _assert_same_samples(_draw(_engine(policy), prompts), _draw(engine, prompts))


def test_memory_for_keys_and_values_stays_within_the_budget(policy, prompts):
    expected = _draw(_engine(policy), prompts)
    page = page_bytes(policy.spec, 8, torch.float32)
    need = 8 + 3  # pages of the longest prompt and of 23 own tokens: one sequence at a time
    for pages in (need, need + 5, need + 20):
        engine = _engine(policy, kv_budget_gib=(pages + 1) * page / 2**30)
        _assert_same_samples(expected, _draw(engine, prompts))
        assert engine.pool.nbytes <= (pages + 1) * page
        assert engine.stats.peak_pages <= pages
    small = _engine(policy, kv_budget_gib=need * page / 2**30)
    with pytest.raises(ValueError, match="needs 8 prompt pages and 3 of its own, the pool has 10"):
        _draw(small, prompts)


def test_a_call_takes_no_more_memory_than_it_can_use(policy, prompts):
    engine = _engine(policy, kv_budget_gib=1.0)
    _draw(engine, prompts)
    assert engine.pool.nbytes < 2**20
    few = _engine(policy, max_sequences=2, kv_budget_gib=1.0)
    _draw(few, prompts)
    # Own pages of 2 rows, and the prompts of at most 2 rows and of the next: 60, 45 and 42 tokens.
    assert few.pool.pages == 2 * 3 + 8 + 6 + 6
    pool = engine.pool
    _draw(engine, prompts, max_new_tokens=8)
    assert engine.pool is pool, "a pool that suffices is kept"
    _draw(engine, prompts, max_new_tokens=100)
    assert engine.pool.pages > pool.pages


def test_nothing_computed_with_old_adapters_outlives_its_call(policy, prompts):
    engine = _engine(policy)
    before = _draw(engine, prompts)
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.mul_(-2)
    engine.sync()
    after = _draw(engine, prompts)
    _assert_same_samples(_draw(_engine(policy), prompts), after)
    assert not torch.equal(before.completions, after.completions)


def test_greedy_rows_of_a_group_are_equal(policy, prompts):
    rollouts = _draw(_engine(policy, max_sequences=7), prompts, temperature=0.0)
    for group in rollouts.completions.view(5, 4, -1):
        assert (group == group[0]).all()


def test_an_engine_in_bf16_scores_as_the_trainer_does(make_policy, prompts, score):
    policy = make_policy(dtype=torch.bfloat16)
    rollouts = _draw(_engine(policy), prompts)
    gap = (rollouts.sampler_logprobs - score(policy, rollouts, 1.0))[rollouts.mask].abs()
    assert gap.mean() < 0.01  # bf16 rounds activations at 2^-9; 0.003 nats measured
    assert gap.max() < 0.1


def test_diverged_weights_are_an_error_and_no_sample(policy, prompts):
    with torch.no_grad():
        policy.adapters()["layers.0.q_proj"].lora_b.fill_(torch.nan)
    engine = _engine(policy)
    with pytest.raises(FloatingPointError, match="test/0 has no finite log-probability"):
        _draw(engine, prompts)
    assert engine.pool.used == 0


def test_a_context_beyond_the_models_or_beyond_ones_own_limit_is_refused(policy, prompts):
    with pytest.raises(ValueError, match="max_context=5000: the model's limit is 4096"):
        _engine(policy, max_context=5000)
    with pytest.raises(ValueError, match=r"test/1: 60 tokens .* exceed the context of 83"):
        _draw(_engine(policy, max_context=83), prompts)
    _draw(_engine(policy, max_context=84), prompts)
    with pytest.raises(ValueError, match="page_size=0"):
        _engine(policy, page_size=0)


def test_a_draw_after_a_restart_is_the_draw_of_the_straight_run(make_policy, prompts):
    straight = _engine(make_policy())
    for step in range(3):
        expected = _draw(straight, prompts, rollout_step=step)
    resumed = _engine(make_policy())
    _assert_same_samples(expected, _draw(resumed, prompts, rollout_step=2))


def test_many_prompts_of_one_sequence_each_run_together(policy, make_prompts):
    ids = torch.randint(3, 100, (64, 9), generator=torch.Generator().manual_seed(2)).tolist()
    prompts: Prompts = make_prompts([row[: 1 + i % 9] for i, row in enumerate(ids)])
    wide = _draw(_engine(policy), prompts, group_size=1)
    narrow = _draw(_engine(policy, max_sequences=5), prompts, group_size=1)
    _assert_same_samples(wide, narrow)
