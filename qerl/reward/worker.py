"""Verifier processes: a fork server that never sees text, and the workers that it forks.

::

    pool ──control socket──▸ fork server ──fork──▸ worker ◂──its own socket──▸ pool
           fork, end PID, quit                            completion, gold ▸ verdict

The pool starts `serve_forks` as a fresh interpreter: it inherits no CUDA context, no threads and no
`__main__`, so it may fork at any time and from any of the pool's threads. It loads the verifier
once; a worker is a fork of it (measured: 4 ms), so killing one costs almost nothing.

Nothing outlives the pool's process. A worker dies with the fork server (PR_SET_PDEATHSIG, and the
end of its socket); the fork server ends when its control socket ends or its parent is another one.
It has a session of its own and ignores SIGINT: Ctrl-C is the pool's to handle.

This module and everything it imports at its top leave out torch.
"""

import contextlib
import ctypes
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from qerl.reward.equality import judge
from qerl.reward.symbolic import math_verify_agrees

_LENGTH = struct.Struct("!I")
_ANSWER = struct.Struct("!ii")
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
FORK, END, QUIT = b"F", b"E", b"Q"


def send(connection: socket.socket, message: list[Any]) -> None:
    """One message: its length, then JSON. Workers hold hostile text, so nothing is unpickled."""
    body = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> list[Any]:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    message: list[Any] = json.loads(receive_exactly(connection, length))
    return message


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """`size` bytes.

    Raises:
        EOFError: the other side is gone.
    """
    parts = []
    while size:
        try:
            part = connection.recv(min(size, 1 << 20))
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other side closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def request_fork(control: socket.socket) -> tuple[int, socket.socket]:
    """A new worker's process id and its socket.

    Raises:
        EOFError: the fork server is gone.
    """
    try:
        control.sendall(FORK + _LENGTH.pack(0))
        message, descriptors, _, _ = socket.recv_fds(control, _ANSWER.size, 1)
    except ConnectionError as error:
        raise EOFError(str(error)) from error
    if not message:
        raise EOFError("the fork server is gone")
    os.set_inheritable(descriptors[0], False)
    message += receive_exactly(control, _ANSWER.size - len(message))
    return _ANSWER.unpack(message)[0], socket.socket(fileno=descriptors[0])


def request_end(control: socket.socket, pid: int) -> int:
    """Kill worker `pid` if it runs, reap it, and return how it ended: -signal, or exit status.

    Raises:
        EOFError: the fork server is gone.
    """
    try:
        control.sendall(END + _LENGTH.pack(pid))
    except ConnectionError as error:
        raise EOFError(str(error)) from error
    return int(_ANSWER.unpack(receive_exactly(control, _ANSWER.size))[1])


def request_quit(control: socket.socket) -> None:
    """End the fork server and its workers, even if a fork of ours holds the socket open."""
    with contextlib.suppress(ConnectionError):
        control.sendall(QUIT + _LENGTH.pack(0))


def serve_forks(descriptor: int, memory_mib: int) -> None:
    """Fork and end workers on request until the control socket ends; the main of its process."""
    control = socket.socket(fileno=descriptor)
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    _warm_up()
    workers: set[int] = set()
    with contextlib.suppress(EOFError, ConnectionError):
        while os.getppid() == parent:
            if select.select([control], [], [], _PARENT_CHECK_S)[0]:
                _answer(control, workers, memory_mib)
    for pid in workers:
        _end(pid)


def _warm_up() -> None:
    # What the first answers would load and cache, before the forks that share it.
    math_verify_agrees(r"\frac{1}{2}", r"\sum_{k=1}^{2} \frac{1}{4}")
    judge(r"\boxed{\frac{\sqrt{3}}{2}}", r"\sin 60^\circ")


def _answer(control: socket.socket, workers: set[int], memory_mib: int) -> None:
    request = receive_exactly(control, 1 + _LENGTH.size)
    (pid,) = _LENGTH.unpack(request[1:])
    if request[:1] == QUIT:
        raise EOFError("the pool is closed")
    if request[:1] == END:
        status = _end(pid) if pid in workers else 0
        workers.discard(pid)
        control.sendall(_ANSWER.pack(pid, status))
        return
    ours, theirs = socket.socketpair()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        ours.close()
        _work_and_exit(theirs, server, memory_mib)
    theirs.close()
    workers.add(pid)
    socket.send_fds(control, [_ANSWER.pack(pid, 0)], [ours.fileno()])
    ours.close()


def _end(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work_and_exit(connection: socket.socket, server: int, memory_mib: int) -> None:
    status = 1
    try:
        _restrict(server, memory_mib)
        _work(connection, memory_mib)
        status = 0
    except EOFError:
        status = 0
    finally:
        os._exit(status)  # never the fork server's own clean-up


def _restrict(server: int, memory_mib: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before the call above
            os._exit(1)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go, if any must
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (memory_mib << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _work(connection: socket.socket, memory_mib: int) -> None:
    """Answer ``[completion, gold]`` with ``[correct, reason, answer]`` until the pool is gone.

    A worker that ran out of memory, or has come to hold much, says so and ends: ``retire``.
    """
    start = _peak_memory()
    while True:
        completion, gold = receive(connection)
        exhausted = False
        try:
            verdict: list[Any] = list(judge(completion, gold))
        except MemoryError:
            verdict = [False, f"needed more than {memory_mib} MiB", None]
            exhausted = True
        # The pool must learn of a defect here; it abstains, with this reason.
        except Exception as error:
            verdict = [None, f"the verifier failed: {type(error).__name__}: {error}"[:200], None]
        retire = exhausted or _peak_memory() > start + _RETIRE_BYTES
        send(connection, [*verdict, retire])
        if retire:
            return


_RETIRE_BYTES = 64 << 20


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
