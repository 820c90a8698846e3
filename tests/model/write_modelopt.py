"""Quantises a dense folder with NVIDIA ModelOpt, in a process of its own: it patches libraries.

Not a test by itself. ``write_modelopt.py <dense folder> <folder>``; what ModelOpt unpacks of its
own bytes lies below ``<folder>/unpacked``.
"""

import copy
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

DENSE = ("*layers.1.mlp*", "*layers.0.self_attn.k_proj*")


def main(source: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    for pattern in DENSE:
        config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    model = mtq.quantize(model, config, lambda quantized: quantized(torch.arange(40)[None]))
    export_hf_checkpoint(model, export_dir=target)
    tensors = load_file(target / "model.safetensors")
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        if tensor.dtype != torch.uint8:
            plain[name] = tensor.float()
            continue
        shape = torch.Size((tensor.shape[0], 2 * tensor.shape[1]))
        plain[name] = NVFP4QTensor(shape, torch.float32, tensor).dequantize(
            dtype=torch.float32,
            scale=tensors[f"{name}_scale"],
            double_scale=tensors[f"{name}_scale_2"],
            block_sizes={-1: 16},
        )
    (target / "unpacked").mkdir()
    save_file(plain, target / "unpacked" / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
