from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.quant.nvfp4 import E4M3_MAX, NVFP4, ZERO_BLOCK_SCALE
from qerl.quant.packed import PackedWeight

SHAPES = [(576, 1536), (7, 64), (1, 16), (33, 320)]


def around(values: torch.Tensor) -> torch.Tensor:
    """Fp32 values one below, at and one above `values` in turn."""
    steps = torch.arange(values.numel()).remainder(3) - 1
    return (values.float().view(torch.int32) + steps.to(torch.int32)).view(torch.float32)


def at_scale_borders(weight: torch.Tensor) -> torch.Tensor:
    """Block maxima within an ulp of where E4M3 rounds up."""
    byte = torch.arange(weight.numel() // 16).remainder(126).to(torch.uint8)
    low, high = (b.view(torch.float8_e4m3fn).double() for b in (byte, byte + 1))
    weight = weight.clamp(-1, 1) * 1e-7
    weight.view(-1, 16)[:, 3] = around((low + high) / 2 * 6 * (0.37 / 2688))
    weight[0, 0] = 0.37
    return weight


def at_code_borders(weight: torch.Tensor) -> torch.Tensor:
    """Weights within an ulp of where a code rounds up."""
    border = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).double().repeat(2)
    byte = (100 + torch.arange(weight.numel() // 16).remainder(20)).to(torch.uint8)
    scale = byte.view(torch.float8_e4m3fn).double()[:, None] * (0.37 / 2688)
    weight = around((border * scale).flatten()).view(weight.shape)
    weight[0, 0] = 0.37
    return weight


def decades(weight: torch.Tensor) -> torch.Tensor:
    """Tiny and huge rows under one tensor scale."""
    return weight * 10.0 ** (-(torch.arange(len(weight)) % 9).float())[:, None]


def zero_block(weight: torch.Tensor) -> torch.Tensor:
    return weight.index_fill(1, torch.arange(16), 0)


def outliers(weight: torch.Tensor) -> torch.Tensor:
    weight[::3, 5] = 1000
    return weight


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaussian": lambda weight: weight * 0.02,
    "decades": decades,
    "huge": lambda weight: weight * 1e34,
    "tiny": lambda weight: weight * 1e-33,
    "vanishing": lambda weight: weight * 1e-38,  # below what an fp32 global scale can reach
    "zero block": zero_block,
    "zeros": torch.zeros_like,
    "outliers": outliers,
    "ties": lambda weight: (weight * 8).round() / 4,
    "scale borders": at_scale_borders,
    "code borders": at_code_borders,
}


def weights(shape: tuple[int, int], kind: str) -> torch.Tensor:
    return KINDS[kind](torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def dense_from(codes: torch.Tensor, block_scale: torch.Tensor, tensor_scale: float) -> PackedWeight:
    return PackedWeight(
        format=NVFP4(),
        shape=(codes.shape[0], 2 * codes.shape[1]),
        tensors={
            "codes": codes,
            "block_scale": block_scale,
            "tensor_scale": torch.tensor(tensor_scale),
        },
    )


class Peer:
    """compressed-tensors' own path from a dense weight to a checkpoint's tensors, and back."""

    def __init__(self) -> None:
        pytest.importorskip("compressed_tensors", reason="the peer whose bytes are compared")
        from compressed_tensors.compressors import NVFP4PackedCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        self.scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
        self.compressor = NVFP4PackedCompressor
        self.qparams = calculate_qparams
        self.global_scale = generate_gparam

    def pack(self, weight: torch.Tensor, g: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        g = self.global_scale(weight.amin(), weight.amax()) if g is None else g
        blocks = weight.unflatten(1, (-1, 16))
        scale, _ = self.qparams(
            blocks.amin(-1), blocks.amax(-1), self.scheme.weights, global_scale=g
        )
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": g}
        return self.compressor.compress(state, self.scheme)

    def unpack(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.compressor.decompress(state, self.scheme)["weight"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_compressed_tensors(shape: tuple[int, int], kind: str) -> None:
    weight = weights(shape, kind)
    theirs, ours = Peer().pack(weight), NVFP4().quantize(weight).tensors
    assert torch.equal(ours["codes"], theirs["weight_packed"])
    assert same_bits(ours["block_scale"], theirs["weight_scale"])
    assert torch.equal(ours["tensor_scale"], 1 / theirs["weight_global_scale"][0])


def test_fused_bytes_are_those_of_compressed_tensors_under_the_smallest_global_scale() -> None:
    peer = Peer()
    members = [torch.randn(64, 320), torch.randn(16, 320) * 5, torch.randn(16, 320) * 0.1]
    g = torch.stack([peer.global_scale(w.amin(), w.amax()) for w in members]).amin(0)
    for weight, packed in zip(members, NVFP4().quantize_fused(members), strict=True):
        theirs = peer.pack(weight, g)
        assert torch.equal(packed.tensors["codes"], theirs["weight_packed"])
        assert same_bits(packed.tensors["block_scale"], theirs["weight_scale"])


@pytest.mark.parametrize("kind", ["gaussian", "decades", "huge", "tiny", "outliers"])
def test_a_power_of_two_scale_dequantises_to_the_bits_of_compressed_tensors(kind: str) -> None:
    peer = Peer()
    weight = weights((577, 320), kind)
    packed = NVFP4(power_of_two_scale=True).quantize(weight)
    theirs = peer.pack(weight, (1 / packed.tensors["tensor_scale"]).reshape(1))
    assert torch.equal(packed.tensors["codes"], theirs["weight_packed"])
    dense = packed.dequantize(torch.bfloat16)
    assert torch.equal(dense.view(torch.int16), peer.unpack(theirs).view(torch.int16))


def test_multiplying_by_the_scale_is_dividing_by_the_inverse_to_the_last_bit_but_one() -> None:
    peer = Peer()
    weight = weights((576, 1536), "gaussian")
    ours = NVFP4().quantize(weight).dequantize(torch.bfloat16)
    theirs = peer.unpack(peer.pack(weight))
    steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps != 0).float().mean() < 1e-3


def test_equation_six_by_hand() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([26.88, -13.44, 4.5])
    weight[0, 16] = 0.06
    packed = NVFP4().quantize(weight)
    assert packed.tensors["tensor_scale"].item() == pytest.approx(26.88 / 2688)
    # 0.06 / 6 is 1 unit of the tensor scale; 26.88 / 6 is 448 of them.
    assert packed.tensors["block_scale"].float().tolist() == [[448.0, 1.0]]
    # 26.88 → 6, -13.44 → -3, 4.5 / 4.48 → 1; the first byte holds column 1 in its high nibble.
    assert packed.tensors["codes"][0, :2].tolist() == [0xD7, 0x02]
    back = packed.dequantize(torch.float32)[0]
    assert back[[0, 1, 2, 16]].tolist() == pytest.approx([26.88, -13.44, 4.48, 0.06])


def test_fused_members_share_the_scale_of_the_largest_and_dequantise_with_it() -> None:
    q, k, v = torch.randn(64, 128), torch.randn(16, 128) * 10, torch.randn(16, 128) * 0.1
    alone = [NVFP4().quantize(w) for w in (q, k, v)]
    fused = NVFP4().quantize_fused([q, k, v])
    scales = [float(p.tensors["tensor_scale"]) for p in fused]
    assert scales == [float(alone[1].tensors["tensor_scale"])] * 3
    assert float(alone[0].tensors["tensor_scale"]) < scales[0]
    # The fused matmul sees one matrix: packing the stack gives the members' bytes.
    stacked = NVFP4().quantize(torch.cat([q, k, v]))
    assert torch.equal(stacked.tensors["codes"], torch.cat([p.tensors["codes"] for p in fused]))
    assert torch.equal(
        stacked.dequantize(torch.float32), torch.cat([p.dequantize(torch.float32) for p in fused])
    )


def every_code_and_scale(tensor_scale: float) -> PackedWeight:
    """All 16 codes under each of the 127 finite, not negative E4M3 scales."""
    byte = torch.arange(127, dtype=torch.uint8)
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = byte.view(torch.float8_e4m3fn)[:, None].contiguous()
    return dense_from(codes.expand(127, 8).contiguous(), scale, tensor_scale)


@pytest.mark.parametrize("exponent", [-100, -14, -13, 0, 20])
def test_under_a_power_of_two_scale_bf16_holds_every_weight_exactly(exponent: int) -> None:
    packed = every_code_and_scale(2.0**exponent)
    wide = packed.dequantize(torch.float32)
    assert torch.equal(packed.dequantize(torch.bfloat16).float(), wide)
    assert wide.max() == 6 * E4M3_MAX * 2.0**exponent


def test_under_another_scale_bf16_rounds() -> None:
    packed = every_code_and_scale(0.3)
    wide = packed.dequantize(torch.float32)
    assert not torch.equal(packed.dequantize(torch.bfloat16).float(), wide)


@pytest.mark.parametrize("amax", [1.0, 2688.0, 2687.0, 2689.0, 0.02, 5.25, 5.2500005, 1e-30, 1e30])
def test_the_power_of_two_scale_is_the_smallest_that_does_not_overflow(amax: float) -> None:
    weight = torch.full((2, 32), amax)
    packed = NVFP4(power_of_two_scale=True).quantize(weight)
    scale = float(packed.tensors["tensor_scale"])
    assert torch.tensor(scale).frexp().mantissa == 0.5
    exact = float(weight[0, 0]) / (6 * E4M3_MAX)
    assert exact <= scale < 2 * exact
    back = packed.dequantize(torch.float32)
    assert torch.allclose(back, weight, rtol=1 / 16)  # E4M3 has 3 mantissa bits; nothing saturates


def test_a_block_that_vanishes_beside_the_largest_stores_an_eighth_and_zeros() -> None:
    weight = torch.full((1, 32), 1e-6)
    weight[0, 0] = 6.0  # the unit is 6 / 2688; the second block's scale would be below 2^-10 of it
    packed = NVFP4().quantize(weight)
    assert packed.tensors["block_scale"].float().tolist() == [[448.0, ZERO_BLOCK_SCALE]]
    assert (packed.dequantize(torch.float32)[0, 16:] == 0).all()


def test_a_weight_too_small_for_a_scale_packs_as_zeros() -> None:
    packed = NVFP4().quantize(torch.full((1, 16), 1e-37))
    assert float(packed.tensors["tensor_scale"]) == 1
    assert (packed.dequantize(torch.float32) == 0).all()


nibbles = st.lists(st.integers(0, 15), min_size=32, max_size=32)


@settings(max_examples=60, deadline=None)
@given(
    nibbles,
    st.lists(st.integers(8, 0x7E), min_size=2, max_size=2),  # normal E4M3 scales
    st.integers(-20, 20),
)
def test_codes_survive_a_round_trip(codes: list[int], scales: list[int], exponent: int) -> None:
    # A block keeps its scale if it holds a ±6, and a tensor its own if a block holds the largest.
    codes = [0 if code == 8 else code for code in codes]  # minus zero is read back as zero
    codes[0], codes[16] = 7, 15
    low_first = torch.tensor(codes[0::2]) | torch.tensor(codes[1::2]) << 4
    block_scale = torch.tensor([[0x7E, scales[1]]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = dense_from(low_first.to(torch.uint8)[None], block_scale, 2.0**exponent)
    again = NVFP4().quantize(packed.dequantize(torch.float32))
    for name, tensor in packed.tensors.items():
        assert same_bits(tensor, again.tensors[name]), name
