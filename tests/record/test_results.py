"""What stands under results/ is what its README says."""

from pathlib import Path

import pytest

from qerl.record.schema import find

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("folder", ["runs", "evals", "bench"])
def test_every_committed_record_is_valid_and_stands_where_its_fields_say(folder: str) -> None:
    for record in find(RESULTS / folder):
        assert record.path is not None
        assert record.path.parent == RESULTS / folder / record.name
        assert record.path.name.startswith(record.file.stem)
