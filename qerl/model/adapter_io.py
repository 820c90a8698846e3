"""Adapters in and out in the format of peft, which serving engines read.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``; matrices are named
``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`` [R, K], ``.lora_B.weight``
[N, R], fp32.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl.model.linear import LoRAConfig
from qerl.model.policy import Policy
from qerl.model.shards import json_object

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PEFT_NAME = re.compile(
    r"base_model\.model\.model\.(layers\.\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_MLP = ("gate_proj", "up_proj", "down_proj")

_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}
"""Settings of peft under which an adapter is (alpha / rank) B A and nothing else."""


def save_peft(policy: Policy, folder: str | Path, base_model_name: str) -> None:
    """Write the adapters so that peft loads them on `base_model_name`.

    Each file appears whole or not at all, the weights last; files of an earlier save are replaced.

    Raises:
        ValueError: for a policy without adapters.
    """
    if policy.lora is None:
        raise ValueError("policy without adapters: nothing to save; load it with a lora config")
    write_peft(policy.lora, policy.adapter_state(), folder, base_model_name)


def write_peft(
    lora: LoRAConfig, state: Mapping[str, Tensor], folder: str | Path, base_model_name: str
) -> None:
    """Write matrices by the policy's names as `save_peft` does."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as unfinished:
        _write_config(lora, base_model_name, unfinished)
        tensors = {_to_peft(name): tensor for name, tensor in state.items()}
        save_file(tensors, Path(unfinished) / WEIGHTS_FILE, metadata={"format": "pt"})
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            (Path(unfinished) / file).replace(target / file)


def read_peft(folder: Path) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """The settings of a saved adapter, and its matrices by the policy's names.

    Raises:
        ValueError: there is none, or one that is more than plain LoRA.
    """
    lora = read_lora(folder)
    _check_config(lora, json.loads((folder / CONFIG_FILE).read_text()), folder)
    state = _matrices(folder / WEIGHTS_FILE)
    return lora, {_from_peft(name, folder): tensor for name, tensor in state.items()}


def read_lora(folder: Path) -> LoRAConfig:
    """Rank, scale and targets of an adapter in the format of peft.

    Raises:
        ValueError: there is none, or its settings cannot be read.
    """
    path = folder / CONFIG_FILE
    if not path.is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(
            f"adapter={folder}: no {CONFIG_FILE} and {WEIGHTS_FILE} there; name the folder that a "
            "run left (out/.../adapter) or that peft saved"
        )
    config = json_object(path)
    if config is None:
        raise ValueError(f"{path}: no JSON object; bring the file again")
    absent = [key for key in ("r", "lora_alpha", "target_modules") if key not in config]
    if absent:
        raise ValueError(f"{path}: no {', '.join(absent)}; take an adapter that peft saved")
    targets = config["target_modules"]
    if not isinstance(targets, list):
        raise ValueError(
            f"{path}: target_modules={targets}: a list of linears is read, for example ['q_proj']"
        )
    return LoRAConfig(rank=config["r"], alpha=config["lora_alpha"], targets=sorted(targets))


def weights_digest(folder: Path) -> str:
    """SHA-256 of the adapter's file of matrices."""
    return hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()


def load_peft(policy: Policy, folder: str | Path) -> None:
    """Set the policy's adapters, in place, to those of a folder that peft or `save_peft` wrote.

    Raises:
        ValueError: where files are missing, the adapter is of another kind, rank, scale or target
            set than the policy's; the policy is left as it is.
    """
    source = Path(folder)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (source / file).is_file():
            raise ValueError(f"{source}: no {file}, so no adapter in the format of peft")
    _check_config(policy.lora, json.loads((source / CONFIG_FILE).read_text()), source)
    state: dict[str, Tensor] = {}
    for name, tensor in _matrices(source / WEIGHTS_FILE).items():
        state[_from_peft(name, source)] = tensor
    policy.load_adapter_state(state)


def _matrices(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}; bring the file again") from None


def _write_config(lora: LoRAConfig, base_model_name: str, folder: str) -> None:
    # Here and not above: importing peft takes 2 s and initialises bitsandbytes.
    from peft import LoraConfig

    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a fraction is kept; peft only divides by it
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model_name,
        inference_mode=True,
    )
    config.save_pretrained(folder)


def _check_config(lora: LoRAConfig | None, config: dict[str, Any], source: Path) -> None:
    """Raise unless the saved adapter computes what the policy's would."""
    if lora is None:
        raise ValueError(f"{source}: the policy has no adapters; load it with a lora config")
    for key, plain in _PLAIN.items():
        if (value := config.get(key, plain)) != plain and (value or plain):
            raise ValueError(f"{source}: {key}={value}: only plain LoRA is read ({plain})")
    ours = {"r": lora.rank, "lora_alpha": lora.alpha}
    for key, wanted in ours.items():
        if config.get(key) != wanted:
            raise ValueError(
                f"{source}: {key}={config.get(key)}, the policy has {wanted}; "
                "set model.lora.rank and model.lora.alpha to the adapter's"
            )


def _to_peft(name: str) -> str:
    """``layers.0.q_proj.lora_a`` as peft names it."""
    layer, linear, part = name.rsplit(".", 2)
    block = "mlp" if linear in _MLP else "self_attn"
    return f"base_model.model.model.{layer}.{block}.{linear}.lora_{part[-1].upper()}.weight"


def _from_peft(name: str, source: Path) -> str:
    """The policy's name of a matrix that peft wrote."""
    match = _PEFT_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{source}: {name} is no LoRA matrix of a decoder linear")
    layer, linear, part = match.groups()
    return f"{layer}.{linear}.lora_{part.lower()}"
