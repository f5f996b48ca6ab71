"""Calls that may hang, crash or eat the memory, made in processes that can be killed.

A sandbox is one server process, started with a fresh interpreter (so no thread or lock of the
caller is copied, and it works from any thread and from daemonic worker processes). The server
imports one module and then only forks: a worker killed after a time-out is replaced in
milliseconds. The server never reads what is computed; it ends, with its workers, when its caller
does. Replies are JSON, so a worker that has gone wrong can hand over nothing but data.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

TIME_LIMIT = 1.5
"""Seconds a call may take; with the hand-over it stays below two."""
STARVED = 0.1
"""A worker that ran for less than this share of its time was kept waiting by a busy machine."""
START_LIMIT = 60.0
"""Seconds the server may take to import its module, once."""
MEMORY_LIMIT = 512 * 2**20
"""Bytes of address space that a worker may add to what it starts with."""


class CallFailedError(RuntimeError):
    """The call did not come to a result: it ran out of time or memory, or it crashed."""


class StarvedError(CallFailedError):
    """The time went by, but the machine gave the worker next to none of it."""


class Sandbox:
    """Runs functions of one module in killable processes; safe to share between threads.

    >>> with Sandbox("math") as sandbox:
    ...     sandbox.call("gcd", 12, 18)
    6
    """

    def __init__(
        self,
        module: str,
        *setup: Any,
        workers: int | None = None,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        """`setup` are the arguments of the module's `warm_up`, if it has one; JSON values."""
        self.module = module
        self.setup = setup
        self.time_limit = time_limit
        self._slots: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers or max(2, min(8, os.cpu_count() or 2))):
            self._slots.put(None)  # a free place whose worker is not started yet
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to start the server, without waiting for it."""
        with self._lock:
            if self._server is None or not self._server.alive():
                self._server = _Server(self.module, self.setup)

    def call(self, function: str, *arguments: Any) -> Any:
        """`module.function(*arguments)`, or `CallFailedError` within the time limit.

        On a machine so busy that the worker hardly ran, it is called once more.
        """
        try:
            return self._call(function, arguments)
        except StarvedError:
            return self._call(function, arguments)

    def _call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        worker = self._slots.get()
        try:
            if worker is None or not worker.usable():
                self.start()
                assert self._server is not None
                worker = self._server.fork()
            return worker.call(function, arguments, self.time_limit)
        except CallFailedError:
            if worker is not None:
                worker.kill()
            worker = None
            raise
        finally:
            self._slots.put(worker)

    def disown(self) -> None:
        """Forget the server without ending it."""
        if self._server is not None:
            self._server.disown()

    def close(self) -> None:
        """End the server and its workers; a later call starts them anew."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None


class _Server:
    """The caller's side of the server process."""

    def __init__(self, module: str, setup: tuple[Any, ...]) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._ready = False
        with theirs:
            arguments = [str(theirs.fileno()), module, json.dumps(setup)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asymgrpo.tasks.sandbox_server", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> _Worker:
        """A new worker; waits for the server to be ready the first time."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                if not self._ready:
                    self._socket.settimeout(START_LIMIT)
                    receive(self._socket)
                    self._socket.settimeout(10.0)
                    self._ready = True
                socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
                pid = json.loads(receive(self._socket))
            except (OSError, EOFError) as error:
                ours.close()
                self._process.kill()  # out of step with us; the next call starts another
                raise CallFailedError(f"the grading process did not start: {error}") from error
        return _Worker(ours, pid, self)

    def kill(self, pid: int) -> None:
        with self._lock:
            try:
                self._socket.sendall(b"kill")
                self._socket.sendall(struct.pack("!q", pid))
                receive(self._socket)
            except (OSError, EOFError):
                return  # the server has gone, and took its workers along

    def disown(self) -> None:
        """Let go without ending it: it belongs to the process this one was forked from."""
        self._socket.close()

    def close(self) -> None:
        self._socket.close()
        if not self._ready:
            self._process.kill()  # it has no workers yet, and is busy importing
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Worker:
    """The caller's side of one forked worker."""

    def __init__(self, connection: socket.socket, pid: int, server: _Server) -> None:
        self._connection = connection
        self._pid = pid
        self._server = server

    def usable(self) -> bool:
        return self._server.alive()

    def call(self, function: str, arguments: tuple[Any, ...], time_limit: float) -> Any:
        deadline = time.monotonic() + time_limit
        before = _time_run(self._pid)
        try:
            self._connection.settimeout(time_limit)
            send(self._connection, pickle.dumps((function, arguments)))
            reply = json.loads(receive(self._connection, deadline))
        except TimeoutError:
            ran, waits = _time_run(self._pid)
            starved = not waits and ran - before[0] < STARVED * time_limit
            kind = StarvedError if starved else CallFailedError
            raise kind(f"no result within {time_limit:g} s") from None
        except (OSError, EOFError, ValueError):
            raise CallFailedError("the grading process crashed or ran out of memory") from None
        if "error" in reply:
            raise CallFailedError(reply["error"])
        return reply["value"]

    def kill(self) -> None:
        self._connection.close()
        self._server.kill(self._pid)


def _time_run(pid: int) -> tuple[float, bool]:
    """Seconds that a process has run, and whether it waits for something of its own.

    Outside Linux every process is taken for one that waits.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0, True
    # fields 14 and 15 of proc(5); the first three are before `fields`
    ticks = int(fields[10]) + int(fields[11])
    return ticks / os.sysconf("SC_CLK_TCK"), state == "S"


def send(connection: socket.socket, payload: bytes) -> None:
    """One message, its length first."""
    connection.sendall(struct.pack("!I", len(payload)) + payload)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """One message as `send` wrote it; EOFError where the other side is gone."""
    (size,) = struct.unpack("!I", receive_exactly(connection, 4, deadline))
    return receive_exactly(connection, size, deadline)


def receive_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    """`size` bytes, by `deadline` on the monotonic clock."""
    chunks = []
    while size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        chunk = connection.recv(min(size, 1 << 16))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


_shared: dict[str, Sandbox] = {}
_shared_lock = threading.Lock()


def shared_sandbox(module: str, *setup: Any) -> Sandbox:
    """The sandbox of this process for `module` with that setup."""
    key = json.dumps([module, setup], sort_keys=True)
    with _shared_lock:
        if key not in _shared:
            _shared[key] = Sandbox(module, *setup)
        return _shared[key]


def _close_shared() -> None:
    for sandbox in _shared.values():
        sandbox.close()


def _forget_shared() -> None:
    """A forked copy of this process must not write into its parent's connections."""
    global _shared_lock
    _shared_lock = threading.Lock()
    for sandbox in _shared.values():
        sandbox.disown()
    _shared.clear()


atexit.register(_close_shared)
os.register_at_fork(after_in_child=_forget_shared)
