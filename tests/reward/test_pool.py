"""Workers that can be killed: budgets, order, constant number, every way to call."""

import asyncio
import math
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from qerl.reward import pool as pool_module
from qerl.reward import worker
from qerl.reward.pool import MAX_COMPLETION, STARVED_S, VerifierPool

HANG = r"\boxed{\int_0^1 x^{x^{x^x}} dx}"
"""math-verify does not come back from this in minutes."""


def gone(pid: int) -> bool:
    """Ended; a zombie that waits for an init process that never reaps has ended too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(holds: Callable[[], bool], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


def test_verdicts_come_in_order(pool: VerifierPool) -> None:
    numbers = [str(number) for number in range(200)]
    completions = [rf"\boxed{{{n}}}" if int(n) % 3 else r"\boxed{-1}" for n in numbers]
    verdicts = pool.verify(completions, numbers)
    assert [verdict.correct for verdict in verdicts] == [int(n) % 3 != 0 for n in numbers]
    assert [verdict.answer for verdict in verdicts][:3] == ["-1", "1", "2"]


def test_nothing_to_verify_starts_nothing() -> None:
    with VerifierPool() as idle:
        assert idle.verify([], []) == []
        assert idle.pids == []


def test_an_overrun_is_wrong_and_its_worker_is_replaced() -> None:
    with VerifierPool(workers=2, answer_budget_s=0.3) as small:
        small.verify([r"\boxed{1}"], ["1"])
        before = set(small.pids)
        started = time.monotonic()
        hung, fine = small.verify([HANG, r"\boxed{42}"], ["42", "42"])
        took = time.monotonic() - started
        assert (hung.correct, hung.reason) == (False, "took longer than 0.3 s")
        assert hung.answer == r"\int_0^1 x^{x^{x^x}} dx"
        assert fine.correct is True
        assert took < 0.3 + STARVED_S
        after = set(small.pids)
        assert len(after) == 2
        (killed,) = before - after
        assert gone(killed)


def test_a_worker_that_gets_no_processor_abstains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_cpu_s", lambda pid: 0.0)
    monkeypatch.setattr(pool_module, "STARVED_S", 0.3)
    with VerifierPool(workers=1, answer_budget_s=0.1) as small:
        verdicts = small.verify([HANG], ["42"])
        assert (verdicts[0].correct, verdicts[0].reason) == (None, "the machine is too busy")
        assert len(small.pids) == 1


def test_twenty_overruns_in_a_row_keep_the_number_of_workers() -> None:
    with VerifierPool(workers=2, answer_budget_s=0.05) as small:
        for _ in range(10):
            verdicts = small.verify([HANG, HANG], ["42", "42"])
            assert [verdict.correct for verdict in verdicts] == [False, False]
            assert len(small.pids) == 2
            assert all(psutil.pid_exists(pid) for pid in small.pids)
        assert small.verify([r"\boxed{42}"], ["42"])[0].correct


def test_what_a_batch_has_no_time_for_is_abstained_from() -> None:
    with VerifierPool(workers=1, answer_budget_s=5.0, batch_budget_s=1.0) as small:
        small.verify([r"\boxed{1}"], ["1"])
        verdicts = small.verify([r"\boxed{42}", HANG, r"\boxed{42}"], ["42"] * 3)
        assert [verdict.correct for verdict in verdicts[1:]] == [None, None]
        assert verdicts[2].reason == "the batch took longer than 1 s"
        assert small.verify([r"\boxed{42}"], ["42"])[0].correct  # nothing stale is read


def kill_busy(pool: VerifierPool, times: int) -> list[int]:
    """Crash the only worker of `pool` while it works, as often as asked; the killed ones."""
    killed: list[int] = []
    while len(killed) < times:
        time.sleep(0.3)
        (pid,) = pool.pids
        if pid not in killed:
            os.kill(pid, signal.SIGSEGV)
            killed.append(pid)
    return killed


def test_an_answer_whose_worker_dies_twice_is_abstained_from() -> None:
    with VerifierPool(workers=1, answer_budget_s=60.0) as small, ThreadPoolExecutor(1) as aside:
        small.verify([r"\boxed{1}"], ["1"])
        killed = aside.submit(kill_busy, small, 2)
        verdicts = small.verify([HANG, r"\boxed{42}"], ["42", "42"])
        assert (verdicts[0].correct, verdicts[0].reason) == (None, "the verifier died (signal 11)")
        assert verdicts[1].correct is True
        assert all(gone(pid) for pid in killed.result())
        assert len(small.pids) == 1


def test_an_answer_whose_worker_dies_once_is_tried_again() -> None:
    with VerifierPool(workers=1, answer_budget_s=1.0) as small, ThreadPoolExecutor(1) as aside:
        small.verify([r"\boxed{1}"], ["1"])
        aside.submit(kill_busy, small, 1)
        verdicts = small.verify([HANG, r"\boxed{42}"], ["42", "42"])
        assert [verdict.reason for verdict in verdicts] == ["took longer than 1 s", "identical"]


def test_idle_workers_that_died_cost_no_verdict() -> None:
    with VerifierPool(workers=2) as small:
        small.verify([r"\boxed{1}"], ["1"])
        for pid in small.pids:
            os.kill(pid, signal.SIGKILL)
        verdicts = small.verify([r"\boxed{42}"] * 8, ["42"] * 8)
        assert all(verdict.correct for verdict in verdicts)


def test_an_idle_worker_that_dies_beside_a_busy_one_touches_no_verdict() -> None:
    with VerifierPool(workers=2, answer_budget_s=1.0) as small, ThreadPoolExecutor(1) as aside:
        small.verify([r"\boxed{1}"], ["1"])
        idle = small.pids[1]
        aside.submit(lambda: (time.sleep(0.4), os.kill(idle, signal.SIGKILL)))
        assert small.verify([HANG], ["42"])[0].reason == "took longer than 1 s"
        assert len(small.pids) == 2
        assert idle not in small.pids
        verdicts = small.verify([r"\boxed{42}"] * 4, ["42"] * 4)  # and nothing is left in flight
        assert all(verdict.correct for verdict in verdicts)


def test_a_lost_fork_server_is_started_again() -> None:
    with VerifierPool(workers=2) as small:
        small.verify([r"\boxed{1}"], ["1"])
        workers = small.pids
        parent = psutil.Process(workers[0]).ppid()
        os.kill(parent, signal.SIGKILL)
        assert wait_until(lambda: all(gone(pid) for pid in workers))
        verdicts = small.verify([r"\boxed{42}"] * 4, ["42"] * 4)
        assert any(verdict.correct for verdict in verdicts)


def test_closing_ends_every_process_and_the_next_use_starts_anew() -> None:
    small = VerifierPool(workers=2)
    small.verify([r"\boxed{1}"], ["1"])
    pids = small.pids
    small.close()
    assert all(gone(pid) for pid in pids)
    assert small.pids == []
    assert small.verify([r"\boxed{1}"], ["1"])[0].correct
    small.close()
    small.close()


def test_a_pool_that_is_dropped_ends_its_processes() -> None:
    small = VerifierPool(workers=2)
    small.verify([r"\boxed{1}"], ["1"])
    pids = small.pids
    server = psutil.Process(pids[0]).ppid()
    del small
    assert wait_until(lambda: all(gone(pid) for pid in pids))
    assert not psutil.pid_exists(server)  # our own child is reaped, no zombie


def test_verifying_works_from_threads_at_once(pool: VerifierPool) -> None:
    with ThreadPoolExecutor(4) as threads:
        batches = [
            threads.submit(pool.verify, [rf"\boxed{{{n}}}"] * 20, [str(n)] * 20) for n in range(8)
        ]
        assert all(verdict.correct for batch in batches for verdict in batch.result())


def test_workers_outlive_the_thread_that_started_them() -> None:
    with VerifierPool(workers=1) as small:
        thread = threading.Thread(target=small.verify, args=([r"\boxed{1}"], ["1"]))
        thread.start()
        thread.join()
        (pid,) = small.pids
        time.sleep(0.2)
        assert not gone(pid)
        assert small.verify([r"\boxed{42}"], ["42"])[0].correct
        assert small.pids == [pid]


def test_verifying_works_under_asyncio(pool: VerifierPool) -> None:
    async def both() -> list[bool | None]:
        aside = asyncio.to_thread(pool.verify, [r"\boxed{1}"], ["1"])
        inside = pool.verify([r"\boxed{2}"], ["3"])
        return [verdict.correct for verdict in [*await aside, *inside]]

    assert asyncio.run(both()) == [True, False]


def test_a_copy_in_another_process_starts_its_own_workers(pool: VerifierPool) -> None:
    pool.verify([r"\boxed{1}"], ["1"])
    copy = pickle.loads(pickle.dumps(pool))
    assert (copy.workers, copy.pids) == (pool.workers, [])


def test_surrogates_null_bytes_and_empty_texts_cross_the_wire(pool: VerifierPool) -> None:
    verdicts = pool.verify(["\ud800 \\boxed{4\x00}", "", "\\boxed{\u202e}"], ["4", "4", "\ud800"])
    assert [verdict.correct for verdict in verdicts] == [True, False, None]


def test_a_completion_of_many_megabytes_is_read_from_its_end(pool: VerifierPool) -> None:
    long = "x" * (3 * MAX_COMPLETION) + r"\boxed{42}"
    assert pool.verify([long], ["42"])[0].correct


def test_answers_agree_with_references_in_a_box(pool: VerifierPool) -> None:
    assert pool.agree([("0.5", r"\frac12"), ("1", "2"), ("{", "{"), ("", "1")]) == [
        True,
        False,
        False,
        False,
    ]


def test_memory_beyond_the_limit_is_a_wrong_answer_and_retires_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhaust(completion: str, gold: str) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "judge", exhaust)
    ours, theirs = socket.socketpair()
    worker.send(ours, ["completion", "gold"])
    worker._work(theirs, memory_mib=64)
    assert worker.receive(ours) == [False, "needed more than 64 MiB", None, True]


def test_a_defect_of_the_verifier_abstains(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(completion: str, gold: str) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(worker, "judge", fail)
    ours, theirs = socket.socketpair()
    worker.send(ours, ["completion", "gold"])
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        worker._work(theirs, memory_mib=64)
    correct, reason, _, retire = worker.receive(ours)
    assert (correct, retire) == (None, False)
    assert reason == "the verifier failed: KeyError: 'defect'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0: at least 1"),
        ({"answer_budget_s": 0.0}, "above 0"),
        ({"batch_budget_s": -1.0}, "above 0"),
        ({"memory_mib": 1}, "memory_mib=1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifierPool(**options)


def test_as_many_references_as_completions_are_needed(pool: VerifierPool) -> None:
    with pytest.raises(ValueError, match="1 completions against 2 references"):
        pool.verify(["a"], ["1", "2"])


def attack(pool: VerifierPool, completions: list[str]) -> tuple[float, float]:
    """Longest batch of ten, in seconds, and growth of all workers' memory, in MiB."""
    pool.verify([r"\boxed{1}"] * 8, ["1"] * 8)
    resident = sum(psutil.Process(pid).memory_info().rss for pid in pool.pids)
    longest = 0.0
    for start in range(0, len(completions), 10):
        batch = completions[start : start + 10]
        started = time.monotonic()
        verdicts = pool.verify(batch, ["42"] * len(batch))
        longest = max(longest, time.monotonic() - started)
        assert len(verdicts) == len(batch)
        assert all(verdict.correct is not None for verdict in verdicts), verdicts
        assert len(pool.pids) == pool.workers
    grown = sum(psutil.Process(pid).memory_info().rss for pid in pool.pids) - resident
    return longest, grown / 2**20


def test_a_hundred_hostile_answers_stay_within_budget(
    pool: VerifierPool, hostile: Callable[[int], list[str]]
) -> None:
    longest, grown = attack(pool, hostile(100))
    assert longest < pool.answer_budget_s + STARVED_S
    assert grown < 100
    assert pool.verify([r"\boxed{42}"], ["42"])[0].correct


@pytest.mark.slow
def test_a_thousand_hostile_answers_stay_within_budget(
    pool: VerifierPool, hostile: Callable[[int], list[str]]
) -> None:
    longest, grown = attack(pool, hostile(1000))
    assert longest < pool.answer_budget_s + STARVED_S
    assert grown < 200
    assert not math.isnan(longest)


ORDINARY = [
    ("1,000", "1000"),
    ("18", "18"),
    (r"\frac{3}{4}", "0.75"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("[0,3)", r"0 \le x < 3"),
    (r"\$5.50", "5.5"),
    ("17", "18"),
    (r"\text{Friday}", "friday"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 2.0 \end{bmatrix}"),
]


def ordinary(count: int) -> tuple[list[str], list[str]]:
    """Completions of about 2,000 characters, one in five of them wrong."""
    pairs = [ORDINARY[row % len(ORDINARY)] for row in range(count)]
    prose = "We add the numbers and see what remains of them. " * 40
    return [rf"{prose}\boxed{{{answer}}}" for answer, _ in pairs], [gold for _, gold in pairs]


@pytest.mark.slow
def test_ordinary_answers_are_verified_at_300_a_second() -> None:
    with VerifierPool(workers=2) as small:
        small.verify([r"\boxed{1}"], ["1"])
        started = time.monotonic()
        verdicts = small.verify(*ordinary(3000))
        rate = 3000 / (time.monotonic() - started)
        assert sum(verdict.correct is True for verdict in verdicts) == 2700
        assert rate > 300, rate


@pytest.mark.slow
def test_a_batch_with_one_hostile_answer_in_twenty_takes_under_15_seconds(
    hostile: Callable[[int], list[str]],
) -> None:
    completions, golds = ordinary(1024)
    for row, attack_text in zip(range(0, 1024, 20), hostile(52), strict=True):
        completions[row], golds[row] = attack_text, "42"
    with VerifierPool(workers=4) as small:
        started = time.monotonic()
        verdicts = small.verify(completions, golds)
        took = time.monotonic() - started
        assert len(verdicts) == 1024
        assert took < 15, took
