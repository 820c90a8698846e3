"""A tokenizer with one token per character, and random weights: a whole model in milliseconds.

The 98 printable characters of ASCII, the newline and the tab make every arithmetic prompt and
every boxed answer expressible; the template is ChatML, as Qwen and SmolLM write it.
"""

import string
from collections.abc import Iterator

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qerl.model.spec import ModelSpec

SPECIAL_TOKENS = ("<unk>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
CHARACTERS = "\n\t" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """One token per character; padding and end-of-sequence share an id, as in SmolLM2."""
    vocabulary = {token: id_ for id_, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token=EOS,
        pad_token=EOS,
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def random_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """A checkpoint of `spec` in Hugging Face names; bf16, so that every format starts equal.

    Linears are N(0, 1/K) and embeddings N(0, 0.01), which gives logits of standard deviation near
    1: neither uniform nor decided. Norms are 1; biases N(0, 0.01).
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.ones(shape) if std is None else torch.randn(shape, generator=generator).mul_(std)
        ).to(torch.bfloat16)
        for name, shape, std in tensors(spec)
    }


def tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Name, shape and standard deviation (None: all ones) of every tensor of a checkpoint."""
    D = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, D), 0.1
    for i in range(spec.layers):
        prefix = f"model.layers.{i}"
        for name, (N, K) in spec.linear_shapes().items():
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            yield f"{prefix}.{block}.{name}.weight", (N, K), K**-0.5
            if spec.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
                yield f"{prefix}.{block}.{name}.bias", (N,), 0.1
        if spec.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (spec.head_dim,), None
            yield f"{prefix}.self_attn.k_norm.weight", (spec.head_dim,), None
        yield f"{prefix}.input_layernorm.weight", (D,), None
        yield f"{prefix}.post_attention_layernorm.weight", (D,), None
    yield "model.norm.weight", (D,), None
    if not spec.tied:
        yield "lm_head.weight", (spec.vocab_size, D), 0.1
