r"""Cleaned LaTeX to an expression tree: the grammar of closed-form answers, and nothing beyond it.

::

    sum      = [sign] term { sign term }
    term     = power { ("*" | \cdot | \times | "/" | \div | nothing) [sign] power }
    power    = primary { "^" exponent | "!" | "%" | \degree }
    primary  = number | mixed number | letter | \greek | group | |sum|
             | \frac | \sqrt | \binom | function

Decisions where mathematics has none:

* ``3\frac{1}{2}`` and ``3 1/2`` are mixed numbers, 7/2; ``2(3)`` and ``(2)(3)`` are 6, and two
  numbers with nothing between them are unreadable.
* ``\frac12`` takes one digit each, as TeX does; ``\sqrt13`` and ``x^10`` take the whole number,
  which is what is meant.
* ``1/2x`` is x/2; ``\sin 5x \cos x`` is sin(5x) cos(x); ``\sin^{-1}`` is arcsin; ``\log`` without
  a base has base 10.
* ``e`` is Euler's number and ``i`` the imaginary unit, always; ``f(4-x)`` is a product, since no
  answer says whether f is a function, and both sides are read alike.
* ``0.1\overline{6}`` is 1/6, and ``1.5`` is 3/2: there are no floats.

The parser neither evaluates nor recurses deeper than `MAX_DEPTH` groups; a sum of a thousand terms
is one node. What it cannot read raises `UnreadableError`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from qerl.reward.clean import tokens

MAX_DEPTH = 40
MAX_TOKENS = 1000


class UnreadableError(ValueError):
    """The text is no expression of this grammar."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of an expression tree."""

    op: str
    """``num``, ``sym``, ``const``, ``add``, ``mul``, ``neg``, ``inv``, ``pow``, ``root``, ``fact``,
    ``binom``, ``log`` (argument, base) or the name of a function of one argument."""

    args: tuple["Node", ...] = ()

    leaf: Fraction | str = ""
    """Value of a ``num``, name of a ``sym`` or a ``const``."""

    def symbols(self) -> frozenset[str]:
        """Names of the free symbols; ``e``, ``i`` and ``pi`` are none."""
        if self.op == "sym":
            return frozenset({str(self.leaf)})
        return frozenset().union(*(arg.symbols() for arg in self.args))


_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth "
    "ln exp sqrt log abs floor ceil"
)
_GREEK = (
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa "
    r"\lambda \mu \nu \xi \rho \varrho \sigma \varsigma \tau \upsilon \phi \varphi \chi \psi "
    r"\omega \Gamma \Delta \Theta \Lambda \Xi \Sigma \Upsilon \Phi \Psi \Omega \ell \hbar "
    r"\triangle \angle"
)
_ACCENTED = r"\overline \bar \vec \hat \tilde \overrightarrow \mathbb \mathcal"
FUNCTIONS = frozenset(_FUNCTIONS.split())
GREEK = frozenset(_GREEK.split())
_ACCENTS = frozenset(_ACCENTED.split())
_INVERSE = {name: "arc" + name for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_CLOSED_BY = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_TIMES = frozenset({"*", r"\cdot", r"\times"})
_OVER = frozenset({"/", r"\div"})
# What can follow a factor without a sign between them: the first token of a primary.
_STARTS = frozenset({"(", "[", "{", r"\frac", r"\sqrt", r"\binom", r"\pi", r"\lfloor", r"\lceil"})
_SCIENTIFIC = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]{1,4})")


def number(value: Fraction) -> Node:
    """A literal."""
    return Node("num", leaf=value)


def parse(text: str) -> Node:
    """The expression that cleaned `text` states.

    Raises:
        UnreadableError: `text` is none, or exceeds `MAX_DEPTH` or `MAX_TOKENS`.
    """
    if scientific := _SCIENTIFIC.fullmatch(text.replace(" ", "")):
        return number(Fraction(scientific[1]) * Fraction(10) ** int(scientific[2]))
    parser = _Parser([token for token in tokens(text) if token != " "])
    tree = parser.sum()
    if parser.peek():
        raise UnreadableError(f"unexpected {parser.peek()[:20]!r}")
    return tree


class _Parser:
    """Recursive descent over a list of tokens."""

    def __init__(self, listed: list[str]) -> None:
        if len(listed) > MAX_TOKENS:
            raise UnreadableError(f"longer than {MAX_TOKENS} symbols")
        self.tokens = listed
        self.at = 0
        self.depth = 0
        self.bars = 0  # |...| groups that are open

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise UnreadableError(f"expected {expected or 'more'}, found {token[:20]!r}")
        self.at += 1
        return token

    def sum(self) -> Node:
        terms = [self.signed(self.term)]
        while self.peek() in ("+", "-"):
            terms.append(self.signed(self.term))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed(self, read: Callable[[], Node]) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        tree = read()
        return Node("neg", (tree,)) if negative else tree

    def term(self) -> Node:
        factors = [self.power()]
        while True:
            if self.peek() in _TIMES:
                self.take()
                factors.append(self.signed(self.power))
            elif self.peek() in _OVER:
                self.take()
                factors.append(Node("inv", (self.signed(self.power),)))
            elif self.starts_primary():
                factors.append(self.power())
            else:
                return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def starts_primary(self) -> bool:
        token = self.peek()
        if token[:1].isdecimal() or token[:1] == ".":
            # "(2)3" multiplies; "5 6" is two numbers, and "x2" may mean a power or an index.
            return self.tokens[self.at - 1] in (")", "}", "]")
        if token == "|":
            return self.bars == 0
        return token in _STARTS or self.is_name(token)

    def is_name(self, token: str) -> bool:
        if len(token) == 1:
            return token.isascii() and token.isalpha()
        bare = token[1:]
        return token in GREEK or token in _ACCENTS or bare in FUNCTIONS or token == r"\text"

    def power(self) -> Node:
        tree = self.primary()
        for _ in range(MAX_DEPTH):
            token = self.peek()
            if token == "^":
                self.take()
                tree = Node("pow", (tree, self.signed(self.primary)))
            elif token == "!":
                self.take()
                tree = Node("fact", (tree,))
            elif token == "%":
                self.take()
                tree = Node("mul", (tree, number(Fraction(1, 100))))
            elif token == r"\degree":
                self.take()
                tree = Node("mul", (tree, number(Fraction(1, 180)), Node("const", leaf="pi")))
            else:
                return tree
        raise UnreadableError(f"more than {MAX_DEPTH} powers, factorials and percents")

    def primary(self) -> Node:
        self.depth += 1  # every recursion passes here
        if self.depth > MAX_DEPTH:
            raise UnreadableError(f"nested deeper than {MAX_DEPTH}")
        tree = self.bare_primary()
        self.depth -= 1
        return tree

    def bare_primary(self) -> Node:
        token = self.peek()
        if token[:1].isdecimal() or token[:1] == ".":
            return self.literal()
        if token in _CLOSED_BY:
            return self.group()
        if token == "|":
            return self.absolute()
        if token == r"\frac":
            self.take()
            over, under = self.argument(), self.argument()
            return Node("mul", (over, Node("inv", (under,))))
        if token == r"\binom":
            self.take()
            return Node("binom", (self.argument(), self.argument()))
        if token == r"\sqrt":
            return self.root()
        return self.name()

    def literal(self) -> Node:
        token = self.take()
        if token == ".":
            raise UnreadableError("a point without digits")
        if self.peek() == r"\overline" and "." in token:
            return number(self.repeating(token))
        value = Fraction(token.rstrip("."))
        if token.isdecimal() and (fraction := self.proper_fraction()) is not None:
            return number(value + fraction)
        return number(value)

    def repeating(self, token: str) -> Fraction:
        self.take()
        self.take("{")
        digits = self.take()
        self.take("}")
        if not digits.isdecimal():
            raise UnreadableError("a period that is not digits")
        whole, _, decimals = token.partition(".")
        scale = Fraction(1, 10 ** len(decimals))
        period = Fraction(int(digits), 10 ** len(digits) - 1) * scale
        return Fraction(int(whole or "0")) + int(decimals or "0") * scale + period

    def proper_fraction(self) -> Fraction | None:
        """The fraction of a mixed number, consumed; None, nothing consumed, where none follows."""
        ahead = [self.peek(offset) for offset in range(7)]
        if ahead[1] == "/" and ahead[0].isdecimal() and ahead[2].isdecimal():
            parts, width = (ahead[0], ahead[2]), 3
        elif ahead[0] != r"\frac":
            return None
        elif ahead[1] == ahead[4] == "{" and ahead[3] == ahead[6] == "}":
            parts, width = (ahead[2], ahead[5]), 7
        elif ahead[1].isdecimal() and len(ahead[1]) == 2:
            parts, width = (ahead[1][0], ahead[1][1]), 2
        else:
            return None
        if not (
            parts[0].isdecimal() and parts[1].isdecimal() and 0 < int(parts[0]) < int(parts[1])
        ):
            return None
        self.at += width
        return Fraction(int(parts[0]), int(parts[1]))

    def group(self) -> Node:
        opened = self.take()
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.bars = bars
        self.take(_CLOSED_BY[opened])
        if opened in (r"\lfloor", r"\lceil"):
            return Node(opened[2:], (tree,))
        return tree

    def absolute(self) -> Node:
        self.take()
        self.bars += 1
        tree = self.sum()
        self.bars -= 1
        self.take("|")
        return Node("abs", (tree,))

    def argument(self) -> Node:
        r"""What a TeX command takes: a group, or one digit, letter or command."""
        token = self.peek()
        if token == "{":
            return self.group()
        if token.isdecimal() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return number(Fraction(token[0]))
        return number(Fraction(self.take())) if token.isdecimal() else self.name()

    def root(self) -> Node:
        self.take()
        degree = self.group() if self.peek() == "[" else number(Fraction(2))
        radicand = number(Fraction(self.take())) if self.peek().isdecimal() else self.primary()
        return Node("root", (radicand, degree))

    def name(self) -> Node:
        word = self.word()
        if word in FUNCTIONS:
            return self.function(word)
        if word in ("e", "i"):
            return Node("const", leaf=word)
        if word in ("pi", r"\pi"):
            return Node("const", leaf="pi")
        return Node("sym", leaf=word + self.index())

    def word(self) -> str:
        """A known word, a letter, a Greek letter or an accented symbol, consumed."""
        token = self.peek()
        if len(token) == 1 and token.isascii() and token.isalpha():
            run = "".join(self.peek(offset) for offset in range(6) if len(self.peek(offset)) == 1)
            known = next((w for w in _WORDS if run.startswith(w)), "")
            self.at += max(1, len(known))
            return known or token
        if token in GREEK or token == r"\pi":
            return self.take()
        if token[1:] in FUNCTIONS and token.startswith("\\"):
            return self.take()[1:]
        if token == r"\text" or token in _ACCENTS:
            return self.spelled()
        raise UnreadableError(f"{token[:20] or 'nothing'!r} is no part of an expression")

    def spelled(self) -> str:
        command = self.take()
        if self.peek() != "{":
            inner = self.take()
        else:
            self.take()
            letters = []
            while self.peek() not in ("}", "", "{"):
                letters.append(self.take())
            inner = "".join(letters)
            self.take("}")
        if not inner or (command == r"\text" and len(inner) > 1 and inner not in FUNCTIONS):
            raise UnreadableError("text inside an expression")
        return inner if command == r"\text" else f"{command}{{{inner}}}"

    def index(self) -> str:
        name = ""
        while self.peek() in ("_", "'"):
            name += self.take()
            if name.endswith("_"):
                if self.peek() != "{":
                    name += self.take()
                    continue
                self.take()
                while self.peek() not in ("}", "", "{"):
                    name += self.take()
                self.take("}")
        return name

    def function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                base = self.argument() if self.peek() == "{" else self.primary()
            else:
                power = self.signed(self.primary)
        if name in _INVERSE and power == Node("neg", (number(Fraction(1)),)):
            name, power = _INVERSE[name], None
        argument = self.function_argument()
        if name == "log":
            tree = Node("log", (argument, base or number(Fraction(10))))
        elif base is not None:
            raise UnreadableError(f"{name} with an index")
        elif name == "sqrt":
            tree = Node("root", (argument, number(Fraction(2))))
        else:
            tree = Node(name, (argument,))
        return tree if power is None else Node("pow", (tree, power))

    def function_argument(self) -> Node:
        """A group in brackets, or factors up to the next sign, bracket or function."""
        if self.peek() in ("(", "[", "{"):
            return self.group()
        factors = [self.signed(self.power)]
        while self.starts_primary() and self.peek() not in ("(", "[", "{", "|"):
            bare = self.peek().lstrip("\\")
            if bare in FUNCTIONS:
                break
            factors.append(self.power())
        return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))


_WORDS = sorted(FUNCTIONS | {"pi"}, key=len, reverse=True)
