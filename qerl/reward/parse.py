r"""The answer in a completion: found in untrusted text, in linear time, or not there at all.

An answer is one of four complete forms:

==========  =========================================================================
``box``     ``\boxed{...}`` or ``\fbox{...}`` with balanced braces (``\{`` and ``\}`` do not
            count), or ``\boxed 42``: the text up to white space, ``$`` or an unmatched ``}``,
            unless it is a word, as in "put it in \boxed form"
``tag``     ``<answer>...</answer>``, tags in any case
``hash``    ``#### 18`` up to the end of the line (GSM8K). A Markdown heading has the same mark:
            ``#### Step 2`` (words), ``#### 2. Add`` (an enumeration) and ``#### Sum:`` are none
``line``    ``Answer: ...`` or ``Final answer: ...``, if it is the last line that is not empty
==========  =========================================================================

The form that ends last wins, whatever its kind, and the last of two boxes is never joined with
the one before. A form that is not complete (``\boxed{42`` and the end of the text) or empty is
none, so the one before it counts. A box inside the winner is its content: ``<answer>It is
\boxed{42}.</answer>`` answers 42. Where no form stands there is no answer: naming the right number
somewhere earns nothing.

Thinking: where ``</think>`` stands, only what follows the last one counts. Where none stands the
whole text counts, an opened ``<think>`` included: a prompt may have opened the block itself, and a
verdict must not depend on which side of the prompt's end the tag fell. The format component, not
the verdict, judges a block that was never closed.
"""

import re
from dataclasses import dataclass
from typing import Literal

AnswerForm = Literal["box", "tag", "hash", "line"]

THINK_END = "</think>"

# Every pattern is a single pass: fixed words, or one character class with no overlap on its right.
# A second backslash is that of an answer escaped once too often.
_BOX_TOKEN = re.compile(r"\\\\?(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASH = re.compile(r"(?<!#)####(?!#)[^\n#]*")
_ANSWER_LINE = re.compile(r"[\s*_#>]*(?:final\s+)?answer[*_]* ?:[*_]*", re.IGNORECASE)
_ENUMERATION = re.compile(r"[0-9]+[.)]\s+[^\s]")
_WORD = re.compile(r"[A-Za-z]{2}")
_NO_BARE_BOX = re.compile(r"[A-Za-z]{2}|\\+(?:boxed|fbox)")


@dataclass(frozen=True, slots=True)
class Extracted:
    """An answer and where its form stood in the completion."""

    answer: str
    """Content of the form, stripped; never empty."""

    form: AnswerForm

    end: int
    """Offset just after the form, in characters of the completion."""


def after_thinking(text: str) -> str:
    """The part of a completion that can hold its answer."""
    return text[text.rfind(THINK_END) + len(THINK_END) :] if THINK_END in text else text


def extract(text: str) -> Extracted | None:
    """The last complete answer form after the thinking; None where there is none."""
    visible = after_thinking(text)
    forms = (_last_box(visible), _last_tag(visible), _last_hash(visible), _last_line(visible))
    found = [form for form in forms if form is not None]
    if not found:
        return None
    last = max(found, key=lambda form: form.end)
    answer = last.answer
    if last.form != "box" and (inner := _last_box(answer)) is not None:
        answer = inner.answer
    return Extracted(answer, last.form, last.end + len(text) - len(visible))


def _last_box(text: str) -> Extracted | None:
    r"""The last complete box: one pass with a stack, so nesting costs neither time nor frames."""
    stack: list[int] = []  # start of the content where the brace opened a box, else -1
    last: Extracted | None = None
    opens = -1  # offset at which a brace would be a box's own
    for token in _BOX_TOKEN.finditer(text):
        mark, start = token.group(), token.start()
        if mark == "{":
            stack.append(token.end() if start == opens else -1)
        elif mark == "}":
            content = stack.pop() if stack else -1
            if content >= 0 and (answer := text[content:start].strip()):
                last = Extracted(answer, "box", token.end())
        elif len(mark) > 2:
            opens = _skip_spaces(text, token.end())
            if opens < len(text) and text[opens] != "{":
                bare = _bare_box(text, opens)
                last = bare if bare is not None else last
    return last


def _skip_spaces(text: str, start: int) -> int:
    # A cap keeps a run of white space after each of many boxes from costing quadratic time.
    end = min(len(text), start + 16)
    while start < end and text[start].isspace():
        start += 1
    return start


def _bare_box(text: str, start: int) -> Extracted | None:
    r"""``\boxed 42``: up to white space, ``$`` or an unmatched ``}``; at most 100 characters."""
    stop, depth, end = min(len(text), start + 100), 0, start
    while end < stop and text[end] != "$" and not (text[end].isspace() and depth == 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth < 0:
            break
        end += 1
    answer = text[start:end].rstrip(".,;:")
    complete = answer and depth <= 0 and _NO_BARE_BOX.match(answer) is None
    return Extracted(answer, "box", end) if complete else None


def _last_tag(text: str) -> Extracted | None:
    opened: int | None = None
    last: Extracted | None = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag.group(1):
            opened = tag.end()
        elif opened is not None:
            if answer := text[opened : tag.start()].strip():
                last = Extracted(answer, "tag", tag.end())
            opened = None
    return last


def _last_hash(text: str) -> Extracted | None:
    last: Extracted | None = None
    for line in _HASH.finditer(text):
        answer = line.group()[4:].strip().strip("*").strip()
        if answer and not _is_heading(answer):
            last = Extracted(answer, "hash", line.end())
    return last


def _is_heading(answer: str) -> bool:
    words = _WORD.match(answer) is not None
    return words or answer.endswith(":") or _ENUMERATION.match(answer) is not None


def _last_line(text: str) -> Extracted | None:
    end = len(text.rstrip())
    line = text[text.rfind("\n", 0, end) + 1 : end]
    form = _ANSWER_LINE.match(line)
    if form is None:
        return None
    answer = line[form.end() :].strip().rstrip("*_").strip()
    return Extracted(answer, "line", end) if answer else None
