"""Gold answers out of the fields that hold them."""

import pytest

from qerl.data.golds import Reading, read_gold


@pytest.mark.parametrize(
    ("text", "reading", "gold"),
    [
        ("  x + 1 ", "as_is", "x + 1"),
        ("1,234.0", "number", "1234"),
        ("27.0", "number", "27"),
        ("0.50", "number", "0.50"),
        ("-3", "number", "-3"),
        ("She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "after_hashes", "18"),
        ("So 1,000 #### no\n#### 1,234", "after_hashes", "1234"),
        ("72", "after_hashes", "72"),
        ("1,080", "after_hashes", "1080"),
        (r"first \boxed{1}, then $\boxed{\frac{1}{2}}$.", "boxed", r"\frac{1}{2}"),
        (r"so $\boxed 5$ it is", "boxed", "5"),
        (r"\boxed{\text{a {b} c}}", "boxed", r"\text{a {b} c}"),
    ],
)
def test_gold_is_read(text: str, reading: Reading, gold: str) -> None:
    assert read_gold(text, reading) == gold


@pytest.mark.parametrize(
    ("text", "reading", "reason"),
    [
        ("", "as_is", "empty"),
        ("She makes 18 dollars", "after_hashes", "no '#### answer'"),
        ("She makes 18\n####", "after_hashes", "empty"),
        ("no box", "boxed", "no .*boxed"),
        (r"\boxed{1", "boxed", "unclosed"),
        (r"\boxed{}", "boxed", "empty"),
    ],
)
def test_text_without_an_answer_is_refused(text: str, reading: Reading, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_gold(text, reading)
