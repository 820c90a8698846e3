"""GPTQ against a column-by-column reference that inverts H anew for every column."""

import pytest
import torch

from qerl.quant.awq import output_error
from qerl.quant.e2m1 import E2M1_VALUES
from qerl.quant.gptq import GptqSettings, gptq
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.search import BlockScaled

FORMATS = [NVFP4(), NVFP4(power_of_two_scale=True), MXFP4()]


def correlated(tokens: int, K: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, K // 4, generator=g) @ torch.randn(K // 4, K, generator=g)
    own = torch.randn(tokens, K, generator=g)
    return (mixed + own) * torch.exp(0.5 * torch.randn(K, generator=g))


def nearest(w: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(sorted(set(E2M1_VALUES)), dtype=torch.float64)
    return step * values[(w[:, None] - step[:, None] * values).abs().argmin(1)]


def reference(
    w: torch.Tensor, step: torch.Tensor, second_moment: torch.Tensor, settings: GptqSettings
) -> torch.Tensor:
    """Optimal brain quantisation with GPTQ's fixed order (arXiv:2210.17323, Eq. 2), fp64."""
    h = second_moment.double()
    h = h + settings.damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    order = h.diagonal().argsort(descending=True, stable=True) if settings.descending else None
    order = torch.arange(len(h)) if order is None else order
    w, step = w.double().clone(), step.double()
    left = order.tolist()
    while left:
        i = left[0]
        inverse = torch.linalg.inv(h[left][:, left])
        error = (w[:, i] - nearest(w[:, i], step[:, i])) / inverse[0, 0]
        w[:, left[1:]] -= error[:, None] * inverse[0, 1:]
        w[:, i] = nearest(w[:, i], step[:, i])
        left = left[1:]
    return w


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_codes_are_those_of_the_column_by_column_reference(
    format: BlockScaled, search: bool, descending: bool
) -> None:
    x = correlated(512, 192)  # more than one lazy batch
    second_moment = x.T @ x / len(x)
    w = torch.randn(16, 192) * 0.02
    settings = GptqSettings(descending=descending, search=search)
    packed = gptq([w], second_moment, format, settings)[0]
    step = format.steps(packed).repeat_interleave(format.block_size, 1)
    expected = reference(w, step, second_moment, settings)
    found = packed.dequantize(torch.float32).double()
    # A weight within fp32's rounding of a border may take the other side, and then its row differs.
    same_rows = ((found - expected).abs() < 1e-6 * step).all(1)
    assert int(same_rows.sum()) >= 15


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_correlated_inputs_give_a_much_lower_output_error_than_rounding(
    format: BlockScaled,
) -> None:
    x = correlated(2048, 256)
    second_moment = x.T @ x / len(x)
    w = torch.randn(64, 256) * 0.02
    found = output_error(w, gptq([w], second_moment, format, GptqSettings())[0], second_moment)
    plain = output_error(w, format.quantize(w), second_moment)
    assert found < 0.5 * plain
    y = x @ w.T
    away = x @ format.quantize(w).dequantize(torch.float32).T - y
    assert plain == pytest.approx(float(away.square().sum(1).mean()), rel=1e-3)


def test_uncorrelated_inputs_leave_round_to_nearest() -> None:
    w = torch.randn(8, 64)
    packed = gptq([w], torch.eye(64), NVFP4(), GptqSettings(search=False))[0]
    assert torch.equal(packed.tensors["codes"], NVFP4().quantize(w).tensors["codes"])


def test_scales_are_those_of_the_data_free_method_and_fused_weights_share_theirs() -> None:
    x = correlated(256, 64)
    weights = [torch.randn(8, 64), 5 * torch.randn(4, 64)]
    packed = gptq(weights, x.T @ x, NVFP4(), GptqSettings())
    for one, free in zip(packed, NVFP4(method="mse").quantize_fused(weights), strict=True):
        for name in ("block_scale", "tensor_scale"):
            assert torch.equal(one.tensors[name].float(), free.tensors[name].float())


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    x = correlated(256, 64)
    x[:, 10:30] = 0
    w = torch.randn(8, 64)
    for inputs in (x, torch.zeros(4, 64)):
        packed = gptq([w], inputs.T @ inputs, NVFP4(), GptqSettings(search=False))[0]
        plain = NVFP4().quantize(w).dequantize(torch.float32)
        found = packed.dequantize(torch.float32)
        assert torch.equal(found[:, 10:30], plain[:, 10:30])


def test_fewer_tokens_than_inputs_still_work() -> None:
    x = correlated(8, 128)
    w = torch.randn(8, 128)
    packed = gptq([w], x.T @ x, MXFP4(), GptqSettings())[0]
    assert bool(packed.dequantize(torch.float32).isfinite().all())


def test_inputs_that_are_not_finite_are_refused() -> None:
    broken = torch.eye(64)
    broken[3, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        gptq([torch.randn(4, 64)], broken, NVFP4(), GptqSettings())
    with pytest.raises(ValueError, match=r"damping=0.0: in \(0, 1\]"):
        GptqSettings(damping=0.0)
