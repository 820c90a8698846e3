"""No verifier process outlives the process that uses it, however that ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = str(Path(__file__).parents[2])

START = r"""
import json, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from qerl.reward.pool import VerifierPool
HANG = r"\boxed{{\int_0^1 x^{{x^{{x^x}}}} dx}}"
def tell(pool):
    import psutil
    print(json.dumps([*pool.pids, psutil.Process(pool.pids[0]).ppid()]), flush=True)
"""


def launch(body: str) -> subprocess.Popen[str]:
    code = START.format(root=ROOT) + body
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def told(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the script ended with {process.wait()}"
    return json.loads(line)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_gone(pids: list[int], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


BUSY = r"""
pool = VerifierPool(workers=2, answer_budget_s=60)
pool.verify([r"\boxed{1}"], ["1"])
tell(pool)
pool.verify([HANG] * 4, ["42"] * 4)
"""

IDLE = r"""
pool = VerifierPool(workers=2)
pool.verify([r"\boxed{1}"], ["1"])
tell(pool)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "death"),
    [
        (BUSY, signal.SIGKILL),
        (BUSY, signal.SIGINT),
        (IDLE, signal.SIGTERM),
    ],
    ids=["busy-SIGKILL", "busy-SIGINT", "idle-SIGTERM"],
)
def test_no_worker_outlives_its_process(body: str, death: signal.Signals) -> None:
    process = launch(body)
    pids = told(process)
    assert len(pids) == 3  # two workers and their fork server
    time.sleep(0.2)
    os.killpg(process.pid, death)  # as a terminal's Ctrl-C reaches a whole process group
    process.wait(timeout=60)
    assert_gone(pids)


def test_an_ordinary_end_leaves_no_worker_and_no_zombie() -> None:
    process = launch(
        r"""
pool = VerifierPool(workers=2)
pool.verify([r"\boxed{1}"], ["1"])
tell(pool)
pool.close()
import psutil
assert psutil.Process().children() == [], "a child is left"
other = VerifierPool(workers=2)
other.verify([r"\boxed{1}"], ["1"])
tell(other)
"""
    )
    pids = told(process) + told(process)
    assert process.wait(timeout=60) == 0
    assert_gone(pids)


def test_ctrl_c_in_a_batch_leaves_a_pool_that_still_works() -> None:
    process = launch(
        r"""
pool = VerifierPool(workers=2, answer_budget_s=60)
pool.verify([r"\boxed{1}"], ["1"])
try:
    tell(pool)
    pool.verify([HANG] * 4, ["42"] * 4)
except KeyboardInterrupt:
    assert [v.correct for v in pool.verify([r"\boxed{42}"] * 4, ["42"] * 4)] == [True] * 4
    tell(pool)
"""
    )
    first = told(process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    second = told(process)
    assert process.wait(timeout=60) == 0
    assert not set(first) & set(second)
    assert_gone(first + second)


def test_ctrl_c_between_batches_does_not_reach_the_workers() -> None:
    process = launch(
        r"""
pool = VerifierPool(workers=2)
pool.verify([r"\boxed{1}"], ["1"])
try:
    tell(pool)
    time.sleep(60)
except KeyboardInterrupt:
    pass
time.sleep(0.3)
assert pool.verify([r"\boxed{42}"] * 4, ["42"] * 4)[0].correct
tell(pool)
"""
    )
    before = told(process)
    os.killpg(process.pid, signal.SIGINT)
    assert told(process) == before
    assert process.wait(timeout=60) == 0
    assert_gone(before)


def test_a_fork_of_the_process_uses_workers_of_its_own() -> None:
    process = launch(
        r"""
pool = VerifierPool(workers=1)
pool.verify([r"\boxed{1}"], ["1"])
tell(pool)
child = os.fork()
if child == 0:
    right = pool.verify([r"\boxed{42}"], ["42"])[0].correct is True
    tell(pool)
    pool.close()
    os._exit(0 if right else 1)
assert os.waitpid(child, 0)[1] == 0
assert pool.verify([r"\boxed{42}"], ["42"])[0].correct is True
tell(pool)
"""
    )
    parents, childs, again = told(process), told(process), told(process)
    assert process.wait(timeout=60) == 0
    assert parents == again
    assert not set(parents) & set(childs)
    assert_gone(parents + childs)


def test_no_worker_outlives_its_process_though_a_fork_of_it_lives_on() -> None:
    process = launch(
        r"""
pool = VerifierPool(workers=1)
pool.verify([r"\boxed{1}"], ["1"])
child = os.fork()  # holds a copy of every socket, as a data loader's workers do
if child == 0:
    time.sleep(60)
    os._exit(0)
tell(pool)
print(json.dumps([child]), flush=True)
time.sleep(60)
"""
    )
    workers, (fork,) = told(process), told(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert_gone(workers)
    assert not gone(fork)
    os.kill(fork, signal.SIGKILL)


def test_the_verifier_and_its_workers_never_load_torch() -> None:
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); import qerl.reward.worker; "
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules; "
        "qerl.reward.worker._warm_up(); "
        "assert 'sympy' in sys.modules and 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_memory_limit_holds() -> None:
    code = (
        f"import os, sys; sys.path.insert(0, {ROOT!r}); from qerl.reward import worker\n"
        "worker._restrict(os.getppid(), 64)\n"
        "bytearray(32 << 20)\n"
        "try:\n    bytearray(128 << 20)\n"
        "except MemoryError:\n    sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
