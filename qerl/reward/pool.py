"""Verdicts from worker processes that can be killed: in order, in time, and of constant number.

An answer has a budget of processor time, so that its verdict does not depend on how busy the
machine is: other processes can slow a right answer, but not make it wrong. A worker that overruns,
or dies, is killed, reaped and replaced. A batch has a budget of its own by the clock. Whatever the
answer itself is not to blame for is abstained from.

==================================  =======  =======================================
what happened                       correct  reason
==================================  =======  =======================================
the answer took too long            False    took longer than 2 s
it needed too much memory           False    needed more than 1024 MiB
its worker died, twice              None     the verifier died (signal 11)
the verifier raised                 None     the verifier failed: ...
its worker hardly ran for 22 s      None     the machine is too busy
the batch ran out of time           None     the batch took longer than 120 s
==================================  =======  =======================================
"""

import contextlib
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from qerl.reward.equality import MAX_SHOWN, shorten
from qerl.reward.parse import extract
from qerl.reward.worker import receive, request_end, request_fork, request_quit, send
from qerl.types import Verdict

STARVED_S = 20.0
"""By the clock, beyond its budget, after which an answer whose worker hardly ran is given up."""

MAX_COMPLETION = 1 << 20
"""Characters of a completion that are read, from its end."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START = (
    "import sys; sys.path[:] = {path!r}; from qerl.reward.worker import serve_forks; "
    "serve_forks({descriptor}, {memory_mib})"
)


@dataclass(eq=False, slots=True)
class _Worker:
    pid: int
    connection: socket.socket
    row: int = -1
    """The answer it works on; -1 for none."""
    started_s: float = 0.0
    cpu_s: float = 0.0
    check_s: float = 0.0
    """When to look at it next, by the monotonic clock."""


@dataclass(eq=False, slots=True)
class _Server:
    """The fork server and its workers, of one process of ours."""

    owner: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    workers: list[_Worker] = field(default_factory=list)


class VerifierPool:
    """Verifies completions in worker processes; starts them when first used.

    Usable from any thread (one batch at a time), under asyncio by ``asyncio.to_thread``, before and
    after CUDA is initialised. ``close()``, leaving a ``with`` block, the end of the process or its
    death by any signal end all workers.

    Args:
        workers: Processes that verify at the same time.
        answer_budget_s: Processor time for one answer.
        batch_budget_s: Time by the clock for one call of `verify`.
        memory_mib: Address space that a worker may add to what it starts with.
    """

    def __init__(
        self,
        workers: int = 4,
        answer_budget_s: float = 2.0,
        batch_budget_s: float = 120.0,
        memory_mib: int = 1024,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: at least 1")
        if answer_budget_s <= 0 or batch_budget_s <= 0:
            raise ValueError(
                f"answer_budget_s={answer_budget_s}, batch_budget_s={batch_budget_s}: above 0"
            )
        if memory_mib < 64:
            raise ValueError(f"memory_mib={memory_mib}: a verifier needs at least 64")
        self.workers = workers
        self.answer_budget_s = answer_budget_s
        self.batch_budget_s = batch_budget_s
        self.memory_mib = memory_mib
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._finalizer: weakref.finalize[..., VerifierPool] | None = None

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """The options: a copy in another process starts workers of its own."""
        names = ("workers", "answer_budget_s", "batch_budget_s", "memory_mib")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that stand ready; empty before the first use."""
        return [worker.pid for worker in self._server.workers] if self._server else []

    def verify(self, completions: Sequence[str], golds: Sequence[str]) -> list[Verdict]:
        """One verdict for each completion against its reference, in order.

        Raises:
            RuntimeError: the verifier cannot be started, or its fork server died twice.
        """
        if len(completions) != len(golds):
            raise ValueError(f"{len(completions)} completions against {len(golds)} references")
        verdicts: list[Verdict | None] = [None] * len(completions)
        if not completions:
            return []
        with self._lock:
            deadline_s = time.monotonic() + self.batch_budget_s
            for _ in range(2):
                with contextlib.suppress(EOFError):  # the fork server is gone: start another
                    self._run(completions, golds, verdicts, deadline_s)
                    break
            else:
                raise RuntimeError("the verifier's fork server died twice in one batch")
        return [verdict for verdict in verdicts if verdict is not None]

    def agree(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether each answer, boxed, verifies against its reference; pairs are (answer, gold)."""
        boxed = [rf"\boxed{{{answer}}}" for answer, _ in pairs]
        return [v.correct is True for v in self.verify(boxed, [gold for _, gold in pairs])]

    def close(self) -> None:
        """End all workers; the next `verify` starts new ones."""
        with self._lock:
            self._drop()

    def _run(
        self,
        completions: Sequence[str],
        golds: Sequence[str],
        verdicts: list[Verdict | None],
        deadline_s: float,
    ) -> None:
        try:
            server = self._ready()
            batch = _Batch(self, server, completions, golds, verdicts)
            batch.run(deadline_s)
        except BaseException:
            # Ctrl-C or a lost server leave answers in flight: no later batch may read them.
            self._drop()
            raise

    def _ready(self) -> _Server:
        if self._server is not None and self._server.owner != os.getpid():
            self._forget()  # we are a fork: the workers belong to our parent
        if self._server is None:
            self._server = _start_server(self.memory_mib)
            self._finalizer = weakref.finalize(self, _stop_server, self._server)
            for _ in range(self.workers):
                self._server.workers.append(_Worker(*request_fork(self._server.control)))
        return self._server

    def _drop(self) -> None:
        if self._server is not None and self._server.owner == os.getpid():
            _stop_server(self._server)
        self._forget()

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._server, self._finalizer = None, None


class _Batch:
    """One call of `verify`: which worker has which answer, and since when."""

    def __init__(
        self,
        pool: VerifierPool,
        server: _Server,
        completions: Sequence[str],
        golds: Sequence[str],
        verdicts: list[Verdict | None],
    ) -> None:
        self.pool = pool
        self.server = server
        self.completions = completions
        self.golds = golds
        self.verdicts = verdicts
        self.pending = deque(row for row, verdict in enumerate(verdicts) if verdict is None)
        self.retried: set[int] = set()
        self.selector = selectors.DefaultSelector()

    def run(self, deadline_s: float) -> None:
        with self.selector:
            for worker in list(self.server.workers):
                self.selector.register(worker.connection, selectors.EVENT_READ, worker)
                self.give(worker)
            while busy := [worker for worker in self.server.workers if worker.row >= 0]:
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    self.give_up(busy)
                    return
                wait_s = min(deadline_s, *(worker.check_s for worker in busy)) - now_s
                for key, _ in self.selector.select(max(0.0, wait_s)):
                    self.collect(key.data)
                for worker in busy:
                    if worker.row >= 0 and time.monotonic() >= worker.check_s:
                        self.check(worker)

    def give(self, worker: _Worker) -> None:
        """Hand the next answer to an idle worker."""
        if not self.pending:
            return
        worker.row = self.pending.popleft()
        worker.started_s = time.monotonic()
        worker.cpu_s = _cpu_s(worker.pid)
        worker.check_s = worker.started_s + self.pool.answer_budget_s
        with contextlib.suppress(ConnectionError):  # a dead worker shows when it is read from
            tail = self.completions[worker.row][-MAX_COMPLETION:]  # the last form counts
            send(worker.connection, [tail, self.golds[worker.row]])

    def collect(self, worker: _Worker) -> None:
        try:
            correct, reason, answer, retire = receive(worker.connection)
        except EOFError:
            self.mourn(worker, self.replace(worker))
            return
        if retire:
            self.replace(worker)
        self.settle(worker, correct, reason, answer)

    def mourn(self, worker: _Worker, status: int) -> None:
        """Try an answer once more whose worker died: it may have died of something else."""
        row = worker.row
        if row in self.retried:
            cause = f"signal {-status}" if status < 0 else f"exit status {status}"
            self.settle(worker, None, f"the verifier died ({cause})")
            return
        if row >= 0:
            self.retried.add(row)
            self.pending.appendleft(row)
            worker.row = -1
        self.give(worker)

    def check(self, worker: _Worker) -> None:
        """End an answer that used up its budget; look again later at one that did not."""
        if select.select([worker.connection], [], [], 0)[0]:
            return  # it has just answered, or died
        budget_s = self.pool.answer_budget_s
        left_s = budget_s - (_cpu_s(worker.pid) - worker.cpu_s)
        now_s = time.monotonic()
        starved = now_s >= worker.started_s + budget_s + STARVED_S
        if left_s > 0 and not starved:
            worker.check_s = now_s + max(left_s, 0.01)
            return
        self.replace(worker)
        if left_s > 0:
            self.settle(worker, None, "the machine is too busy")
        else:
            self.settle(worker, False, f"took longer than {budget_s:g} s")

    def give_up(self, busy: list[_Worker]) -> None:
        reason = f"the batch took longer than {self.pool.batch_budget_s:g} s"
        for worker in busy:
            self.pending.append(worker.row)
            worker.row = -1
            self.replace(worker)
        for row in self.pending:
            self.verdicts[row] = Verdict(correct=None, reason=reason, answer=None)

    def settle(
        self, worker: _Worker, correct: bool | None, reason: str, answer: str | None = None
    ) -> None:
        row, worker.row = worker.row, -1
        if answer is None and (found := extract(self.completions[row])) is not None:
            answer = shorten(found.answer, MAX_SHOWN)  # the worker could not say
        self.verdicts[row] = Verdict(correct=correct, reason=reason, answer=answer)
        self.give(worker)

    def replace(self, worker: _Worker) -> int:
        """Kill and reap the process of `worker`, put a fresh one in its place; how it ended."""
        self.selector.unregister(worker.connection)
        worker.connection.close()
        status = request_end(self.server.control, worker.pid)
        worker.pid, worker.connection = request_fork(self.server.control)
        self.selector.register(worker.connection, selectors.EVENT_READ, worker)
        return status


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far; where there is no /proc, the clock stands in for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _start_server(memory_mib: int) -> _Server:
    ours, theirs = socket.socketpair()
    path = [str(Path(entry).resolve()) for entry in sys.path]
    code = _START.format(path=path, descriptor=theirs.fileno(), memory_mib=memory_mib)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    return _Server(os.getpid(), process, ours)


def _stop_server(server: _Server) -> None:
    if server.owner != os.getpid():
        return
    for worker in server.workers:
        worker.connection.close()
    request_quit(server.control)
    server.control.close()
    try:
        server.process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
