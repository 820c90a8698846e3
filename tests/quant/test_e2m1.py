import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.quant.e2m1 import E2M1_VALUES, encode_e2m1
from qerl.quant.nibbles import dequantize_rows, pack_high_first, pack_low_first, pair_table

CPU = torch.device("cpu")


def test_each_code_stands_for_its_golden_value() -> None:
    golden = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    # Sign, exponent and mantissa bits by the definition of a float with bias 1.
    for code, value in enumerate(golden):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert E2M1_VALUES[code] == value == (-magnitude if sign else magnitude)


def test_every_value_encodes_to_its_own_code() -> None:
    codes = encode_e2m1(torch.tensor(E2M1_VALUES))
    assert codes.tolist() == [*range(8), 0, *range(9, 16)]  # minus zero takes code 0


@pytest.mark.parametrize(
    ("tie", "value"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)],
)
def test_a_tie_takes_the_even_mantissa_and_its_neighbours_take_the_nearest(
    tie: float, value: float
) -> None:
    at = torch.tensor(tie)
    low, high = torch.nextafter(at, torch.tensor(0.0)), torch.nextafter(at, torch.tensor(9.0))
    codes = encode_e2m1(torch.stack([low, at, high, -low, -at, -high]))
    values = torch.tensor(E2M1_VALUES)[codes.int()]
    assert values[1] == value
    assert values[4] == -value
    below, above = sorted((float(values[0]), float(values[2])))
    assert below < tie < above
    assert value in (below, above)
    assert torch.equal(values[3:], -values[:3])


def test_beyond_six_saturates() -> None:
    codes = encode_e2m1(torch.tensor([6.0, 6.5, 7.0, 1e30, float("inf"), -7.0, -1e30]))
    assert codes.tolist() == [7, 7, 7, 7, 7, 15, 15]


def test_a_small_negative_is_minus_zero() -> None:
    assert encode_e2m1(torch.tensor([-0.1, -0.25, -1e-45, -0.0, 0.1])).tolist() == [8, 8, 8, 0, 0]


@settings(deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_no_other_value_is_nearer(values: list[float]) -> None:
    x = torch.tensor(values)
    nearest = torch.tensor(E2M1_VALUES)[encode_e2m1(x.clone()).int()]
    distance = (x.double()[:, None] - torch.tensor(E2M1_VALUES).double()).abs().amin(1)
    assert torch.equal((x.double() - nearest.double()).abs(), distance)


def test_low_first_puts_the_even_column_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    assert pack_low_first(codes).tolist() == [[0x21, 0xF3]]
    assert pack_high_first(codes).tolist() == [[0x12, 0x3F]]


@pytest.mark.parametrize(("pack", "low_first"), [(pack_low_first, True), (pack_high_first, False)])
def test_every_byte_unpacks_to_the_two_codes_that_made_it(pack, low_first: bool) -> None:
    values = tuple(float(v) for v in range(16))
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)  # [256, 2]
    table = pair_table(values, low_first, CPU)
    ones = torch.ones(256, 1)
    back = dequantize_rows(pack(codes), lambda rows: ones[rows], table, torch.float32)
    assert torch.equal(back, codes.float())
