"""Weights in: a source, a format and adapters become a Policy, one layer at a time.

A dense tensor exists from its read to its quantisation; the whole model is never dense in memory.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.model.decoder import Attention, Decoder, DecoderLayer
from qerl.model.layers import RMSNorm, SwiGLU
from qerl.model.linear import FrozenLinear, Linear, LoRAConfig, LoRALinear, adapter_generator
from qerl.model.policy import Policy
from qerl.model.source import Source, Weights
from qerl.model.spec import ModelSpec
from qerl.quant.packed import Format, PackedWeight

logger = logging.getLogger(__name__)

_FUSED = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
"""Linears that read the same input share a tensor scale, so that an engine may fuse them."""


def load_policy(
    source: Source,
    format: Format,
    lora: LoRAConfig | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    shadow: bool = False,
    seed: int = 0,
    checkpoint_layers: bool = False,
) -> Policy:
    """The policy of a source, its linears packed in `format`.

    Args:
        source: where config and weights come from.
        format: of the seven linears of each layer; embeddings and head stay dense.
        lora: adapters; None gives a policy with nothing to train.
        device: where quantisation runs and the policy lives.
        dtype: compute dtype, also of embeddings, head and biases. fp32 on CPUs, bf16 on GPUs.
        shadow: keep dense copies of the linears (`Policy.set_shadow`).
        seed: of the adapters' start.
        checkpoint_layers: recompute layers in the backward instead of keeping activations.

    Raises:
        ValueError: for an architecture the decoder does not implement, a tensor that is missing,
            left over or of the wrong shape, or packed bytes that are not what the format promises.
    """
    spec = full_spec(source)
    reader = _Reader(source.name, source.weights(), torch.device(device), dtype)
    builder = _LayerBuilder(spec, format, lora, seed)
    started = time.monotonic()
    embed = reader.dense("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    layers = []
    for index in range(spec.layers):
        layers.append(builder.layer(reader, index))
        if (index + 1) % 8 == 0 or index + 1 == spec.layers:
            seconds = time.monotonic() - started
            logger.info(
                "%s: %d of %d layers in %s, %.1f s",
                *(source.name, index + 1, spec.layers, format.name, seconds),
            )
    norm = RMSNorm(reader.dense("model.norm.weight", (spec.hidden_size,)), spec.rms_eps)
    head = None
    if not spec.tied:
        head = reader.dense("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    reader.check_all_used(tied=spec.tied)
    decoder = Decoder(spec, embed, layers, norm, head)
    decoder.checkpoint_layers = checkpoint_layers
    policy = Policy(decoder, lora)
    _check_packed(policy, format)
    policy.set_shadow(shadow)
    return policy


def full_spec(source: Source) -> ModelSpec:
    """The spec of a source with every id that ends a sequence, wherever it is declared."""
    spec = ModelSpec.from_hf(source.config())
    ends = dict.fromkeys((*source.generation_eos_ids(), *spec.eos_ids))
    return replace(spec, eos_ids=tuple(ends))


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer of a source; padding and end-of-sequence may share an id."""
    tokenizer = source.tokenizer()
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source.name}: the tokenizer has no end-of-sequence token")
    return tokenizer


class _Reader:
    """Takes tensors out of a checkpoint, checks their shapes and remembers which were used."""

    def __init__(
        self, name: str, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._name = name
        self._weights = weights
        self._left = set(weights.names())
        self._all = frozenset(self._left)
        self._device = device
        self._dtype = dtype

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the device, in the dtype of the checkpoint."""
        if name not in self._all:
            raise ValueError(f"{self._name}: the checkpoint has no tensor {name}")
        tensor = self._weights.get(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self._name}: {name} is {list(tensor.shape)}, the config says {list(shape)}"
            )
        self._left.discard(name)
        return tensor.to(self._device)

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the device, in the compute dtype."""
        return self.stored(name, shape).to(self._dtype)

    def check_all_used(self, *, tied: bool) -> None:
        """Raise if a tensor of the checkpoint has no place in the model."""
        # Some exports repeat a tied head, and old ones store the rotary table.
        spare = {"lm_head.weight"} if tied else set()
        left = sorted(n for n in self._left - spare if not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(
                f"{self._name}: {len(left)} tensors have no place in the model, first {left[0]}"
            )


class _LayerBuilder:
    """Makes decoder layers: reads, quantises and wraps their linears."""

    def __init__(self, spec: ModelSpec, format: Format, lora: LoRAConfig | None, seed: int) -> None:
        self._spec = spec
        self._format = format
        self._lora = lora
        self._seed = seed

    def layer(self, reader: _Reader, index: int) -> DecoderLayer:
        """Layer `index`, filled."""
        spec, prefix = self._spec, f"model.layers.{index}"
        linears = dict(self._linears(reader, index))

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(reader.stored(f"{prefix}.{name}.weight", (width,)), spec.rms_eps)

        q_norm, k_norm = (
            (norm("self_attn.q_norm", spec.head_dim), norm("self_attn.k_norm", spec.head_dim))
            if spec.qk_norm
            else (None, None)
        )
        return DecoderLayer(
            input_norm=norm("input_layernorm", spec.hidden_size),
            attention=Attention(spec, linears, q_norm, k_norm),
            post_attention_norm=norm("post_attention_layernorm", spec.hidden_size),
            mlp=SwiGLU(linears["gate_proj"], linears["up_proj"], linears["down_proj"]),
        )

    def _linears(self, reader: _Reader, index: int) -> Iterator[tuple[str, Linear]]:
        """The seven linears of a layer; those that share an input are quantised together."""
        shapes = self._spec.linear_shapes()
        for block, names in _FUSED:
            prefix = f"model.layers.{index}.{block}"
            dense = [reader.stored(f"{prefix}.{name}.weight", shapes[name]) for name in names]
            packed = self._format.quantize_fused(dense)
            del dense
            for name, weight in zip(names, packed, strict=True):
                bias = None
                if self._spec.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
                    bias = reader.dense(f"{prefix}.{name}.bias", shapes[name][:1])
                yield name, self._wrap(f"layers.{index}.{name}", weight, bias)

    def _wrap(self, full_name: str, packed: PackedWeight, bias: Tensor | None) -> Linear:
        """A frozen linear, with its adapter where the config targets it."""
        linear = FrozenLinear(packed, bias)
        if self._lora is None or full_name.rpartition(".")[2] not in self._lora.targets:
            return linear
        return LoRALinear(linear, self._lora, adapter_generator(self._seed, full_name))


def _check_packed(policy: Policy, format: Format) -> None:
    """Raise unless the bytes in memory are those that the format promises."""
    bits = policy.linear_bits_per_weight()
    spec = policy.spec
    tensor_scales = 8 * 64 * 7 * spec.layers / spec.linear_weights  # at most 64 bytes a linear
    if not format.bits_per_weight <= bits <= format.bits_per_weight + tensor_scales:
        raise ValueError(
            f"linears take {bits:.4f} bits per weight, {format.name} promises "
            f"{format.bits_per_weight}: the weights in memory are not in that format"
        )
