"""Compile the decode kernels for sm_90a without a GPU and read the machine code.

Three faults do not show in a test that passes: a register that a pending wgmma still reads is
written again (right or wrong by timing alone); ptxas serialises the wgmma pipeline (C7515: slow);
registers spill (slow). `check` finds them in the code of a plan.

The hazard check follows the innermost loops that hold an HGMMA, three turns, branches out of them
ignored. Source: found on an H200, where 37 to 190 such overwrites a kernel of plain ``tl.dot`` went
with results that differed between runs, and none with results that did not.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from qerl.kernels.layout import TiledWeight
from qerl.kernels.layout_nf4 import Tiled, TiledNF4
from qerl.kernels.tiles import Plan

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_NO_WRITE = (
    *("ST", "BAR", "BRA", "SYNCS", "LDGSTS", "HGMMA", "WARP", "DEPBAR", "U", "RED", "EXIT"),
    *("NOP", "BSSY", "BSYNC", "R2UR", "ISETP", "R2P", "PLOP", "VOTEU", "FSETP"),
)

Instruction = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Report:
    """What the machine code of one plan shows."""

    hazards: int
    """Writes to a register that a pending wgmma reads."""

    serialised: bool
    """ptxas reported C7515."""

    spills: int
    """Bytes of spilled registers."""

    registers: int
    shared_bytes: int

    @property
    def clean(self) -> bool:
        return not (self.hazards or self.serialised or self.spills)


class _NoDevice:
    """Stands in for the CUDA driver while kernels are compiled for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def hopper_target() -> Iterator[None]:
    """Compile for sm_90a inside the block, whatever the machine has."""
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_NoDevice())
    try:
        yield
    finally:
        driver._active = before


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, sass.split("\n")):
        if match := re.match(r"^(\.L_?\S+):", line):
            labels[match[1]] = len(code)
        elif match := re.match(r"^/\*([0-9a-f]+)\*/\s+(.*?)\s*;", line):
            code.append((int(match[1], 16), match[2]))
    return code, labels


def _loops(code: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Innermost loops that hold an HGMMA, as index ranges."""
    found = []
    for end, (_, text) in enumerate(code):
        match = re.search(r"BRA.*?`\((\.L\S+)\)", text)
        start = labels.get(match[1], end + 1) if match else end + 1
        if start <= end and any("HGMMA" in body for _, body in code[start : end + 1]):
            found.append((start, end))
    return [
        loop
        for loop in found
        if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in found)
    ]


def _written(text: str) -> set[int]:
    """Registers that an instruction writes."""
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    name = text.split()[0]
    match = re.search(r"\bR(\d+)\b", text[len(name) :].split(",")[0])
    if name.startswith(_NO_WRITE) or not match:
        return set()
    first, count = int(match[1]), 1
    if ".128" in name:
        count = 4
    elif ".64" in name or ".WIDE" in name or (name.startswith("CS2R") and ".32" not in name):
        count = 2
    if name.startswith("LDSM"):
        found = re.search(r"\.(\d)\b", name)
        count = int(found[1]) if found else 1
    return set(range(first, first + count))


def _operand(text: str) -> set[int]:
    """Registers of the A operand of an HGMMA, empty where it is in shared memory."""
    parts = text.split(None, 2 if text.startswith("@") else 1)[-1].split(",")
    match = re.match(r"R(\d+)$", parts[1].strip())
    return set(range(int(match[1]), int(match[1]) + 4)) if match else set()


def hazards(sass: str) -> list[tuple[int, int]]:
    """(address of the wgmma, address of the write) for each overwritten pending operand."""
    code, labels = _parse(sass)
    found = set()
    for start, end in _loops(code, labels):
        groups: list[list[tuple[set[int], int]]] = []  # committed, not yet waited for
        group: list[tuple[set[int], int]] = []
        for turn in range(3):
            for address, text in code[start : end + 1]:
                if "HGMMA" in text:
                    group.append((_operand(text), address))
                    if "gsb0" in text:
                        groups, group = [*groups, group], []
                elif match := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text):
                    keep = int(match[1], 16)
                    groups = groups[len(groups) - keep :] if 0 < keep < len(groups) else groups
                    groups = groups if keep else []
                elif turn and (written := _written(text)):
                    pending = [entry for entries in [*groups, group] for entry in entries]
                    found |= {(at, address) for regs, at in pending if regs & written}
    return sorted(found)


def read_code(kernel: Any) -> Report:
    """Report on a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(kernel.asm["ptx"])
        cubin.write_bytes(kernel.asm["cubin"])
        log = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        sass = subprocess.run(
            [_TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
    used = re.search(r"Used (\d+) registers", log)
    return Report(
        hazards=len(hazards(sass)),
        serialised="C7515" in log,
        spills=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        registers=int(used[1]) if used else 0,
        shared_bytes=kernel.metadata.shared,
    )


def compile_plan(plan: Plan, rank: int = 0, nf4: bool = False) -> Any:
    """The compiled kernel of a gemv or gemm plan, for sm_90a.

    Args:
        plan: whose tiles to compile.
        rank: of its adapter, 0 for none.
        nf4: for NF4 instead of the E2M1 formats.
    """
    # Imported here: an older or newer triton without Gluon's Hopper set fails in this function.
    from qerl.kernels import w4a16_gemm, w4a16_gemv

    i32, f32, bf16 = torch.int32, torch.float32, torch.bfloat16
    with hopper_target():
        if plan.kernel == "gemv":
            return w4a16_gemv._gemv_kernel.warmup(
                *(i32, i32, f32 if nf4 else i32, f32, f32, i32, bf16),
                *(bf16, f32, 3 * rank, 3584, 4096, 4),
                *(5, 4608, 3584, plan.split),
                RANK=rank,
                NW=plan.warps,
                R=plan.blocks,
                T=1,
                SUM=plan.split > 1,
                PDL=plan.pdl,
                NF4=nf4,
                num_warps=plan.warps,
                launch_pdl=plan.pdl > 0,
                grid=(1, 1, 1),
            )
        x = torch.empty(max(plan.token_tile, 8), 256, dtype=bf16)
        words = torch.empty(8, 4, 256, dtype=i32)
        weight: Tiled = TiledNF4((256, 256), words, torch.empty(8, 2, 64, dtype=f32))
        if not nf4:
            scales, tensor_scale = torch.empty(8, 2, 64, dtype=i32), torch.empty(8, dtype=f32)
            weight = TiledWeight((256, 256), words, scales, tensor_scale)
        operands = w4a16_gemm.descriptors(x, weight, plan.token_tile, plan.row_tiles)
        return w4a16_gemm._gemm_kernel.warmup(
            *operands,
            *(f32, f32, bf16),
            *(bf16, bf16, 3 * rank, 3584, 4096),
            *(5, 4608, 28, 1, 0, plan.split),
            RANK=rank,
            BM=plan.token_tile,
            TG=plan.row_tiles,
            ST=plan.stages,
            PDL=plan.pdl,
            NF4=nf4,
            num_warps=4 * plan.row_tiles,
            maxnreg=plan.registers,
            launch_pdl=plan.pdl > 0,
            grid=(1,),
        )


def check(plan: Plan, rank: int = 0, nf4: bool = False) -> Report:
    """Compile `plan` and read its code."""
    return read_code(compile_plan(plan, rank, nf4))


def why_not() -> str | None:
    """Why the installed triton cannot be linted, or None."""
    if sys.platform != "linux" or not (_TOOLS / "nvdisasm").exists():
        return f"no nvdisasm under {_TOOLS}: the lint needs triton's Linux wheel"
    return None
