"""Calibration from the configuration: text, its tokens, and the states they become."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from qerl.build.config import check_whole, make
from qerl.convert.calibrate import Progress, StreamedCalibration
from qerl.data.texts import TextSource, token_sequences
from qerl.model.load import full_spec, load_tokenizer
from qerl.model.source import Source
from qerl.training.compute import Compute


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """Tokens to calibrate on, and how to begin."""

    begin: Callable[[], StreamedCalibration]
    """Reads the embedding and embeds the tokens."""

    facts: dict[str, Any]
    """What the result depends on, as JSON values."""


def calibration_plan(
    cfg: DictConfig, source: Source, compute: Compute, progress: Progress | None = None
) -> CalibrationPlan:
    """The plan that ``calibration`` describes; reads the text and the tokenizer.

    Raises:
        ValueError: the text is out of reach or too short, or sequences exceed the model's context.
    """
    check_whole(cfg, {"calibration.sequences": 1, "calibration.length": 1, "calibration.seed": 0})
    options, spec = cfg.calibration, full_spec(source)
    if options.length > spec.max_positions:
        raise ValueError(
            f"calibration.length={options.length}: {source.name} has a context of "
            f"{spec.max_positions} tokens; set calibration.length={spec.max_positions}"
        )
    text: TextSource = make(options.text)
    try:
        tokens = token_sequences(
            text,
            load_tokenizer(source),
            sequences=options.sequences,
            length=options.length,
            seed=options.seed,
        )
    except ValueError as error:  # where a run has data.path, calibration has another setting
        raise ValueError(str(error).replace("data.path", "calibration.text.rows.path")) from error
    dtype = compute.torch_dtype()

    def begin() -> StreamedCalibration:
        embed = source.weights().get("model.embed_tokens.weight")
        embed = embed.to(compute.torch_device(), dtype)
        return StreamedCalibration(spec, embed, tokens, dtype=dtype, progress=progress)

    facts = {
        "sequences": options.sequences,
        "length": options.length,
        "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return CalibrationPlan(begin=begin, facts={"calibration": facts})
