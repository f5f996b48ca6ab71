"""Folders that an older version wrote are read and continued; a newer one's are refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.experiment.run import kept_record, run_record, train_run, trainer_config
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import FORMAT, RunStore

OLD = Path(__file__).parents[1] / "fixtures/run-format-1"
"""A finished LoRA run of 4 steps, with the checkpoint of step 2, as the first format had it."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "run")
    return tmp_path / "run"


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["asymgrpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def rewrite(run: Path, **changes: Any) -> None:
    path = run / "run.json"
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))


def test_a_folder_of_the_first_format_is_read_and_continued(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "format" not in json.loads((old / "run.json").read_text())
    assert call(["report", str(old), "--out", str(tmp_path / "page.html")], monkeypatch) == 0
    assert call(["inspect", str(old), "--limit", "1"], monkeypatch) == 0
    words = ["evaluate", str(old), "--problems", "2", "--samples", "2", "--k", "1"]
    assert call(words, monkeypatch) == 0
    (written,) = (old / "evaluations").glob("evaluate-arithmetic-test-*.json")
    record = json.loads(written.read_text())
    assert len(record["problems"]) == 2
    shutil.rmtree(old / "final")
    rewrite(old, status="running")
    kept = (old / "metrics.jsonl").read_text().splitlines()[:2]
    settings = RunSettings.from_dict(RunStore(old).run()["settings"])
    train_run(settings, old)
    lines = (old / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == kept
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert (old / "final/adapter_model.safetensors").is_file()
    after = json.loads((old / "run.json").read_text())
    assert (after["format"], after["status"]) == (FORMAT, "finished")


def test_a_folder_of_a_newer_format_is_refused_in_one_line(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(old, format=FORMAT + 1)
    before = (old / "run.json").read_bytes()
    page = str(tmp_path / "page.html")
    for words in (
        ["report", str(old), "--out", page],
        ["inspect", str(old)],
        ["evaluate", str(old)],
        ["train", "--out", str(old)],
    ):
        capsys.readouterr()
        assert call(words, monkeypatch) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"has format {FORMAT + 1}, of a newer asymgrpo" in line
        assert "remove" not in line
    assert (old / "run.json").read_bytes() == before


def places(record: dict[str, Any], *, depth: int = 3) -> list[tuple[str, ...]]:
    """Every key of a record, of the trainer's given ones none: one that is absent was not given."""
    found = []
    for key, value in record.items():
        found.append((key,))
        if isinstance(value, dict) and depth > 1 and key != "trainer":
            found += [(key, *inner) for inner in places(value, depth=depth - 1)]
    return found


def test_a_key_that_a_record_lacks_does_not_make_it_another_run(old: Path) -> None:
    rewrite(old, status="running")
    store = RunStore(old)
    settings = RunSettings.from_dict(store.run()["settings"])
    now = run_record(settings, trainer_config(settings, old), old, "cpu")
    whole = json.loads((old / "run.json").read_text())
    keys = places(whole)
    assert ("objective", "sampling") in keys
    assert len(keys) > 150
    usual = RunSettings().to_dict()
    unset = [name for name, value in whole["settings"].items() if value == usual[name]]
    for key in keys:
        record = json.loads(json.dumps(whole))
        inner = record
        for name in key[:-1]:
            inner = inner[name]
        del inner[key[-1]]
        (old / "run.json").write_text(json.dumps(record))
        if key == ("settings",):
            with pytest.raises(UserError, match=r"run\.json has no settings") as caught:
                kept_record(store, settings, now)
            assert "remove" not in str(caught.value)
        elif key[0] != "settings" or key[1] in unset:
            assert kept_record(store, settings, now) == store.run(), key


def test_no_message_advises_to_remove_data() -> None:
    """A folder or a file of a run may be all that somebody has of a week's work."""
    import asymgrpo

    home = Path(asymgrpo.__file__).parent
    for path in home.rglob("*.py"):
        text = path.read_text()
        for words in ("remove the folder", "remove the file", "or remove it"):
            assert words not in text, path
