"""Weights side by side in memory stay the weights they were."""

import pytest
import torch

from qerl.kernels.layout import dequantize_reference
from qerl.model import resident
from qerl.model.resident import settle, stacked
from qerl.quant.bf16 import BF16
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
