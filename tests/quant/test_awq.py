"""Channel scales: never a higher calibration error, and a lower one where channels differ."""

import pytest
import torch

from qerl.quant.awq import (
    AwqSettings,
    channel_scale,
    output_energy,
    output_error,
    pack_for_inputs,
)
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.search import BlockScaled

FORMATS = [NVFP4(), NVFP4(power_of_two_scale=True), MXFP4()]


def salient(tokens: int, K: int) -> torch.Tensor:
    """Inputs of which one in sixteen is ten times as large."""
    x = torch.randn(tokens, K)
    x[:, ::16] *= 10
    return x


def test_the_error_by_the_second_moment_is_the_error_of_the_outputs() -> None:
    x, w, scale = salient(512, 128), torch.randn(32, 128), torch.rand(128) + 0.5
    second_moment = x.T @ x / len(x)
    packed = NVFP4().quantize(w * scale)
    outputs = (x / scale) @ packed.dequantize(torch.float32).T - x @ w.T
    found = output_error(w, packed, second_moment, scale)
    assert found == pytest.approx(float(outputs.square().sum(1).mean()), rel=1e-3)
    assert output_energy(w, second_moment) == pytest.approx(
        float((x @ w.T).square().sum(1).mean()), rel=1e-3
    )


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_salient_channels_are_scaled_up_and_the_output_error_falls(
    format: BlockScaled, search: bool
) -> None:
    x = salient(2048, 256)
    second_moment, mean_abs = x.T @ x / len(x), x.abs().mean(0)
    weights = [torch.randn(64, 256) * 0.02, torch.randn(32, 256) * 0.02]
    settings = AwqSettings(search=search)
    scale = channel_scale(weights, mean_abs, second_moment, format, settings)
    assert float(scale[::16].min()) > float(scale[1::16].max())
    packed = pack_for_inputs(
        [weight * scale for weight in weights],
        second_moment / torch.outer(scale, scale),
        format,
        settings,
    )
    for weight, one in zip(weights, packed, strict=True):
        plain = output_error(weight, format.quantize(weight), second_moment)
        assert output_error(weight, one, second_moment, scale) < 0.95 * plain


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_calibration_error_never_exceeds_that_of_the_searched_scales(
    format: BlockScaled,
) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        x, w = torch.randn(512, 64) @ torch.randn(64, 64), torch.randn(16, 64)
        second_moment = x.T @ x / len(x)
        settings = AwqSettings(rows=4)
        scale = channel_scale([w], x.abs().mean(0), second_moment, format, settings)
        moment = second_moment / torch.outer(scale, scale)
        packed = pack_for_inputs([w * scale], moment, format, settings)[0]
        found = output_error(w, packed, second_moment, scale)
        importance = second_moment.diagonal()
        weighted = format.quantize_scaled([w], search=True, importance=importance)[0]
        assert found <= output_error(w, weighted, second_moment) * (1 + 1e-5)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_scale_is_the_best_of_the_grid_by_brute_force(format: BlockScaled) -> None:
    x, w = salient(512, 64), torch.randn(16, 64)
    second_moment, mean_abs = x.T @ x / len(x), x.abs().mean(0)
    found = channel_scale([w], mean_abs, second_moment, format, AwqSettings(grid=8))
    errors = {}
    for point in range(8):
        power = mean_abs ** (point / 8)
        scale = power / (power.max() * power.min()).sqrt()
        moment = second_moment / torch.outer(scale, scale)  # of x / s, the inputs of W s
        packed = format.quantize_scaled([w * scale], search=True, importance=moment.diagonal())[0]
        errors[point] = (output_error(w * scale, packed, moment), scale)
    _, expected = min(errors.values(), key=lambda pair: pair[0])
    assert torch.allclose(found, expected, rtol=1e-4)


def test_channels_with_one_mean_have_one_scale() -> None:
    x = salient(512, 64)
    mean_abs = x.abs().mean(0).view(2, 32).mean(0).repeat(2)
    scale = channel_scale([torch.randn(8, 64)], mean_abs, x.T @ x / len(x), NVFP4(), AwqSettings())
    assert torch.equal(scale[:32], scale[32:])


def test_inputs_that_are_always_zero_leave_the_weights_alone() -> None:
    zero = torch.zeros(64)
    scale = channel_scale([torch.randn(8, 64)], zero, torch.zeros(64, 64), MXFP4(), AwqSettings())
    assert torch.equal(scale, torch.ones(64))


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="grid=0: at least 1"):
        AwqSettings(grid=0)
    with pytest.raises(ValueError, match="rows=0: at least 1"):
        AwqSettings(rows=0)
