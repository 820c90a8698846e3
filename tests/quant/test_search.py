"""The searched scales: never worse than round to nearest, as good as trying every scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.quant.e2m1 import E2M1_VALUES
from qerl.quant.mxfp4 import MXFP4, decode_e8m0
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format, PackedWeight
from qerl.quant.search import BlockScaled, check_method, search_bytes

FORMATS: list[tuple[Format, Format]] = [
    (NVFP4(), NVFP4(method="mse")),
    (NVFP4(power_of_two_scale=True), NVFP4(power_of_two_scale=True, method="mse")),
    (MXFP4(), MXFP4(method="mse")),
]
KINDS = ("gaussian", "outliers", "decades", "zero block", "tiny", "huge", "constant")


def weights(kind: str, seed: int, shape: tuple[int, int] = (24, 128)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator)
    if kind == "outliers":
        w *= (torch.rand(shape, generator=generator) < 0.05) * 30 + 1
    elif kind == "decades":
        w *= 10.0 ** (-(torch.arange(shape[0]) % 9).float())[:, None]
    elif kind == "zero block":
        w[:, :32] = 0
    elif kind == "constant":
        w = w.sign() * 0.3
    return w * {"tiny": 1e-30, "huge": 1e30}.get(kind, 0.02)


def block_errors(w: torch.Tensor, packed: PackedWeight, importance: torch.Tensor | None = None):
    error = (w.double() - packed.dequantize(torch.float32).double()).square()
    error = error if importance is None else error * importance.double()
    return error.unflatten(1, (-1, packed.format.block_size)).sum(-1)  # [N, blocks]


@pytest.mark.parametrize(("nearest", "searched"), FORMATS, ids=lambda f: f.name)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10_000), weighted=st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_block_is_worse_than_round_to_nearest(
    nearest: BlockScaled, searched: BlockScaled, kind: str, seed: int, weighted: bool
) -> None:
    w = weights(kind, seed)
    importance = None
    if weighted:
        importance = torch.rand(w.shape[1], generator=torch.Generator().manual_seed(seed)) + 0.01
    before = block_errors(w, nearest.quantize(w), importance)
    packed = searched.quantize_scaled([w], search=True, importance=importance)[0]
    after = block_errors(w, packed, importance)
    assert bool((after <= before * (1 + 1e-5)).all())


@pytest.mark.parametrize(("nearest", "searched"), FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_under_their_scale(
    nearest: BlockScaled, searched: BlockScaled, kind: str
) -> None:
    w = weights(kind, 1)
    packed = searched.quantize(w)
    step = searched.steps(packed).double().repeat_interleave(packed.format.block_size, 1)  # [N, K]
    error = (w.double() - packed.dequantize(torch.float32).double()).abs()
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    best = (w.double()[..., None] - step[..., None] * values).abs().amin(-1)  # [N, K]
    assert bool((error <= best + 1e-6 * step).all())


def test_the_search_is_worth_more_than_a_decibel_on_gaussian_nvfp4() -> None:
    w = weights("gaussian", 2, (256, 512))

    def sqnr_db(format: Format) -> float:
        noise = w - format.quantize(w).dequantize(torch.float32)
        return float(10 * torch.log10(w.square().sum() / noise.square().sum()))

    assert sqnr_db(NVFP4()) == pytest.approx(20.4, abs=0.1)
    assert sqnr_db(NVFP4(method="mse")) == pytest.approx(21.8, abs=0.1)
    # A power-of-two step leaves little to choose: 1 in 5 blocks may clip 7 .. 8 steps at 6.
    assert sqnr_db(MXFP4(method="mse")) - sqnr_db(MXFP4()) == pytest.approx(0.05, abs=0.03)


def test_nine_scales_are_as_good_as_all_126() -> None:
    w = weights("gaussian", 3, (64, 512))
    packed = NVFP4(method="mse").quantize(w)
    byte = torch.arange(256, dtype=torch.uint8)
    steps = byte.view(torch.float8_e4m3fn).float() * packed.tensors["tensor_scale"]
    first = packed.tensors["block_scale"].view(torch.uint8)
    every = search_bytes(w, first, steps, range(-125, 126), (1, 126))
    inverse = 1 / packed.tensors["tensor_scale"]
    every_scale = NVFP4()._pack(w, every.view(torch.float8_e4m3fn), inverse)
    found, best = block_errors(w, packed).sum(), block_errors(w, every_scale).sum()
    assert best <= found <= best * (1 + 1e-4)


def test_a_large_weight_alone_in_its_block_may_map_to_four_or_six() -> None:
    # 4 and 3 steps of 1 are exact under a maximum of 4 and cannot be under one of 6.
    block = torch.tensor([4.0, 3.0, 1.0, 0.5] + [0.0] * 12)
    other = torch.full((16,), 6.0)  # gives the tensor scale room for the larger block scale
    w = torch.stack([block, other * 4])
    four = NVFP4(method="mse").quantize(w)
    assert torch.allclose(four.dequantize(torch.float32)[0], block, rtol=0.05)
    assert not torch.allclose(NVFP4().quantize(w).dequantize(torch.float32)[0], block, rtol=0.05)


def test_fused_weights_keep_one_tensor_scale() -> None:
    small, large = weights("gaussian", 4), weights("gaussian", 5) * 7
    nearest = NVFP4().quantize_fused([small, large])
    searched = NVFP4(method="mse").quantize_fused([small, large])
    scales = {float(p.tensors["tensor_scale"]) for p in (*nearest, *searched)}
    assert len(scales) == 1


def test_the_scale_of_a_block_that_round_to_nearest_gives_up_is_used() -> None:
    w = torch.zeros(2, 16)
    w[0, 0] = 1.0
    w[1] = 1.5e-6  # amax / 6 below half of the smallest E4M3 scale
    assert float(NVFP4().quantize(w).dequantize(torch.float32)[1].abs().sum()) == 0
    assert float(NVFP4(method="mse").quantize(w).dequantize(torch.float32)[1].abs().sum()) > 0


def test_mxfp4_searches_the_whole_exponent_range() -> None:
    w = torch.full((2, 32), 1e-38)
    packed = MXFP4(method="mse").quantize(w)
    assert bool(decode_e8m0(packed.tensors["block_scale"]).isfinite().all())


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("format", [NVFP4, MXFP4])
def test_a_calibrated_method_is_refused_at_load_with_the_command(
    format: type[NVFP4] | type[MXFP4], method: str
) -> None:
    chosen = format(method=method)
    with pytest.raises(ValueError, match=rf"method={method}: .*scripts/quantize\.py quant="):
        chosen.quantize(torch.ones(2, 64))


def test_nf4_has_no_method_but_rtn() -> None:
    with pytest.raises(ValueError, match=r"method=awq: nf4 has no method but rtn"):
        NF4(method="awq")
    with pytest.raises(ValueError, match=r"method=best: one of rtn, mse, awq, gptq"):
        check_method("best", "nvfp4")


def test_the_method_is_no_part_of_what_the_bytes_mean() -> None:
    assert NVFP4(method="mse") == NVFP4()
