"""The process behind a `Sandbox`: it imports one module, and forks a worker for every request.

Run as `python -m asymgrpo.tasks.sandbox_server FD MODULE SETUP`, by `Sandbox` alone.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from typing import Any

from asymgrpo.tasks.sandbox import MEMORY_LIMIT, receive, receive_exactly, send


def _serve(control: socket.socket, module_name: str, setup: list[Any]) -> None:
    """Fork a worker for every connection received, until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    module = importlib.import_module(module_name)
    warm_up = getattr(module, "warm_up", None)
    if warm_up is not None:
        warm_up(*setup)
    workers: set[int] = set()
    try:
        send(control, b"ready")
        while True:
            command, descriptors, _, _ = socket.recv_fds(control, 4, 1)
            if command == b"fork":
                connection = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _work(connection, module)
                connection.close()
                workers.add(pid)
                send(control, json.dumps(pid).encode())
            elif command == b"kill":
                (pid,) = struct.unpack("!q", receive_exactly(control, 8, None))
                _end(workers & {pid})
                workers.discard(pid)
                send(control, b"killed")
            else:
                return
    except (OSError, EOFError):
        return
    finally:
        _end(workers)


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(connection: socket.socket, module: Any) -> None:
    """Answer calls until the connection closes; never returns into the server's loop."""
    try:
        _limit_resources()
        while True:
            function, arguments = pickle.loads(receive(connection))
            try:
                reply = {"value": getattr(module, function)(*arguments)}
            except MemoryError:
                reply = {"error": "out of memory"}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:300]}
            send(connection, json.dumps(reply).encode())
    finally:
        os._exit(0)


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # a worker has nothing to write
    try:
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # no such limit outside Linux; the time limit bounds what can be allocated
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, size + MEMORY_LIMIT))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as caller:
        _serve(caller, sys.argv[2], json.loads(sys.argv[3]))
