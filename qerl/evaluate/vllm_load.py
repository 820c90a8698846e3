"""Whether vLLM loads the folders that scripts/quantize.py writes, and computes what we compute.

For each model: convert it, let vLLM decode greedily from the folder and report the log-probability
of every token it chose, then score the same tokens with our policy, loaded from the same folder.
Both compute in bf16 with kernels of their own, so log-probabilities differ by rounding; a wrong
scale, a swapped nibble or a missing bias would move them by nats.

vLLM's kernel for 4-bit weights on Hopper (Marlin) takes N a multiple of 128, or N of 64 and K of
128. Where a width is neither, as the 576 of SmolLM2-135M, the model is also measured with its
hidden width padded by zeros, which changes no number (`PaddedSource`).
"""

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from qerl.convert.convert import convert
from qerl.convert.job import Job
from qerl.convert.methods import METHODS
from qerl.model.load import full_spec, load_policy
from qerl.model.random_source import RandomSource, geometry_spec
from qerl.model.shards import DictWeights
from qerl.model.source import Folder, SmolLM2Gguf, Source
from qerl.model.spec import ModelSpec
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.rollout.parity import Gap, completion_logprobs

log = logging.getLogger(__name__)

_FORMATS: dict[str, Callable[..., Format]] = {"nvfp4": NVFP4, "mxfp4": MXFP4}
_QUESTIONS = (
    "What is 21 + 34?",
    "What is the capital of France?",
    "Write a short sentence about the sea.",
    "Which is larger, 9.11 or 9.9?",
    "Name three colours.",
    "How many days does a week have?",
    "Translate 'good morning' into German.",
    "What do plants need to grow?",
)

Tokens = list[int]


class PaddedSource:
    """A model whose hidden width D is padded to `width` with zeros; it computes the same.

    Padded channels of the residual stream stay 0. A norm divides by the root mean square over
    `width` channels instead of D, so its weight is taken sqrt(D / width) times and its epsilon
    D / width times.
    """

    def __init__(self, inner: Source, width: int) -> None:
        self.inner = inner
        self.name = f"{inner.name}-width-{width}"
        before = full_spec(inner)
        self._share = before.hidden_size / width
        self._spec = replace(before, hidden_size=width, rms_eps=before.rms_eps * self._share)
        if ModelSpec.from_hf(self.config()).head_dim != before.head_dim:
            raise ValueError(
                f"{inner.name}: the config of {before.family} has no head width of its own, so "
                "its hidden width cannot be padded; take a llama or qwen3 model"
            )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the model."""
        return self.inner.tokenizer()

    def config(self) -> PretrainedConfig:
        """That of the model, wider."""
        return self._spec.to_hf_config()

    def generation_eos_ids(self) -> tuple[int, ...]:
        """Those of the model."""
        return self._spec.eos_ids

    def geometry(self) -> ModelSpec:
        """The sizes."""
        return self._spec

    def folder(self) -> None:
        """Nothing of it is on disk."""

    def weights(self) -> DictWeights:
        """Every tensor with an axis of the hidden width, padded."""
        weights = self.inner.weights()
        return DictWeights(
            {name: self._padded(name, weights.get(name)) for name in weights.names()}
        )

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        extra = self._spec.hidden_size - round(self._spec.hidden_size * self._share)
        if name.endswith("norm.weight") and not name.endswith(("q_norm.weight", "k_norm.weight")):
            scaled = (tensor.float() * self._share**0.5).to(tensor.dtype)
            return torch.nn.functional.pad(scaled, (0, extra))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return torch.nn.functional.pad(tensor, (0, 0, 0, extra))
        if name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            return torch.nn.functional.pad(tensor, (0, extra))
        return tensor


@dataclass(frozen=True, kw_only=True)
class VllmLoadBench:
    """One row a model and format: how far vLLM's log-probabilities are from ours."""

    models: Sequence[str] = ("smollm2-135m", "smollm2-135m-width-1152", "random-7b-2-layers")

    formats: Sequence[str] = ("nvfp4",)

    method: str = "rtn"

    new_tokens: int = 32
    """Tokens of a completion; an end-of-sequence token does not end it."""

    vocabulary: int = 4096
    """Of the random model."""

    folder: str = "out/bench/vllm"
    """Where the folders are written; they stay there."""

    memory_share: float = 0.3
    """Of the GPU, for vLLM."""

    mean_bound_nats: float = 0.05
    """Mean |difference| from our forward in fp32 up to which vLLM agrees, whatever our own bf16
    forward does. vLLM's logits are bf16, whose steps are 0.125 between 16 and 32."""

    times: float = 2.0
    """vLLM agrees, too, where it is on average at most so many times as far from our forward in
    fp32 as our own forward in bf16 is: random models have no small differences."""

    max_bound_nats: float = 0.5
    """Largest |difference| from our bf16 forward up to which it agrees."""

    device: str = "cuda"

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a model; one that vLLM refuses says why instead of figures."""
        for model in self.models:
            for format in self.formats:
                row = {"section": "vllm", "model": model, "format": format, "method": self.method}
                rows.append(row | self._measure(model, format))

    def _measure(self, model: str, format: str) -> dict[str, Any]:
        source = self._source(model)
        folder = Path(self.folder) / f"{model}-{format}-{self.method}"
        job = Job(
            source=source,
            format=_FORMATS[format](method=self.method),
            method=METHODS[self.method],
            out=folder,
            device=torch.device(self.device),
        )
        convert(job)
        prompts = self._prompts(model, source)
        # A process of its own, so that its memory is free before ours is needed.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            asked = pool.submit(generate, folder, prompts, self.new_tokens, self.memory_share)
            failure = asked.exception()
        if failure is not None:
            log.warning("%s: vLLM failed: %s", model, failure)
            return {"loads": False, "error": " ".join(str(failure).split())[:500]}
        return self._compared(folder, format, prompts, asked.result())

    def _compared(
        self,
        folder: Path,
        format: str,
        prompts: Sequence[Tokens],
        theirs: Sequence[tuple[Tokens, list[float]]],
    ) -> dict[str, Any]:
        """Differences over all tokens of all prompts, ours minus theirs."""
        held, source = _FORMATS[format](method=self.method), Folder(folder)

        def scored(dtype: torch.dtype) -> Tensor:
            policy = load_policy(source, held, None, device=self.device, dtype=dtype)
            pairs = zip(prompts, theirs, strict=True)
            return torch.cat([completion_logprobs(policy, p, tokens) for p, (tokens, _) in pairs])

        exact = scored(torch.float32)  # [N]
        ours = scored(torch.bfloat16) if self.device == "cuda" else exact  # [N]
        wanted = torch.tensor([value for _, values in theirs for value in values])  # [N]
        gap, own, other = (
            Gap.between(ours, wanted),
            Gap.between(ours, exact),
            Gap.between(wanted, exact),
        )
        return {
            "loads": True,
            "prompts": len(prompts),
            "tokens": len(wanted),
            "mean_abs_nats": round(gap.mean, 6),
            "max_abs_nats": round(gap.max, 6),
            "ours_to_fp32_mean_nats": round(own.mean, 6),
            "ours_to_fp32_max_nats": round(own.max, 6),
            "vllm_to_fp32_mean_nats": round(other.mean, 6),
            "vllm_to_fp32_max_nats": round(other.max, 6),
            "mean_signed_nats": round(float((ours - wanted).mean()), 6),
            "mean_logprob_nats": round(float(wanted.mean()), 4),
            "agrees": other.mean <= max(self.mean_bound_nats, self.times * own.mean)
            and gap.max <= self.max_bound_nats,
        }

    def _source(self, model: str) -> Source:
        if model == "smollm2-135m":
            return SmolLM2Gguf()
        if model == "smollm2-135m-width-1152":
            return PaddedSource(SmolLM2Gguf(), 1152)
        if model == "random-7b-2-layers":
            spec = geometry_spec("7b", layers=2)
            return RandomSource(
                replace(spec, vocab_size=self.vocabulary, eos_ids=(2,)), self.device
            )
        raise ValueError(f"model={model}: one of {', '.join(VllmLoadBench().models)}")

    def _prompts(self, model: str, source: Source) -> list[Tokens]:
        """Eight prompts: questions for a model that answers, random tokens for another."""
        if model.startswith("random"):
            generator = torch.Generator().manual_seed(0)
            drawn: list[Tokens] = torch.randint(
                3, self.vocabulary, (len(_QUESTIONS), 48), generator=generator
            ).tolist()
            return drawn
        tokenizer = source.tokenizer()
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in _QUESTIONS
        ]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def generate(
    folder: Path, prompts: Sequence[Tokens], new_tokens: int, memory_share: float
) -> list[tuple[Tokens, list[float]]]:
    """Greedy completions by vLLM, with the log-probability of every token."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors come with their cause
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise ValueError(f"vllm is not installed ({error}): pip install qerl[vllm]") from None
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        gpu_memory_utilization=memory_share,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for answer in engine.generate(asked, sampling, use_tqdm=False):
        best = answer.outputs[0]
        tokens = list(best.token_ids)
        chosen = [place[token].logprob for token, place in zip(tokens, best.logprobs, strict=True)]
        answers.append((tokens, chosen))
    return answers
