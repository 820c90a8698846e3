"""Key/value memory in pages: one arena for all layers, a free list, and a count of holders.

Layout: keys and values are each [L, Hk, pages, page_size, Dh], so that the pages of one head of
one layer are rows of a matrix and gathering them is one `index_select`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.model.spec import ModelSpec


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page, keys and values of all layers."""
    return 2 * spec.layers * spec.kv_heads * page_size * spec.head_dim * dtype.itemsize


class PagePool:
    """`pages` pages that sequences take and drop; page 0 exists besides and pads block tables.

    A page may have many holders (a prompt's page is held by every sequence of its group that is
    not finished); it returns to the free list when the last one drops it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        shape = (spec.layers, spec.kv_heads, pages + 1, page_size, spec.head_dim)
        # Zeros, not uninitialised memory: slots that a mask hides still meet a product with 0.
        self.keys: Float[Tensor, "L Hk pages page_size Dh"]
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.reset()

    def reset(self) -> None:
        """All pages free, whoever held them."""
        self._free = list(range(self.pages, 0, -1))  # a stack: low ids first, recent ids again
        self._holders = [0] * (self.pages + 1)
        self.peak = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with a holder."""
        return self.pages - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.keys.nbytes + self.values.nbytes

    def holders(self, page: int) -> int:
        """How many hold `page`."""
        return self._holders[page]

    def take(self, count: int, holders: int = 1) -> list[int]:
        """`count` free pages with `holders` holders each; the caller has checked `free`."""
        assert 0 <= count <= len(self._free), f"{count} pages of {len(self._free)} free"
        assert holders > 0, "a page without a holder would never come back"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = holders
        self.peak = max(self.peak, self.used)
        return taken

    def drop(self, pages: Sequence[int]) -> None:
        """One holder fewer for each page."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} has no holder"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as rows of whole pages, [Hk * pages, page_size * Dh]."""
        rows = self.keys.shape[1] * self.keys.shape[2]
        return self.keys[layer].view(rows, -1), self.values[layer].view(rows, -1)

    def layer_slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by token slot, [Hk, pages * page_size, Dh]."""
        return self.keys[layer].flatten(1, 2), self.values[layer].flatten(1, 2)
