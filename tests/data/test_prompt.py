"""The prompt as tokens: documented form, templates with and without a system role, and BOS."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from qerl.data import prompt
from qerl.data.prompt import PromptBuilder
from qerl.model.toy import build_tokenizer

SHOT = (
    "State the final answer to the following arithmetic problem: 21 + 34 =",
    r"21 + 34 = 55. The answer is \boxed{55}.",
)
QUESTION = "State the final answer to the following arithmetic problem: 58 + 26 ="
ONE_SHOT = PromptBuilder(system=r"Put the final answer in \boxed{}.", shots=[SHOT])

NO_SYSTEM = (  # raises on a system turn, as Gemma's does
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% endif %}{% endfor %}[assistant]"
)
ONE_TURN = (
    "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    "{{ messages[0]['content'] }}"
)


def with_template(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


class Scripted:
    """A tokenizer that returns given ids, to stand for habits of tokenizers in the wild."""

    chat_template = "any"
    bos_token_id = 1
    eos_token_id = 2

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, return_dict: bool
    ) -> Any:
        assert tokenize
        assert add_generation_prompt
        assert not return_dict
        return self.answer

    def encode(self, text: str) -> list[int]:
        return list(self.answer)


def test_documented_form_in_smollm2_tokens(smollm2: PreTrainedTokenizerBase) -> None:
    (tokens,) = ONE_SHOT.encode([QUESTION], smollm2)
    assert smollm2.decode(tokens) == (
        "<|im_start|>system\nPut the final answer in \\boxed{}.<|im_end|>\n"
        f"<|im_start|>user\n{SHOT[0]}<|im_end|>\n"
        f"<|im_start|>assistant\n{SHOT[1]}<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(tokens) == 92
    assert tokens[0] == smollm2.bos_token_id
    assert tokens[1] != smollm2.bos_token_id


def test_many_questions_encode_as_each_alone(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt, "CHUNK", 3)
    questions = [f"{n} + 1 =" for n in range(8)]
    together = ONE_SHOT.encode(questions, tokenizer)
    assert together == [ONE_SHOT.encode([question], tokenizer)[0] for question in questions]
    assert len(set(together)) == 8


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_without_system_role_the_text_opens_the_first_user_turn(template: str) -> None:
    tokenizer = with_template(template)
    builder = PromptBuilder(system="Be brief.", template="Q: {question}", shots=[("1+1", "2")])
    (tokens,) = builder.encode(["2+2"], tokenizer)
    expected = "[user]Be brief.\n\nQ: 1+1[assistant]2[user]Q: 2+2[assistant]"
    assert tokenizer.decode(tokens) == expected


def test_with_system_role_the_text_is_not_folded(tokenizer: PreTrainedTokenizerBase) -> None:
    (tokens,) = PromptBuilder(system="Be brief.").encode(["2+2"], tokenizer)
    assert tokenizer.decode(tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_template_that_refuses_shots_names_the_cure() -> None:
    builder = PromptBuilder(shots=[("1+1", "2")])
    with pytest.raises(ValueError, match=r"refuses .*user, assistant, user.*prompt\.shots=\[\]"):
        builder.encode(["2+2"], with_template(ONE_TURN))


def test_missing_chat_template_names_the_cure() -> None:
    with pytest.raises(ValueError, match=r"no chat template; set data\.prompt\.form=plain"):
        PromptBuilder().encode(["2+2"], with_template(None))


def test_mapping_of_transformers_5_is_unwrapped() -> None:
    answer = {"input_ids": [[1, 7, 8]], "attention_mask": [[1, 1, 1]]}
    assert PromptBuilder().encode(["2+2"], Scripted(answer)) == [(1, 7, 8)]


def test_bos_is_never_doubled() -> None:
    assert PromptBuilder().encode(["2+2"], Scripted([[1, 1, 7]])) == [(1, 7)]
    assert PromptBuilder(form="plain").encode(["2+2"], Scripted([1, 1, 7])) == [(1, 7)]


def test_bos_that_is_content_stays() -> None:
    assert PromptBuilder().encode(["2+2"], Scripted([[7, 1, 1, 8]])) == [(7, 1, 1, 8)]


def test_plain_form_ends_where_the_completion_begins() -> None:
    assert PromptBuilder(form="plain").encode(["2+2"], Scripted([1, 7, 2])) == [(1, 7)]


def test_plain_form_needs_no_chat_template() -> None:
    tokenizer = with_template(None)
    builder = PromptBuilder(form="plain", system="Add.", shots=[("1+1=", "2")])
    (tokens,) = builder.encode(["2+2="], tokenizer)
    assert tokenizer.decode(tokens) == "Add.\n\n1+1=\n2\n\n2+2="


def test_braces_of_latex_survive(tokenizer: PreTrainedTokenizerBase) -> None:
    builder = PromptBuilder(template=r"{question} Use \boxed{}.")
    (tokens,) = builder.encode([r"\frac{1}{2} {0}"], tokenizer)
    assert r"\frac{1}{2} {0} Use \boxed{}." in tokenizer.decode(tokens)


@pytest.mark.parametrize("template", ["no slot", "{question} {question}"])
def test_template_without_exactly_one_slot_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"must contain \{question\} exactly once"):
        PromptBuilder(template=template)


def test_shot_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="a question and an answer"):
        PromptBuilder(shots=[("only a question",)])  # type: ignore[list-item]
