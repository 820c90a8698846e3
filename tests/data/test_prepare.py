"""What is left out of a set, and that the report accounts for every row."""

import json
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from qerl.data.overlap import Overlap
from qerl.data.prepare import LoadReport, prepare
from qerl.data.problems import Loaded, Problem
from qerl.data.prompt import PromptBuilder

PLAIN = PromptBuilder(form="plain", shots=[("1+1=", "2")])


def left_out(report: LoadReport) -> int:
    return sum(report.dropped().values())


def test_report_accounts_for_every_row(
    load_questions: Callable[..., Loaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    questions = ["1+1=", "2+2=", "2+2 =", "2+2=", "3+3=", "4+4=", "5+5=" + "0" * 30, "6+6="]
    golds = ["2", "4", "4", "4", "broken", "8", "10", "12"]
    loaded = load_questions(*questions, golds=golds)
    asked: list[list[tuple[str, str]]] = []

    def verify(pairs: list[tuple[str, str]]) -> list[bool]:
        asked.append(pairs)
        return [gold != "broken" for _, gold in pairs]

    prompts, report = prepare(
        loaded,
        PLAIN,
        tokenizer,
        max_prompt_tokens=20,
        seed=5,
        verify=verify,
        apart_from=[load_questions("4+4=", name="bench/test")],
    )
    assert report.as_shots == ("mine/train/0",)
    assert report.duplicates == ("mine/train/3",)
    assert report.unverified_golds == ("mine/train/4",)
    assert report.overlaps == {"bench/test": ("mine/train/5",)}
    assert report.overlong == ("mine/train/6",)
    assert prompts.all().ids == ("mine/train/1", "mine/train/2", "mine/train/7")
    assert report.rows == report.kept + left_out(report) == 8
    assert asked == [[(g, g) for g in ("4", "broken", "8", "10", "12")]], "each gold once"


def test_summary_is_one_line_with_every_count_and_warning(
    load_questions: Callable[..., Loaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    loaded = Loaded(
        name="gsm8k/train",
        problems=load_questions("2+2=", "3+3=").problems,
        origin="/sets/gsm8k/train.jsonl",
        rows=1240,
        other_levels=1237,
        unreadable_golds=("train.jsonl:9: the answer is empty",),
        checksum="verified",
        warnings=("1,240 rows where 7,473 are published",),
    )
    _, report = prepare(loaded, PromptBuilder(form="plain"), tokenizer)
    assert report.summary() == (
        "gsm8k/train: 2 of 1,240 problems from /sets/gsm8k/train.jsonl; left out 1,237 of other "
        "levels, 1 with an unreadable gold; prompts of 4-4 tokens (median 4); sha256 verified; "
        "WARNING 1,240 rows where 7,473 are published"
    )
    assert json.loads(json.dumps(report.as_dict()))["kept"] == 2


def test_training_and_evaluation_prompts_are_the_same_tokens(
    load_questions: Callable[..., Loaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    builder = PromptBuilder(system="Add.", shots=[("1+1=", "2")], template="Q {question}")
    train, _ = prepare(load_questions("2+2=", "3+3="), builder, tokenizer, seed=1)
    held_out, _ = prepare(load_questions("3+3=", "2+2=", name="h/test"), builder, tokenizer)
    trained_on = dict(zip(train.batch(0, 2).questions, train.batch(0, 2).tokens, strict=True))
    for question, tokens in zip(held_out.all().questions, held_out.all().tokens, strict=True):
        assert trained_on[question] == tokens


def test_nothing_left_says_where_the_rows_went(
    load_questions: Callable[..., Loaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    loaded = load_questions("2+2=", "3+3=")
    with pytest.raises(ValueError, match=r"mine/train: none of 2 problems .* 2 in bench/test\)"):
        prepare(
            loaded,
            PLAIN,
            tokenizer,
            apart_from=[load_questions("2+2=", "3+3=", name="bench/test")],
            overlap=Overlap(words=None),
        )


def test_overlap_settings_are_used(
    load_questions: Callable[..., Loaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    bench = load_questions("one two three four", name="bench/test")
    loaded = load_questions("zero one two three", "2+2=")
    _, kept = prepare(loaded, PLAIN, tokenizer, apart_from=[bench])
    _, fewer = prepare(loaded, PLAIN, tokenizer, apart_from=[bench], overlap=Overlap(words=3))
    assert (kept.kept, fewer.kept) == (2, 1)


def test_seed_sets_the_order(
    load_questions: Callable[..., Loaded], tokenizer: PreTrainedTokenizerBase
) -> None:
    loaded = load_questions(*(f"{n}=" for n in range(20)))
    orders = [
        prepare(loaded, PromptBuilder(form="plain"), tokenizer, seed=seed)[0].batch(0, 20).ids
        for seed in (1, 2, 1)
    ]
    assert orders[0] == orders[2] != orders[1]


def test_longest_prompt_is_reported(tokenizer: PreTrainedTokenizerBase) -> None:
    problems = tuple(Problem(id=str(n), question="1" * n, gold="1") for n in (2, 3, 9))
    loaded = Loaded(name="m", problems=problems, origin="a test", rows=3)
    _, report = prepare(loaded, PromptBuilder(form="plain"), tokenizer)
    assert (report.shortest_tokens, report.median_tokens, report.longest_tokens) == (2, 3, 9)
