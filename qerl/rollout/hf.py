"""The oracle: `generate` of transformers over the policy's dequantised weights, adapters by peft.

Nothing of the decoder, the cache, the scheduler or the sampler is shared with the native engine
but the norms that carry noise, which are the policy's own objects in both. Slow, plain, and dense:
it holds a full copy of the weights and every logit of a batch.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from qerl.model.layers import RMSNorm
from qerl.model.policy import Policy
from qerl.rollout.engine import Progress, RolloutStats, check_idle, check_request
from qerl.rollout.sampler import sequence_seed
from qerl.types import Prompts, Rollouts, Sampling

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class HfEngine:
    """Samples with a transformers model of the same architecture and the same weight values.

    Two things differ from the native engine by nature. Adapters are copies, taken at `sync`. And
    transformers draws from the global generator, which is seeded here for each batch from (seed,
    rollout step, batch): a call repeats exactly, but a sample depends on the batch it ran in.
    Greedy completions are those of the native engine, token for token.
    """

    name = "hf"

    def __init__(
        self, policy: Policy, *, max_sequences: int = 16, eos_ids: Sequence[int] | None = None
    ) -> None:
        """Build the transformers model and take over the adapters.

        Args:
            policy: whose weights are dequantised, once, in its compute dtype.
            max_sequences: sequences of a batch, which runs until its last one ends. A batch keeps
                max_new_tokens * max_sequences * V logits in fp32.
            eos_ids: ids that end a completion; None takes those of the model's config.
        """
        if max_sequences < 1:
            raise ValueError(f"max_sequences={max_sequences}: at least 1 row")
        self._policy = policy
        self._max_sequences = max_sequences
        self._eos_ids = tuple(policy.spec.eos_ids if eos_ids is None else eos_ids)
        with torch.random.fork_rng(devices=_generators(policy)):  # both initialise at random first
            self._model: Any = _dense_model(policy)
            self._adapters = _attach_adapters(self._model, policy)
        self._busy = False
        self.stats: RolloutStats | None = None
        self.sync()
        _share_norms(self._model, policy)

    @property
    def copies(self) -> bool:
        """Adapters and dequantised weights."""
        return True

    @property
    def norms(self) -> Sequence[RMSNorm]:
        """The policy's own norms, which stand in the transformers model."""
        return self._policy.noisy_norms

    def sync(self) -> None:
        """Copy the policy's adapters into peft's parameters, in place."""
        check_idle(self._busy)
        state = self._policy.adapter_state()
        if state.keys() != self._adapters.keys():
            raise ValueError(
                f"{len(self._adapters)} adapter matrices in transformers, {len(state)} in the "
                "policy: the LoRA targets of both must agree"
            )
        with torch.no_grad():
            for name, parameter in self._adapters.items():
                parameter.copy_(state[name])

    def release(self) -> None:
        """Nothing to give back: transformers frees its cache after every batch."""

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        rollout_step: int,
        sigma: float = 0.0,
        progress: Progress | None = None,
    ) -> Rollouts:
        """Draw `sampling.group_size` completions of every prompt; see `Engine.generate`."""
        check_idle(self._busy)
        check_request(
            self._policy, prompts, sampling.max_new_tokens, self._policy.spec.max_positions
        )
        started = time.perf_counter()
        rows = [tokens for tokens in prompts.tokens for _ in range(sampling.group_size)]  # [B]
        B, C = len(rows), sampling.max_new_tokens
        completions = torch.zeros(B, C, dtype=torch.int64)
        logprobs = torch.zeros(B, C)
        eos_ids = () if sampling.ignore_eos else self._eos_ids
        steps = 0
        self._busy = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=_generators(self._policy)):
                for batch, start in enumerate(range(0, B, self._max_sequences)):
                    part = slice(start, min(start + self._max_sequences, B))
                    torch.manual_seed(sequence_seed(seed, rollout_step, "hf", batch) & (2**63 - 1))
                    tokens, chosen = self._batch(rows[part], sampling, eos_ids)
                    width = tokens.shape[1]
                    completions[part, :width], logprobs[part, :width] = tokens, chosen
                    steps += width
                    if progress is not None:
                        progress(part.stop, B)
        finally:
            self._busy = False
        lengths, ended = _lengths(completions, eos_ids)
        longest = int(lengths.max())
        beyond = torch.arange(longest) >= lengths[:, None]  # [B, longest]
        prompt_tokens = sum(map(len, rows))
        self.stats = RolloutStats(
            sequences=B,
            tokens=int(lengths.sum()),
            seconds=time.perf_counter() - started,
            prompt_tokens=prompt_tokens,
            prefill_tokens=prompt_tokens,
            occupancy=int(lengths.sum()) / (steps * self._max_sequences),
        )
        return Rollouts(
            prompts=prompts,
            group_size=sampling.group_size,
            completions=completions[:, :longest].masked_fill(beyond, 0),
            lengths=lengths,
            sampler_logprobs=logprobs[:, :longest].masked_fill(beyond, 0),
            truncated=~ended,
            rollout_step=rollout_step,
            sigma=sigma,
        )

    def _batch(
        self, rows: Sequence[tuple[int, ...]], sampling: Sampling, eos_ids: tuple[int, ...]
    ) -> tuple[Int[Tensor, "b c"], Float[Tensor, "b c"]]:
        """Tokens and their log-probabilities until the last row ends, both on the CPU."""
        width = max(map(len, rows))
        pads = [width - len(tokens) for tokens in rows]
        prompts = torch.tensor([[0] * pad + list(t) for pad, t in zip(pads, rows, strict=True)])
        real = torch.arange(width) >= torch.tensor(pads)[:, None]  # [b, width]
        device = self._policy.decoder.device
        out = self._model.generate(
            prompts.to(device),
            attention_mask=real.long().to(device),
            generation_config=_generation_config(sampling, eos_ids),
        )
        tokens = out.sequences[:, width:]  # [b, c]
        temperature = sampling.temperature or 1.0
        chosen = [
            (logits.float() / temperature)
            .log_softmax(-1)
            .gather(1, tokens[:, step, None])
            .squeeze(1)
            for step, logits in enumerate(out.logits)
        ]  # [c][b]
        return tokens.cpu(), torch.stack(chosen, 1).cpu()


def _generators(policy: Policy) -> list[torch.device]:
    """The devices besides the CPU whose global generator transformers would draw from."""
    device = policy.decoder.device
    return [] if device.type == "cpu" else [device]


def _generation_config(sampling: Sampling, eos_ids: tuple[int, ...]) -> GenerationConfig:
    """Plain sampling, every option that would reshape the distribution off unless asked for."""
    options: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "eos_token_id": list(eos_ids) or None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if sampling.temperature > 0:
        options |= {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    return GenerationConfig(**options)  # type: ignore[no-untyped-call]


def _lengths(
    completions: Int[Tensor, "B C"], eos_ids: tuple[int, ...]
) -> tuple[Int[Tensor, " B"], Tensor]:
    """Tokens up to the first end-of-sequence one, which counts, and whether there is one."""
    ends = torch.isin(completions, torch.tensor(eos_ids, dtype=torch.int64))  # [B, C]
    ended = ends.any(1)
    return torch.where(ended, ends.int().argmax(1) + 1, completions.shape[1]), ended


def _dense_model(policy: Policy) -> nn.Module:
    """A transformers model with the policy's weight values, in evaluation mode."""
    decoder = policy.decoder
    config = policy.spec.to_hf_config()
    model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=decoder.dtype
    ).to(decoder.device)
    state = {"model.embed_tokens.weight": decoder.embed, "lm_head.weight": decoder.head}
    state["model.norm.weight"] = decoder.final_norm.weight.detach()
    for name, linear in policy.linears().items():
        target = _hf_name(name)
        state[f"{target}.weight"] = linear.packed.dequantize(decoder.dtype)
        if linear.bias is not None:
            state[f"{target}.bias"] = linear.bias
    for index, layer in enumerate(policy.layers()):
        prefix = f"model.layers.{index}"
        norms: Mapping[str, RMSNorm | None] = {
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_attention_norm,
            "self_attn.q_norm": layer.attention.q_norm,
            "self_attn.k_norm": layer.attention.k_norm,
        }
        for name, norm in norms.items():
            if norm is not None:
                state[f"{prefix}.{name}.weight"] = norm.weight.detach()
    model.load_state_dict(state)
    return model.eval()


def _hf_name(name: str) -> str:
    """``layers.0.q_proj`` to ``model.layers.0.self_attn.q_proj``."""
    layers, index, linear = name.split(".")
    return f"model.{layers}.{index}.{'self_attn' if linear in _ATTENTION else 'mlp'}.{linear}"


def _attach_adapters(model: Any, policy: Policy) -> dict[str, nn.Parameter]:
    """Put one peft adapter into `model`; its matrices under the names of `adapter_state`."""
    lora = policy.lora
    if lora is None:
        return {}
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        bias="none",
    )
    wrapped = get_peft_model(model, config).eval()
    assert list(wrapped.peft_config) == ["default"], "a sampler has exactly one adapter"
    parameters = dict(model.named_parameters())
    return {
        f"{name}.{ours}": parameters[f"{_hf_name(name)}.{theirs}.default.weight"]
        for name in policy.adapters()
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B"))
    }


def _share_norms(model: Any, policy: Policy) -> None:
    """Stand the policy's own norms in `model`, so that noise on them reaches its samples."""
    shared = []
    for theirs, ours in zip(model.model.layers, policy.layers(), strict=True):
        theirs.input_layernorm = ours.input_norm
        theirs.post_attention_layernorm = ours.post_attention_norm
        shared += [theirs.input_layernorm, theirs.post_attention_layernorm]
    assert all(a is b for a, b in zip(shared, policy.noisy_norms, strict=True)), (
        "the norms that sample are not the norms that carry noise"
    )
