import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qerl.model.layers import RMSNorm, RotaryEmbedding, SwiGLU
from qerl.model.source import Toy


def test_the_norm_equals_that_of_transformers_and_its_weight_is_fp32() -> None:
    weight = torch.rand(64).bfloat16() + 0.5
    ours, theirs = RMSNorm(weight, 1e-5), LlamaRMSNorm(64, 1e-5)
    theirs.weight.data.copy_(weight)
    x = torch.randn(5, 64) * 3
    assert ours.weight.dtype == torch.float32
    assert not ours.weight.requires_grad
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    assert ours(x.bfloat16()).dtype == torch.bfloat16


def test_the_norm_owns_its_weight() -> None:
    weight = torch.ones(64)
    norm = RMSNorm(weight, 1e-5)
    norm.weight.data.add_(1.0)
    assert (weight == 1).all()


def test_noise_below_bf16_resolution_reaches_a_bf16_output() -> None:
    norm = RMSNorm(torch.ones(4096), 1e-5)
    x = torch.randn(1, 4096)
    clean = norm(x.bfloat16())
    norm.weight.data.add_(1e-3)  # bf16 near 1 has steps of 8e-3
    assert not torch.equal(norm(x.bfloat16()), clean)


def test_rotary_tables_are_fp32_and_tell_late_positions_apart() -> None:
    rotary = RotaryEmbedding(Toy().spec)
    cos, sin = rotary(torch.tensor([3000, 3001]))
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos[0] - cos[1]).abs().max() > 0.1
    assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos))


def test_norm_and_gate_have_the_gradients_of_their_definition() -> None:
    x = torch.randn(5, 64, dtype=torch.float64).float().requires_grad_()
    weight, grad = torch.rand(64) + 0.5, torch.randn(5, 64)
    wide = x.detach().double().requires_grad_()
    by_hand = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    (wanted,) = torch.autograd.grad(by_hand, wide, grad.double())
    (got,) = torch.autograd.grad(RMSNorm(weight, 1e-5)(x), x, grad)
    assert (got - wanted).abs().max() < 1e-5

    class Pass(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Times(Pass):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.7

    mlp = SwiGLU(Pass(), Times(), Pass())  # type: ignore[arg-type]
    by_hand = wide * wide.sigmoid() * 0.7 * wide
    (wanted,) = torch.autograd.grad(by_hand, wide, grad.double())
    got_value = mlp(x)
    (got,) = torch.autograd.grad(got_value, x, grad)
    assert (got_value - by_hand).abs().max() < 1e-5
    assert (got - wanted).abs().max() < 1e-5


def test_norm_and_gate_keep_nothing_wider_than_their_input() -> None:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        RMSNorm(torch.ones(64), 1e-5)(x)
    assert sum(t.nbytes for t in saved) <= x.nbytes + 32 * 4 + 64 * 4
