"""compressed-tensors' names, both ways."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from qerl.model import compressed
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4

FORMATS = [NVFP4(), NVFP4(power_of_two_scale=True), MXFP4()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_packing_and_storing_are_inverses(format) -> None:
    ours = format.quantize(torch.randn(48, 128))
    back = compressed.packed(compressed.stored(ours), format)
    assert back.shape == ours.shape
    for name, tensor in ours.tensors.items():
        assert torch.equal(back.tensors[name].float(), tensor.float())


def test_a_global_scale_survives_its_reciprocal() -> None:
    """Exactly for the largest |w| of a bf16 or fp16 checkpoint: all significands of fp16."""
    for amax in torch.arange(1024, 2048).float() / 1024:
        g = 448.0 * 6.0 / amax
        assert compressed.global_scale(1.0 / g) == g


def test_a_loaded_scale_is_stored_so_that_it_loads_again() -> None:
    for g in torch.rand(2000) * 1e4 + 1:
        again = compressed.global_scale(1.0 / g)
        assert 1.0 / again == 1.0 / g


def test_a_scale_without_an_exact_reciprocal_takes_the_nearest() -> None:
    for each in 1 - torch.arange(1, 21) * 2.0**-24:
        g = compressed.global_scale(each)
        assert abs(1.0 / g.double() - each.double()) <= 2**-24 * each.double()


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16"])
def test_the_config_is_the_preset_of_the_library(preset) -> None:
    format = {"NVFP4A16": NVFP4(), "MXFP4A16": MXFP4()}[preset]
    config = compressed.quantization_config(format, ["lm_head"])
    del config["quant_method"], config["sparsity_config"], config["transform_config"]
    read = QuantizationConfig.model_validate(config)
    group = read.config_groups["group_0"]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    assert group.weights == scheme.weights
    assert group.input_activations is None
    assert group.format == read.format
    assert read.ignore == ["lm_head"]


def test_a_format_it_does_not_store_is_refused() -> None:
    with pytest.raises(ValueError, match="format nf4"):
        compressed.stored(NF4().quantize(torch.randn(64, 64)))
    with pytest.raises(ValueError, match="format nf4"):
        compressed.quantization_config(NF4(), [])


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_global_scale_that_is_no_scale_is_refused(value) -> None:
    tensors = compressed.stored(NVFP4().quantize(torch.randn(16, 64)))
    tensors["weight_global_scale"] = torch.tensor([value])
    with pytest.raises(ValueError, match="weight_global_scale"):
        compressed.packed(tensors, NVFP4())


def test_an_ignore_list_names_modules_exactly_or_by_pattern() -> None:
    ignore = ["lm_head", "re:.*layers.1.mlp.*"]
    assert compressed.matches("lm_head", ignore)
    assert compressed.matches("model.layers.1.mlp.up_proj", ignore)
    assert not compressed.matches("model.layers.0.mlp.up_proj", ignore)
    assert not compressed.matches("model.lm_head", ignore)
