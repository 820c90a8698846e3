import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from qerl.model.linear import LoRAConfig
from qerl.model.load import full_spec, load_policy, load_tokenizer
from qerl.model.source import DictWeights, Toy
from qerl.quant.bf16 import BF16
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4

UP = "model.layers.1.mlp.up_proj"
EMBED, Q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj"


class Edited(Toy):
    """A toy whose checkpoint is changed before it is read."""

    def __init__(self, changes: dict[str, Tensor | None], **settings: Any) -> None:
        super().__init__(**settings)
        self.changes = changes

    def weights(self) -> DictWeights:
        plain = super().weights()
        tensors = {name: plain.get(name) for name in plain.names()} | self.changes
        return DictWeights({name: t for name, t in tensors.items() if t is not None})


@dataclass
class Watched:
    """A checkpoint that notes how many of the dense tensors it gave are alive at once."""

    inner: DictWeights
    alive: list[weakref.ref[Tensor]] = field(default_factory=list)
    most: int = 0

    def names(self) -> Sequence[str]:
        return self.inner.names()

    def entry(self, name: str) -> Any:
        return self.inner.entry(name)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def get(self, name: str) -> Tensor:
        tensor = self.inner.get(name).clone()
        if "_proj.weight" in name:
            self.alive.append(weakref.ref(tensor))
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        return tensor


def test_the_same_seed_gives_the_same_policy_and_another_does_not() -> None:
    lora = LoRAConfig(rank=4, alpha=8)
    one, two = (load_policy(Toy(), NVFP4(), lora, seed=3) for _ in range(2))
    other = load_policy(Toy(seed=1), NVFP4(), lora, seed=3)
    assert one.base_hash() == two.base_hash() != other.base_hash()
    for name, matrix in one.adapter_state().items():
        assert torch.equal(matrix, two.adapter_state()[name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"no tensor model.layers.1.mlp.up_proj"),
        ({"model.layers.0.self_attn.q_proj.bias": None}, r"no tensor .*q_proj.bias"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}, "1 tensors have no place"),
        ({"model.norm.weight": torch.ones(64)}, r"model.norm.weight is \[64\], .* \[128\]"),
        (
            {f"{UP}.weight": torch.zeros(256, 128, dtype=torch.int8)},
            f"memory: {UP}.weight is torch",
        ),
        ({f"{UP}.weight": torch.full((256, 128), torch.nan)}, f"memory: {UP}.weight: .* NaN"),
        ({"model.norm.weight": torch.full((128,), torch.nan)}, r"memory: model.norm.weight is nan"),
        ({EMBED: torch.full((100, 128), torch.inf)}, rf"memory: {EMBED} is inf at \[0, 0\]; bring"),
        ({f"{Q}.bias": torch.full((128,), torch.nan)}, rf"memory: {Q}.bias is nan at \[0\]; bring"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Tensor | None], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_policy(Edited(changes), NVFP4(), None)


def test_a_width_that_does_not_divide_into_blocks_is_refused_by_name(
    hf_model: Callable[..., Any], source_of: Callable[..., Any]
) -> None:
    source = source_of(hf_model(Qwen2Config, hidden_size=48))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight: K=48: nf4 needs"):
        load_policy(source, NF4(), None)


def test_copies_that_exports_add_are_allowed() -> None:
    spare = {
        "lm_head.weight": torch.zeros(100, 128),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
    }
    load_policy(Edited(spare), NVFP4(), None)
    with pytest.raises(ValueError, match="no tensor lm_head"):
        load_policy(Edited({"lm_head.weight": None}, tied=False), NVFP4(), None)


def test_no_more_dense_linears_than_one_fused_group_exist_at_once() -> None:
    source = Toy(layers=4)
    watched = Watched(source.weights())  # type: ignore[arg-type]
    source.weights = lambda: watched  # type: ignore[method-assign,assignment,return-value]
    policy = load_policy(source, NVFP4(), None)
    assert len(watched.alive) == 4 * 7
    assert watched.most <= 3  # q, k and v
    assert not any(ref() is not None for ref in watched.alive)
    assert policy.spec.layers == 4


def test_linears_that_read_the_same_input_share_a_tensor_scale() -> None:
    linears = load_policy(Toy(), NVFP4(), None).linears()

    def scale(name: str) -> float:
        return linears[f"layers.0.{name}"].packed.tensors["tensor_scale"].item()

    assert scale("q_proj") == scale("k_proj") == scale("v_proj")
    assert scale("gate_proj") == scale("up_proj")
    assert len({scale(n) for n in ("q_proj", "o_proj", "gate_proj", "down_proj")}) == 4


def test_bytes_that_are_not_what_the_format_promises_are_refused() -> None:
    class Boasting(BF16):
        bits_per_weight = 4.5

    with pytest.raises(ValueError, match=r"16.0000 bits per weight, bf16 promises 4.5"):
        load_policy(Toy(), Boasting(), None)


def test_the_compute_dtype_is_that_of_embedding_and_bias_not_of_norms_and_adapters() -> None:
    policy = load_policy(Toy(), NVFP4(), LoRAConfig(rank=4, alpha=8), dtype=torch.bfloat16)
    assert policy.decoder.embed.dtype == torch.bfloat16
    bias = policy.linears()["layers.0.q_proj"].bias
    assert bias is not None
    assert bias.dtype == torch.bfloat16
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_every_declared_end_of_sequence_reaches_the_spec() -> None:
    source = Toy()
    source.generation_eos_ids = lambda: (2, 7)  # type: ignore[method-assign]
    assert full_spec(source).eos_ids == (2, 7)
    assert load_policy(source, BF16(), None).spec.eos_ids == (2, 7)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    source = Toy()
    source.tokenizer().eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence"):
        load_tokenizer(source)


@pytest.mark.gpu
def test_weights_are_packed_to_the_same_bytes_on_either_device() -> None:
    cpu, gpu = (load_policy(Toy(layers=4), NVFP4(), None, device=d) for d in ("cpu", "cuda"))
    for name, linear in cpu.linears().items():
        for part, tensor in linear.packed.tensors.items():
            other = gpu.linears()[name].packed.tensors[part].cpu()
            assert torch.equal(tensor.float(), other.float()), (name, part)
