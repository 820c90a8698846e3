"""Shared fixtures: shape checks on, a fixed seed, and a skip for tests whose device is missing."""

from jaxtyping import install_import_hook

# Shapes and dtypes of annotated functions and carriers are checked in tests and cost a run nothing.
install_import_hook(
    ["qerl.types", "qerl.quant", "qerl.algorithm", "qerl.noise"], "beartype.beartype"
)

import os
from pathlib import Path

import pytest
import torch


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
