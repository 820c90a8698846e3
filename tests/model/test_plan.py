from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.plan import check_fits, memory_plan
from qerl.model.source import Toy
from qerl.quant.bf16 import BF16
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format

CONF = Path(__file__).parents[2] / "conf" / "model"


@pytest.mark.parametrize(
    ("name", "gigabytes", "adapter_millions"),
    [
        ("qwen2.5-3b", 2.18, 59.9),
        ("qwen2.5-7b", 5.85, 80.7),
        ("qwen2.5-14b", 10.55, 137.6),
        ("qwen2.5-32b", 20.67, 268.4),
    ],
)
def test_declared_sizes_give_the_published_checkpoints(
    name: str, gigabytes: float, adapter_millions: float
) -> None:
    model = OmegaConf.load(CONF / f"{name}.yaml")
    plan = memory_plan(instantiate(model.source).geometry(), NVFP4(), instantiate(model.lora))
    assert (plan.linears + plan.embeddings) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert plan.adapters / 4e6 == pytest.approx(adapter_millions, abs=0.1)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_model_option_builds_under_its_own_name(path: Path) -> None:
    model = OmegaConf.load(path)
    assert model.name == path.stem
    if OmegaConf.is_missing(model.source, "path"):
        model.source.path = "/nowhere"  # nothing is read before it is asked for
    assert instantiate(model.source).name
    assert isinstance(instantiate(model.lora), LoRAConfig)


@pytest.mark.parametrize("format", [BF16(), NVFP4(), NF4()], ids=lambda f: f.name)
@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_is_what_a_loaded_policy_holds(format: Format, shadow: bool, tied: bool) -> None:
    source, lora = Toy(tied=tied, family="llama"), LoRAConfig(rank=8, alpha=8, targets=["o_proj"])
    plan = memory_plan(source.geometry(), format, lora, dtype=torch.float32, shadow=shadow)
    report = load_policy(source, format, lora, shadow=shadow).memory_bytes()
    assert plan.linears == pytest.approx(report["packed"], rel=1e-3)
    assert plan.embeddings == report["embeddings"]
    assert plan.norms == report["norms_and_biases"]
    assert plan.adapters == report["adapters"]
    assert plan.shadow == report["shadow"]
    assert plan.optimizer == 3 * report["adapters"]


def test_a_model_that_does_not_fit_is_one_line_with_what_would() -> None:
    geometry = instantiate(OmegaConf.load(CONF / "qwen2.5-32b.yaml").source).geometry()
    plans = {f"quant={f.name}": memory_plan(geometry, f, None) for f in (BF16(), NVFP4())}
    with pytest.raises(ValueError, match=r"needs 66\.1 GB") as raised:
        check_fits(plans["quant=bf16"], 24 * 10**9, "NVIDIA RTX 4090", plans)
    assert str(raised.value).endswith("RTX 4090 has 24.0 GB free; would fit: quant=nvfp4")
    assert "linears 62.4, embeddings 3.1" in str(raised.value)
    assert "\n" not in str(raised.value)
    check_fits(plans["quant=nvfp4"], 24 * 10**9, "NVIDIA RTX 4090", plans)
    with pytest.raises(ValueError, match=r"needs 21\.2 GB.* has 20\.0 GB"):
        check_fits(plans["quant=nvfp4"], 20 * 10**9, "card")  # the linears alone would fit
    with pytest.raises(ValueError, match="take a smaller model"):
        check_fits(plans["quant=bf16"], 10**9, "small", plans)
