import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.quant.mxfp4 import MXFP4, decode_e8m0, encode_e8m0
from qerl.quant.packed import PackedWeight


def peer_pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors' checkpoint tensors, and the bf16 weight that it reads back."""
    pytest.importorskip("compressed_tensors", reason="the peer whose bytes are compared")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    blocks = weight.unflatten(1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return state, MXFP4PackedCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [0.02, 1.0, 1e-30, 1e30, 1e-38, 0.0, "decades", "ties"])
@pytest.mark.parametrize("shape", [(576, 1536), (7, 64), (1, 32), (33, 320)], ids=str)
def test_bytes_and_values_are_those_of_compressed_tensors(
    shape: tuple[int, int], magnitude: float | str, dtype: torch.dtype
) -> None:
    weight = torch.randn(shape)
    if magnitude == "decades":
        weight *= 10.0 ** (30 - torch.arange(shape[0]) % 61).float()[:, None]
    elif magnitude == "ties":
        weight = (weight * 8).round() / 4
    else:
        weight *= magnitude
    weight = weight.to(dtype)
    theirs, dense = peer_pack(weight)
    ours = MXFP4().quantize(weight)
    assert torch.equal(ours.tensors["codes"], theirs["weight_packed"])
    assert torch.equal(ours.tensors["block_scale"], theirs["weight_scale"])
    assert torch.equal(ours.dequantize(torch.bfloat16).view(torch.int16), dense.view(torch.int16))


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(4.0, 0), (6.0, 0), (6.999, 0), (7.0, 1), (7.999, 1), (8.0, 1), (3.5, 0), (3.499, -1)],
)
def test_the_step_is_a_quarter_of_the_power_of_two_below_or_above_from_seven_quarters_on(
    amax: float, exponent: int
) -> None:
    assert encode_e8m0(torch.tensor([[amax]])).item() == 127 + exponent


def test_every_byte_is_its_power_of_two() -> None:
    byte = torch.arange(255, dtype=torch.uint8)[None]
    golden = 2.0 ** (torch.arange(255, dtype=torch.float64) - 127)
    assert torch.equal(decode_e8m0(byte)[0].double(), golden)


def test_the_largest_weights_saturate_and_stay_finite() -> None:
    weight = torch.full((1, 32), 3.3e38)  # compressed-tensors stores NaN's byte, 255, here
    packed = MXFP4().quantize(weight)
    assert packed.tensors["block_scale"].item() == 252
    assert torch.equal(packed.dequantize(torch.float32), torch.full((1, 32), 6 * 2.0**125))


@pytest.mark.parametrize("byte", [1, 60, 127, 200, 250])
def test_bf16_holds_every_weight_exactly(byte: int) -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    packed = PackedWeight(
        format=MXFP4(), shape=(1, 32), tensors={"codes": codes, "block_scale": scale}
    )
    wide = packed.dequantize(torch.float32)
    assert torch.equal(packed.dequantize(torch.bfloat16).float(), wide)
    assert wide.max() == 6 * 2.0 ** (byte - 127)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=32, max_size=32), st.integers(0, 250))
def test_codes_survive_a_round_trip(codes: list[int], byte: int) -> None:
    codes = [0 if code == 8 else code for code in codes]  # minus zero is read back as zero
    codes[5] = 6 + codes[5] % 2  # a block keeps its scale if its largest value is 4 or 6
    low_first = torch.tensor(codes[0::2]) | torch.tensor(codes[1::2]) << 4
    tensors = {
        "codes": low_first.to(torch.uint8)[None],
        "block_scale": torch.tensor([[byte]], dtype=torch.uint8),
    }
    packed = PackedWeight(format=MXFP4(), shape=(1, 32), tensors=tensors)
    again = MXFP4().quantize(packed.dequantize(torch.float32))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name
