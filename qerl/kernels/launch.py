"""What a launch needs beside its arguments: is this a Hopper GPU, and how shared memory is cut."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CUDA driver API


@cache
def is_hopper(device: torch.device) -> bool:
    """True on compute capability 9.0, whose instructions the Gluon kernels use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def gpu_name(device: torch.device) -> str:
    """The name by which the tile table knows the GPU."""
    return torch.cuda.get_device_name(device)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


_done: set[int] = set()  # functions whose carve-out is set: a property of the loaded module


def carve_shared(kernel: Any) -> None:
    """Ask for the largest shared memory under `kernel`, the return value of a launch.

    Kernels of one graph overlap under programmatic dependent launch only if an SM is cut the same
    way for all of them: worth 5 to 20 us a layer on an H200 for the wgmma kernel's graphs. It acts
    from the next launch on, so run a step once before capturing it.
    """
    handle = getattr(kernel, "function", None)
    if handle is None or handle in _done:
        return
    code = _driver().cuFuncSetAttribute(ctypes.c_void_p(handle), _PREFERRED_CARVEOUT, 100)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute returned {code}: the carve-out needs CUDA >= 9")
    _done.add(handle)


def check_rows(name: str, x: Tensor, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise unless `x` is contiguous [rows, columns] of `dtype`."""
    if x.ndim != 2 or x.shape[1] != columns or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"{name} {tuple(x.shape)} {x.dtype}: pass contiguous {dtype} [rows, {columns}]"
        )


def runs_kernels(x: Tensor) -> bool:
    """True where the Triton kernels run; elsewhere launchers fall back on their torch reference."""
    return x.is_cuda


def pdl_options(pdl: int) -> dict[str, bool]:
    """Launch options for programmatic dependent launch, which the interpreter does not know."""
    return {"launch_pdl": True} if pdl else {}
