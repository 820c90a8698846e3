"""The plain Triton kernels against their torch references, by Triton's interpreter on a CPU.

The interpreter is chosen when triton is imported, so the cases run in one process of their own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

CASES = Path(__file__).with_name("interpreted_cases.py")
NAMES = re.findall(r"^def (case_\w+)", CASES.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy does the dots
    environment = os.environ | single | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_reference(name: str, results: dict[str, str]) -> None:
    assert results[name] == "ok", results[name]
