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
from qerl.model.packing import Packing, check_quant, linear_format, linear_name, read_packing
from qerl.model.policy import Policy
from qerl.model.reader import FUSED, Reader
from qerl.model.source import Source
from qerl.model.spec import ModelSpec
from qerl.quant.packed import Format, PackedWeight

logger = logging.getLogger(__name__)


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

    A source whose linears are packed already must hold `format`; its bytes are taken as they are,
    and linears that it leaves dense are held in bf16.

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
    packing = read_packing(source.config())
    check_quant(source.name, packing, format, source.folder())
    reader = Reader(source.name, source.weights(), torch.device(device), packing)
    builder = _LayerBuilder(spec, format, lora, seed, dtype)
    started = time.monotonic()
    embed = reader.matrix("model.embed_tokens", (spec.vocab_size, spec.hidden_size), dtype)
    layers = []
    for index in range(spec.layers):
        layers.append(builder.layer(reader, index))
        if (index + 1) % 8 == 0 or index + 1 == spec.layers:
            seconds = time.monotonic() - started
            logger.info(
                "%s: %d of %d layers in %s, %.1f s",
                *(source.name, index + 1, spec.layers, format.name, seconds),
            )
    norm = RMSNorm(reader.stored("model.norm.weight", (spec.hidden_size,)).to(dtype), spec.rms_eps)
    head = None
    if not spec.tied:
        head = reader.matrix("lm_head", (spec.vocab_size, spec.hidden_size), dtype)
    reader.check_all_used(tied=spec.tied)
    decoder = Decoder(spec, embed, layers, norm, head)
    decoder.checkpoint_layers = checkpoint_layers
    policy = Policy(decoder, lora)
    _check_packed(policy, packing, format)
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


class _LayerBuilder:
    """Makes decoder layers: reads, quantises and wraps their linears."""

    def __init__(
        self,
        spec: ModelSpec,
        format: Format,
        lora: LoRAConfig | None,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self._format = format
        self._lora = lora
        self._seed = seed
        self._dtype = dtype

    def layer(self, reader: Reader, index: int) -> DecoderLayer:
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

    def _linears(self, reader: Reader, index: int) -> Iterator[tuple[str, Linear]]:
        """The seven linears of a layer; those that share an input are quantised together."""
        shapes = self._spec.linear_shapes()
        for names in FUSED:
            packed = reader.linears(index, names, [shapes[name] for name in names], self._format)
            for name, weight in zip(names, packed, strict=True):
                bias = None
                if self._spec.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
                    stored = reader.stored(f"{linear_name(index, name)}.bias", shapes[name][:1])
                    bias = stored.to(self._dtype)
                yield name, self._wrap(f"layers.{index}.{name}", weight, bias)

    def _wrap(self, full_name: str, packed: PackedWeight, bias: Tensor | None) -> Linear:
        """A frozen linear, with its adapter where the config targets it."""
        linear = FrozenLinear(packed, bias)
        if self._lora is None or full_name.rpartition(".")[2] not in self._lora.targets:
            return linear
        return LoRALinear(linear, self._lora, adapter_generator(self._seed, full_name))


def _check_packed(policy: Policy, packing: Packing | None, format: Format) -> None:
    """Raise unless the bytes in memory are those that the formats promise."""
    held = promised = weights = 0.0
    linears = policy.linears()
    for layer in range(policy.spec.layers):
        for name, (N, K) in policy.spec.linear_shapes().items():
            own = linear_format(linear_name(layer, name), packing, format)
            packed = linears[f"layers.{layer}.{name}"].packed
            if packed.format.name != own.name:
                raise ValueError(
                    f"layers.{layer}.{name} is held in {packed.format.name}, not {own.name}"
                )
            held += 8 * packed.nbytes
            promised += own.bits_per_weight * N * K
            weights += N * K
    tensor_scales = 8 * 64 * 7 * policy.spec.layers  # at most 64 bytes a linear
    if not promised <= held <= promised + tensor_scales:
        raise ValueError(
            f"linears take {held / weights:.4f} bits per weight, {format.name} promises "
            f"{promised / weights:g}: the weights in memory are not in that format"
        )
