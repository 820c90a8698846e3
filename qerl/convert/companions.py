"""The files beside the weights: config, index, tokenizer, generation config, checksums."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qerl.convert.method import Row
from qerl.convert.plan import Plan
from qerl.convert.unfinished import sha256, write_whole
from qerl.model import compressed
from qerl.model.shards import CHECKSUMS, INDEX, SINGLE
from qerl.model.source import Source
from qerl.model.spec import ModelSpec
from qerl.quant.packed import Format

REPORT = "quantization_report.json"

Json = Any

# A tokenizer, its template, how to sample, and under which terms.
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def check_companions(source: Source) -> None:
    """Refuse a folder without a tokenizer before any weight is read.

    Raises:
        ValueError: naming the folder.
    """
    folder = source.folder()
    if folder is not None and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f"{folder}: no tokenizer ({' or '.join(_TOKENIZERS)}); copy the tokenizer's files of "
            "the original model there"
        )


def fingerprint(source: Source) -> str:
    """SHA-256 of what `write_companions` takes from the source."""
    digest = hashlib.sha256(json.dumps(_config(source), sort_keys=True).encode())
    for path in _copied(source.folder()):
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()


def write_companions(
    folder: Path, source: Source, spec: ModelSpec, plan: Plan, format: Format
) -> None:
    """Write everything but weights and checksums."""
    config = _config(source) | {"checksums": CHECKSUMS}
    if format.name == "bf16":
        config = {
            k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype")
        }
        config["dtype"] = "bfloat16"
    else:
        config["quantization_config"] = compressed.quantization_config(format, ["lm_head"])
    _write_json(folder / "config.json", config)
    if plan.shards[0].file != SINGLE:
        data = sum(part.nbytes for shard in plan.shards for part in shard.parts)
        index = {"metadata": {"total_size": data}, "weight_map": plan.weight_map()}
        _write_json(folder / INDEX, index)
    copied = _copied(source.folder())
    for path in copied:
        shutil.copyfile(path, folder / path.name)
    if not copied:
        source.tokenizer().save_pretrained(folder)
    if not (folder / "generation_config.json").is_file():
        ends = list(spec.eos_ids) or None
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)  # type: ignore[no-untyped-call]


def write_report(folder: Path, report: Mapping[str, Json]) -> None:
    """Write the report of a conversion."""
    rows = ",\n  ".join(json.dumps(row) for row in report["rows"])
    head = json.dumps({**report, "rows": []}, indent=1)
    text = head.replace('"rows": []', f'"rows": [\n  {rows}\n ]')
    write_whole(folder / REPORT, text + "\n")


def read_report(folder: Path) -> list[Row]:
    """The rows of the report in a folder."""
    rows: list[Row] = json.loads((folder / REPORT).read_text())["rows"]
    return rows


def write_checksums(folder: Path, settings: Mapping[str, Json], known: Mapping[str, str]) -> None:
    """Write the list of all files with their bytes and SHA-256, and how they were made.

    Args:
        folder: with every other file in place.
        settings: of the conversion.
        known: SHA-256 by file, where it has been computed already.
    """
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": known.get(path.name) or sha256(path),
        }
        for path in sorted(folder.iterdir())
    }
    _write_json(folder / CHECKSUMS, {"settings": settings, "files": files})


def _config(source: Source) -> dict[str, Json]:
    """The config as the source has it on disk, or as its library writes it."""
    folder = source.folder()
    if folder is not None:
        raw: dict[str, Json] = json.loads((folder / "config.json").read_text())
        return raw
    config = source.config()
    plain = json.loads(config.to_json_string())
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plain["model_type"]]
    return plain | {"architectures": [architecture], "dtype": "bfloat16"}


def _copied(folder: Path | None) -> list[Path]:
    """Files that are taken over as they are."""
    if folder is None:
        return []
    found = {path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def _write_json(path: Path, document: Mapping[str, Json]) -> None:
    write_whole(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
