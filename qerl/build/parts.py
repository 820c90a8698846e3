"""The parts that training and evaluation share: the policy on its device, and problems."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from qerl.build.config import make, options
from qerl.data.prepare import LoadReport, prepare
from qerl.data.prompt_set import PromptSet
from qerl.evaluate import HeldOut
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.packing import check_quant, linear_bytes, read_packing
from qerl.model.plan import check_fits, memory_plan
from qerl.model.policy import Policy
from qerl.model.source import Source
from qerl.model.spec import ModelSpec
from qerl.quant.packed import Format
from qerl.reward.reward import Reward
from qerl.training.compute import Compute
from qerl.types import Sampling

log = logging.getLogger(__name__)


def build_policy(cfg: DictConfig, source: Source, lora: LoRAConfig | None) -> Policy:
    """The policy on its device."""
    compute: Compute = make(cfg.trainer.compute)
    format: Format = make(cfg.quant)
    device = compute.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
    policy = load_policy(
        source,
        format,
        lora,
        device=device,
        dtype=compute.torch_dtype(),
        shadow=compute.keeps_shadow(),
        seed=cfg.seed,
        checkpoint_layers=compute.checkpoint_layers,
    )
    sizes = {name: count / 2**20 for name, count in policy.memory_bytes().items() if count}
    log.info(
        "%s in %s on %s: %.2f bits per weight of the linears; MiB: %s",
        cfg.model.name,
        format.name,
        device,
        policy.linear_bits_per_weight(),
        ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
    )
    return policy


def base_model(cfg: DictConfig, source: Source) -> str:
    """What adapters are trained on, for those who load them: a packed folder, else the model."""
    path = OmegaConf.select(cfg, "model.source.path")
    if path and read_packing(source.config()) is not None:
        return str(Path(path).expanduser().resolve())
    return source.name


def check_memory(cfg: DictConfig, source: Source, lora: LoRAConfig | None) -> None:
    """Refuse a model that cannot fit, naming formats and models that would; reads no weights."""
    compute: Compute = make(cfg.trainer.compute)
    device = compute.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
    plan = partial(
        memory_plan, lora=lora, dtype=compute.torch_dtype(), shadow=compute.keeps_shadow()
    )
    format: Format = make(cfg.quant)
    geometry = source.geometry()
    # Sizes that are only declared come without a config; loading checks the format once more.
    packing = None
    if isinstance(geometry, ModelSpec):
        packing = read_packing(source.config())
        check_quant(source.name, packing, format, source.folder())
    chosen = HydraConfig.get().runtime.choices
    others = {}
    if packing is None:
        others = {
            f"quant={name}": plan(geometry, make(OmegaConf.load(path)))
            for name, path in options("quant")
            if name != chosen["quant"]
        }
    for name, path in options("model"):
        node = OmegaConf.load(path)
        declared = OmegaConf.select(node, "source.geometry")
        if declared is not None and name != chosen["model"]:
            others[f"model={name}"] = plan(make(declared), format)
    if device.type == "cuda":
        free, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        free, name = psutil.virtual_memory().available, "this machine's memory"
    held = linear_bytes(geometry, packing, format) if packing is not None else None
    check_fits(plan(geometry, format, linear_bytes=held), free, name, others)


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of token ids as the model wrote it: special tokens kept, no space tidied away."""

    def decode(ids: list[int]) -> str:
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(ids, **plain))

    return decode


def build_prompts(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, reward: Reward
) -> tuple[PromptSet, HeldOut | None]:
    """Training prompts, and the held-out ones with how they are evaluated."""
    data, evaluation = cfg.data, cfg.trainer.evaluation
    prepare_with = preparation(data, tokenizer, reward, data.max_prompt_tokens)
    apart = [make(benchmark).load() for benchmark in data.benchmarks.values()]
    held_out = None
    if data.held_out is not None:
        loaded = make(data.held_out).load()
        apart.append(loaded)
        if evaluation.problems:
            chosen, report = prepare_with(loaded)
            log.info("held out: %s", report.summary())
            held_out = HeldOut(
                chosen.all().take(list(range(min(evaluation.problems, len(chosen))))),
                Sampling(
                    group_size=evaluation.samples,
                    max_new_tokens=cfg.algorithm.max_new_tokens,
                    temperature=cfg.algorithm.temperature,
                ),
                before=evaluation.before,
                after=evaluation.after,
            )
    prompts, report = prepare_with(
        make(data.problems).load(), apart_from=apart, overlap=make(data.overlap)
    )
    log.info("prompts: %s", report.summary())
    return prompts, held_out


def preparation(
    data: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward,
    max_prompt_tokens: int | None,
) -> Callable[..., tuple[PromptSet, LoadReport]]:
    """`prepare` with the data set's one prompt builder, for training and for evaluation alike."""
    return partial(
        prepare,
        builder=make(data.prompt),
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        seed=data.seed,
        verify=reward.pool.agree,
    )
