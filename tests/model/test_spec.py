import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from qerl.model.source import Toy
from qerl.model.spec import Geometry, ModelSpec

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class OldForm(PretrainedConfig):
    """A config whose dictionary has the keys of transformers 4."""

    def __init__(self, raw: dict[str, object]) -> None:
        self._raw = raw

    def to_dict(self) -> dict[str, object]:
        return self._raw


def old_form(**changes: object) -> OldForm:
    raw = LlamaConfig(max_position_embeddings=131072).to_dict()
    raw.pop("rope_parameters")
    raw |= {"rope_theta": 500000.0, "rope_scaling": None}
    return OldForm(raw | changes)


def test_qwen_32b_has_the_published_linears() -> None:
    config = Qwen2Config(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
    )
    spec = ModelSpec.from_hf(config)
    assert spec.linear_shapes()["k_proj"] == (1024, 5120)
    assert spec.linear_shapes()["down_proj"] == (5120, 27648)
    assert spec.linear_weights == 31_205_621_760  # Qwen2.5-32B model card: 31.0 B non-embedding
    assert spec.qkv_bias
    assert not spec.qk_norm


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_spec_survives_the_hugging_face_config(family: str, tied: bool) -> None:
    spec = Toy(family=family, tied=tied).spec
    assert ModelSpec.from_hf(spec.to_hf_config()) == spec


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_survives_the_hugging_face_config(rope: dict[str, object]) -> None:
    spec = ModelSpec.from_hf(LlamaConfig(max_position_embeddings=131072, rope_parameters=rope))
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.kind == rope["rope_type"]
    assert ModelSpec.from_hf(spec.to_hf_config()) == spec


def test_the_old_config_form_reads_like_the_new_one() -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    new = ModelSpec.from_hf(LlamaConfig(max_position_embeddings=131072, rope_parameters=LLAMA3))
    assert ModelSpec.from_hf(old_form(rope_scaling=scaling)) == new
    older = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    assert ModelSpec.from_hf(old_form(rope_scaling=older)) == new


def test_several_eos_ids_are_kept() -> None:
    spec = ModelSpec.from_hf(LlamaConfig(eos_token_id=[128001, 128008, 128009]))
    assert spec.eos_ids == (128001, 128008, 128009)
    assert ModelSpec.from_hf(LlamaConfig(eos_token_id=7)).eos_ids == (7,)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(), "model_type='mistral'"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (old_form(use_sliding_window=True), "use_sliding_window=false"),
        (Qwen3Config(attention_bias=True), "attention_bias=True"),
        (LlamaConfig(mlp_bias=True), "mlp_bias=True"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act=gelu"),
        (
            old_form(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type='dynamic'",
        ),
        (old_form(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (old_form(rope_theta=None), "rope_theta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_decoder_does_not_do_is_refused_in_one_line(
    config: PretrainedConfig, words: str
) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        ModelSpec.from_hf(config)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_sliding_window_that_is_not_in_use_is_accepted() -> None:
    assert ModelSpec.from_hf(Qwen2Config(sliding_window=4096, use_sliding_window=False))


def test_query_heads_must_divide_into_key_heads() -> None:
    with pytest.raises(ValueError, match="heads=6"):
        Geometry(
            hidden_size=96,
            mlp_size=128,
            layers=1,
            heads=6,
            kv_heads=4,
            head_dim=16,
            vocab_size=10,
            tied=True,
        )
