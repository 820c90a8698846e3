from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.quant.nf4 import (
    NF4,
    NF4_BOUNDS,
    NF4_VALUES,
    dynamic_values,
    encode_nf4,
    quantize_absmax,
    quantize_dynamic,
)
from qerl.quant.packed import PackedWeight

CPU = torch.device("cpu")
SHAPES = [(576, 1536), (7, 64), (1, 64), (33, 320), (1001, 64)]
KINDS = ["gaussian", "decades", "huge", "tiny", "zero blocks", "zeros", "equal", "negative"]


def weights(shape: tuple[int, int], kind: str) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    if kind == "gaussian":
        weight *= 0.02
    elif kind == "decades":
        weight *= 10.0 ** (-(torch.arange(shape[0]) % 9).float())[:, None]
    elif kind == "huge":
        weight *= 1e30
    elif kind == "tiny":
        weight *= 1e-30
    elif kind == "zero blocks":
        weight[::2, :64] = 0
    elif kind == "zeros":
        weight[:] = 0
    elif kind == "equal":
        weight[:] = 0.5
    elif kind == "negative":
        weight = -weight.abs()
    return weight


@pytest.fixture(scope="module")
def bnb() -> ModuleType:
    pytest.importorskip("bitsandbytes", reason="the peer whose bytes are compared")
    import bitsandbytes.functional as functional

    return functional


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def test_the_tables_are_those_of_bitsandbytes(bnb: ModuleType) -> None:
    assert same_bits(torch.tensor(NF4_VALUES), bnb.get_4bit_type("nf4", device="cpu"))
    assert same_bits(dynamic_values(CPU), bnb.create_dynamic_map())


def test_the_dynamic_type_has_256_values_in_order() -> None:
    values = dynamic_values(CPU)
    assert values.shape == (256,)
    assert (values.diff() > 0).all()
    assert values[-1] == 1
    assert values[0] == pytest.approx(-0.9929688)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_values_are_those_of_bitsandbytes(
    bnb: ModuleType, shape: tuple[int, int], kind: str, double_quant: bool, dtype: torch.dtype
) -> None:
    weight = weights(shape, kind).to(dtype)
    flat, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=double_quant
    )
    packed = NF4(double_quant=double_quant).quantize(weight)
    assert torch.equal(packed.tensors["codes"].reshape(-1, 1), flat)
    assert same_bits(packed.tensors["absmax"].flatten(), state.absmax)
    if double_quant:
        assert same_bits(packed.tensors["nested_absmax"], state.state2.absmax)
        assert same_bits(packed.tensors["nested_offset"], state.offset)
    theirs = bnb.dequantize_4bit(flat, state)
    assert same_bits(packed.dequantize(dtype), theirs)


@pytest.mark.parametrize("absmax", [1.0, 0.37])
def test_statistics_near_every_rounding_border_are_those_of_bitsandbytes(
    bnb: ModuleType, absmax: float
) -> None:
    border = (torch.arange(65535).double() + 0.5) * 2 / 65535 - 1  # between two grid points
    border = (border * torch.tensor(absmax)).float()
    up, down = torch.full_like(border, 2), torch.full_like(border, -2)
    values = torch.cat([torch.nextafter(border, down), border, torch.nextafter(border, up)])
    values = values[: values.numel() // 255 * 255].view(-1, 255)
    blocks = torch.cat([torch.full((len(values), 1), absmax), values], 1).clamp(-absmax, absmax)
    codes, state = bnb.quantize_blockwise(blocks, blocksize=256)
    assert (state.absmax == torch.tensor(absmax)).all()
    assert torch.equal(quantize_dynamic(blocks)[0], codes)


@pytest.mark.parametrize("blocks", [1, 255, 256, 257, 5000])
def test_statistics_of_any_length_are_those_of_bitsandbytes(bnb: ModuleType, blocks: int) -> None:
    absmax = torch.rand(1, blocks) * 10.0 ** torch.randint(-6, 3, (1, blocks))
    offset = absmax.mean()
    codes, state = bnb.quantize_blockwise(absmax.flatten() - offset, blocksize=256)
    ours = quantize_absmax(absmax)
    assert torch.equal(ours["absmax"].flatten(), codes)
    assert same_bits(ours["nested_absmax"], state.absmax)
    assert same_bits(ours["nested_offset"], offset)


def test_every_level_encodes_to_its_own_code_and_a_tie_to_the_lower() -> None:
    assert encode_nf4(torch.tensor(NF4_VALUES)).tolist() == list(range(16))
    bounds = torch.tensor(NF4_BOUNDS)
    assert encode_nf4(bounds).tolist() == list(range(15))
    above = torch.nextafter(bounds, torch.full_like(bounds, 2))
    assert encode_nf4(above).tolist() == list(range(1, 16))


def test_the_even_column_is_the_high_nibble() -> None:
    weight = torch.zeros(1, 64)
    weight[0, 0], weight[0, 1], weight[0, 2] = 1.0, -1.0, 0.4407
    codes = NF4().quantize(weight).tensors["codes"][0]
    assert codes[:3].tolist() == [0xF0, 0xC7, 0x77]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 15), min_size=64, max_size=64),
    st.floats(2.0**-100, 2.0**100, width=32),
)
def test_codes_survive_a_round_trip(codes: list[int], absmax: float) -> None:
    codes[9] = 15 * (codes[9] % 2)  # a block keeps its absmax if it holds a level -1 or 1
    high_first = torch.tensor(codes[0::2]) << 4 | torch.tensor(codes[1::2])
    tensors = {"codes": high_first.to(torch.uint8)[None], "absmax": torch.tensor([[absmax]])}
    packed = PackedWeight(format=NF4(double_quant=False), shape=(1, 64), tensors=tensors)
    again = NF4(double_quant=False).quantize(packed.dequantize(torch.float32))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name
