"""What each format and method costs: output error, perplexity, divergence, right answers.

Every variant is made from the same dense weights and calibrated on the same tokens; all read the
same held-out text and answer the same problems, so that differences are paired. Likelihoods and
divergence resolve more than answers do: thousands of tokens against a few hundred completions.
Answers are greedy: drawing with top-p sorts the vocabulary at every token, and in the same time a
CPU answers eight times as many problems without.

    perplexity = exp(mean -log p(token)),   divergence = mean KL(dense || variant), nats a token
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.convert.in_memory import quantized_policy
from qerl.convert.method import Row
from qerl.convert.methods import METHODS
from qerl.convert.report import summary
from qerl.data.prepare import prepare
from qerl.data.problems import ProblemSource
from qerl.data.prompt import PromptBuilder
from qerl.data.texts import TextSource, token_sequences
from qerl.evaluate.estimate import estimate, standard_error
from qerl.evaluate.harness import evaluate
from qerl.model.attention import ForestAttend
from qerl.model.head import project
from qerl.model.load import load_tokenizer
from qerl.model.policy import Policy
from qerl.model.source import Source
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.record.progress import duration
from qerl.reward.reward import Reward
from qerl.rollout.native import NativeEngine
from qerl.types import Prompts, Sampling, Segment

log = logging.getLogger(__name__)

FORMATS: Mapping[str, Format] = {
    "bf16": BF16(),
    "nf4": NF4(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
    "nvfp4-pow2": NVFP4(power_of_two_scale=True),
}
"""First part of a variant's name."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

BASELINE = "bf16/rtn"

_ROWS = 128  # tokens whose logits are in memory at a time: 25 MB at 49,152 words


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """How a policy reads the held-out text."""

    nll: Float[Tensor, "windows T1"]
    """-log p of every token but each window's first, nats."""

    log_probs: Float[Tensor, "rows V"]
    """Of the tokens of the first windows, for the divergence."""


@dataclass(frozen=True, kw_only=True)
class _Material:
    """What all variants share."""

    calibration: Int[Tensor, "n T"]
    text: Int[Tensor, "windows T"]
    prompts: Prompts
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class QuantisersBench:
    """All variants of one model."""

    source: Source

    calibration: TextSource

    held_out: TextSource
    """Apart from `calibration`."""

    problems: ProblemSource

    prompt: PromptBuilder

    reward: Reward

    variants: Sequence[str] = (BASELINE, "nvfp4/rtn", "nvfp4/mse", "nvfp4/awq", "nvfp4/gptq")
    """``format/method``; the dense baseline first."""

    device: str = "cpu"

    dtype: str = "bfloat16"
    """Compute dtype of every variant; statistics and likelihoods are fp32."""

    calibration_sequences: int = 16
    calibration_length: int = 512

    windows: int = 40
    """Of held-out text, each read on its own."""

    window: int = 512
    """Tokens of a window."""

    divergence_windows: int = 4
    """Windows on which whole distributions are compared; 1 takes 100 MB at 49,152 words."""

    max_new_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [v for v in self.variants if v.partition("/")[0] not in FORMATS]
        wrong += [v for v in self.variants if v.partition("/")[2] not in METHODS]
        if wrong or not self.variants or self.variants[0] != BASELINE:
            raise ValueError(
                f"bench.variants={list(self.variants)}: {BASELINE} first, then format/method with "
                f"{', '.join(FORMATS)} and {', '.join(METHODS)}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"bench.dtype={self.dtype}: one of {', '.join(DTYPES)}")

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a variant, and one a kind of linear of each, to `rows`."""
        material = self._material()
        rows.append(self._text_row(material))
        baseline: _Reading | None = None
        try:
            with _Display(len(self.variants)) as display:
                for variant in self.variants:
                    found, reading = self._variant(variant, material, baseline, display)
                    baseline = baseline or reading
                    rows += found
                    display.variant(variant, found[0])
        finally:
            self.reward.close()

    def _material(self) -> _Material:
        tokenizer = load_tokenizer(self.source)
        calibration = token_sequences(
            self.calibration,
            tokenizer,
            sequences=self.calibration_sequences,
            length=self.calibration_length,
            seed=self.seed,
        )
        text = token_sequences(
            self.held_out, tokenizer, sequences=self.windows, length=self.window, seed=None
        )
        prompts, _ = prepare(
            self.problems.load(),
            builder=self.prompt,
            tokenizer=tokenizer,
            max_prompt_tokens=None,
            seed=self.seed,
        )
        return _Material(
            calibration=calibration, text=text, prompts=prompts.all(), tokenizer=tokenizer
        )

    def _text_row(self, material: _Material) -> dict[str, Any]:
        return {
            "section": "text",
            "held_out_sha256": self.held_out.checksum(),
            "held_out_tokens": material.text.numel(),
            "calibration_sha256": self.calibration.checksum(),
            "calibration_tokens": material.calibration.numel(),
            "problems": len(material.prompts),
        }

    def _variant(
        self, variant: str, material: _Material, baseline: _Reading | None, display: "_Display"
    ) -> tuple[list[dict[str, Any]], _Reading]:
        name, _, method = variant.partition("/")
        started = time.perf_counter()
        policy, linears = quantized_policy(
            self.source,
            FORMATS[name],
            METHODS[method],
            None if name == "bf16" else material.calibration,
            device=self.device,
            dtype=DTYPES[self.dtype],
            progress=lambda done, total: display.phase(f"{variant}: layer {done}/{total}"),
        )
        quantise_s = time.perf_counter() - started
        policy.set_shadow(True)  # changes no result; a CPU has no 4-bit matmul
        display.phase(f"{variant}: text")
        reading = _read(policy, material.text, self.divergence_windows)
        row: dict[str, Any] = {"section": "quantiser", "variant": variant}
        row |= {"format": name, "method": method, **summary(linears)}
        row |= {"bits_per_weight": policy.linear_bits_per_weight()}
        row |= likelihood(reading, baseline or reading)
        display.phase(f"{variant}: problems")
        row |= self._answers(policy, material) | {"quantise_s": round(quantise_s, 1)}
        return [row, *_by_linear(variant, linears)], reading

    def _answers(self, policy: Policy, material: _Material) -> dict[str, float]:
        """Greedy pass@1 on the problems."""
        sampling = Sampling(group_size=1, max_new_tokens=self.max_new_tokens, temperature=0.0)
        result = evaluate(
            NativeEngine(policy),
            material.prompts,
            sampling,
            self.reward,
            lambda ids: str(material.tokenizer.decode(ids, skip_special_tokens=False)),
            seed=self.seed,
        )
        of = estimate(result.per_problem.tolist(), 1)
        return {
            "pass_at_1": of.mean,
            "pass_at_1_stderr": of.standard_error,
            "pass_at_1_low": of.low,
            "pass_at_1_high": of.high,
        }


@torch.no_grad()
def _read(policy: Policy, text: Int[Tensor, "windows T"], divergence_windows: int) -> _Reading:
    """Likelihoods of a text, a window at a time."""
    decoder, losses, kept = policy.decoder, [], []
    length = text.shape[1]
    for index, window in enumerate(text.to(decoder.device)):
        attend = ForestAttend([Segment(start=0, length=length, parent=None)], decoder.device)
        hidden = decoder(window, torch.arange(length, device=decoder.device), attend)  # [T, D]
        for rows in torch.arange(length - 1).split(_ROWS):
            z = project(hidden[rows], decoder.head)  # [r, V]
            log_total = z.logsumexp(1, keepdim=True)  # [r, 1]
            losses.append((log_total - z.gather(1, window[rows + 1, None])).squeeze(1))
            if index < divergence_windows:
                kept.append(z - log_total)
    nll = torch.cat(losses).view(len(text), length - 1)
    return _Reading(nll=nll.cpu(), log_probs=torch.cat(kept))


def likelihood(reading: _Reading, baseline: _Reading) -> dict[str, float]:
    """Perplexity, its distance from the baseline's in nats, and the divergence from it.

    Standard errors are over windows, those of the distance over paired windows.
    """
    per_window = reading.nll.double().mean(1)  # [windows]
    away = per_window - baseline.nll.double().mean(1)
    kl = (baseline.log_probs.exp() * (baseline.log_probs - reading.log_probs)).sum(-1)  # [rows]
    return {
        "perplexity": math.exp(float(per_window.mean())),
        "nll_nats": float(per_window.mean()),
        "nll_nats_stderr": standard_error(per_window.tolist()),
        "nll_above_baseline_nats": float(away.mean()),
        "nll_above_baseline_nats_stderr": standard_error(away.tolist()),
        "divergence_nats": float(kl.double().mean()),
    }


def _by_linear(variant: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over layers, one row a kind of linear."""
    names = dict.fromkeys(str(row["linear"]) for row in rows)
    kinds = {name: summary([row for row in rows if row["linear"] == name]) for name in names}
    return [
        {"section": "linear", "variant": variant, "linear": name, **figures}
        for name, figures in kinds.items()
    ]


class _Display:
    """A bar on a terminal, a line a variant anywhere else."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()
        self._console = Console()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "_Display":
        if self._console.is_terminal:
            columns = (
                BarColumn(24, complete_style="green"),
                TextColumn("{task.completed:.0f}/{task.total:.0f} variants"),
                TimeElapsedColumn(),
                TextColumn("[cyan]{task.description}"),
            )
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def phase(self, text: str) -> None:
        """What is being done."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def variant(self, name: str, row: Mapping[str, Any]) -> None:
        """A variant is measured."""
        self._done += 1
        spent = time.monotonic() - self._started
        eta = duration(spent / self._done * (self._total - self._done))
        line = (
            f"{name:<16} perplexity {row['perplexity']:.3f}  "
            f"divergence {row['divergence_nats']:.4f} nats  "
            f"pass@1 {row['pass_at_1']:.3f}  {self._done}/{self._total}  eta {eta}"
        )
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done)
