"""Where and in what precision a run computes."""

from dataclasses import dataclass
from typing import Literal

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Device, compute type and memory modes; `auto` follows the machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where a device is visible, otherwise the CPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, float32 on the CPU (bf16 products are slow on most CPUs)."""

    shadow: bool | Literal["auto"] = "auto"
    """Keep a dense copy of the packed linears beside the packed bytes; auto: on the CPU only."""

    checkpoint_layers: bool = False
    """Recompute each layer's activations in the backward pass."""

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: auto, cpu or cuda")
        if self.dtype != "auto" and self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: auto, float32 or bfloat16")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "trainer.compute.device=cuda: no CUDA device is visible; "
                "use trainer=cpu, or install a CUDA build of torch and check nvidia-smi"
            )

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """The device of this process."""
        if self.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", local_rank)

    def torch_dtype(self) -> torch.dtype:
        """The type in which products are computed."""
        if self.dtype != "auto":
            return _DTYPES[self.dtype]
        return torch.bfloat16 if self.torch_device().type == "cuda" else torch.float32

    def keeps_shadow(self) -> bool:
        """Whether the dense copy is kept."""
        return self.torch_device().type == "cpu" if self.shadow == "auto" else self.shadow
