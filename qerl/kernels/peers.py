"""Other W4A16 kernels, and cuBLAS in bf16, on the same linears in the same process."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.timing import graph_us, shapes

logger = logging.getLogger(__name__)


def time_peer(
    kind: str, geometry: str, tokens: Iterable[int], count: int = 4
) -> dict[int, float | str]:
    """Us a layer of a peer's linears, or why there is no time; a peer's failure is the peer's.

    Args:
        kind: ``cublas`` (bf16), ``humming`` or ``marlin`` (NVFP4), ``bnb`` (bitsandbytes NF4).
        geometry: key of `GEOMETRIES`.
        tokens: M.
        count: layers whose weights rotate.
    """
    if kind not in _PEERS:
        raise ValueError(f"peer {kind!r}: {', '.join(_PEERS)}")
    make, call = _PEERS[kind]
    linears, out = shapes(geometry), dict[int, float | str]()
    try:
        layers = [{name: make(*shape) for name, shape in linears.items()} for _ in range(count)]
    except Exception as error:  # another project's code
        return {m: _told(kind, error) for m in tokens}
    for m in tokens:
        inputs = {n: torch.randn(m, k, device="cuda").bfloat16() for n, (_, k) in linears.items()}

        def step(inputs: dict[str, Tensor] = inputs) -> None:
            for layer in layers:
                for name, weight in layer.items():
                    call(inputs[name], weight)

        try:
            out[m] = graph_us(step) / count
        except Exception as error:
            out[m] = _told(kind, error)
    return out


def _told(kind: str, error: Exception) -> str:
    """The first line of a peer's error."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    logger.warning("%s: %s", kind, line)
    return line


def _make_cublas(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02


def _make_humming(n: int, k: int) -> Any:
    from humming.layer import HummingLayer

    weight = {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16}
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={**weight, "scale_2_type": "tensor"},
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_unquantized(_make_cublas(n, k))
    layer.transform()
    return layer


def _make_marlin(n: int, k: int) -> Any:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    layer: Any = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = n, k
    layer.params_dtype = torch.bfloat16
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.full((n, k // 16), 1.0, device="cuda").to(torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    one = torch.ones((), device="cuda")
    layer.weight_global_scale = torch.nn.Parameter(one, requires_grad=False)
    marlin.prepare_fp4_layer_for_marlin(layer)
    return layer


def _call_marlin(x: Tensor, layer: Any) -> object:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    parts = (layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace)
    return marlin.apply_fp4_marlin_linear(x, *parts, n, k)


def _make_bnb(n: int, k: int) -> Any:
    import bitsandbytes as bnb

    return bnb.functional.quantize_4bit(_make_cublas(n, k), blocksize=64, quant_type="nf4")


def _call_bnb(x: Tensor, weight: Any) -> object:
    from bitsandbytes.autograd._functions import matmul_4bit

    codes, state = weight
    result: object = matmul_4bit(x, codes.t(), quant_state=state)
    return result


_PEERS: dict[str, tuple[Callable[[int, int], Any], Callable[[Tensor, Any], object]]] = {
    "cublas": (_make_cublas, torch.nn.functional.linear),
    "humming": (_make_humming, lambda x, layer: layer(x)),
    "marlin": (_make_marlin, _call_marlin),
    "bnb": (_make_bnb, _call_bnb),
}
