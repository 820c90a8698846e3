"""What published sets contain, so that a short or altered copy is noticed.

Rows are as their authors publish them. The checksum is that of a JSON-lines copy with the fields
``id, question, answer`` laid out as ``<name>/<split>.jsonl``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from qerl.data.problems import Checksum


@dataclass(frozen=True, slots=True)
class Known:
    """A published set."""

    rows: tuple[int, ...]
    """Row counts that are whole; more than one where a usual copy lacks some rows."""

    sha256: str
    """Checksum of the recorded JSON-lines copy, in hexadecimal."""


KNOWN: Mapping[tuple[str, str], Known] = MappingProxyType(
    {
        ("gsm8k", "train"): Known(
            (7473,), "54e7a21a6895354af464deb388b100de49c64e71e12506b9f742e20bc21a75cf"
        ),
        ("gsm8k", "test"): Known(
            (1319,), "99a5b36fdd47425b15491cee228358d97a42724085c783c166a214c0fa0f0076"
        ),
        # 7,500 published; the recorded copy lacks 26 that its source lacks and 2 without an answer.
        ("math", "train"): Known(
            (7500, 7472), "3f11a1383890f43245530ac3d426523339fe57066cd4062e3033f113bc6e97f8"
        ),
        ("math500", "test"): Known(
            (500,), "95a200fac56d9b348efcd24fc2d6ab962f5439c191a779ff5732eb685765117d"
        ),
        ("aime24", "test"): Known(
            (30,), "c49e305b3de84422803442555e5c1d0ce96cada6c6b2e4c7f6989909fb6f9060"
        ),
        ("aime25", "test"): Known(
            (30,), "44ae642085b3b916479f082602d8adccf8bae0ee3d3e4abaabb696cff2b2f372"
        ),
        ("amc23", "test"): Known(
            (40,), "e68b2aeff178b99a245ac100224860463ea5f36a16919ae23ae8d8dbfd6573f5"
        ),
        # A split of the 1,000 published rows in file order: 0-699 and 700-999.
        ("svamp", "train"): Known(
            (700,), "4c8620696f18a78e2480678392f2d745a62a354ae3feb6a9afdf4fa9a008f002"
        ),
        ("svamp", "test"): Known(
            (300,), "b7a6c61debee4a682f0924be2ad8233837c5bfcc362ff4eee38657ae8ec5518c"
        ),
    }
)


def check_known(
    name: str, split: str, rows: int, files: tuple[Path, ...]
) -> tuple[Checksum, tuple[str, ...]]:
    """Compare what was read with what is recorded of that set.

    Args:
        name: Data set, for example ``gsm8k``.
        split: Its split.
        rows: Rows read.
        files: Local files they were read from; empty for the hub.

    Returns:
        The state of the checksum, and one warning for each mismatch.
    """
    known = KNOWN.get((name, split))
    if known is None:
        return "unknown", ()
    published = f"{rows:,} rows where {known.rows[0]:,} are published"
    count = () if rows in known.rows else (published,)
    if not (len(files) == 1 and files[0].suffix == ".jsonl"):
        return "unknown", count
    if sha256(files[0].read_bytes()).hexdigest() == known.sha256:
        return "verified", ()
    return "differs", (*count, f"{files[0]} is not the recorded copy (its sha256 differs)")
