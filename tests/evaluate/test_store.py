"""The folder of an evaluation keeps whole chunks, drops torn ones and refuses other settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from qerl.evaluate.store import COMPLETIONS, Store, fingerprint

STARTED = "2025-01-31T09:30:00+00:00"


def rows(*prompts: str, samples: int = 2) -> list[dict[str, Any]]:
    return [
        {"mode": "sampled", "prompt": p, "sample": g, "completion": f"{p}: …\ud83d"}
        for p in prompts
        for g in range(samples)
    ]


def reopened(folder: Path) -> Store:
    return Store(folder, {"seed": 0}, STARTED)


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    store = reopened(tmp_path)
    assert store.take("sampled", ["a", "b"], 2) is None
    store.add(rows("a", "b"))
    store.close()
    again = reopened(tmp_path)
    assert again.take("sampled", ["a", "b"], 2) == rows("a", "b")
    assert again.take("greedy", ["a", "b"], 2) is None


LINE = len(json.dumps(rows("d")[1], ensure_ascii=False).encode("utf-8", "backslashreplace")) + 1


@pytest.mark.parametrize("cut", [1, 5, 40, LINE, 2 * LINE, 120])
def test_a_torn_chunk_is_drawn_again_whole(tmp_path: Path, cut: int) -> None:
    store = reopened(tmp_path)
    store.add(rows("a", "b"))
    store.add(rows("c", "d"))
    store.close()
    path = tmp_path / COMPLETIONS
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = reopened(tmp_path)
    assert again.take("sampled", ["a", "b"], 2) == rows("a", "b")
    if again.take("sampled", ["c", "d"], 2) is None:
        again.add(rows("c", "d"))
    else:
        assert cut == 1  # only the end of the last line is missing
        again.add(rows("e"))
        again.close()
        assert reopened(tmp_path).take("sampled", ["e"], 2) == rows("e")
        return
    again.close()
    assert path.read_bytes() == whole


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    Store(tmp_path, {"seed": 0, "limit": 4}, STARTED).close()
    with pytest.raises(ValueError, match=r"limit: 4 -> 8\): use the same settings") as caught:
        Store(tmp_path, {"seed": 0, "limit": 8}, STARTED)
    assert "\n" not in str(caught.value)
    assert "seed" not in str(caught.value)


def test_the_start_is_that_of_the_first_call(tmp_path: Path) -> None:
    reopened(tmp_path).close()
    assert Store(tmp_path, {"seed": 0}, "2026-01-01T00:00:00+00:00").started == STARTED


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    store = reopened(tmp_path)
    with pytest.raises(ValueError, match="another process evaluates there"):
        reopened(tmp_path)
    store.close()
    reopened(tmp_path).close()


def test_a_fingerprint_is_of_values_and_not_of_their_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1})
