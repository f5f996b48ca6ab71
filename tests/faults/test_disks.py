"""A disk that is full, and folders that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import small, words

from asymgrpo import cli
from asymgrpo.experiment.run import train_run
from asymgrpo.training.resuming import checkpoints
from outcome import outcome


def command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["asymgrpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no right to mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def one_line(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.startswith("asymgrpo: ")]
    assert len(lines) == 1, errors
    assert "Traceback" not in errors
    return lines[0]


def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = small(sample_every=0)
    train_run(settings, tmp_path / "whole")
    one_checkpoint = sum(
        path.stat().st_size for path in (tmp_path / "whole/checkpoint-6").rglob("*")
    )
    run = disk / "run"
    # No room for a checkpoint; then for the first but not for the second beside it.
    for room, saved in ((one_checkpoint // 2, []), (one_checkpoint * 3 // 2, ["checkpoint-2"])):
        remount(disk, f"size={room}")
        capsys.readouterr()
        assert command(words(settings, run), monkeypatch) == 2
        line = one_line(capsys.readouterr().err)
        assert str(run / "checkpoint-") in line
        assert "free some space" in line
        assert [path.name for path in checkpoints(run)] == saved
        assert not list(run.glob(".saving*"))
    remount(disk, f"size={one_checkpoint * 5}")
    train_run(settings, run)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_no_room_for_the_first_line(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (disk / "filler").write_bytes(bytes(64 * 1024))
    run = disk / "run"
    assert command(words(small(steps=1), run), monkeypatch) == 2
    assert "No space left on device; free some space" in one_line(capsys.readouterr().err)
    assert not (run / "run.json").exists()
    assert [path.name for path in run.iterdir() if path.name != ".lock"] == []


@pytest.mark.parametrize("kind", ["read-only", "file"])
def test_a_folder_that_cannot_be_written(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind == "read-only":
        place: Path = request.getfixturevalue("disk")
        remount(place, "ro")
    else:
        place = tmp_path / "taken"
        place.write_text("a file")
    small_evaluation = ["--problems", "1", "--samples", "1", "--k", "1", "--max-new-tokens", "4"]
    commands = [
        words(small(steps=1), place / "run"),
        ["evaluate", "tiny", *small_evaluation, "--out", str(place / "a" / "b.json")],
        ["compare", "--seeds", "1", "--steps", "1", "--out", str(place / "runs")],
    ]
    for arguments in commands:
        capsys.readouterr()
        assert command(arguments, monkeypatch) == 2
        line = one_line(capsys.readouterr().err)
        assert str(place) in line
        assert "choose a" in line
