"""What a split matmul leaves for the next kernel: dense columns, and fp32 parts of the others.

y[m, n] = dense[m, n]                      for n < first
y[m, n] = sum over s of cut[s, m, n - first]   for n >= first, s ascending
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from dataclasses import dataclass

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """y [M, N] before the sum over the parts of K."""

    dense: Float[Tensor, "M N"]
    """bf16; columns before `first` hold y."""

    cut: Float[Tensor, "*P"]
    """fp32 [split, M, N - first], flat; the scratch of the kernel that wrote it."""

    first: int
    """First column that is cut; N where none is."""

    split: int
    """Number of parts; 0 where no column is cut."""

    @staticmethod
    def of(y: Float[Tensor, "M N"]) -> "Parts":
        """A finished y as parts; nothing is allocated."""
        return Parts(y, y, y.shape[1], 0)

    def total(self) -> Float[Tensor, "M N"]:
        """Y in fp32: the torch twin of `load_parts`."""
        m, n = self.dense.shape
        y = self.dense.float().clone()
        if self.split:
            size = self.split * m * (n - self.first)
            y[:, self.first :] = self.cut[:size].view(self.split, m, n - self.first).sum(0)
        return y

    def arguments(self) -> tuple[Tensor, Tensor, int, int, int, int]:
        """(dense, cut, M, N, first, split) as kernels take them."""
        m, n = self.dense.shape
        return self.dense, self.cut, m, n, self.first, self.split


@triton.jit
def load_parts(dense_ptr, cut_ptr, row, col, mask, M, N, FIRST, SPLIT):  # noqa: PLR0913
    """Y at (row, col), fp32. row and col broadcast."""
    y = tl.load(dense_ptr + row * N + col, mask=mask & (col < FIRST), other=0.0).to(tl.float32)
    for s in range(SPLIT):
        at = (s * M + row) * (N - FIRST) + col - FIRST
        y += tl.load(cut_ptr + at, mask=mask & (col >= FIRST), other=0.0)
    return y


@triton.jit
def mma_column(col):
    """Position of natural column `col` in `layout.mma_order`."""
    low = ((col >> 2) & 3) << 4 | ((col >> 1) & 1) << 3 | ((col >> 4) & 3) << 1 | (col & 1)
    return (col & -64) | low


@triton.jit
def natural_column(position):
    """Natural column at `position` of `layout.mma_order`: the inverse of `mma_column`."""
    low = ((position >> 1) & 3) << 4 | ((position >> 4) & 3) << 2 | ((position >> 3) & 1) << 1
    return (position & -64) | low | (position & 1)
