"""The paired difference of two evaluations on the same problems, second minus first.

python scripts/compare.py FIRST SECOND

FIRST and SECOND are records (results/evals/<name>/seed0-<sha>.json) or folders of evaluations
(out/evals/<name>/seed0-<fingerprint>).
"""

import argparse
import sys
from pathlib import Path

from qerl.evaluate.compare import compare, comparison_table
from qerl.record.schema import Record, load


def read(place: Path) -> Record:
    """The record at a file or in an evaluation's folder."""
    path = place / "record.json" if place.is_dir() else place
    if not path.is_file():
        raise ValueError(
            f"{path}: no record there; an evaluation that has not ended has none "
            "(run its scripts/evaluate.py line again)"
        )
    return load(path)


def main() -> None:
    """Compare the two evaluations that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="record or folder of the first evaluation")
    parser.add_argument("second", type=Path, help="record or folder of the second")
    arguments = parser.parse_args()
    try:
        first, second = read(arguments.first), read(arguments.second)
        print(comparison_table(first, second, compare(first, second)))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
