"""Calibration tokens through the decoder, one layer at a time, while its layers are quantised.

A layer is run twice: dense, to see what enters its linears; and quantised, for the states that the
next layer gets. So every layer is calibrated on what it will receive when the model runs. Memory
holds one dense layer, its statistics and the hidden states (the paper's 256 sequences of 2048
tokens take 5.4 GB in bf16 at a width of 5120). The layers are those of `qerl.model`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from qerl.convert.method import GROUPS, LINEAR_NAMES, LayerInputs, LayerWeights, QuantizedLayer
from qerl.model.attention import ForestAttend
from qerl.model.decoder import Attention, DecoderLayer
from qerl.model.layers import RMSNorm, RotaryEmbedding, SwiGLU
from qerl.model.linear import FrozenLinear
from qerl.model.spec import ModelSpec
from qerl.quant.bf16 import BF16
from qerl.types import Segment

Progress = Callable[[str, int, int], None]
"""Told ``measure`` or ``advance``, sequences done, sequences in all."""

CHUNK_TOKENS = 8192
"""Tokens that go through a layer at a time, unless one sequence is longer."""


class StreamedCalibration:
    """The hidden states of the calibration tokens; a `method.Calibration`.

    `inputs` and `advance` are called for layer 0, 1, 2, ... in turn. A conversion that is taken up
    again calls `advance` alone for the layers it has stored.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embed: Float[Tensor, "V D"],
        tokens: Int[Tensor, "n T"],
        *,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        """Embed the tokens.

        Args:
            spec: of the model.
            embed: its embedding, on the device where layers run.
            tokens: sequences of equal length.
            dtype: of the hidden states and the layers' arithmetic; statistics are fp32.
            progress: told after every chunk.

        Raises:
            ValueError: there are no tokens, or ids that the embedding does not have.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(
                f"calibration tokens {tuple(tokens.shape)}: [sequences, length], not 0"
            )
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= len(embed):
            raise ValueError(
                f"calibration tokens {low} .. {high}: this model has {len(embed)}; take its own "
                "tokenizer"
            )
        self.spec = spec
        self.hidden = functional.embedding(tokens.to(embed.device), embed).to(dtype)  # [n, T, D]
        self._rotary = RotaryEmbedding(spec, embed.device)
        self._progress = progress
        self._chunk = max(1, CHUNK_TOKENS // tokens.shape[1])

    @torch.no_grad()
    def inputs(self, layer: LayerWeights) -> LayerInputs:
        """Statistics of the tokens inside the dense `layer`, after the layers before it."""
        module = dense_layer(self.spec, layer, self.hidden.dtype)
        with _observed(module) as sums:
            for _ in self._run("measure", layer.index, module):
                pass
        tokens = self.hidden.shape[0] * self.hidden.shape[1]
        return LayerInputs(
            tokens=tokens,
            second_moment={group: s.second_moment / tokens for group, s in sums.items()},
            mean_abs={group: s.absolute / tokens for group, s in sums.items()},
            head_dim=self.spec.head_dim,
        )

    @torch.no_grad()
    def advance(self, layer: QuantizedLayer) -> None:
        """Send the tokens through the quantised layer."""
        module = quantized_layer(self.spec, layer, self.hidden.dtype)
        for linear in module.linears().values():
            assert isinstance(linear, FrozenLinear)
            linear.set_shadow(self.hidden.dtype)  # unpacked once, not once a chunk
        for rows, states in self._run("advance", layer.index, module):
            self.hidden[rows] = states

    def _run(
        self, what: str, index: int, module: DecoderLayer
    ) -> Iterator[tuple[slice, Float[Tensor, "c T D"]]]:
        """The layer's output, a chunk of sequences at a time."""
        count, length, _ = self.hidden.shape
        for start in range(0, count, self._chunk):
            rows = slice(start, min(start + self._chunk, count))
            states = self.hidden[rows]  # [c, T, D]
            device = states.device
            segments = [
                Segment(start=i * length, length=length, parent=None) for i in range(len(states))
            ]
            cos, sin = self._rotary(torch.arange(length, device=device).repeat(len(states)))
            attend = ForestAttend(segments, device)
            out = module(index, states.flatten(0, 1), cos, sin, attend)  # [c * T, D]
            yield rows, out.view(states.shape)
            if self._progress is not None:
                self._progress(what, rows.stop, count)


def dense_layer(spec: ModelSpec, layer: LayerWeights, dtype: torch.dtype) -> DecoderLayer:
    """The decoder layer with its dense weights in `dtype`."""
    linears = {}
    for name in LINEAR_NAMES:
        weight = layer.linear(name)
        linear = FrozenLinear(BF16().quantize(weight), _bias(layer.tensors, name, dtype))
        linear.shadow = weight.to(dtype)  # of the weight itself: fp32 ones lose nothing
        linears[name.rpartition(".")[2]] = linear
    return _layer(spec, linears, layer.tensors)


def quantized_layer(spec: ModelSpec, layer: QuantizedLayer, dtype: torch.dtype) -> DecoderLayer:
    """The decoder layer over its packed weights."""
    linears = {
        name.rpartition(".")[2]: FrozenLinear(packed, _bias(layer.others, name, dtype))
        for name, packed in layer.linears.items()
    }
    return _layer(spec, linears, layer.others)


def _bias(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor | None:
    bias = tensors.get(f"{name}.bias")
    return None if bias is None else bias.to(dtype)


def _layer(
    spec: ModelSpec, linears: Mapping[str, FrozenLinear], others: Mapping[str, Tensor]
) -> DecoderLayer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(others[f"{name}.weight"], spec.rms_eps)

    heads = [norm("self_attn.q_norm"), norm("self_attn.k_norm")] if spec.qk_norm else [None, None]
    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        attention=Attention(spec, dict(linears), *heads),
        post_attention_norm=norm("post_attention_layernorm"),
        mlp=SwiGLU(linears["gate_proj"], linears["up_proj"], linears["down_proj"]),
    )


@dataclass
class _Sums:
    """Over the rows that entered one group of linears, fp32."""

    second_moment: Float[Tensor, "K K"]
    absolute: Float[Tensor, " K"]

    def add(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """As a hook before the forward of the group's first linear."""
        x = arguments[0].float()  # [S, K]
        self.second_moment.addmm_(x.T, x)
        self.absolute.add_(x.abs().sum(0))


@contextmanager
def _observed(module: DecoderLayer) -> Iterator[dict[str, _Sums]]:
    """Sums that grow while the layer runs, by a name of `GROUPS`."""
    linears = module.linears()
    sums, hooks = {}, []
    for group, names in GROUPS.items():
        linear = linears[names[0].rpartition(".")[2]]
        assert isinstance(linear, FrozenLinear)
        width, device = linear.shape[1], linear.packed.device
        sums[group] = _Sums(
            second_moment=torch.zeros(width, width, device=device),
            absolute=torch.zeros(width, device=device),
        )
        hooks.append(linear.register_forward_pre_hook(sums[group].add))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
