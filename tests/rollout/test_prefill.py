"""The fused forward over prompts is the policy's: on a CPU, where kernels are their references."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qerl.rollout.attend import PrefillAttend
from qerl.rollout.pages import PagePool
from qerl.rollout.prefill import prefill_hidden
from qerl.rollout.scheduler import Scheduler


def _pass(policy, prompts, dtype):
    """Tokens, positions, ends and a fresh attention of all prompts in one pass."""
    device = torch.device("cpu")
    pool = PagePool(policy.spec, pages=99, page_size=8, dtype=dtype, device=device)
    scheduler = Scheduler(prompts.tokens, 1, pool=pool, max_sequences=8, own_pages=1)
    _, prefills = scheduler.admit()
    tokens = torch.tensor([t for p in prefills for t in p.prompt.tokens[p.start :]])
    positions = torch.cat([torch.arange(p.start, len(p.prompt.tokens)) for p in prefills])
    ends = torch.tensor([len(p.prompt.tokens) - p.start for p in prefills]).cumsum(0) - 1
    return tokens, positions, ends, PrefillAttend(pool, prefills), pool


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_hidden_states_and_pages_are_those_of_the_decoder(make_policy, prompts, family, dtype):
    policy = make_policy(family, dtype)
    tokens, positions, ends, attend, pool = _pass(policy, prompts, dtype)
    want = policy.decoder(tokens, positions, attend)[ends]
    pages = pool.keys.clone(), pool.values.clone()
    pool.keys.zero_()
    pool.values.zero_()
    found = prefill_hidden(policy.decoder, tokens, positions, attend, ends)
    assert torch.equal(pool.keys, pages[0])
    assert torch.equal(pool.values, pages[1])
    # the last MLP is a product of fewer rows, whose sums may come in another order
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)


def test_the_weights_and_the_embedding_stay_as_they_are(make_policy, prompts):
    policy = make_policy()
    tokens, positions, ends, attend, _ = _pass(policy, prompts, torch.float32)
    kept = policy.decoder.embed.clone()
    first, second = (
        prefill_hidden(policy.decoder, tokens, positions, attend, ends) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(policy.decoder.embed, kept)
