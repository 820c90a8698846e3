import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl.model.linear import FrozenLinear, LoRAConfig, LoRALinear, adapter_generator, packed_matmul
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format

FORMATS: list[Format] = [BF16(), NVFP4(), MXFP4(), NF4()]
N, K = 96, 128


def named(format: Format) -> str:
    return format.name


@pytest.mark.parametrize("format", FORMATS, ids=named)
def test_a_frozen_linear_has_the_values_and_gradients_of_its_dense_weight(format: Format) -> None:
    packed = format.quantize(torch.randn(N, K))
    bias = torch.randn(N)
    x = torch.randn(7, K, requires_grad=True)
    grad = torch.randn(7, N)
    y = FrozenLinear(packed, bias)(x)
    y.backward(grad)
    dense = packed.dequantize(torch.float32)
    assert torch.allclose(y, x @ dense.T + bias, atol=1e-5)
    assert torch.allclose(x.grad, grad @ dense, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS[1:], ids=named)
def test_autograd_keeps_packed_bytes_only(format: Format) -> None:
    packed = format.quantize(torch.randn(N, K))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(7, K, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = packed_matmul(x, packed)
    assert {t.data_ptr() for t in saved} == set(packed.data_ptrs().values())
    assert sum(t.nbytes for t in saved) == packed.nbytes
    y.sum().backward()
    assert x.grad is not None


def test_no_dense_weight_outlives_forward_or_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    dense: list[weakref.ref[Tensor]] = []
    unpack: Callable[..., Tensor] = NVFP4.dequantize

    def watched(*args: Any) -> Tensor:
        weight = unpack(*args)
        dense.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(NVFP4, "dequantize", watched)
    layers = [FrozenLinear(NVFP4().quantize(torch.randn(K, K) / K**0.5)) for _ in range(5)]
    x = torch.randn(3, K, requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y)
        assert not any(ref() is not None for ref in dense)
    y.sum().backward()
    assert len(dense) == 10  # unpacked once in each direction
    assert not any(ref() is not None for ref in dense)


def test_packed_bytes_changed_between_forward_and_backward_are_noticed() -> None:
    packed = NVFP4().quantize(torch.randn(N, K))
    y = packed_matmul(torch.randn(2, K, requires_grad=True), packed)
    packed.tensors["codes"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_shadow_changes_nothing_but_time_and_memory() -> None:
    linear = FrozenLinear(NVFP4().quantize(torch.randn(N, K)), torch.randn(N))
    x = torch.randn(7, K, requires_grad=True)
    grad = torch.randn(7, N)
    plain = linear(x)
    (plain_grad,) = torch.autograd.grad(plain, x, grad)
    linear.set_shadow(torch.float32)
    assert linear.shadow is not None
    shadowed = linear(x)
    (shadow_grad,) = torch.autograd.grad(shadowed, x, grad)
    assert torch.allclose(plain, shadowed, atol=1e-5)
    assert torch.allclose(plain_grad, shadow_grad, atol=1e-5)
    linear.set_shadow(None)
    assert linear.shadow is None


def make_lora(rank: int = 4, alpha: float = 8) -> LoRALinear:
    base = FrozenLinear(NVFP4().quantize(torch.randn(N, K)))
    config = LoRAConfig(rank=rank, alpha=alpha)
    return LoRALinear(base, config, adapter_generator(0, "layers.0.q_proj"))


def test_lora_adds_scale_times_b_a_x() -> None:
    linear = make_lora(rank=4, alpha=6)
    x = torch.randn(7, K)
    base = linear.base(x)
    assert torch.equal(linear(x), base)  # B starts at zero
    linear.lora_b.data.normal_()
    wanted = base + 1.5 * x @ linear.lora_a.T @ linear.lora_b.T
    assert torch.allclose(linear(x), wanted, atol=1e-4)
    linear.enabled = False
    assert torch.equal(linear(x), base)


def test_lora_starts_as_peft_starts_and_independently_of_other_adapters() -> None:
    a, b = make_lora().lora_a, make_lora().lora_a
    assert torch.equal(a, b)
    bound = K**-0.5
    assert a.abs().max() <= bound
    assert a.abs().max() > 0.9 * bound
    other = adapter_generator(0, "layers.1.q_proj").initial_seed()
    assert other != adapter_generator(0, "layers.0.q_proj").initial_seed()
    assert other != adapter_generator(1, "layers.1.q_proj").initial_seed()


def test_one_step_at_1e_minus_6_changes_master_bits() -> None:
    linear = make_lora()
    linear.lora_b.data.normal_(std=0.1)
    before = {n: p.detach().clone() for n, p in linear.named_parameters()}
    assert before.keys() == {"lora_a", "lora_b"}
    assert all(p.dtype == torch.float32 for p in linear.parameters())
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-6, weight_decay=0.0)
    linear(torch.randn(7, K).bfloat16()).float().square().mean().backward()
    optimizer.step()
    for name, parameter in linear.named_parameters():
        changed = (parameter != before[name]).float().mean()
        assert changed > 0.99, name
        rounded = (parameter.bfloat16() != before[name].bfloat16()).float().mean()
        assert rounded < 0.1, name  # what bf16 masters would have kept of the step


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0, "alpha": 1}, "rank=0"),
        ({"rank": 4, "alpha": 0}, "alpha=0"),
        ({"rank": 4, "alpha": 8, "targets": ["q_proj", "lm_head"]}, "lm_head"),
        ({"rank": 4, "alpha": 8, "targets": ["qkv_proj"]}, "qkv_proj"),
        ({"rank": 4, "alpha": 8, "targets": []}, "at least one"),
    ],
)
def test_adapters_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoRAConfig(**settings)


def test_a_rank_above_the_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=97: at most 96"):
        make_lora(rank=97)
