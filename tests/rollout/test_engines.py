"""What every engine promises, run over each of them on a toy policy."""

from collections.abc import Callable

import pytest
import torch

from qerl.model.load import load_policy
from qerl.model.source import Toy
from qerl.noise.scope import noisy
from qerl.quant.bf16 import BF16
from qerl.rollout.engine import Engine
from qerl.rollout.hf import HfEngine
from qerl.rollout.native import NativeEngine
from qerl.types import Prompts, Rollouts, Sampling

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MANY_ENDS = tuple(range(2, 16))  # so many ends that short completions are common
EOS = 2


def _engine(kind: str, policy, **options) -> Engine:
    # Both have to work in several batches: 5 prompts x 4 samples over 7 rows.
    if kind == "native":
        options |= {"page_size": 8, "graphs": False}
        return NativeEngine(policy, max_sequences=7, kv_budget_gib=0.05, **options)
    if kind == "graphs":  # the steps that a GPU captures, uncaptured
        options |= {"page_size": 16, "graphs": True}
        return NativeEngine(policy, max_sequences=7, kv_budget_gib=0.05, **options)
    return HfEngine(policy, max_sequences=7, **options)


@pytest.fixture(params=["native", "graphs", "hf"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def engine(kind, policy) -> Engine:
    return _engine(kind, policy)


def _draw(engine: Engine, prompts: Prompts, *, seed=0, rollout_step=0, **options) -> Rollouts:
    sampling = Sampling(**({"group_size": 4, "max_new_tokens": 12} | options))
    return engine.generate(prompts, sampling, seed=seed, rollout_step=rollout_step)


def _same(a: Rollouts, b: Rollouts) -> bool:
    return torch.equal(a.completions, b.completions) and torch.equal(
        a.sampler_logprobs, b.sampler_logprobs
    )


def _check_ends(rollouts: Rollouts, eos_ids: tuple[int, ...], cap: int) -> None:
    for row in range(len(rollouts.lengths)):
        completion = rollouts.completion(row)
        assert not set(completion[:-1]) & set(eos_ids), "goes on after its end"
        assert bool(rollouts.truncated[row]) == (completion[-1] not in eos_ids)
        if rollouts.truncated[row]:
            assert len(completion) == cap


def test_carrier_is_padded_with_zeros_beyond_the_lengths_and_on_the_cpu(kind, policy, prompts):
    rollouts = _draw(_engine(kind, policy, eos_ids=MANY_ENDS), prompts)
    assert rollouts.completions.shape == (20, int(rollouts.lengths.max()))
    assert rollouts.completions.dtype == rollouts.lengths.dtype == torch.int64
    assert rollouts.sampler_logprobs.dtype == torch.float32
    assert (rollouts.completions.device.type, rollouts.truncated.dtype) == ("cpu", torch.bool)
    beyond = ~rollouts.mask
    assert beyond.any()
    assert not rollouts.completions[beyond].any()
    assert not rollouts.sampler_logprobs[beyond].any()
    assert (rollouts.sampler_logprobs[rollouts.mask] < 0).all()
    assert (rollouts.group_size, rollouts.prompts) == (4, prompts)


def test_step_and_noise_level_are_recorded(engine, prompts):
    sampling = Sampling(group_size=1, max_new_tokens=2)
    rollouts = engine.generate(prompts, sampling, seed=0, rollout_step=17, sigma=0.25)
    assert (rollouts.rollout_step, rollouts.sigma) == (17, 0.25)


def test_completions_end_at_the_first_of_several_end_tokens_and_keep_it(kind, policy, prompts):
    rollouts = _draw(_engine(kind, policy, eos_ids=MANY_ENDS), prompts)
    _check_ends(rollouts, MANY_ENDS, cap=12)
    lengths = rollouts.lengths.tolist()
    assert 1 in lengths
    assert 12 in lengths
    ends = {rollouts.completion(row)[-1] for row in range(20) if not rollouts.truncated[row]}
    assert len(ends) > 2, "several of the end tokens were used"


def test_the_models_own_end_token_is_the_default(engine, prompts, policy):
    assert policy.spec.eos_ids == (EOS,)
    rollouts = _draw(engine, prompts, max_new_tokens=40)
    _check_ends(rollouts, (EOS,), cap=40)
    assert 0 < int(rollouts.truncated.sum()) < 20


def test_an_end_token_at_the_cap_is_no_truncation(kind, policy, prompts):
    engine = _engine(kind, policy, eos_ids=MANY_ENDS)
    free = _draw(engine, prompts)
    row = int(((free.lengths > 2) & ~free.truncated).nonzero()[0])
    cap = int(free.lengths[row])
    capped = _draw(engine, prompts, max_new_tokens=cap)
    assert capped.completion(row) == free.completion(row)
    assert not capped.truncated[row]
    short = _draw(engine, prompts, max_new_tokens=cap - 1)
    assert short.completion(row) == free.completion(row)[:-1]
    assert short.truncated[row]


def test_ignoring_ends_runs_every_completion_to_the_cap(kind, policy, prompts):
    engine = _engine(kind, policy, eos_ids=MANY_ENDS)
    rollouts = _draw(engine, prompts, ignore_eos=True)
    assert rollouts.lengths.tolist() == [12] * 20
    assert rollouts.truncated.all()


def test_a_single_token_can_be_asked_for(engine, policy, prompts, score):
    rollouts = _draw(engine, prompts, max_new_tokens=1)
    assert rollouts.completions.shape == (20, 1)
    assert torch.equal(rollouts.truncated, rollouts.completions[:, 0] != EOS)
    torch.testing.assert_close(
        rollouts.sampler_logprobs, score(policy, rollouts, 1.0), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_are_the_trainers_at_the_sampling_temperature(
    engine, policy, prompts, score, temperature
):
    rollouts = _draw(engine, prompts, temperature=temperature)
    expected = score(policy, rollouts, temperature)
    torch.testing.assert_close(rollouts.sampler_logprobs, expected, atol=1e-4, rtol=0)
    other = score(policy, rollouts, 1.1 * temperature)
    assert (rollouts.sampler_logprobs - other).abs().max() > 0.01, "the test would see the other"


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.3}])
def test_cut_sampling_reports_the_whole_distribution(engine, policy, prompts, score, cut):
    rollouts = _draw(engine, prompts, temperature=0.8, **cut)
    expected = score(policy, rollouts, 0.8)
    torch.testing.assert_close(rollouts.sampler_logprobs, expected, atol=1e-4, rtol=0)
    assert rollouts.sampler_logprobs.sum() > _draw(engine, prompts).sampler_logprobs.sum()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_completions_agree_token_for_token(make_policy, family, prompts, score):
    policy = make_policy(family)
    native, hf = (
        _draw(_engine(kind, policy), prompts, group_size=1, max_new_tokens=40, temperature=0.0)
        for kind in ("native", "hf")
    )
    assert torch.equal(native.completions, hf.completions)
    assert torch.equal(native.lengths, hf.lengths)
    torch.testing.assert_close(native.sampler_logprobs, hf.sampler_logprobs, atol=1e-4, rtol=0)
    expected = score(policy, native, 1.0)
    torch.testing.assert_close(native.sampler_logprobs, expected, atol=1e-4, rtol=0)


def test_prompts_of_ids_that_no_text_gives_pass_untouched(engine, policy, make_prompts, score):
    # Padding, unknown and end-of-sequence ids inside and at both ends of prompts of unequal
    # length: nothing may be read as padding.
    odd = make_prompts([[EOS, 0, 5, 0, EOS, EOS, 7, 0], [0, 0, 0], [EOS], [9, 9, 9, 9, EOS]])
    rollouts = _draw(engine, odd)
    expected = score(policy, rollouts, 1.0)
    torch.testing.assert_close(rollouts.sampler_logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_an_adapter_of_any_target_moves_the_sampler(engine, policy, prompts, score, target):
    def first_logprobs() -> torch.Tensor:
        engine.sync()
        rollouts = _draw(engine, prompts, group_size=1, max_new_tokens=3, temperature=0.0)
        expected = score(policy, rollouts, 1.0)
        torch.testing.assert_close(rollouts.sampler_logprobs, expected, atol=1e-4, rtol=0)
        return rollouts.sampler_logprobs[:, 0]

    before = first_logprobs()
    with torch.no_grad():
        policy.adapters()[f"layers.1.{target}"].lora_b.normal_(0, 0.3)
    assert (first_logprobs() - before).abs().max() > 1e-3


def test_samples_of_a_group_differ(engine, prompts):
    rollouts = _draw(engine, prompts)
    for group in rollouts.completions.view(5, 4, -1):
        assert len({tuple(row) for row in group.tolist()}) > 1


def test_a_call_repeats_exactly_and_depends_on_seed_and_step(engine, prompts):
    first = _draw(engine, prompts)
    assert _same(first, _draw(engine, prompts))
    assert not torch.equal(first.completions, _draw(engine, prompts, seed=1).completions)
    assert not torch.equal(first.completions, _draw(engine, prompts, rollout_step=1).completions)


def test_a_second_engine_on_the_same_policy_repeats_the_first(kind, policy, prompts):
    assert _same(_draw(_engine(kind, policy), prompts), _draw(_engine(kind, policy), prompts))


def test_noise_on_the_norms_reaches_the_samples_and_leaves_with_its_scope(engine, policy, prompts):
    assert len(engine.norms) == 2 * policy.spec.layers
    clean = _draw(engine, prompts, temperature=0.0)
    with noisy(engine.norms, 0.1, seed=0, rollout_step=0):
        perturbed = _draw(engine, prompts, temperature=0.0)
    assert (perturbed.sampler_logprobs[:, 0] - clean.sampler_logprobs[:, 0]).abs().min() > 1e-4
    assert _same(clean, _draw(engine, prompts, temperature=0.0))


def test_noise_on_any_single_norm_reaches_the_samples(engine, prompts):
    clean = _draw(engine, prompts, max_new_tokens=1, temperature=0.0).sampler_logprobs
    for norm in engine.norms:
        with noisy([norm], 0.2, seed=0, rollout_step=0):
            moved = _draw(engine, prompts, max_new_tokens=1, temperature=0.0).sampler_logprobs
        assert (moved - clean).abs().max() > 1e-4


@pytest.mark.parametrize("training", [True, False])
def test_sampling_leaves_the_policy_and_the_global_generator_as_they_are(
    kind, policy, prompts, training
):
    policy.train(training)
    policy.decoder.layers[0].train(not training)
    flags = [module.training for module in policy.modules()]
    grads = [parameter.requires_grad for parameter in policy.parameters()]
    base, adapters, state = policy.base_hash(), policy.adapter_state(), torch.get_rng_state()
    engine = _engine(kind, policy)
    engine.sync()
    _draw(engine, prompts)
    engine.release()
    assert [module.training for module in policy.modules()] == flags
    assert [parameter.requires_grad for parameter in policy.parameters()] == grads
    assert policy.base_hash() == base
    assert all(torch.equal(adapters[name], now) for name, now in policy.adapter_state().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_progress_counts_every_sequence(engine, prompts):
    seen: list[tuple[int, int]] = []
    sampling = Sampling(group_size=4, max_new_tokens=12)
    engine.generate(
        prompts, sampling, seed=0, rollout_step=0, progress=lambda *now: seen.append(now)
    )
    assert len(seen) > 1
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (20, 20)


@pytest.mark.parametrize("interference", ["sync", "generate"])
def test_interference_with_a_rollout_is_refused(engine, prompts, interference):
    def interfere(done: int, total: int) -> None:
        if interference == "sync":
            engine.sync()
        else:
            _draw(engine, prompts)

    sampling = Sampling(group_size=4, max_new_tokens=12)
    with pytest.raises(RuntimeError, match="a rollout is in flight"):
        engine.generate(prompts, sampling, seed=0, rollout_step=0, progress=interfere)
    engine.sync()


def test_hot_sampling_draws_from_the_whole_vocabulary(engine, policy, prompts):
    rollouts = _draw(engine, prompts, group_size=40, max_new_tokens=6, temperature=50.0)
    drawn = set(rollouts.completions[rollouts.mask].tolist())
    assert len(drawn) > 0.95 * policy.spec.vocab_size


def test_sampling_with_the_adapters_off_is_refused(engine, policy, prompts):
    with policy.reference(), pytest.raises(RuntimeError, match="inside policy"):
        _draw(engine, prompts)
    _draw(engine, prompts)


def test_an_interrupted_engine_works_again(engine, prompts):
    expected = _draw(engine, prompts)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    sampling = Sampling(group_size=4, max_new_tokens=12)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling, seed=0, rollout_step=0, progress=interrupt)
    assert _same(expected, _draw(engine, prompts))


def test_stats_count_what_was_drawn(engine, prompts):
    assert engine.stats is None
    rollouts = _draw(engine, prompts)
    stats = engine.stats
    assert (stats.sequences, stats.tokens) == (20, int(rollouts.lengths.sum()))
    assert stats.prompt_tokens == 4 * sum(map(len, prompts.tokens))
    assert 0 < stats.prefill_tokens <= stats.prompt_tokens
    assert 0 < stats.occupancy <= 1
    assert stats.tok_per_s == pytest.approx(stats.tokens / stats.seconds)
    assert stats.metrics()["rollout/tok_per_s"] == stats.tok_per_s


def test_requests_that_cannot_be_served_are_refused_by_name(engine, make_prompts):
    refused: list[tuple[Callable[[], Rollouts], str]] = [
        (lambda: _draw(engine, make_prompts([])), "0 prompts"),
        (lambda: _draw(engine, make_prompts([[3], []])), "test/1 has no tokens"),
        (
            lambda: _draw(engine, make_prompts([[3], [5] * 4090])),
            "test/1: 4090 tokens [+] max_new_tokens=12 exceed the context of 4096",
        ),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_engine_needs_a_row(kind, policy):
    engine = HfEngine if kind == "hf" else NativeEngine
    with pytest.raises(ValueError, match="max_sequences=0"):
        engine(policy, max_sequences=0)


def test_a_policy_without_adapters_samples(kind, prompts):
    policy = load_policy(Toy(), BF16(), None)
    rollouts = _draw(_engine(kind, policy), prompts, group_size=1)
    assert rollouts.lengths.min() >= 1
