"""Shared fixtures: shape checks on, a fixed seed, composed configurations, skips without a GPU."""

from jaxtyping import install_import_hook

# Shapes and dtypes of annotated functions and carriers are checked in tests and cost a run nothing.
# Not in qerl.noise: from Python 3.12 on, no run-time check sees that a module has a weight, since
# torch keeps parameters out of the instance's own attributes.
install_import_hook(["qerl.types", "qerl.quant", "qerl.algorithm"], "beartype.beartype")

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

ROOT = Path(__file__).parent.parent

Compose = Callable[..., DictConfig]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of whole data sets named by QERL_DATA_DIR; tests that need it skip without it."""
    folder = os.environ.get("QERL_DATA_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("QERL_DATA_DIR names no folder with the data sets (gsm8k/, math/, ...)")
    return Path(folder)


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compose:
    """`composed("model=toy", ...)`: the configuration `python train.py model=toy ...` would get.

    The working folder is a temporary one, so that runs leave nothing in the checkout.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def make(*overrides: str, config: str = "train") -> DictConfig:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose(config, list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):  # as in a run, where Hydra keeps its own node to itself
            del cfg["hydra"]
        return cfg

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
