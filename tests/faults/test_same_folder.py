"""Two commands on one folder: one run, never a mixture."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from runs import environment, small, words

from asymgrpo.experiment.store import RunStore

MEETING = '''
"""Waits, when it is loaded, until two processes have got as far."""
import os, pathlib, time

(pathlib.Path("met") / str(os.getpid())).touch()
while len(list(pathlib.Path("met").iterdir())) < 2:
    time.sleep(0.02)

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]
'''


def test_two_commands_that_start_together_do_not_mix(tmp_path: Path) -> None:
    """Both find the folder free; the one that comes second under the lock must look again."""
    (tmp_path / "meeting.py").write_text(MEETING)
    (tmp_path / "met").mkdir()
    settings = small(steps=1, reward=("meeting:length",))
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "asymgrpo.cli",
             *words(replace(settings, seed=seed), Path("run"))],
            cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (3, 4)
    ]  # fmt: skip
    errors = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    winner, refused = (3, errors[1]) if codes[0] == 0 else (4, errors[0])
    assert "holds another run (seed" in refused or "another process is running" in refused
    record = RunStore(tmp_path / "run").run()
    assert (record["seed"], record["status"]) == (winner, "finished")
    assert len(RunStore(tmp_path / "run").metrics()) == 1
