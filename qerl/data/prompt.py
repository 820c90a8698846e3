"""Questions become token ids: the only place where a prompt is made, for training and evaluation.

A prompt is the system text, worked examples as earlier turns, and the question, rendered by the
tokenizer's own chat template up to the point where the assistant begins to write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jinja2.exceptions import TemplateError

Message = dict[str, str]
Shot = tuple[str, str]

SLOT = "{question}"
CHUNK = 4096  # conversations rendered at once; bounds the memory of a set of 100,000


class PromptTokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers satisfy it.

    `apply_chat_template` and `chat_template` are only used with ``form="chat"``, `encode` only
    with ``form="plain"``.
    """

    @property
    def chat_template(self) -> Any: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        return_dict: bool,
    ) -> Any: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """The wording around a question."""

    system: str | None = None
    """System text; null leaves it to the template, which may have one of its own. Where a template
    knows no system role, the text stands in front of the first user turn."""

    template: str = SLOT
    """User turn, with ``{question}`` exactly once; shots go through it too."""

    shots: Sequence[Shot] = ()
    """Worked examples, (question, answer), shown as earlier turns."""

    form: Literal["chat", "plain"] = "chat"
    """``plain`` writes bare text for models without a chat template: system, shots and question,
    a blank line between them."""

    def __post_init__(self) -> None:
        if self.template.count(SLOT) != 1:
            raise ValueError(f"template={self.template!r}: must contain {SLOT} exactly once")
        if self.form not in ("chat", "plain"):
            raise ValueError(f"form={self.form!r}: chat or plain")
        for shot in self.shots:
            if len(shot) != 2 or not all(isinstance(part, str) for part in shot):
                raise ValueError(f"shot {shot!r}: a question and an answer, both text")
        # A tuple of tuples: lists from a config file must not be shared or changed later.
        object.__setattr__(self, "shots", tuple((shot[0], shot[1]) for shot in self.shots))

    def messages(self, question: str, *, system_role: bool = True) -> list[Message]:
        """The conversation that ends in `question`; without `system_role`, folded."""
        turns: list[Message] = []
        for asked, answered in self.shots:
            turns.append({"role": "user", "content": self._user(asked)})
            turns.append({"role": "assistant", "content": answered})
        turns.append({"role": "user", "content": self._user(question)})
        if self.system is None:
            return turns
        if system_role:
            return [{"role": "system", "content": self.system}, *turns]
        first = {"role": "user", "content": f"{self.system}\n\n{turns[0]['content']}"}
        return [first, *turns[1:]]

    def encode(self, questions: Sequence[str], tokenizer: PromptTokenizer) -> list[tuple[int, ...]]:
        """Token ids [P][length] of each prompt, generation prompt included, nothing cut off.

        Raises:
            ValueError: the tokenizer has no chat template, or its template refuses the turns.
        """
        if self.form == "plain":
            return [self._encode_plain(question, tokenizer) for question in questions]
        if not tokenizer.chat_template:
            raise ValueError(
                "this tokenizer has no chat template; set data.prompt.form=plain, or take an "
                "instruction-tuned model"
            )
        system_role = self._keeps_system_role(tokenizer)
        prompts: list[tuple[int, ...]] = []
        for start in range(0, len(questions), CHUNK):
            chunk = questions[start : start + CHUNK]
            conversations = [self.messages(text, system_role=system_role) for text in chunk]
            ids = _render(tokenizer, conversations, tokenize=True)
            # transformers 5 returns a mapping unless told otherwise, some tokenizers even then.
            rows = ids["input_ids"] if isinstance(ids, Mapping) else ids
            prompts += [_single_bos(row, tokenizer.bos_token_id) for row in rows]
        return prompts

    def _user(self, question: str) -> str:
        return self.template.replace(SLOT, question)  # format() would choke on \boxed{}

    def _keeps_system_role(self, tokenizer: PromptTokenizer) -> bool:
        """Whether the template renders a system turn, found by trying it.

        Some templates raise on one (Gemma); some drop it without a word.
        """
        if self.system is None:
            return True
        trial = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": "?"},
        ]
        try:
            text = tokenizer.apply_chat_template(
                trial, tokenize=False, add_generation_prompt=True, return_dict=False
            )
        except TemplateError:
            return False
        return self.system.strip() in text

    def _encode_plain(self, question: str, tokenizer: PromptTokenizer) -> tuple[int, ...]:
        parts = [] if self.system is None else [self.system]
        parts += [f"{self._user(asked)}\n{answered}" for asked, answered in self.shots]
        ids = tokenizer.encode("\n\n".join([*parts, self._user(question)]))
        # Tokenizers that close a text with the end of sequence would end the prompt there.
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
        return _single_bos(ids, tokenizer.bos_token_id)


def _render(
    tokenizer: PromptTokenizer, conversations: list[list[Message]], *, tokenize: bool
) -> Any:
    try:
        return tokenizer.apply_chat_template(
            conversations, tokenize=tokenize, add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in conversations[0])
        raise ValueError(
            f"the chat template refuses the turns {roles} ({error}); set data.prompt.shots=[] or "
            "data.prompt.system=null"
        ) from error


def _single_bos(ids: Sequence[int], bos: int | None) -> tuple[int, ...]:
    """`ids` with at most one begin-of-sequence token: template and tokenizer may each add one."""
    start = 0
    while bos is not None and len(ids) > start + 1 and ids[start] == ids[start + 1] == bos:
        start += 1
    return tuple(ids[start:])
