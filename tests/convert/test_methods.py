"""Folding changes no function, and every method leaves a smaller error than rounding."""

from collections.abc import Callable

import pytest
import torch

from qerl.convert.calibrate import StreamedCalibration, dense_layer, quantized_layer
from qerl.convert.method import GROUPS, LayerInputs, LayerWeights
from qerl.convert.methods import METHODS, Awq, Gptq, Mse, _shared, fold
from qerl.convert.report import document, linear_rows, summary
from qerl.model.attention import ForestAttend
from qerl.model.layers import RotaryEmbedding
from qerl.model.source import Toy
from qerl.model.spec import ModelSpec
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.types import Segment

Layers = Callable[..., tuple[ModelSpec, torch.Tensor, list[LayerWeights]]]


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def toy(
    family: str = "llama", layers: int = 2
) -> tuple[ModelSpec, torch.Tensor, list[LayerWeights]]:
    """A toy whose channels differ in norms, in rows of v_proj and in rows of up_proj."""
    source = Toy(family=family, layers=layers, heads=4, kv_heads=2)
    weights = source.weights()
    spec = source.spec
    g = torch.Generator().manual_seed(3)
    found = []
    for index in range(layers):
        prefix = f"model.layers.{index}."
        tensors = {
            name.removeprefix(prefix): weights.get(name).float()
            for name in weights.names()
            if name.startswith(prefix)
        }
        for name, tensor in tensors.items():
            if "layernorm" in name:
                tensor.copy_(torch.exp(torch.randn(tensor.shape, generator=g)))
            if name.endswith(".bias"):
                tensor.normal_(generator=g)
            if "v_proj" in name or "up_proj" in name:
                tensor.mul_(
                    torch.exp(torch.randn(len(tensor), generator=g)).view(
                        -1, *[1] * (tensor.ndim - 1)
                    )
                )
        found.append(LayerWeights(index=index, tensors=tensors))
    return spec, weights.get("model.embed_tokens.weight").float(), found


def tokens(spec: ModelSpec, count: int = 8, length: int = 48) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, spec.vocab_size, (count, length), generator=g)


def outputs(spec: ModelSpec, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    cos, sin = RotaryEmbedding(spec)(torch.arange(len(x)))
    attend = ForestAttend([Segment(start=0, length=len(x), parent=None)])
    with torch.no_grad():
        out: torch.Tensor = dense_layer(spec, layer, torch.float32)(0, x, cos, sin, attend)
    return out


def test_folding_any_scales_leaves_the_layer_s_function(family: str) -> None:
    spec, _, (layer, *_) = toy(family)
    scales = {
        group: torch.rand(layer.linear(names[0]).shape[1]) * 3 + 0.3
        for group, names in GROUPS.items()
    }
    heads = scales["o"].view(spec.kv_heads, -1, spec.head_dim)
    scales["o"] = heads[:, :1].expand_as(heads).flatten()
    folded, _ = fold(layer, scales, spec.head_dim)
    x = torch.randn(40, spec.hidden_size)
    before, after = outputs(spec, layer, x), outputs(spec, folded, x)
    assert not torch.equal(layer.linear("self_attn.o_proj"), folded.linear("self_attn.o_proj"))
    assert float((before - after).abs().max()) < 1e-5 * float(before.abs().max())


def test_folding_is_exact_for_norms_that_are_stored_in_bf16() -> None:
    spec, _, (layer, *_) = toy()
    norms = {n: t.bfloat16() for n, t in layer.tensors.items() if "layernorm" in n}
    layer = LayerWeights(index=0, tensors={**layer.tensors, **norms})
    scales = {
        group: torch.full((layer.linear(names[0]).shape[1],), 1.37)
        for group, names in GROUPS.items()
    }
    folded, exact = fold(layer, scales, spec.head_dim)
    assert folded.tensors["input_layernorm.weight"].dtype == torch.bfloat16
    assert not torch.equal(exact["q/k/v"], scales["q/k/v"])
    x = torch.randn(40, spec.hidden_size)
    before, after = outputs(spec, layer, x), outputs(spec, folded, x)
    assert float((before - after).abs().max()) < 1e-5 * float(before.abs().max())


def test_scales_that_no_value_row_can_carry_are_refused() -> None:
    spec, _, (layer, *_) = toy()
    scales = {group: torch.ones(layer.linear(names[0]).shape[1]) for group, names in GROUPS.items()}
    scales["o"][0] = 2
    with pytest.raises(ValueError, match="query heads of one value head"):
        fold(layer, scales, spec.head_dim)


def through(
    name: str, format: Format, family: str = "llama"
) -> tuple[list[float], list[torch.Tensor]]:
    """Output errors of all linears, and the hidden states after each layer."""
    spec, embed, layers = toy(family)
    calibration = StreamedCalibration(spec, embed, tokens(spec), dtype=torch.float32)
    errors, states = [], []
    for layer in layers:
        inputs = calibration.inputs(layer)
        quantised = METHODS[name].quantize(layer, format, inputs)
        rows = quantised.rows
        if name == "rtn":
            rows = linear_rows(layer, quantised.linears, inputs)
        errors += [float(str(row["output_error"])) for row in rows]
        calibration.advance(quantised)
        states.append(calibration.hidden.clone())
    return errors, states


@pytest.mark.parametrize("format", [NVFP4(), MXFP4()], ids=lambda f: f.name)
def test_every_method_beats_rounding_on_output_error(format: Format, family: str) -> None:
    plain, _ = through("rtn", format, family)
    for name, factor in (("mse", 1.0), ("awq", 0.98), ("gptq", 0.8)):
        found, _ = through(name, format, family)
        assert sum(found) < factor * sum(plain), name


def test_awq_s_reported_error_is_that_of_the_layer_before_folding() -> None:
    spec, embed, (layer, *_) = toy()
    calibration = StreamedCalibration(spec, embed, tokens(spec), dtype=torch.float32)
    inputs = calibration.inputs(layer)
    quantised = Awq().quantize(layer, NVFP4(), inputs)
    norm = "input_layernorm.weight"
    scale = layer.tensors[norm] / quantised.others[norm]
    assert float(scale.max()) > 1.01  # it has found something to scale
    row = next(row for row in quantised.rows if row["linear"] == "self_attn.q_proj")
    dense = layer.linear("self_attn.q_proj")
    away = quantised.linears["self_attn.q_proj"].dequantize(torch.float32) / scale - dense
    moment = inputs.second_moment["q/k/v"]
    share = torch.trace(away @ moment @ away.T) / torch.trace(dense @ moment @ dense.T)
    assert float(str(row["output_error"])) == pytest.approx(float(share) ** 0.5, rel=1e-3)
    divided_moment = moment / torch.outer(scale, scale)
    options = [
        NVFP4().quantize_scaled([dense * scale], search=True, importance=divided_moment.diagonal())
    ]
    best = torch.trace(
        (a := options[0][0].dequantize(torch.float32) / scale - dense) @ moment @ a.T
    )
    assert float(share * torch.trace(dense @ moment @ dense.T)) < float(best) * 1.05


def test_heads_that_read_one_value_head_share_their_mean() -> None:
    spec, _, (layer, *_) = toy()
    mean = torch.rand(spec.heads * spec.head_dim)
    inputs = LayerInputs(tokens=1, second_moment={}, mean_abs={"o": mean}, head_dim=spec.head_dim)
    shared = _shared(mean, layer, inputs).view(spec.heads, spec.head_dim)
    expected = mean.view(spec.heads, spec.head_dim)[:2].mean(0)  # heads 0 and 1 read value head 0
    assert torch.allclose(shared[0], expected)
    assert torch.equal(shared[0], shared[1])
    assert not torch.equal(shared[1], shared[2])


def test_two_conversions_give_the_same_bytes_and_states() -> None:
    for name in ("awq", "gptq"):
        assert torch.equal(through(name, NVFP4())[1][-1], through(name, NVFP4())[1][-1])


def test_statistics_are_those_of_a_plain_forward() -> None:
    spec, embed, (layer, *_) = toy("qwen2")
    ids = tokens(spec)
    seen: list[tuple[str, int, int]] = []
    calibration = StreamedCalibration(
        spec, embed, ids, dtype=torch.float32, progress=lambda *at: seen.append(at)
    )
    calibration._chunk = 3  # the last chunk is smaller
    inputs = calibration.inputs(layer)
    x = embed[ids.flatten()]
    norm = layer.tensors["input_layernorm.weight"]
    entered = x * torch.rsqrt(x.square().mean(1, keepdim=True) + spec.rms_eps) * norm
    assert inputs.tokens == ids.numel()
    assert torch.allclose(
        inputs.second_moment["q/k/v"], entered.T @ entered / len(x), rtol=1e-3, atol=1e-5
    )
    assert torch.allclose(inputs.mean_abs["q/k/v"], entered.abs().mean(0), rtol=1e-4)
    assert {group: len(mean) for group, mean in inputs.mean_abs.items()} == {
        "q/k/v": spec.hidden_size,
        "o": spec.heads * spec.head_dim,
        "gate/up": spec.hidden_size,
        "down": spec.mlp_size,
    }
    assert seen == [("measure", 3, 8), ("measure", 6, 8), ("measure", 8, 8)]


def test_the_next_layer_sees_what_the_quantised_one_gives() -> None:
    spec, embed, (layer, *_) = toy("qwen3")
    ids = tokens(spec, 2, 16)
    calibration = StreamedCalibration(spec, embed, ids, dtype=torch.float32)
    quantised = Mse().quantize(layer, NVFP4())
    calibration.advance(quantised)
    module = quantized_layer(spec, quantised, torch.float32)
    cos, sin = RotaryEmbedding(spec)(torch.arange(16))
    attend = ForestAttend([Segment(start=0, length=16, parent=None)])
    with torch.no_grad():
        expected = module(0, embed[ids[1]], cos, sin, attend)
    assert torch.allclose(calibration.hidden[1], expected, atol=1e-5)


def test_tokens_of_another_vocabulary_are_refused() -> None:
    spec, embed, _ = toy()
    with pytest.raises(ValueError, match=rf"this model has {len(embed)}"):
        StreamedCalibration(spec, embed, torch.tensor([[0, 10_000]]), dtype=torch.float32)
    with pytest.raises(ValueError, match="not 0"):
        StreamedCalibration(spec, embed, torch.zeros(0, 4).long(), dtype=torch.float32)


@pytest.mark.parametrize("format", [NF4(), BF16()], ids=lambda f: f.name)
def test_a_format_without_block_scales_is_refused_with_a_cure(format: Format) -> None:
    _, _, (layer, *_) = toy()
    with pytest.raises(ValueError, match=rf"method=mse: {format.name} .*quant=nvfp4"):
        Mse().quantize(layer, format)
    with pytest.raises(ValueError, match=r"method=gptq: needs calibration inputs"):
        Gptq().quantize(layer, NVFP4(), None)
    with pytest.raises(ValueError, match=r"method=awq: needs calibration inputs"):
        Awq().quantize(layer, NVFP4(), None)


def test_the_report_names_the_worst_linear_and_counts_all() -> None:
    _, _, (layer, *_) = toy()
    quantised = Mse().quantize(layer, NVFP4())
    assert len(quantised.rows) == 7
    assert "output_error" not in quantised.rows[0]
    page = document(quantised.rows, model="toy", format="nvfp4", method="mse", tokens=0)
    assert (page["schema"], page["kind"], page["method"]) == (1, "quantisation", "mse")
    assert set(page["summary"]) == {"sqnr_mean_db", "sqnr_worst_db"}
    assert 15 < page["summary"]["sqnr_worst_db"] <= page["summary"]["sqnr_mean_db"] < 25
    assert summary([{"layer": 0, "linear": "q", "sqnr_db": None}]) == {}
