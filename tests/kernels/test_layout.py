"""The packed layout: every bit of it against the checkpoint's bytes, exhaustively where finite."""

import pytest
import torch

from qerl.kernels import layout
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, layout.TiledWeight]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8)
    tiled = layout.tile(codes, layout.from_e4m3(scales), torch.tensor(0.0037))
    return codes, scales, tiled


@pytest.mark.parametrize("shape", [(32, 128), (64, 64), (576, 576), (192, 1536), (80, 112)])
def test_tiles_give_back_the_checkpoint_bytes(shape: tuple[int, int]) -> None:
    codes, scales, tiled = random_weight(*shape)
    back_codes, back_scales = layout.untile(tiled)
    assert torch.equal(back_codes, codes)
    assert torch.equal(layout.to_e4m3(back_scales), scales)


def test_every_e4m3_scale_is_an_e5m3_scale() -> None:
    stored = torch.arange(127, dtype=torch.uint8)  # the non-negative finite ones
    values = stored.view(torch.float8_e4m3fn).float()
    scales = layout.from_e4m3(stored)
    assert torch.equal(layout.decode_e5m3(scales)[1:], values[1:])
    assert scales[0] == 0
    assert torch.equal(layout.to_e4m3(scales), stored)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_negative_and_nan_scales_are_refused(byte: int) -> None:
    with pytest.raises(ValueError, match="finite"):
        layout.from_e4m3(torch.tensor([[byte]], dtype=torch.uint8))


def test_the_nine_operations_unpack_every_code_at_every_place() -> None:
    # A word with code c at place p and code 15 - c elsewhere, for all c and p.
    code = torch.arange(16)[:, None, None]
    place = torch.arange(8)[None, :, None]
    nibbles = torch.where(torch.arange(8) == place, code, 15 - code)  # [16, 8, 8]
    packed = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8).flatten(1)
    unpacked = layout.unpack_word(layout.spread(packed)).view(16, 8, 8)
    want = E2M1[nibbles].bfloat16().view(torch.int16)  # the sign of zero counts
    scaled = (unpacked.float() * 2.0**126).bfloat16().view(torch.int16)
    assert torch.equal(scaled, want)


def test_every_product_of_code_and_scale_is_exact_and_normal_in_bf16() -> None:
    bits = (torch.arange(8, 160, dtype=torch.int32) << 4) + 0x7580  # exponents 1 to 19
    lifted = bits.to(torch.int16).view(torch.bfloat16)  # s 2^118
    unit = (E2M1[1:8] * 2.0**-126).bfloat16()  # w 2^-126
    assert torch.isfinite(lifted.float()).all()
    product = unit[:, None] * lifted[None, :]  # bf16, as the kernel multiplies
    exact = unit.double()[:, None] * lifted.double()[None, :]
    assert torch.equal(product.double(), exact)
    assert float(product.float().min()) >= torch.finfo(torch.bfloat16).tiny


@pytest.mark.parametrize("quantizer", [NVFP4(), NVFP4(power_of_two_scale=True), MXFP4()])
@pytest.mark.parametrize("shape", [(64, 256), (576, 576)])
def test_tiles_stand_for_the_formats_own_weights(
    quantizer: NVFP4 | MXFP4, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape)
    weight[3] *= 30
    weight[5] = 0
    packed = quantizer.quantize(weight)
    tiled = layout.from_packed(packed)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(layout.dequantize_reference(tiled, dtype), packed.dequantize(dtype))
    assert torch.equal(layout.untile(tiled)[0], packed.tensors["codes"])


def test_mxfp4_scales_too_far_apart_are_refused() -> None:
    weight = torch.randn(32, 64)
    weight[0, :32] *= 2.0**-25
    with pytest.raises(ValueError, match="18 binades"):
        layout.from_packed(MXFP4().quantize(weight))


def test_nf4_has_no_tiles() -> None:
    with pytest.raises(ValueError, match="nf4"):
        layout.from_packed(NF4().quantize(torch.randn(32, 64)))


def test_codes_under_a_zero_scale_become_zero() -> None:
    codes = torch.full((32, 64), 0x77, dtype=torch.uint8)
    scales = torch.zeros(32, 8, dtype=torch.uint8)
    scales[0, 0] = 0x38
    tiled = layout.tile(codes, layout.from_e4m3(scales), torch.tensor(1.0))
    dense = layout.dequantize_reference(tiled, torch.float32)
    assert torch.equal(dense[0, :16], torch.full((16,), 6.0))
    assert int(dense.count_nonzero()) == 16


def test_k_that_does_not_divide_into_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="K=24"):
        layout.tile(
            torch.zeros(32, 12, dtype=torch.uint8),
            torch.zeros(32, 1, dtype=torch.uint8),
            torch.tensor(1.0),
        )


def test_stacked_weights_keep_their_own_tensor_scale() -> None:
    weights = [NVFP4().quantize(torch.randn(64, 128) * scale) for scale in (1.0, 100.0)]
    stacked = layout.TiledWeight.stack([layout.from_packed(weight) for weight in weights])
    dense = torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(layout.dequantize_reference(stacked, torch.float32), dense)


def test_stacking_over_a_partial_tile_is_refused() -> None:
    first = layout.from_packed(NVFP4().quantize(torch.randn(48, 128)))
    with pytest.raises(ValueError, match="N=48"):
        layout.TiledWeight.stack([first, first])


def test_a_tiled_weight_checks_its_parts() -> None:
    _, _, tiled = random_weight(64, 128)
    with pytest.raises(ValueError, match="tile"):
        layout.TiledWeight((64, 256), *tiled.parts())


def test_tiles_cost_4_5_bits_a_weight() -> None:
    _, _, tiled = random_weight(3584, 512)
    assert tiled.nbytes == 3584 * 512 * 4.5 / 8 + 4 * 3584 / 32


def test_mma_order_puts_the_columns_of_a_lane_where_wgmma_reads_them() -> None:
    # Lane c owns columns 16 c .. 16 c + 15; step j reads positions 16 j + {2c, 2c+1, 2c+8, 2c+9}.
    order = layout.mma_order(torch.arange(128.0)[None])[0]
    for block in (0, 64):
        for j in range(4):
            for c in range(4):
                lane = [order[block + 16 * j + i].item() for i in (2 * c, 2 * c + 1)]
                lane += [order[block + 16 * j + 8 + i].item() for i in (2 * c, 2 * c + 1)]
                assert lane == [block + 16 * c + 4 * j + i for i in range(4)]


def test_natural_order_inverts_mma_order() -> None:
    x = torch.randn(3, 576)
    assert torch.equal(layout.natural_order(layout.mma_order(x)), x)


@pytest.mark.parametrize("factor", [1.0, 3e-5, 7e4])
def test_tiles_give_back_mxfp4_bytes(factor: float) -> None:
    packed = MXFP4().quantize(torch.randn(96, 256) * torch.rand(96, 1).exp2() * factor)
    assert layout.returns_whole(packed)
    tiled = layout.from_packed(packed)
    codes, scales = layout.untile(tiled)
    assert torch.equal(codes, packed.tensors["codes"])
    found = layout.to_e8m0(scales, tiled.tensor_scale)
    assert torch.equal(found, packed.tensors["block_scale"])


def test_what_tiles_would_lose_is_told_before() -> None:
    weight = torch.randn(32, 128)
    assert layout.returns_whole(NVFP4().quantize(weight))
    assert not layout.returns_whole(NF4().quantize(weight))
    assert not layout.returns_whole(BF16().quantize(weight))
    weight[3, 32:64] = 0
    assert not layout.returns_whole(MXFP4().quantize(weight)), "the scale of a block of zeros"
    weight[3, 32:64] = 2.0**-40
    assert not layout.returns_whole(MXFP4().quantize(weight)), "scales 40 binades apart"
    packed = NVFP4().quantize(torch.randn(32, 128))
    packed.tensors["block_scale"].view(torch.uint8)[2, 1] = 0
    assert not layout.returns_whole(packed), "codes under a scale of 0"
