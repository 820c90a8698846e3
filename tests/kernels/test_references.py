"""The kernels' references say what the policy and the CPU engine compute."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

pytest.importorskip("triton", reason="triton is not installed")

from qerl.kernels.lora import Adapter, add_adapter
from qerl.kernels.norm import add_rms_norm_reference
from qerl.kernels.paged_attention import Tables, paged_attention_reference
from qerl.kernels.parts import Parts
from qerl.kernels.rope import Heads, rope_reference
from qerl.kernels.sample import sample_reference, uniforms_reference
from qerl.kernels.swiglu import silu_mul_reference
from qerl.model.layers import RMSNorm, rotate
from qerl.rollout.sampler import draw, uniforms
from qerl.types import Sampling


def test_norm_is_the_policys_norm_of_the_sum() -> None:
    y, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.rand(96)
    kept, normed = add_rms_norm_reference(Parts.of(y), residual, weight, 1e-5)
    assert torch.equal(kept, residual + y)
    assert torch.equal(normed, RMSNorm(weight, 1e-5)(residual + y))


def test_an_adapter_adds_each_member_its_own_product() -> None:
    widths = (64, 32, 16)
    stacked, b = torch.randn(48, 24), torch.randn(sum(widths), 16)
    partials, counters = Adapter.scratch(5, 48, "cpu")
    fields = {"stacked": stacked, "b": b, "widths": widths, "a": torch.empty(5, 48)}
    fields |= {"partials": partials, "counters": counters}
    adapter = Adapter(**fields)
    x, y = torch.randn(5, 24), torch.randn(5, 112)
    members = zip(stacked.split(16), b.split(widths), strict=True)
    want = y + torch.cat([x @ low.T @ high.T for low, high in members], 1)
    torch.testing.assert_close(add_adapter(y.clone(), x, adapter), want)
    with pytest.raises(ValueError, match="rank 24"):
        Adapter(**fields | {"b": torch.randn(112, 24)})


def test_rope_is_the_policys_rotation_with_the_bias_before_it() -> None:
    h, hk, d, m = 4, 2, 16, 5
    widths = (h * d, hk * d, hk * d)
    y, bias = torch.randn(m, sum(widths)), torch.randn(sum(widths))
    angles = torch.rand(50, d // 2) * 6
    heads = Heads(heads=h, kv_heads=hk, head_dim=d, cos=angles.cos(), sin=angles.sin(), bias=bias)
    positions = torch.randint(0, 50, (m,))
    q, k, v = rope_reference(Parts.of(y), heads, positions)
    cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    want = [x + shift for x, shift in zip(y.split(widths, 1), bias.split(widths), strict=True)]
    torch.testing.assert_close(q, rotate(want[0].view(m, h, d), cos, sin))
    torch.testing.assert_close(k, rotate(want[1].view(m, hk, d), cos, sin))
    torch.testing.assert_close(v, want[2].view(m, hk, d))


def test_silu_mul_is_the_policys_gate() -> None:
    y = torch.randn(5, 192)
    torch.testing.assert_close(silu_mul_reference(Parts.of(y)), silu(y[:, :96]) * y[:, 96:])


def test_attention_over_pages_is_attention_over_their_tokens() -> None:
    size, d = 16, 32
    keys, values, q = torch.randn(2, 5 * size, d), torch.randn(2, 5 * size, d), torch.randn(1, 6, d)
    tables = Tables(
        torch.tensor([[4, 1]]),
        torch.tensor([20]),
        torch.tensor([[0]]),
        torch.tensor([[3]]),
        torch.tensor([7]),
    )
    seen = [*range(4 * size, 5 * size), *range(size, size + 4), *range(3 * size, 3 * size + 7)]
    want = scaled_dot_product_attention(
        q.transpose(0, 1), keys[:, seen], values[:, seen], enable_gqa=True
    )
    found = paged_attention_reference(q, (keys, values), tables, size)
    torch.testing.assert_close(found[0], want[:, 0])


def test_uniforms_are_the_cpu_engines_bit_for_bit() -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,))
    positions = torch.randint(0, 10_000, (64,))
    assert torch.equal(uniforms_reference(seeds, positions), uniforms(seeds, positions))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampling_draws_what_the_cpu_engine_draws(temperature: float) -> None:
    logits = torch.randn(32, 5000) * 3
    seeds, positions = torch.randint(-(2**62), 2**62, (32,)), torch.arange(32)
    tokens, logprobs, _, _ = sample_reference(logits, seeds, positions, temperature)
    sampling = Sampling(group_size=1, max_new_tokens=1, temperature=temperature)
    drawn = draw(logits.clone(), uniforms(seeds, positions), sampling)
    assert torch.equal(drawn.tokens, tokens)
    torch.testing.assert_close(drawn.logprobs, logprobs)
