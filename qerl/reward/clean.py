r"""Answers in one spelling: Unicode, LaTeX synonyms and spacing, with the mathematics untouched.

After `clean` an answer uses ASCII and plain LaTeX: ``-`` for every minus, ``\frac`` for every size
of fraction, ``\le`` for ``\leq`` and ``≤``, ``\text{...}`` for every text command, ``\dollar`` for
``\$``, ``\degree`` for ``^\circ`` and ``°``, ``%`` for ``\%``; no ``\left``, no ``$``, no font, no
thin space, no zero-width or direction mark. Control characters become spaces, so that ``4<NUL>2``
is not 42. Thousands separators that only LaTeX has (``10{,}000``, ``10,\!000``, ``10\,000``) are
dropped here; ``1,000`` is left to the reader, who knows whether it stands in a list.

Every pattern runs on text whose white space is collapsed and whose length the caller has capped.
"""

import re
import unicodedata
from collections.abc import Iterator

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega"
)
_UNICODE = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
    **dict.fromkeys("×⨯✕", r"\times "),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("\u2018\u2019\u2032", "'"),
    **dict.fromkeys("\u201c\u201d", '"'),
    "÷": r"\div ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3] ",
    "∞": r"\infty ",
    "°": r"\degree ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "±": r"\pm ",
    "∓": r"\mp ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "€": r"\euro ",
    "£": r"\pounds ",
    "¥": r"\yen ",
    "₹": r"\rupee ",
    "π": r"\pi ",
    **{
        mark: rf"\{name} "
        for mark, name in zip(
            "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΦΨΩ",
            _GREEK.split(),
            strict=True,
        )
    },
    **{mark: f"^{digit}" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{mark: f"_{digit}" for digit, mark in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{
        mark: rf"\frac{{{over}}}{{{under}}}"
        for mark, over, under in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅖25", "⅙16", "⅛18")
    },
}
_TRANSLATION = str.maketrans(_UNICODE)

_DROPPED = (
    "left right bigl bigr Bigl Bigr biggl biggr big Big bigg Bigg displaystyle textstyle limits "
    "boxed fbox mathbf mathit mathsf mathtt boldsymbol bm bf it ensuremath mathstrut nolimits "
    "mleft mright middle underline"
)
_SPACES = "quad qquad enspace thinspace medspace thickspace hfill newline"
_SYNONYMS = {
    "dfrac": r"\frac",
    "tfrac": r"\frac",
    "cfrac": r"\frac",
    "leq": r"\le",
    "leqslant": r"\le",
    "geq": r"\ge",
    "geqslant": r"\ge",
    "neq": r"\ne",
    "lt": "<",
    "gt": ">",
    "ast": "*",
    "colon": ":",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "lparen": "(",
    "rparen": ")",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "simeq": r"\approx",
    "dbinom": r"\binom",
    "tbinom": r"\binom",
    "infin": r"\infty",
    "varnothing": r"\emptyset",
    "lnot": r"\neg",
    "degree": r"\degree",
    "textdollar": r"\dollar",
    "mbox": r"\text",
    "mathrm": r"\text",
    "operatorname": r"\text",
    "hbox": r"\text",
    "rm": r"\text",
    "textnormal": r"\text",
    "textrm": r"\text",
    "textbf": r"\text",
    "textit": r"\text",
    "textsf": r"\text",
    "texttt": r"\text",
    "textup": r"\text",
    "arctg": r"\arctan",
    "tg": r"\tan",
    "ctg": r"\cot",
    **dict.fromkeys(_DROPPED.split(), ""),
    **dict.fromkeys(_SPACES.split(), " "),
}

_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
_DOUBLED_BACKSLASH = re.compile(r"\\\\(?=[A-Za-z])")
_EMPTY_DELIMITER = re.compile(r"\\(left|right)\s?\.")
_PHANTOM = re.compile(r"\\phantom ?(?:\{[^{}]*\}|.)")
_DELIMITER = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$+)")
_DEGREE = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z])) ?")
_TEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|, ?\\!|\\,|\\!, ?) ?(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,/}] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_TEX_SPACE = re.compile(r"(?<!\\)(?:\\[,;:> ]|~)")
_CONJUNCTION = re.compile(r",? ?\\text ?\{ ?,? ?(?:and|or) ?,? ?\}")
_EMPTY_TEXT = re.compile(r"\\text ?\{ ?\}")
_WHITE = re.compile(r"\s+")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|.", re.DOTALL)

OPENING = frozenset({"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"})
CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"})


def clean(answer: str) -> str:
    """`answer` in the one spelling that the readers know."""
    text = _plain_characters(answer)
    text = _EMPTY_DELIMITER.sub("", text)
    if r"\begin" not in text:
        text = _DOUBLED_BACKSLASH.sub(r"\\", text)
    text = text.replace(r"\$", r"\dollar ").replace(r"\%", "%").replace(r"\&", "&")
    text = _DELIMITER.sub("", text)
    text = _TEX_THOUSANDS.sub("", text).replace(r"\!", "")
    text = _COMMAND.sub(_synonym, _TEX_SPACE.sub(" ", text))
    text = _DEGREE.sub(r"\\degree ", _PHANTOM.sub("", text))
    text = _CONJUNCTION.sub(", ", text)  # the space tells "2 and 300" from 2,300
    text = _WHITE.sub(" ", _EMPTY_TEXT.sub(" ", text)).replace("{ ", "{").replace(" }", "}")
    text = _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)
    return _trim(text)


def _plain_characters(answer: str) -> str:
    text = unicodedata.normalize("NFKC", answer.translate(_TRANSLATION)).translate(_TRANSLATION)
    kept = []
    for char in text:
        category = unicodedata.category(char)
        if category in ("Cc", "Zl", "Zp", "Zs"):
            kept.append(" ")
        elif category == "Nd":
            kept.append(str(unicodedata.decimal(char)))
        elif category not in ("Cf", "Cs", "Co", "Cn"):
            kept.append(char)
    return _WHITE.sub(" ", "".join(kept))


def _synonym(match: re.Match[str]) -> str:
    command = _SYNONYMS.get(match.group(1))
    if command is None:
        return match.group()
    runs_on = command[-1:].isalpha() and match.string[match.end() : match.end() + 1].isalpha()
    return command + " " if runs_on else command


def _trim(text: str) -> str:
    """Without outer white space, Markdown, punctuation, and braces around the whole."""
    while True:
        inner = text.strip().strip("*`").strip()
        inner = inner.rstrip(",;:") if inner.endswith((",", ";", ":")) else inner
        if inner.endswith(".") and not inner.endswith(("..", ".m.")):
            inner = inner[:-1]
        if inner.startswith("{") and inner.endswith("}"):
            inner = _peel(inner)
        if inner == text:
            return text
        text = inner


def _peel(text: str) -> str:
    """Without the braces that enclose all of `text`, however many, in one pass."""
    lead = len(text) - len(text.lstrip("{"))
    trail = len(text) - len(text.rstrip("}"))
    trail -= text[: len(text) - trail].endswith("\\")  # an escaped brace belongs to a set
    inside = text[lead : len(text) - trail]
    depth, least = lead, min(lead, trail)
    for token in tokens(inside):
        depth += (token == "{") - (token == "}")
        least = min(least, depth)
    return text[least : len(text) - least] if depth == trail else text


def tokens(text: str) -> list[str]:
    """Commands, numbers and single characters of cleaned text, in order; white space included."""
    return _TOKEN.findall(text)


def levels(text: str) -> Iterator[tuple[str, int, int]]:
    """Each token of cleaned text with its offset and bracket depth; a bracket has its outside's."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in CLOSING:
            depth -= 1
        yield token, match.start(), depth
        if token in OPENING:
            depth += 1


def closes_at_end(text: str) -> bool:
    """True where the bracket that opens `text` is closed by its last token and no earlier."""
    last = ""
    for token, start, depth in levels(text):
        if depth == 0 and start > 0 and last:
            return False
        if depth <= 0 and token in CLOSING:
            last = token
    return bool(last)


def is_balanced(text: str) -> bool:
    """True where every bracket of cleaned text is closed, whatever it is closed by."""
    depth = 0
    for token, _, depth in levels(text):
        if depth < 0:
            return False
        depth += token in OPENING
    return depth == 0


def split_top(text: str, separators: frozenset[str]) -> list[tuple[str, str]]:
    """Parts between `separators` outside brackets, each with the separator before it ("" first)."""
    parts, start, before = [], 0, ""
    for token, offset, depth in levels(text):
        if depth == 0 and token in separators:
            parts.append((before, text[start:offset].strip()))
            start, before = offset + len(token), token
    parts.append((before, text[start:].strip()))
    return parts
