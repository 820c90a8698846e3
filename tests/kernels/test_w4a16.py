"""The front door on a CPU: the portable path, its gradient, the plans, and the parts of a split."""

import itertools
import json
import logging

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qerl.kernels import layout, tiles
from qerl.kernels.dequant import frozen_linear
from qerl.kernels.parts import Parts
from qerl.kernels.tiles import Plan
from qerl.kernels.w4a16 import Workspace, plan, w4a16
from qerl.kernels.w4a16_gemv import w4a16_reference
from qerl.quant.nvfp4 import NVFP4

HOPPER = "NVIDIA H200"


def tiled(n: int, k: int) -> tuple[layout.TiledWeight, torch.Tensor]:
    # Under a power-of-two scale bf16 holds every weight, so fused and portable paths mean the same.
    packed = NVFP4(power_of_two_scale=True).quantize(torch.randn(n, k))
    return layout.from_packed(packed), packed.dequantize(torch.bfloat16).float()


@pytest.mark.parametrize("shape", [(576, 576), (192, 1536)])
def test_portable_path_is_dequantise_and_matmul(shape: tuple[int, int]) -> None:
    weight, dense = tiled(*shape)
    x = torch.randn(5, shape[1])
    torch.testing.assert_close(w4a16(x, weight), x @ dense.T)
    torch.testing.assert_close(w4a16(x, weight), w4a16_reference(x, weight))


def test_portable_path_writes_into_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    weight, dense = tiled(96, 320)
    x, out = torch.randn(3, 320), torch.empty(3, 96)
    with caplog.at_level(logging.INFO):
        assert w4a16(x, weight, out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, x @ dense.T)
    assert "dequantise + matmul" in caplog.text


def test_a_shadow_serves_more_than_128_tokens() -> None:
    weight, dense = tiled(64, 128)
    x = torch.randn(129, 128)
    torch.testing.assert_close(w4a16(x, weight, shadow=2 * dense), 2 * x @ dense.T)
    torch.testing.assert_close(w4a16(x[:128], weight, shadow=2 * dense), x[:128] @ dense.T)


def test_frozen_linear_has_the_gradient_of_the_dense_weight() -> None:
    weight, dense = tiled(96, 192)
    x = torch.randn(7, 192, requires_grad=True)
    grad = torch.randn(7, 96)
    frozen_linear(x, weight).backward(grad)
    torch.testing.assert_close(x.grad, grad @ dense)


def test_a_wrong_width_is_refused() -> None:
    weight, _ = tiled(64, 128)
    with pytest.raises(ValueError, match="x"):
        w4a16(torch.randn(3, 64), weight)
    with pytest.raises(ValueError, match="columns"):
        frozen_linear(torch.randn(3, 64), weight)


def test_parts_add_up_in_order() -> None:
    dense, cut = torch.randn(5, 96), torch.randn(3, 5, 32)
    parts = Parts(dense, torch.cat([cut.flatten(), torch.full((9,), float("nan"))]), 64, 3)
    assert torch.equal(parts.total()[:, :64], dense[:, :64])
    torch.testing.assert_close(parts.total()[:, 64:], cut.sum(0))
    assert torch.equal(Parts.of(dense).total(), dense)


def test_plans_off_hopper_are_dense() -> None:
    weight, _ = tiled(64, 128)
    assert plan(weight, 8).kernel == "dense"


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 33, 128, 129, 256])
def test_every_plan_can_serve_its_shape(tokens: int) -> None:
    names = [name.removeprefix("nf4 ") for name in tiles.table()[HOPPER]]
    measured = [tuple(map(int, name.split("x"))) for name in names]
    small = [(576, 576), (192, 576), (1536, 576), (1152, 896), (896, 4864)]
    codes: tuple[tiles.Codes, ...] = ("e2m1", "nf4")
    for (n, k), kind in itertools.product([*measured, *small], codes):
        how = tiles.plan_for(HOPPER, (n, k), tokens, kind)
        assert how.tokens >= tokens
        if how.kernel == "gemv":
            assert k % (128 * how.warps) == 0
            assert how.split <= k // (128 * how.warps)
        else:
            assert how.kernel == "gemm"
            assert how.token_tile <= 256
            assert how.split <= -(-k // 128)
            assert how.whole < -(-n // (64 * how.row_tiles))
            # A thread block of 32 (4 row tiles + 4) threads has 65536 registers.
            assert 32 * (4 * how.row_tiles + 4) * how.registers <= 65536


def test_more_than_256_tokens_are_dense() -> None:
    assert tiles.plan_for(HOPPER, (3584, 3584), 257).kernel == "dense"


def test_k_that_no_kernel_takes_is_dense() -> None:
    assert tiles.default_plan((64, 48), 8).kernel == "dense"


def test_the_table_names_only_fields_of_a_plan() -> None:
    for shapes in json.loads(tiles.TABLE.read_text()).values():
        for buckets in shapes.values():
            assert [int(size) for size in buckets] == list(tiles.BUCKETS)
            for size, fields in buckets.items():
                assert Plan(**fields).tokens == int(size)


def test_a_workspace_holds_what_the_largest_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.kernels.w4a16.is_hopper", lambda device: True)
    monkeypatch.setattr("qerl.kernels.w4a16.gpu_name", lambda device: HOPPER)
    shapes = [(4608, 3584), (3584, 18944)]
    for most in (1, 9, 100, 256):
        space = Workspace.allocate(shapes, most, "cpu")
        cases = [
            (shape, t) for shape in shapes for t in (1, 8, 9, 16, 17, 64, 100, 256) if t <= most
        ]
        for (n, k), tokens in cases:
            how = tiles.plan_for(HOPPER, (n, k), tokens)
            rows = -(-tokens // how.token_tile) * how.token_tile
            assert space.partials.numel() >= (how.split * tokens * n if how.split > 1 else 0)
            assert space.counters.numel() >= n // 16
            assert how.order == "natural" or space.x.numel() >= rows * k
