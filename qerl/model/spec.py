"""ModelSpec: the integers of an architecture, read from a Hugging Face config.

A decoder layer of width D has seven linears, y = x Wᵀ with W [N, K]:

=========  ==============  =========  ==============
q_proj     [H·Dh, D]       gate_proj  [F, D]
k_proj     [Hk·Dh, D]      up_proj    [F, D]
v_proj     [Hk·Dh, D]      down_proj  [D, F]
o_proj     [D, H·Dh]
=========  ==============  =========  ==============

What a config asks for and this decoder does not do is refused here, in one line, before any
weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

Family = Literal["llama", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn"]

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven linears of a layer, in checkpoint order."""

_FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies of a pre-trained model are stretched to longer contexts.

    Source: linear, arXiv:2306.15595; yarn, arXiv:2309.00071; llama3, the Llama 3.1 release.
    """

    kind: Literal["linear", "llama3", "yarn"]

    factor: float
    """Ratio of the stretched context to the original one, at least 1."""

    original_max_positions: int = 0
    """Context length of the pre-training, in tokens (llama3 and yarn)."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are divided by `factor`."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor stay."""

    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original context stay."""

    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by `factor`."""

    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None takes 0.1 ln(factor) + 1."""

    truncate: bool = True
    """yarn: round the borders of the ramp to whole dimensions."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that decide how much memory a model takes; known before any download."""

    hidden_size: int
    """D."""

    mlp_size: int
    """F."""

    layers: int
    """L."""

    heads: int
    """H, query heads."""

    kv_heads: int
    """Hk, key and value heads; divides H."""

    head_dim: int
    """Dh."""

    vocab_size: int
    """V, rows of the embedding (padding rows included)."""

    tied: bool
    """The head reads the embedding matrix."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}: not a multiple of kv_heads={self.kv_heads}")

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each of the seven linears of one layer."""
        D, F = self.hidden_size, self.mlp_size
        Q, KV = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (Q, D),
            "k_proj": (KV, D),
            "v_proj": (KV, D),
            "o_proj": (D, Q),
            "gate_proj": (F, D),
            "up_proj": (F, D),
            "down_proj": (D, F),
        }

    @property
    def linear_weights(self) -> int:
        """Weights in the linears of all layers, the head not counted."""
        return self.layers * sum(N * K for N, K in self.linear_shapes().values())

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding and, where it is not tied to it, of the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Geometry):
    """Everything the decoder needs to know of an architecture."""

    family: Family

    rope_theta: float
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None

    rms_eps: float
    """Added to the mean square in every norm."""

    qkv_bias: bool
    """q, k and v projections carry a bias (Qwen2)."""

    qk_norm: bool
    """Queries and keys are normed per head before the rotary embedding (Qwen3)."""

    eos_ids: tuple[int, ...]
    """Token ids of the config that end a sequence; may be empty."""

    max_positions: int
    """Context length in tokens."""

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> "ModelSpec":
        """The spec of a Hugging Face config.

        Both config forms are read: `rope_parameters` (transformers 5) and `rope_theta` with
        `rope_scaling` (older folders and releases).

        Raises:
            ValueError: for an architecture, rotary embedding or attention variant that the
                decoder does not implement.
        """
        raw: dict[str, Any] = config.to_dict()
        family = raw.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(
                f"model_type={family!r}: the decoder implements {', '.join(_FAMILIES)}; "
                "choose a model of these families"
            )
        _refuse_variants(family, raw)
        theta, scaling = _rope(raw)
        heads = raw["num_attention_heads"]
        return cls(
            family=family,
            hidden_size=raw["hidden_size"],
            mlp_size=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=raw["rms_norm_eps"],
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            eos_ids=eos_ids(raw.get("eos_token_id")),
            max_positions=raw["max_position_embeddings"],
        )

    def to_hf_config(self) -> PretrainedConfig:
        """A Hugging Face config from which `from_hf` gives this spec back."""
        settings: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "rope_parameters": _rope_parameters(self.rope_theta, self.rope_scaling),
            "rms_norm_eps": self.rms_eps,
            "eos_token_id": list(self.eos_ids) or None,
            "max_position_embeddings": self.max_positions,
        }
        if self.family != "qwen2":
            settings["head_dim"] = self.head_dim
        return _FAMILIES[self.family](**settings)


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The end-of-sequence ids of a config field that holds none, one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _refuse_variants(family: str, raw: Mapping[str, Any]) -> None:
    """Raise for the first setting under which this decoder would compute something else."""
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if raw.get("use_sliding_window") or kinds != {"full_attention"}:
        raise ValueError(
            f"{family} with layer_types={sorted(kinds)}: only full attention is implemented; "
            "set use_sliding_window=false if the context allows"
        )
    plain: dict[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, wanted in plain.items():
        if raw.get(key, wanted) != wanted:
            raise ValueError(f"{family} with {key}={raw[key]}: the decoder implements {wanted}")


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from either form of the config."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("config has no rope_theta: rotary frequencies have no base")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"rope_type={kind!r}: the decoder implements {', '.join(_ROPE_TYPES)} rotary embeddings"
        )
    for refused in ("mscale", "mscale_all_dim"):
        if rope.get(refused):
            raise ValueError(f"rope {refused}={rope[refused]}: not implemented; leave it out")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial}: only whole heads are rotated (1.0)")
    if kind == "default":
        return float(theta), None
    original = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return float(theta), RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        original_max_positions=int(original),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=rope.get("attention_factor"),
        truncate=bool(rope.get("truncate", True)),
    )


def _rope_parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The config node of a rotary embedding, in the form of transformers 5."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    node: dict[str, Any] = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
    }
    if scaling.kind != "linear":
        node["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        node |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        node |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        if scaling.attention_factor is not None:
            node["attention_factor"] = scaling.attention_factor
    return node
