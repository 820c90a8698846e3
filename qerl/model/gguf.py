"""GGUF files of small models, unpacked to bf16 once: transformers reads them whole, in memory."""

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
CACHE = Path("~/.cache/qerl")
"""Where files are unpacked."""

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # of a file, for the name of its folder


def unpacked(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file, unpacked below `CACHE` at the first call.

    Raises:
        ValueError: there is no such file.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file; model.source.path names a folder or a GGUF file")
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for sample in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    folder = CACHE.expanduser() / f"{file.stem.lower()}-{digest.hexdigest()[:8]}"
    if not folder.is_dir():
        logger.info("%s: unpacking to bf16, once, in %s", file.name, folder)
        unpack(file, folder)
    return folder


def tokenizer_kind(file: Path) -> str:
    """``tokenizer.ggml.pre``: how the file's tokenizer splits text."""
    # Here and not above: only GGUF files need it.
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else "default"


def unpack(file: Path, folder: Path) -> None:
    """Write `folder` in the Hugging Face layout, in bf16; it appears whole or not at all."""
    # Here and not above: no other source needs it, and older releases of transformers lack it.
    from transformers import GgufConfig

    tokenizer = gguf_tokenizer(file)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # else it is marked as not saveable
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, padding on the left."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, padding_side="left", model_max_length=8192
    )
    kind = tokenizer_kind(file)
    if kind != "smollm":
        logger.warning(
            "%s: a tokenizer of the kind %s, as transformers converts it; where its text is split "
            "otherwise than by the original, take the original folder",
            file.name,
            kind,
        )
        return tokenizer
    # transformers builds a plain byte-level pre-tokenizer and ignores the file's `smollm` kind,
    # which also splits digits: "\n\n1" would become three tokens instead of two.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def publish(unfinished: Path, folder: Path) -> None:
    """Rename a finished folder into place, unless another process with the same bytes did."""
    try:
        unfinished.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(unfinished)
