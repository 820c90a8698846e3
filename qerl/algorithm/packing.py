"""Packing: completions of a step into micro-batches without padding, shared tokens stored once.

A micro-batch is a forest. With two prompts that begin alike (system prompt, examples) and two
completions each::

    shared prefix ─┬─ rest of prompt 0 ─┬─ completion 0
                   │                    └─ completion 1
                   └─ rest of prompt 1 ─┬─ completion 8
                                        └─ completion 9

The last prompt token predicts the first token of every completion below it. The last token of a
completion predicts nothing, so it is a target but has no row.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qerl.types import Packed, Rollouts, Segment


def pack(
    rollouts: Rollouts,
    rows: list[int],
    *,
    token_budget: int,
    share_prompts: bool = True,
    min_shared: int = 16,
) -> list[Packed]:
    """Micro-batches that together score every token of `rows` exactly once.

    Rows fill one micro-batch after the other in their order; none is moved ahead to fill a gap, so
    that the result depends on nothing but the arguments. A group that does not fit is split, and
    its prompt repeated.

    Args:
        rollouts: The step's prompts and completions.
        rows: Completions to score, each once. Those of length 0 are skipped.
        token_budget: Largest S of a micro-batch. A single sequence that exceeds it gets a
            micro-batch of its own.
        share_prompts: Store shared tokens once; False repeats the prompt for each completion.
        min_shared: Fewest tokens that the prompts of a micro-batch must begin with in common for
            that prefix to be stored once.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget={token_budget}: at least 1 token per micro-batch")
    if min_shared < 1:
        raise ValueError(f"min_shared={min_shared}: at least 1 token")
    if len(set(rows)) != len(rows):
        raise ValueError("rows name a completion twice: its tokens would count twice")
    lengths = rollouts.lengths.tolist()
    plans = [_Plan(min_shared=min_shared if share_prompts else None)]
    for row in rows:
        if lengths[row] == 0:
            continue
        prompt = row // rollouts.group_size
        tokens = rollouts.prompts.tokens[prompt]
        if not tokens:
            raise ValueError(
                f"prompt {rollouts.prompts.ids[prompt]!r} has no tokens: nothing predicts the "
                "first token of its completions"
            )
        key = prompt if share_prompts else row
        if plans[-1].trees and plans[-1].size_with(key, tokens, lengths[row]) > token_budget:
            plans.append(_Plan(min_shared=plans[-1].min_shared))
        plans[-1].add(key, tokens, row, lengths[row])
    return [_lay_out(plan, rollouts, lengths) for plan in plans if plan.trees]


def common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass
class _Tree:
    """One prompt of a micro-batch and the completions that hang from it."""

    prompt: tuple[int, ...]
    rows: list[int] = field(default_factory=list)


@dataclass
class _Plan:
    """What goes into one micro-batch, and how many rows it will take."""

    min_shared: int | None
    """Shortest prefix worth a segment of its own; None shares nothing."""

    trees: dict[int, _Tree] = field(default_factory=dict)

    prefix: int = 0
    """Tokens that all prompts begin with. At least 1 less than the shortest prompt, so that every
    prompt keeps a segment whose last row predicts its completions."""

    prompt_tokens: int = 0
    completion_rows: int = 0

    @property
    def root(self) -> int:
        """Tokens of the shared root; 0 for none."""
        return self._root(self.prefix, len(self.trees))

    def size_with(self, key: int, prompt: tuple[int, ...], length: int) -> int:
        """S of the micro-batch if a completion of `length` tokens joined it."""
        rows = self.completion_rows + length - 1
        if key in self.trees:
            count, prefix, tokens = len(self.trees), self.prefix, self.prompt_tokens
        else:
            count, prefix = len(self.trees) + 1, self._prefix_with(prompt)
            tokens = self.prompt_tokens + len(prompt)
        return tokens - (count - 1) * self._root(prefix, count) + rows

    def add(self, key: int, prompt: tuple[int, ...], row: int, length: int) -> None:
        """Take the completion in."""
        if key not in self.trees:
            self.prefix = self._prefix_with(prompt)
            self.prompt_tokens += len(prompt)
            self.trees[key] = _Tree(prompt)
        self.trees[key].rows.append(row)
        self.completion_rows += length - 1

    def _root(self, prefix: int, count: int) -> int:
        shares = self.min_shared is not None and count > 1 and prefix >= self.min_shared
        return prefix if shares else 0

    def _prefix_with(self, prompt: tuple[int, ...]) -> int:
        """Tokens that the prompts and this one begin with, 1 less than the shortest at most."""
        if not self.trees:
            return len(prompt) - 1
        first = next(iter(self.trees.values())).prompt
        return min(self.prefix, common_prefix(first, prompt), len(prompt) - 1)


@dataclass
class _Rows:
    """The rows of a micro-batch while it is laid out."""

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    size: int = 0

    def append(self, tokens: Tensor, position: int, parent: int | None) -> int:
        """Add a segment that begins at `position` of its sequence; its index."""
        length = len(tokens)
        self.tokens.append(tokens)
        self.positions.append(torch.arange(position, position + length))
        self.segments.append(Segment(start=self.size, length=length, parent=parent))
        self.size += length
        return len(self.segments) - 1


def _lay_out(plan: _Plan, rollouts: Rollouts, lengths: list[int]) -> Packed:
    """The segments of a plan end to end, and where each of its tokens is predicted."""
    out = _Rows()
    predictors: list[Tensor] = []
    targets: list[Tensor] = []
    scored: list[int] = []
    root: int | None = None
    if plan.root:
        first = next(iter(plan.trees.values())).prompt
        root = out.append(torch.tensor(first[: plan.root]), 0, None)
    for tree in plan.trees.values():
        stem = out.append(torch.tensor(tree.prompt[plan.root :]), plan.root, root)
        last = out.size - 1  # the row that predicts every first token of this prompt
        for row in tree.rows:
            length = lengths[row]
            completion = rollouts.completions[row, :length]  # [length]
            start = out.size
            if length > 1:
                out.append(completion[:-1], len(tree.prompt), stem)
            predictors.append(torch.tensor([last, *range(start, start + length - 1)]))
            targets.append(completion)
            scored.append(row)
    counts = torch.tensor([lengths[row] for row in scored])
    return Packed(
        tokens=torch.cat(out.tokens),
        positions=torch.cat(out.positions),
        segments=tuple(out.segments),
        predictors=torch.cat(predictors),
        targets=torch.cat(targets),
        sequence=torch.tensor(scored).repeat_interleave(counts),
        offset=torch.cat([torch.arange(lengths[row]) for row in scored]),
    )
