"""The sandbox: limits, crashes, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from asymgrpo.tasks.sandbox import CallFailedError, Sandbox

MODULE = textwrap.dedent(
    """
    import os, time

    def identity(value): return value
    def pid(): return os.getpid()
    def hang(): time.sleep(60)
    def spin():
        while True: pass
    def crash(): os.kill(os.getpid(), 9)
    def eat(): return len(bytearray(4 * 2**30))
    def fail(): raise KeyError("no such thing")
    def write(path): open(path, "w").write("text")
    """
)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sandboxed_calls.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox("sandboxed_calls", workers=1, time_limit=1.0) as made:
        yield made


def children_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_values_travel(sandbox: Sandbox) -> None:
    assert sandbox.call("identity", {"a": [1, 2.5, None, "\u00e9"]}) == {"a": [1, 2.5, None, "é"]}
    assert sandbox.call("pid") == sandbox.call("pid") != os.getpid()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("hang", "no result within 1 s"),
        ("spin", "no result within 1 s"),
        ("crash", "crashed"),
        ("eat", "out of memory"),
        ("fail", "KeyError"),
    ],
)
def test_failures_have_a_reason_and_the_next_call_works(
    sandbox: Sandbox, function: str, reason: str
) -> None:
    sandbox.call("pid")
    start = time.monotonic()
    with pytest.raises(CallFailedError, match=reason):
        sandbox.call(function)
    assert time.monotonic() - start < 2.0
    assert sandbox.call("identity", 1) == 1


def test_a_worker_writes_no_file(sandbox: Sandbox, tmp_path: Path) -> None:
    with contextlib.suppress(CallFailedError):
        sandbox.call("write", str(tmp_path / "written"))
    written = tmp_path / "written"
    assert not written.exists() or written.read_text() == ""


def test_a_killed_worker_is_gone(sandbox: Sandbox) -> None:
    pid = sandbox.call("pid")
    with pytest.raises(CallFailedError):
        sandbox.call("spin")
    assert gone(pid)


def test_close_ends_the_server_and_its_workers(sandbox: Sandbox) -> None:
    worker = sandbox.call("pid")
    sandbox.close()
    assert gone(worker)
    assert sandbox.call("identity", 2) == 2  # and it starts anew


SCRIPT = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from asymgrpo.tasks.sandbox import shared_sandbox
sandbox = shared_sandbox("sandboxed_calls")
print(sandbox.call("pid"), flush=True)
if sys.argv[2] == "killed":
    threading.Thread(target=sandbox.call, args=("spin",), daemon=True).start()
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_nothing_is_left_when_the_caller_ends(tmp_path: Path, how: str) -> None:
    (tmp_path / "sandboxed_calls.py").write_text(MODULE)
    # No `if __name__ == "__main__"` in the script: the sandbox does not import it again.
    (tmp_path / "script.py").write_text(SCRIPT)
    caller = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), how],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    worker = int(caller.stdout.readline())
    left = [worker]
    if how == "killed":
        (server,) = children_of(caller.pid)
        while len(left) < 3:  # until a second worker is spinning, which hears nothing
            left = [server, *children_of(server)]
        caller.send_signal(signal.SIGKILL)
    caller.wait(20)
    caller.stdout.close()
    assert all(gone(pid) for pid in left)
    assert how == "killed" or caller.returncode == 0


def test_a_caller_that_ends_at_once_waits_for_nothing_and_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(30)")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from asymgrpo.tasks.sandbox import shared_sandbox\n"
        "shared_sandbox('slow_to_import').start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_that_cannot_be_imported_is_a_failure() -> None:
    with Sandbox("no_such_module_anywhere") as sandbox, pytest.raises(CallFailedError):
        sandbox.call("anything")


def test_no_torch_is_loaded_by_tasks() -> None:
    code = "import sys, asymgrpo.tasks; sys.exit('torch' in sys.modules or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_that_was_given_no_time_is_not_the_calls_fault(sandbox: Sandbox) -> None:
    """As on a busy machine: it does not run, and is not waiting for anything either."""
    os.kill(sandbox.call("pid"), signal.SIGSTOP)
    assert sandbox.call("identity", 7) == 7


def test_a_call_that_waits_is_not_made_again(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    once = sandbox._call
    monkeypatch.setattr(sandbox, "_call", lambda *call: made.append(call) or once(*call))
    with pytest.raises(CallFailedError, match="no result within 1 s"):
        sandbox.call("hang")
    assert len(made) == 1
