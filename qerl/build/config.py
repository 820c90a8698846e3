"""Configuration nodes to objects and plain values; what a person is told of a wrong one."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from qerl.model.source import Source
from qerl.rollout.parity import SamplerIsNotPolicyError
from qerl.training.checkpoint import CheckpointError
from qerl.training.learner import NothingToLearnError

EXPECTED_ERRORS = (
    ValueError,
    OSError,
    CheckpointError,
    FloatingPointError,
    InstantiationException,
    NothingToLearnError,
    OmegaConfBaseException,
    SafetensorError,
    SamplerIsNotPolicyError,
)
"""What a person at the keyboard can cure; shown as one line instead of a traceback."""

# Groups whose settings make a run what it is; a resumed run must agree on all of them.
# Not among them: engine, device and number of processes, which change rounding and nothing else.
IDENTITY = ("model", "quant", "noise", "algorithm", "data", "optimizer", "seed")
_IDENTITY_OF_TRAINER = ("max_steps", "grad_clip")

# Settings inside them that say where something lies, not what it is.
_PLACES = ("cache_dir", "path")


def one_line(error: BaseException) -> str:
    """The error as one line; that of a constructor called by Hydra without Hydra's frame."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else None
    text = " ".join(str(cause if cause is not None else error).split())
    return f"{text} (HYDRA_FULL_ERROR=1 shows the traceback)"


def make(node: Any) -> Any:
    """The object that a `_target_` node describes, with plain Python containers."""
    return instantiate(node, _convert_="all")


def options(group: str) -> Iterator[tuple[str, Path]]:
    """Name and file of each option of a group."""
    folder = Path(__file__).parent.parent.parent / "conf" / group
    for path in sorted(folder.glob("[!_]*.yaml")):
        yield path.stem, path


def identity(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """Flat settings that a resumed run must share."""
    yield from flat(cfg, IDENTITY)
    yield from checkpoint_identity(cfg).items()
    yield from ((f"trainer.{key}", cfg.trainer[key]) for key in _IDENTITY_OF_TRAINER)


def checkpoint_identity(cfg: DictConfig) -> dict[str, str]:
    """The fingerprint of a local checkpoint: two folders of one model are not the same weights."""
    if not OmegaConf.select(cfg, "model.source.path"):
        return {}
    source: Source = make(cfg.model.source)
    return {"model.source.weights": source.weights().fingerprint()}


def check_whole(cfg: DictConfig, lowest: Mapping[str, int]) -> None:
    """Refuse settings that are no whole numbers, or too low, before anything is loaded.

    Raises:
        ValueError: naming the setting, its value and the least it may be.
    """
    for key, least in lowest.items():
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{key}={value}: a whole number, at least {least}")


def flat(cfg: DictConfig, groups: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The settings of some groups under dotted names, without those that say where things lie."""
    settings = resolved(cfg)
    pending: list[tuple[str, Any]] = [(key, settings[key]) for key in groups]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{key}.{inner}", entry) for inner, entry in value.items()]
        elif key.rpartition(".")[2] not in _PLACES:
            yield key, value


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def quiet_libraries() -> None:
    """Leave the terminal to the run: libraries speak when something is wrong."""
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "httpx", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Comes with peft when an adapter is written, and warns of kernels that nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
