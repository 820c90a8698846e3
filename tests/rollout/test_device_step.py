"""The step that a GPU captures, its matmuls played by torch: column orders, parts, paddings."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qerl.kernels.layout import (
    TiledWeight,
    dequantize_reference,
    from_packed,
    natural_order,
    untile,
)
from qerl.kernels.parts import Parts
from qerl.kernels.tiles import BUCKETS, Plan, default_plan
from qerl.model.linear import LoRAConfig, frozen
from qerl.model.load import load_policy
from qerl.model.resident import TiledPacked, settle, stacked
from qerl.model.source import Toy
from qerl.quant.bf16 import BF16
from qerl.quant.nvfp4 import NVFP4
from qerl.rollout import device_step, graph
from qerl.rollout.native import NativeEngine
from qerl.rollout.stacks import Stack, policy_stacks
from qerl.types import Sampling


def _plan(weight: TiledWeight, tokens: int) -> Plan:
    """The rule's plan, with a last quarter of the rows cut in three parts where it is a gemm."""
    how = default_plan(weight.shape, tokens)
    whole = weight.shape[0] // 64 * 3 // 4
    return how if how.kernel == "gemv" else dataclasses.replace(how, split=3, whole=whole)


def _parts(x, weight, tokens, how, workspace, out, adapter=None) -> Parts:
    """What the kernel promises: parts of y from x in the plan's order; padding rows unread."""
    assert x.is_contiguous()
    assert len(x) == (
        tokens if how.kernel == "gemv" else -(-tokens // how.token_tile) * how.token_tile
    )
    rows = natural_order(x[:tokens]) if how.order == "mma" else x[:tokens]
    y = rows.float() @ dequantize_reference(weight, torch.float32).T
    y = y if adapter is None else y + adapter.added(rows @ adapter.stacked.T)
    first = weight.shape[0] if how.kernel == "gemv" else how.whole * 64 * how.row_tiles
    out.fill_(torch.nan)
    out[:, :first] = y[:, :first]
    if first == weight.shape[0]:
        return Parts(out, workspace.partials, first, 0)
    cut = y[:, first:]
    pieces = torch.stack([cut * 0.25, cut * 0.5, cut * 0.25])
    workspace.partials[: pieces.numel()] = pieces.flatten()
    return Parts(out, workspace.partials, first, 3)


@pytest.fixture
def tiled(monkeypatch):
    """Stacks over tiled weights, and the matmul kernels by their promise."""
    plain = policy_stacks

    def stacks(policy):
        found = plain(policy)
        return [
            {
                name: dataclasses.replace(
                    s, weight=TiledWeight.stack([from_packed(frozen(x).packed) for x in s.linears])
                )
                for name, s in layer.items()
            }
            for layer in found
        ]

    def space(shapes, tokens, device, codes):
        size = 3 * tokens * max(n for n, _ in shapes)
        return device_step.Workspace(*(torch.full((size,), torch.nan) for _ in range(3)))

    monkeypatch.setattr(graph, "policy_stacks", stacks)
    monkeypatch.setattr(device_step, "plan", _plan)
    monkeypatch.setattr(device_step, "w4a16_parts", _parts)
    monkeypatch.setattr(device_step.Workspace, "allocate", staticmethod(space))


def _policy(family="qwen2", targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")):
    toy = Toy(family=family, hidden_size=512, mlp_size=640, heads=8, kv_heads=2)
    lora = LoRAConfig(rank=20, alpha=10, targets=targets)
    policy = load_policy(toy, NVFP4(), lora, shadow=True)
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.normal_(std=0.05)
    return policy


@pytest.mark.parametrize(("family", "rows"), [("qwen2", 12), ("qwen3", 5), ("llama", 12)])
def test_tiled_matmuls_in_every_order_draw_what_eager_steps_draw(tiled, family, rows, prompts):
    policy = _policy(family)
    sampling = Sampling(group_size=4, max_new_tokens=12)
    ends = range(2, 20)
    by_graphs, eager = (
        NativeEngine(policy, max_sequences=rows, page_size=16, graphs=how, eos_ids=ends).generate(
            prompts, sampling, seed=0, rollout_step=0
        )
        for how in (True, False)
    )
    assert torch.equal(by_graphs.completions, eager.completions)
    assert torch.equal(by_graphs.truncated, eager.truncated)
    torch.testing.assert_close(
        by_graphs.sampler_logprobs, eager.sampler_logprobs, atol=1e-4, rtol=0
    )
    assert len(set(eager.lengths.tolist())) > 3


def test_a_stack_pads_ranks_with_zeros_and_scales_b():
    layer = _policy(targets=("k_proj",)).layers()[0]
    linears = [layer.linears()[name] for name in ("q_proj", "k_proj", "v_proj")]
    stack = Stack.of(linears, torch.float32)
    stack.refresh()
    x = torch.randn(3, 512)
    inner = (x @ stack.lora_a.T).split(32, 1)
    columns = stack.lora_b.T.split(stack.widths, 1)
    added = torch.cat([a @ b for a, b in zip(inner, columns, strict=True)], 1)
    plain = torch.cat([frozen(linear)(x) for linear in linears], 1)
    want = torch.cat([linear(x) for linear in linears], 1) - plain
    torch.testing.assert_close(added, want, atol=1e-5, rtol=1e-4)
    assert want.abs().max() > 0.01
    assert Stack.of([layer.linears()["o_proj"]], torch.float32).lora_a is None


def test_linears_side_by_side_are_views_of_one_tiled_weight(monkeypatch):
    packed = NVFP4().quantize_fused([torch.randn(64, 256), torch.randn(32, 256)])
    assert settle(packed, torch.bfloat16) == packed, "nothing moves on a CPU"
    assert stacked(packed) is None
    whole = TiledWeight.stack([from_packed(p) for p in packed])
    parts = zip(*(t.split([2, 1]) for t in whole.parts()), strict=True)
    views = [
        TiledPacked(format=p.format, tiled=TiledWeight(p.shape, *part))
        for p, part in zip(packed, parts, strict=True)
    ]
    joined = stacked(views)
    assert joined.shape == (96, 256)
    for found, want in zip(joined.parts(), whole.parts(), strict=True):
        assert found.data_ptr() == want.data_ptr()
        assert torch.equal(found, want)
    assert stacked(views[::-1]) is None
    assert sum(view.nbytes for view in views) == whole.nbytes
    for view, original in zip(views, packed, strict=True):
        for name, tensor in original.tensors.items():
            same = view.tensors[name].reshape(-1).view(torch.uint8)
            assert torch.equal(same, tensor.reshape(-1).view(torch.uint8)), name
        dense = original.dequantize(torch.float32)
        assert torch.equal(view.dequantize(torch.float32), dense)
        x = torch.randn(5, 256, requires_grad=True)
        view.matmul(x).sum().backward()
        torch.testing.assert_close(view.matmul(x), x @ dense.bfloat16().float().T)
        torch.testing.assert_close(x.grad, dense.bfloat16().float().sum(0).expand(5, 256))
        assert view.to("cpu") is view
    assert untile(joined)[0].shape == (96, 128)


def test_bf16_weights_side_by_side_are_joined_without_a_copy():
    whole = torch.randn(96, 64).bfloat16()
    first, second = (BF16().quantize(part) for part in whole.split([64, 32]))
    joined = stacked([first, second])
    assert joined is None or torch.equal(joined, whole)
    one = stacked([first])
    assert one.data_ptr() == first.tensors["weight"].data_ptr()


def test_limits_hold_what_is_not_larger():
    small = device_step.Limits(
        rows=8, prompt_pages=2, own_pages=3, longest=40, positions=60, ends=1
    )
    large = dataclasses.replace(small, prompt_pages=5)
    assert large.holds(small)
    assert not small.holds(large)
    assert small.joined(dataclasses.replace(large, longest=1)) == large
    assert small.rows in BUCKETS
