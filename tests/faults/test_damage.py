"""A checkpoint that is not as it was saved: never silent, never deleted, never gone on from."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.training.manifest import MANIFEST, newest_whole
from asymgrpo.training.resuming import checkpoints
from outcome import outcome

SETTINGS = small(
    steps=3, trainer={"save_steps": 1, "save_total_limit": 3, "beta": 0.1, "sync_ref_model": True}
)
FILES = {
    *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    *("asymgrpo-0.pt", "asymgrpo-reference.pt", "config.json", "training_args.bin"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "run"
    train_run(SETTINGS, folder)
    return folder


@pytest.fixture
def cut(run: Path, tmp_path: Path) -> Path:
    """A copy that was killed just before its end."""
    shutil.copytree(run, tmp_path / "run")
    RunStore(tmp_path / "run").update_run(status="running")
    shutil.rmtree(tmp_path / "run/final")
    return tmp_path / "run"


def flip(path: Path) -> None:
    """Turn one bit, in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_one_bit_or_a_lost_file_is_noticed_in_each(cut: Path) -> None:
    last, before = checkpoints(cut)[-1], checkpoints(cut)[-2]
    names = {str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()}
    assert {*FILES, MANIFEST} <= names
    shutil.copytree(last, cut.parent / "good")
    for name in sorted(names):
        for spoil in (flip, Path.unlink) if name != MANIFEST else (flip,):
            spoil(last / name)
            said: list[str] = []
            assert newest_whole(checkpoints(cut), said.append) == before
            (line,) = said
            assert name in line or name == MANIFEST
            assert line.startswith(f"{last} is damaged (")
            aside = cut / f"damaged-{last.name}"
            assert line.endswith(f"it is now {aside.name}")
            shutil.rmtree(aside)
            shutil.copytree(cut.parent / "good", last)
    assert newest_whole(checkpoints(cut), lambda line: pytest.fail(line)) == last


@pytest.mark.parametrize("damaged", [1, 3], ids=["the-last", "all"])
def test_a_run_goes_on_from_the_checkpoint_before(
    damaged: int, run: Path, cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in checkpoints(cut)[-damaged:]:
        flip(checkpoint / "optimizer.pt")
    train_run(SETTINGS, cut)
    said = capsys.readouterr().out
    assert said.count("is damaged (optimizer.pt has changed since it was saved)") == damaged
    assert len(list(cut.glob("damaged-checkpoint-*"))) == damaged
    assert outcome(cut) == outcome(run)


def test_a_checkpoint_without_digests_is_taken_with_a_line(
    run: Path, cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an earlier version saved it."""
    for checkpoint in checkpoints(cut):
        (checkpoint / MANIFEST).unlink()
    shutil.rmtree(checkpoints(cut)[-1])
    train_run(SETTINGS, cut)
    said = capsys.readouterr().out
    assert f"checkpoint-2 has no {MANIFEST}: it is taken as it is, unchecked" in said
    assert outcome(cut) == outcome(run)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "asymgrpo-0.pt", "rng_state.pth"])
def test_what_such_a_checkpoint_lacks_is_said(
    name: str, cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(checkpoints(cut)[-1])
    for lost in (MANIFEST, name):
        (checkpoints(cut)[-1] / lost).unlink()
    train_run(SETTINGS, cut)
    assert f"has no {name}" in capsys.readouterr().out


def test_a_file_that_is_none_of_its_own_changes_nothing(run: Path, cut: Path) -> None:
    """A float16 scaler's state beside a run that has no scaler."""
    shutil.rmtree(checkpoints(cut)[-1])
    (checkpoints(cut)[-1] / "scaler.pt").write_bytes(b"stray")
    train_run(SETTINGS, cut)
    assert outcome(cut) == outcome(run)


def test_naming_a_damaged_checkpoint_is_refused(cut: Path) -> None:
    from asymgrpo.errors import UserError
    from asymgrpo.experiment import run as run_module

    flip(checkpoints(cut)[-1] / "model.safetensors")
    trainer: Any = object.__new__(run_module.AsymGRPOTrainer)
    trainer.accelerator = type("Alone", (), {"is_main_process": True, "device": None})
    with pytest.raises(UserError, match=r"model\.safetensors has changed since it was saved"):
        trainer._checkpoint_path(checkpoints(cut)[-1])
