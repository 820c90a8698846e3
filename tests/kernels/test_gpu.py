"""The kernels on a GPU: against float64, bit for bit over 200 runs, and inside a CUDA graph."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qerl.kernels import layout, layout_nf4
from qerl.kernels.bench import check_dequantize, check_lora, check_plan, random_adapter
from qerl.kernels.bench_layer import Batch, DecodeLayers
from qerl.kernels.dequant import dequantize
from qerl.kernels.launch import is_hopper
from qerl.kernels.lora import add_adapter
from qerl.kernels.nf4 import dequantize_nf4
from qerl.kernels.norm import add_rms_norm
from qerl.kernels.paged_attention import Cut, Tables, paged_attention, paged_attention_reference
from qerl.kernels.rotate import rotate_, rotate_reference
from qerl.kernels.sample import Draws, sample, sample_reference
from qerl.kernels.swiglu import gate_mul_, gate_mul_reference
from qerl.kernels.tiles import bucket, default_plan
from qerl.kernels.w4a16 import Workspace, plan, w4a16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4

pytestmark = pytest.mark.gpu


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def packed_weight(n: int, k: int, quantizer: NVFP4 | MXFP4 | None = None) -> layout.TiledWeight:
    weight = torch.randn(n, k, device="cuda")
    weight[torch.rand(n, device="cuda") < 0.01] *= 10
    return layout.from_packed((quantizer or NVFP4()).quantize(weight))


@pytest.mark.parametrize("shape", [(4608, 3584), (576, 576), (80, 1536)])
@pytest.mark.parametrize("quantizer", [NVFP4(), MXFP4()])
def test_dequantise_is_bitwise_its_reference(
    shape: tuple[int, int], quantizer: NVFP4 | MXFP4
) -> None:
    assert check_dequantize(packed_weight(*shape, quantizer))


@pytest.mark.parametrize("double", [True, False])
def test_nf4_is_bitwise_its_format(double: bool) -> None:
    packed = NF4(double_quant=double).quantize(torch.randn(512, 3584, device="cuda"))
    assert torch.equal(dequantize_nf4(packed), packed.dequantize(torch.bfloat16))


NF4_SHAPES = [(4608, 3584), (3584, 18944), (576, 1536), (192, 640), (96, 512)]


@pytest.mark.parametrize("shape", NF4_SHAPES)
def test_nf4_tiles_dequantise_bitwise(shape: tuple[int, int]) -> None:
    assert check_dequantize(layout_nf4.random_nf4(shape))


@pytest.mark.parametrize("shape", NF4_SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 16, 31, 64, 100, 128, 200, 256])
def test_200_runs_of_nf4_agree_too(shape: tuple[int, int], tokens: int) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the fused kernels need compute capability 9.0")
    weight = layout_nf4.random_nf4(shape)
    found = check_plan(weight, tokens, plan(weight, tokens))
    assert found["differing"] == 0
    assert found["counters_zero"]
    assert found["relative_error"] < 3e-3


@pytest.mark.parametrize("tokens", [1, 8, 9, 31, 100, 256])
@pytest.mark.parametrize(
    ("shape", "widths"), [((4608, 3584), (3584, 512, 512)), ((192, 640), (96, 32, 64))]
)
def test_adapters_of_nf4_are_added(
    shape: tuple[int, int], widths: tuple[int, ...], tokens: int
) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the fused kernels need compute capability 9.0")
    found = check_lora(layout_nf4.random_nf4(shape), widths, tokens)
    assert found["differing"] == 0
    assert found["counters_zero"]
    assert found["relative_error"] < 4e-3


@pytest.mark.parametrize("shape", [(4608, 3584), (3584, 18944), (576, 1536), (192, 576), (96, 640)])
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 16, 31, 64, 100, 128, 200, 256])
def test_200_runs_agree_in_every_bit_and_with_float64(shape: tuple[int, int], tokens: int) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the fused kernels need compute capability 9.0")
    weight = packed_weight(*shape)
    found = check_plan(weight, tokens, plan(weight, tokens))
    assert found["differing"] == 0
    assert found["counters_zero"]
    assert found["relative_error"] < 3e-3  # bf16 output: 1.7e-3


def test_plans_by_rule_are_right_too() -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the fused kernels need compute capability 9.0")
    weight = packed_weight(1152, 2048, MXFP4())
    for tokens in (3, 40):
        rule = default_plan(weight.shape, bucket(tokens))
        found = check_plan(weight, tokens, rule, repeats=20)
        assert found["differing"] == 0
        assert found["relative_error"] < 3e-3


def test_w4a16_and_the_norm_run_in_a_graph_that_sees_noise_added_in_place() -> None:
    weight = packed_weight(576, 1536)
    x = torch.randn(16, 1536, device="cuda").bfloat16()
    y = torch.empty(16, 576, dtype=torch.bfloat16, device="cuda")
    space = Workspace.allocate([weight.shape], 16)
    scale = torch.ones(576, device="cuda")
    normed = torch.empty_like(y)

    def step() -> None:
        w4a16(x, weight, y, workspace=space)
        add_rms_norm(None, y, scale, 1e-6, normed)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.normal_()
    scale.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    want = x.double() @ dequantize(weight).double().T
    assert relative(y, want) < 3e-3
    clean = y.float() * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + 1e-6)
    assert relative(normed, 2 * clean) < 5e-3


@pytest.mark.parametrize("tokens", [1, 8, 9, 31, 64, 100, 256])
@pytest.mark.parametrize(
    ("shape", "widths"),
    [((4608, 3584), (3584, 512, 512)), ((3584, 18944), (3584,)), ((192, 640), (96, 32, 64))],
)
def test_adapters_of_every_member_are_added_200_times_alike(
    shape: tuple[int, int], widths: tuple[int, ...], tokens: int
) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the fused kernels need compute capability 9.0")
    found = check_lora(packed_weight(*shape), widths, tokens)
    assert found["differing"] == 0
    assert found["counters_zero"]
    assert found["relative_error"] < 4e-3  # of x Wᵀ + a Bᵀ: both terms matter, a is rounded


@pytest.mark.parametrize("rows", [5, 40])
def test_an_adapter_of_a_dense_matmul_is_added(rows: int) -> None:
    low_rank = random_adapter((3584, 512, 512), 3584, rows, 32)
    y = torch.randn(rows, 4608, device="cuda").bfloat16()
    x = torch.randn(rows, 3584, device="cuda").bfloat16()
    want = y.double() + low_rank.added(x.float() @ low_rank.stacked.float().T).double()
    assert relative(add_adapter(y, x, low_rank), want) < 4e-3


@pytest.mark.parametrize(("rows", "group"), [(1, 0), (5, 0), (32, 16), (48, 8)])
def test_attention_equals_its_reference(rows: int, group: int) -> None:
    h, hk, d, size = 28, 4, 128, 64
    prompts = rows // group if group else 0
    pool = torch.randperm(4 * rows + 8 * prompts, device="cuda")
    tables = Tables(
        pool[: 8 * prompts].view(prompts, 8 if prompts else 1),
        torch.randint(1, 500, (prompts,), device="cuda"),
        torch.arange(rows if prompts else 0, device="cuda").view(prompts, group or 1),
        pool[8 * prompts :].view(rows, 4),
        torch.randint(1, 257, (rows,), device="cuda"),
    )
    slots = pool.numel() * size
    pages = tuple(torch.randn(hk, slots, d, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(rows, h, d, device="cuda").bfloat16()
    wide = (pages[0].float(), pages[1].float())
    want = paged_attention_reference(q.float(), wide, tables, size).flatten(1)
    cut = Cut.allocate(rows, prompts, (h, hk, d))
    first = None
    for _ in range(200):
        out = torch.full((rows, h * d), float("nan"), device="cuda", dtype=torch.bfloat16)
        paged_attention(q, (pages[0], pages[1]), tables, size, cut, out)
        first = out if first is None else first
        assert torch.equal(out, first)
    assert relative(out, want) < 5e-3


@pytest.mark.parametrize("vocabulary", [49152, 151936])
def test_sampling_equals_its_reference_and_ignores_the_batch(vocabulary: int) -> None:
    logits = torch.randn(32, vocabulary, device="cuda") * 3
    seeds = torch.randint(-(2**62), 2**62, (32,), device="cuda")
    positions = torch.arange(32, device="cuda")
    found = sample(logits, seeds, positions, 0.9, Draws.allocate(32, vocabulary))
    tokens, logprobs, lse, entropy = sample_reference(logits, seeds, positions, 0.9)
    same = found.tokens == tokens  # a uniform within a rounding of a border may go either way
    assert int(same.sum()) >= 31
    torch.testing.assert_close(found.logprobs[same], logprobs[same], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.logsumexp, lse, atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(found.entropy, entropy, atol=1e-4, rtol=1e-5)
    alone = sample(logits[7:8], seeds[7:8], positions[7:8], 0.9, Draws.allocate(1, vocabulary))
    assert alone.tokens[0] == found.tokens[7]
    assert alone.logprobs[0] == found.logprobs[7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_nan_draw_a_token_of_the_vocabulary(temperature: float) -> None:
    logits = torch.full((2, 9000), float("nan"), device="cuda")
    seeds = torch.zeros(2, dtype=torch.int64, device="cuda")
    found = sample(logits, seeds, seeds, temperature, Draws.allocate(2, 9000))
    assert bool(((found.tokens >= 0) & (found.tokens < 9000)).all())
    assert bool(found.logprobs.isnan().all())


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("rank", [0, 32])
def test_chained_layers_repeat_bit_for_bit_in_a_graph(rows: int, rank: int) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("the fused kernels need compute capability 9.0")
    layers = DecodeLayers("3b", Batch(rows, prompt=128, own=128), rank, count=2)
    start = layers.residual.clone()
    layers.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.step()
    first = None
    for _ in range(20):
        layers.residual.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        first = layers.residual.clone() if first is None else first
        assert torch.equal(layers.residual, first)
    assert bool(first.isfinite().all())


@pytest.mark.parametrize("heads", [1, 3, 28])
@pytest.mark.parametrize("normed", [True, False])
def test_prompts_are_turned_as_the_reference_turns_them(heads: int, normed: bool) -> None:
    x = torch.randn(37, heads, 128, device="cuda").bfloat16()
    angles = torch.rand(37, 1, 64, device="cuda") * 6
    weight = torch.rand(128, device="cuda") if normed else None
    want = rotate_reference(x, angles.cos(), angles.sin(), weight)
    found = rotate_(x.clone(), angles.cos(), angles.sin(), weight)
    assert relative(found, want) < 2e-3
    assert torch.equal(found, rotate_(x.clone(), angles.cos(), angles.sin(), weight))


@pytest.mark.parametrize("width", [576, 1536, 18944])
def test_gates_are_multiplied_in_place(width: int) -> None:
    gate, up = (torch.randn(37, width, device="cuda").bfloat16() for _ in range(2))
    want = gate_mul_reference(gate, up)
    assert relative(gate_mul_(gate.clone(), up), want) < 2e-3
