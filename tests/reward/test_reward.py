"""Components, their weights and abstentions, and what a scored step holds."""

import math

import pytest
import torch

from qerl.reward.components import Completions, Correctness, Format, Overlong, TagEquality
from qerl.reward.pool import VerifierPool
from qerl.reward.reward import Reward
from qerl.types import Prompts, Rollouts, Verdict

EOS = 1


def rollouts(texts: list[str], golds: list[str], *, truncated: bool = False) -> Rollouts:
    """Completions whose token ids are code points; token 1 ends the sequence."""
    rows = [[ord(char) for char in text] + [EOS] * (not truncated) for text in texts]
    width = max(map(len, rows))
    prompts = len(golds)
    return Rollouts(
        prompts=Prompts(
            ids=tuple(f"p/{row}" for row in range(prompts)),
            questions=("",) * prompts,
            tokens=((5,),) * prompts,
            golds=tuple(golds),
        ),
        group_size=len(texts) // prompts,
        completions=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        sampler_logprobs=torch.zeros(len(rows), width),
        truncated=torch.full((len(rows),), truncated),
        rollout_step=0,
        sigma=0.0,
    )


def decode(ids: list[int]) -> str:
    return "".join("<|end|>" if token == EOS else chr(token) for token in ids)


def completions(texts: list[str], lengths: list[int] | None = None) -> Completions:
    none = Verdict(correct=None, reason="", answer=None)
    return Completions(
        texts=texts,
        golds=["42"] * len(texts),
        lengths=lengths or [1] * len(texts),
        verdicts=[none] * len(texts),
    )


class Fixed:
    """A component with given values."""

    def __init__(
        self, values: list[float | None], weight: float = 1.0, name: str = "fixed"
    ) -> None:
        self.values, self.weight, self.name = values, weight, name

    def __call__(self, completions: Completions) -> list[float | None]:
        return self.values


def test_rewards_are_the_weighted_sum_prompt_major(pool: VerifierPool) -> None:
    reward = Reward([Correctness(weight=1.0), Format(weight=0.1)], pool)
    scored = reward(rollouts([r"\boxed{1}", "#### 1", r"\boxed{1}", "nothing"], ["1", "2"]), decode)
    torch.testing.assert_close(scored.rewards, torch.tensor([[1.1, 1.0], [0.1, 0.0]]))
    assert scored.components["correct"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert scored.components["format"].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert [verdict.reason for verdict in scored.verdicts] == [
        "identical",
        "identical",
        "1 != 2 (number or expression)",
        "no answer",
    ]


def test_texts_keep_special_tokens_and_verdicts_do_not_see_the_end_of_sequence(
    pool: VerifierPool,
) -> None:
    scored = Reward([Correctness()], pool)(rollouts(["Answer: 42"], ["42"]), decode)
    assert scored.texts == ("Answer: 42<|end|>",)
    assert scored.verdicts[0].correct is True


def test_a_truncated_completion_keeps_its_last_token(pool: VerifierPool) -> None:
    step = rollouts(["Answer: 422"], ["422"], truncated=True)
    assert Reward([Correctness()], pool)(step, decode).verdicts[0].correct is True


def test_whole_completions_are_answers_where_the_task_says_so(pool: VerifierPool) -> None:
    step = rollouts(["7", "8"], ["7"])
    assert Reward([Correctness()], pool, answers="whole")(step, decode).rewards.tolist() == [[1, 0]]
    assert Reward([Correctness()], pool)(step, decode).rewards.tolist() == [[0, 0]]


def test_an_abstaining_component_adds_nothing_and_all_of_them_make_nan(pool: VerifierPool) -> None:
    parts = [Fixed([1.0, None, None], name="a"), Fixed([0.5, 0.5, None], weight=2.0, name="b")]
    scored = Reward(parts, pool)(rollouts(["x", "x", "x"], ["1"]), decode)
    torch.testing.assert_close(scored.rewards, torch.tensor([[2.0, 1.0, math.nan]]), equal_nan=True)
    assert scored.components["a"].isnan().tolist() == [[False, True, True]]


def test_a_required_component_that_abstains_leaves_no_reward(pool: VerifierPool) -> None:
    parts = [Fixed([1.0, None], name="a"), Fixed([None, 0.5], name="b")]
    scored = Reward(parts, pool, required=["a"])(rollouts(["x", "x"], ["1"]), decode)
    torch.testing.assert_close(scored.rewards, torch.tensor([[1.0, math.nan]]), equal_nan=True)


def test_an_unreadable_reference_abstains_for_its_whole_group(pool: VerifierPool) -> None:
    step = rollouts([r"\boxed{1}", r"\boxed{2}", r"\boxed{3}", r"\boxed{4}"], [" ", "3"])
    scored = Reward([Correctness(), Format(weight=0.1)], pool, required=["correct"])(step, decode)
    assert scored.rewards[0].isnan().all()
    torch.testing.assert_close(scored.rewards[1], torch.tensor([1.1, 0.1]))


def test_a_weight_of_zero_only_logs(pool: VerifierPool) -> None:
    parts = [Fixed([1.0], name="a"), Correctness(weight=0.0)]
    scored = Reward(parts, pool)(rollouts([r"\boxed{1}"], ["1"]), decode)
    assert scored.rewards.tolist() == [[1.0]]
    assert scored.components["correct"].tolist() == [[1.0]]


def test_a_reward_refuses_what_cannot_be_meant(pool: VerifierPool) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Reward([], pool)
    with pytest.raises(ValueError, match="a name of its own"):
        Reward([Correctness(), Correctness()], pool)
    with pytest.raises(ValueError, match="no such component"):
        Reward([Correctness()], pool, required=["format"])
    with pytest.raises(ValueError, match="marked or whole"):
        Reward([Correctness()], pool, answers="some")


@pytest.mark.parametrize(
    ("text", "boxed", "soft", "strict"),
    [
        (r"\boxed{42}", 1, 0, 0),
        (r"\boxed{}", 0, 0, 0),
        (r"<think>\boxed{42}</think> no", 0, 0, 0),
        ("<think>\na\n</think>\n<answer>\n42\n</answer>", 0, 1, 1),
        ("<think>\na\n</think>\n<answer>\n42\n</answer>\n", 0, 1, 1),
        ("Well, <think>a</think> <answer>42</answer> so.", 0, 1, 0),
        ("<think>a</think> and <answer>42</answer>", 0, 0, 0),
        ("<answer>42</answer><think>a</think>", 0, 0, 0),
        ("a</think><answer>42</answer>", 0, 0, 0),
        ("<think>\n\n</think>\n<answer>\n42\n</answer>", 0, 1, 0),
        ("<think>\na\n</think>\n<answer>\n<answer>\n42\n</answer>", 0, 1, 0),
        ("", 0, 0, 0),
    ],
)
def test_formats(text: str, boxed: int, soft: int, strict: int) -> None:
    kinds = [Format(kind="boxed"), Format(kind="think_soft"), Format(kind="think_strict")]
    assert [kind(completions([text]))[0] for kind in kinds] == [boxed, soft, strict]


def test_a_think_block_that_the_prompt_opened_counts_as_opened() -> None:
    text = "a\n</think>\n<answer>\n42\n</answer>"
    for kind in ("think_soft", "think_strict"):
        assert Format(kind=kind)(completions([text])) == [0.0]
        assert Format(kind=kind, think_opened=True)(completions([text])) == [1.0]


def test_format_takes_linear_time() -> None:
    text = "<think>" * 14_000 + "</think> " * 10_000
    assert Format(kind="think_soft")(completions([text])) == [0.0]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="one of boxed"):
        Format(kind="xml")


@pytest.mark.parametrize(
    ("length", "value"),
    [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (1000, -1.0)],
)
def test_the_overlong_punishment_is_linear_over_the_cache(length: int, value: float) -> None:
    overlong = Overlong(max_new_tokens=100, cache=20)
    assert overlong(completions(["x"], [length])) == [pytest.approx(value)]


def test_the_overlong_punishment_counts_completion_tokens_alone(pool: VerifierPool) -> None:
    reward = Reward([Overlong(max_new_tokens=4, cache=2)], pool)
    step = rollouts(["x", "xxx"], ["1"])  # 2 and 4 tokens with the end of sequence
    assert reward(step, decode).rewards.tolist() == [[0.0, -1.0]]


def test_a_cache_longer_than_the_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="cache=200"):
        Overlong(max_new_tokens=100, cache=200)


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("<answer>42</answer>", 1),
        ("<answer> 42 </answer> bye", 1),
        ("<answer>1</answer><answer>42</answer>", 1),
        ("42", 1),  # without the tags the whole text is compared
        ("<answer>42.0</answer>", 0),
        ("<answer>It is 42</answer>", 0),
        (r"\boxed{42}", 0),
    ],
)
def test_the_released_reward_compares_strings(text: str, paid: int) -> None:
    assert TagEquality()(completions([text])) == [paid]
