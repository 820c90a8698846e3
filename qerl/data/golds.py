r"""How a gold answer is read from the field that holds it.

=============  =====================================================================
as_is          the field is the answer
number         the field is a number: thousands commas and a trailing ``.0`` dropped
after_hashes   a derivation that ends in ``#### answer`` (GSM8K); commas dropped
boxed          a derivation whose last ``\boxed{answer}`` counts (MATH)
=============  =====================================================================
"""

import re
from typing import Literal

Reading = Literal["as_is", "number", "after_hashes", "boxed"]

READINGS = ("as_is", "number", "after_hashes", "boxed")
NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(\.\d+)?%?")
BOX = "\\boxed"


def read_gold(text: str, reading: Reading) -> str:
    """The answer in `text`.

    Raises:
        ValueError: `text` holds no answer of that form; the message does not name the place,
            which the caller knows.
    """
    if reading == "number":
        answer = _plain_number(text)
    elif reading == "after_hashes":
        answer = _after_hashes(text)
    elif reading == "boxed":
        answer = _last_box(text)
    else:
        answer = text.strip()
    if not answer:
        raise ValueError("the answer is empty")
    return answer


def _plain_number(text: str) -> str:
    answer = text.strip().replace(",", "")
    return re.sub(r"\.0+$", "", answer)


def _after_hashes(text: str) -> str:
    _, marker, answer = text.rpartition("####")
    answer = answer.strip()
    # A copy whose answers were already cut out has no marker; a derivation without one has no
    # answer, and its whole text must not pass for one.
    if not marker and not NUMBER.fullmatch(answer):
        raise ValueError(f"no '#### answer' in {text[-40:]!r}")
    return answer.replace(",", "")


def _last_box(text: str) -> str:
    start = text.rfind(BOX)
    if start < 0:
        raise ValueError(f"no \\boxed{{answer}} in {text[-40:]!r}")
    rest = text[start + len(BOX) :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0]  # \boxed 5, as a few rows of MATH have it
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place].strip()
    raise ValueError(f"an unclosed \\boxed{{ in {text[-40:]!r}")
