"""Files of a run: their modes, cells that a spreadsheet would run, weights and leftovers."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo import cli
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.models.model_sources import BUILT_IN
from asymgrpo.report import build_report

OLD = Path(__file__).parents[1] / "fixtures/run-format-1"


def test_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        train_run(small(steps=2, eval_every=2, eval_problems=2, eval_samples=2), tmp_path / "run")
        build_report([tmp_path / "run"], tmp_path / "run/page.html", figures=tmp_path / "run/f")
    finally:
        os.umask(before)
    modes = {path: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "run").rglob("*")}
    wrong = {path.name: mode for path, mode in modes.items()
             if mode != ("0o750" if path.is_dir() else "0o640")}  # fmt: skip
    assert len(modes) > 20
    assert not wrong


def test_cells_of_a_table_are_text_to_a_spreadsheet(tmp_path: Path) -> None:
    """One that begins with = + - or @ would be taken for a formula; numbers stay numbers."""
    for place, label in enumerate(("=1+1", "@SUM(A1)", "-cmd", "+x", "\tx")):
        folder = tmp_path / f"run{place}"
        shutil.copytree(OLD, folder, ignore=shutil.ignore_patterns("checkpoint-*", "final"))
        RunStore(folder).update_run(label=label)
    build_report([tmp_path], tmp_path / "page.html", figures=tmp_path / "figures")
    rows = list(csv.reader(io.StringIO((tmp_path / "figures/table.csv").read_text())))
    cells = [cell for row in rows for cell in row]
    assert any("=1+1" in cell for cell in cells)
    for cell in cells:
        if cell[:1] in ("=", "+", "-", "@", "\t"):
            float(cell)


def nan_model(folder: Path) -> Path:
    """The built-in model with one weight that is no number."""
    shutil.copytree(BUILT_IN["tiny"], folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = sorted(weights)[3]
    weights[name].view(-1)[5] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_weights_that_are_not_finite_are_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(nan_model(tmp_path / "model"))
    words = {
        "evaluate": ["evaluate", model, "--problems", "2", "--samples", "2", "--k", "1",
                     "--out", str(tmp_path / "result.json")],
        "train": ["train", "--model", model, "--steps", "1", "--out", str(tmp_path / "run"),
                  "--report-to", "none", "--set", "max_completion_length=24"],
    }[command]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["asymgrpo", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("asymgrpo: ")
    ]
    assert f"{model} has weights that are not finite" in line
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "run").exists()
