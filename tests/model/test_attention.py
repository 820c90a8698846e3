from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import Qwen2Config

from qerl.model import attention
from qerl.model.adapter_io import save_peft
from qerl.model.attention import ForestAttend, PaddedForest
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.quant.bf16 import BF16
from qerl.types import Packed, Segment

FORESTS: dict[str, list[tuple[int | None, int, bool]]] = {
    "depth 1: a prompt with two completions": [(None, 7, False), (0, 5, True), (0, 3, True)],
    "depth 1: two prompts, uneven groups": [
        (None, 9, False),
        (None, 4, False),
        (0, 1, True),
        (1, 30, True),
        (0, 6, True),
        (1, 2, True),
    ],
    "depth 2: prompts share a system part": [
        (None, 6, False),
        (0, 4, False),
        (1, 5, True),
        (1, 8, True),
        (0, 3, False),
        (4, 7, True),
    ],
    "depth 3: turns": [
        (None, 5, False),
        (0, 3, False),
        (1, 4, True),
        (2, 6, True),
        (2, 2, True),
        (0, 2, True),
        (None, 3, False),
        (6, 4, True),
    ],
}


def attend_slowly(segments: tuple[Segment, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by the definition: one query at a time, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for index, segment in enumerate(segments):
        for row in range(segment.start, segment.start + segment.length):
            seen = list(range(segment.start, row + 1))
            parent = segments[index].parent
            while parent is not None:
                above = segments[parent]
                seen += range(above.start, above.start + above.length)
                parent = above.parent
            for head in range(q.shape[1]):
                scores = k[seen, head // group] @ q[row, head] / q.shape[2] ** 0.5
                out[row, head] = scores.softmax(0) @ v[seen, head // group]
    return out


@pytest.mark.parametrize("name", FORESTS)
def test_every_query_sees_its_ancestors_and_its_own_past(
    name: str, forest: Callable[..., Any]
) -> None:
    packed, _ = forest(FORESTS[name])
    S = len(packed.tokens)
    q, k, v = torch.randn(S, 4, 8), torch.randn(S, 2, 8), torch.randn(S, 2, 8)
    got = ForestAttend(packed.segments)(0, q, k, v)
    assert (got - attend_slowly(packed.segments, q, k, v)).abs().max() < 1e-5


@pytest.mark.parametrize("name", FORESTS)
def test_scores_and_lora_gradients_equal_separate_forwards_of_transformers(
    name: str,
    forest: Callable[..., Any],
    hf_model: Callable[..., Any],
    source_of: Callable[..., Any],
    tmp_path: Any,
) -> None:
    model = hf_model(Qwen2Config, tie_word_embeddings=False)
    policy = load_policy(source_of(model), BF16(), LoRAConfig(rank=4, alpha=8), seed=1)
    for adapter in policy.adapters().values():
        adapter.lora_b.data.normal_(std=0.05)
    packed, full = forest(FORESTS[name])
    weights = torch.randn(len(packed.targets))
    logprobs, entropy = policy.score(packed, temperature=0.7)
    (logprobs * weights).sum().backward()

    save_peft(policy, tmp_path, "tiny")
    peft = PeftModel.from_pretrained(model, tmp_path, is_trainable=True).eval()
    for tokens, length, first in full:
        rows = slice(first, first + length)
        z = peft(tokens[None]).logits[0, -length - 1 : -1] / 0.7
        wanted = z.log_softmax(-1).gather(1, tokens[-length:, None])[:, 0]
        assert (logprobs[rows] - wanted).abs().max() < 1e-4
        spread = torch.distributions.Categorical(logits=z).entropy()
        assert (entropy[rows] - spread).abs().max() < 1e-4
        (wanted * weights[rows]).sum().backward()
    theirs = dict(peft.named_parameters())
    for name_, adapter in policy.adapters().items():
        layer, linear = name_.rsplit(".", 1)
        block = "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        for ours, letter in ((adapter.lora_a, "A"), (adapter.lora_b, "B")):
            key = f"base_model.model.model.{layer}.{block}.{linear}.lora_{letter}.default.weight"
            wanted = theirs[key].grad
            assert wanted.abs().max() > 1e-3
            assert (ours.grad - wanted).abs().max() < 1e-4 * wanted.abs().max() + 1e-5


def test_many_small_buckets_give_what_one_large_gives(
    forest: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = forest([(None, 20, False), *[(0, n, True) for n in (3, 17, 9, 1, 30, 8)]])
    S = len(packed.tokens)
    q, k, v = torch.randn(S, 4, 8), torch.randn(S, 2, 8), torch.randn(S, 2, 8)
    counts, results = [], []
    for cells, padding in ((1, 1.0), (2**24, 1e9), (2**24, 1.25)):
        monkeypatch.setattr(attention, "MASK_CELLS", cells)
        monkeypatch.setattr(attention, "PADDING_LIMIT", padding)
        attend = PaddedForest(packed.segments, "cpu")
        counts.append(len(attend.buckets))
        results.append(attend(q, k, v))
    assert counts[0] == len(packed.segments)
    assert counts[1] == 1
    assert all((r - results[0]).abs().max() < 1e-5 for r in results)


@pytest.mark.parametrize("shortest", [24, 460])
def test_eight_prompts_of_eight_long_completions_stay_small(
    shortest: int, forest: Callable[..., Any]
) -> None:
    lengths = torch.linspace(512, shortest, 64).int().tolist()
    tree = [(None, 180 + p, False) for p in range(8)]
    tree += [(index % 8, length, True) for index, length in enumerate(lengths)]
    packed, _ = forest(tree)
    attend = PaddedForest(packed.segments, "cpu")
    cells = [bucket.mask.numel() for bucket in attend.buckets]
    true = sum(
        s.length * (s.length + (0 if s.parent is None else packed.segments[s.parent].length))
        for s in packed.segments
    )
    assert max(cells) <= attention.MASK_CELLS
    assert sum(cells) < attention.PADDING_LIMIT * true
    assert len(cells) < 12


def test_a_sibling_or_a_later_token_changes_nothing(forest: Callable[..., Any]) -> None:
    packed: Packed
    packed, _ = forest(FORESTS["depth 1: a prompt with two completions"])
    attend = ForestAttend(packed.segments)
    q, k, v = torch.randn(15, 4, 8), torch.randn(15, 2, 8), torch.randn(15, 2, 8)
    before = attend(0, q, k, v)
    k[12:], v[12:] = 9.0, 9.0  # the second completion
    k[11], v[11] = -9.0, -9.0  # the last token of the first
    after = attend(0, q, k, v)
    assert torch.equal(before[:11], after[:11])
    assert not torch.equal(before[11:], after[11:])


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "no segments"),
        ([Segment(start=1, length=3, parent=None)], "start at row 0"),
        ([Segment(start=0, length=0, parent=None)], "at least 1 token"),
        (
            [Segment(start=0, length=2, parent=None), Segment(start=1, length=2, parent=0)],
            "start at row 2",
        ),
        ([Segment(start=0, length=2, parent=0)], "parent comes before"),
    ],
)
def test_segments_that_do_not_tile_the_rows_are_refused(
    segments: list[Segment], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ForestAttend(segments)
