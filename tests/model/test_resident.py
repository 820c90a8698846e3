"""Weights side by side in memory stay the weights they were."""

import pytest
import torch

from qerl.kernels import layout_nf4
from qerl.kernels.launch import is_hopper
from qerl.kernels.layout import dequantize_reference
from qerl.kernels.w4a16 import w4a16
from qerl.model import resident
from qerl.model.resident import settle, stacked
from qerl.quant.bf16 import BF16
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import PackedWeight


def linears() -> list[PackedWeight]:
    """Three linears of one input, each under a tensor scale of its own."""
    sizes = ((64, 1.0), (32, 3.0), (32, 0.01))
    return [NVFP4().quantize(torch.randn(rows, 128) * std) for rows, std in sizes]


def test_tiled_linears_keep_their_own_tensor_scales() -> None:
    plain = linears()
    assert len({float(weight.tensors["tensor_scale"]) for weight in plain}) == 3
    tiled = resident._tiled(plain)
    for weight, before in zip(tiled, plain, strict=True):
        assert torch.equal(weight.dequantize(torch.float32), before.dequantize(torch.float32))
        assert weight.tensors["tensor_scale"] == before.tensors["tensor_scale"]
    whole = stacked(tiled)
    assert not isinstance(whole, torch.Tensor)
    assert whole is not None
    wanted = torch.cat([weight.dequantize(torch.float32) for weight in plain])
    assert torch.equal(dequantize_reference(whole, torch.float32), wanted)


@pytest.mark.parametrize("double", [True, False])
def test_tiled_nf4_gives_back_its_checkpoint(double: bool) -> None:
    quantizer = NF4(double_quant=double)
    plain = [quantizer.quantize(torch.randn(rows, 256) * rows) for rows in (64, 32, 96)]
    tiled = resident._tiled(plain)
    for weight, before in zip(tiled, plain, strict=True):
        assert isinstance(weight, resident.TiledPacked)
        assert set(weight.tensors) == set(before.tensors)
        assert all(torch.equal(weight.tensors[n], before.tensors[n]) for n in before.tensors)
        assert torch.equal(weight.dequantize(torch.float32), before.dequantize(torch.float32))
        x = torch.randn(3, 256, requires_grad=True)
        y = weight.matmul(x)
        wanted = before.dequantize(torch.bfloat16).float()
        torch.testing.assert_close(y, x @ wanted.T)
        y.sum().backward()
        torch.testing.assert_close(x.grad, wanted.sum(0).expand(3, -1))
    whole = stacked(tiled)
    assert isinstance(whole, layout_nf4.TiledNF4)
    wanted = torch.cat([weight.dequantize(torch.float32) for weight in plain])
    assert torch.equal(layout_nf4.dequantize_reference(whole, torch.float32), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("double", [True, False])
def test_settled_nf4_is_multiplied_where_it_lies(double: bool) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("tile order is for compute capability 9.0")
    quantizer = NF4(double_quant=double)
    plain = [quantizer.quantize(torch.randn(n, 256, device="cuda")) for n in (64, 32)]
    settled = settle(plain, torch.bfloat16)
    whole = stacked(settled)
    assert isinstance(whole, layout_nf4.TiledNF4)
    x = torch.randn(5, 256, device="cuda").bfloat16()
    wanted = x.double() @ layout_nf4.multiplied(whole).double().T
    assert (w4a16(x, whole).double() - wanted).norm() < 3e-3 * wanted.norm()
    for weight, before in zip(settled, plain, strict=True):
        assert all(torch.equal(weight.tensors[n], before.tensors[n]) for n in before.tensors)


@pytest.mark.gpu
def test_nf4_that_is_not_whole_tiles_stays_as_it_is() -> None:
    plain = [NF4().quantize(torch.randn(64, 576, device="cuda"))]
    assert settle(plain, torch.bfloat16) == plain


@pytest.mark.gpu
def test_linears_of_several_formats_stay_as_they_are() -> None:
    q, k, _ = (weight.to("cuda") for weight in linears())
    v = BF16().quantize(torch.randn(32, 128)).to("cuda")
    for mixed in ([q, v, k], [v, q]):
        settled = settle(mixed, torch.bfloat16)
        assert [weight.data_ptrs() for weight in settled] == [w.data_ptrs() for w in mixed]
        assert stacked(settled) is None


@pytest.mark.gpu
def test_settled_linears_multiply_by_their_own_scales() -> None:
    plain = [weight.to("cuda") for weight in linears()]
    x = torch.randn(8, 128, device="cuda", dtype=torch.bfloat16)
    for weight, before in zip(settle(plain, torch.bfloat16), plain, strict=True):
        wanted = x @ before.dequantize(torch.bfloat16).T
        if isinstance(weight, resident.TiledPacked):
            assert (weight.matmul(x) - wanted).abs().max() <= 0.01 * wanted.abs().max()
        assert torch.equal(weight.dequantize(torch.float32), before.dequantize(torch.float32))
