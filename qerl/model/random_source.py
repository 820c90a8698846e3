"""A model of any architecture with random weights, made on the device as they are asked for."""

import hashlib

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from qerl.kernels.timing import GEOMETRIES
from qerl.model import toy
from qerl.model.shards import Entry
from qerl.model.spec import Geometry, ModelSpec

_LAYERS = {"3b": 36, "7b": 28, "14b": 48, "32b": 64}
_VOCABULARY = 152064


def geometry_spec(name: str, layers: int | None = None) -> ModelSpec:
    """Qwen2.5 in the size `name`, with all its layers or the first `layers`."""
    width, kv, mlp = GEOMETRIES[name]
    return ModelSpec(
        family="qwen2",
        hidden_size=width,
        mlp_size=mlp,
        layers=layers or _LAYERS[name],
        heads=width // 128,
        kv_heads=kv // 128,
        head_dim=128,
        vocab_size=_VOCABULARY,
        tied=False,
        rope_theta=1e6,
        rope_scaling=None,
        rms_eps=1e-6,
        qkv_bias=True,
        qk_norm=False,
        eos_ids=(0,),
        max_positions=32768,
    )


class RandomSource:
    """A checkpoint that nobody trained: for measurements of speed and memory."""

    def __init__(self, spec: ModelSpec, device: torch.device | str, seed: int = 0) -> None:
        """Nothing is made yet; `seed` fixes the weights on one kind of device."""
        self.name = f"random-{spec.family}"
        self._spec = spec
        self._device = device
        self._seed = seed

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """One token per character, whatever the vocabulary of the model."""
        return toy.build_tokenizer()

    def config(self) -> PretrainedConfig:
        """The architecture as a Hugging Face config."""
        return self._spec.to_hf_config()

    def generation_eos_ids(self) -> tuple[int, ...]:
        """Those of the spec."""
        return self._spec.eos_ids

    def geometry(self) -> Geometry:
        """The sizes."""
        return self._spec

    def weights(self) -> "RandomWeights":
        """bf16 on the device, of the toy's distribution."""
        return RandomWeights(self._spec, self._device, self._seed)

    def folder(self) -> None:
        """Nothing of it is on disk."""


class RandomWeights:
    """Tensors drawn when they are read; none is kept. A name always draws the same tensor."""

    def __init__(self, spec: ModelSpec, device: torch.device | str, seed: int) -> None:
        self._tensors = {name: (shape, std) for name, shape, std in toy.tensors(spec)}
        self._generator = torch.Generator(device)
        self._key = f"{seed}/{spec}"

    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return list(self._tensors)

    def get(self, name: str) -> Tensor:
        """One tensor."""
        shape, std = self._tensors[name]
        out = torch.ones(shape, dtype=torch.bfloat16, device=self._generator.device)
        if std is None:
            return out
        digest = hashlib.sha256(f"{self._key}/{name}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return out.normal_(std=std, generator=self._generator)

    def entry(self, name: str) -> Entry:
        """What a tensor is."""
        return Entry(shape=self._tensors[name][0], dtype=torch.bfloat16, place="memory")

    def fingerprint(self) -> str:
        """SHA-256 of the sizes, the seed and the kind of device."""
        return hashlib.sha256(f"{self._key}/{self._generator.device.type}".encode()).hexdigest()
