"""Files and text from elsewhere: read as data, refused in one line, and no secret written out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.experiment.compare import compare_runs, load_runs
from asymgrpo.experiment.evaluations import default_path
from asymgrpo.experiment.identity import folder_name
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore
from asymgrpo.report import build_report

SECRETS = {
    "HF_TOKEN": "hf_planted-in-the-environment",
    "WANDB_API_KEY": "wandb-planted-in-the-environment",
    "AWS_SECRET_ACCESS_KEY": "aws-planted-in-the-environment",
    "MY_PASSWORD": "password-planted-in-the-environment",
}
HUB_TOKEN = "hf_planted-in-the-settings"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose settings and environment held secrets."""
    folder = tmp_path_factory.mktemp("secrets") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        trainer = {"hub_token": HUB_TOKEN, "run_name": f"run of {SECRETS['MY_PASSWORD']}"}
        trainer |= {"save_steps": 1}
        settings = small(steps=2, eval_every=2, eval_problems=2, eval_samples=2, trainer=trainer)
        train_run(settings, folder)
        train_run(settings, folder)  # the same run, though its record has no token
        build_report([folder], folder / "report.html", figures=folder / "figures")
    return folder


def test_no_secret_is_written(run: Path) -> None:
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"run.json", "training_args.bin", "report.html"} <= {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        for name, secret in {"hub_token": HUB_TOKEN, **SECRETS}.items():
            assert secret.encode() not in data, (name, path)
    assert "(redacted)" in (run / "run.json").read_text()


@pytest.mark.parametrize(
    "name",
    ["..", "../..", "../../etc", "/etc/passwd", ".", "", "a/../../b", "~", "con\n", "\0", "..."],
)
def test_names_cannot_leave_the_output_folder(name: str, tmp_path: Path) -> None:
    settings = RunSettings(model=name, task=name, trainer={"applies_to": name, "alpha": 0.5})
    settings = RunSettings(algorithm=name or "grpo", model=name, trainer=dict(settings.trainer))
    for found in (
        settings.default_name,
        folder_name([settings.label, name], 0, {}),
        default_path(name, False, name, name, {}).name,
    ):
        path = (tmp_path / found).resolve()
        assert path.parent == tmp_path.resolve()
        assert "\n" not in found
        assert "\0" not in found


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["asymgrpo-0.pt", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_never_runs(name: str, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    RunStore(folder).update_run(status="running")
    settings = RunSettings.from_dict(RunStore(folder).run()["settings"])
    shutil.rmtree(folder / "checkpoint-2")
    torch.save({"_step": Evil(tmp_path / "mark")}, folder / "checkpoint-1" / name)
    (folder / "checkpoint-1/manifest.json").unlink()  # which would not let it be read at all
    with pytest.raises(UserError, match="checkpoint-1 is damaged or of another model"):
        train_run(settings, folder)
    assert not (tmp_path / "mark").exists()


WRONG: dict[str, tuple[str, bytes]] = {
    "run-empty": ("run.json", b""),
    "run-list": ("run.json", b"[]"),
    "run-binary": ("run.json", b"\xff\xfe\x00"),
    "run-deep": ("run.json", b"[" * 100_000),
    "run-label": ("run.json", b'{"label": {"a": 1}}'),
    "run-seed": ("run.json", b'{"seed": "zero"}'),
    "run-config": ("run.json", b'{"config": [1]}'),
    "run-seconds": ("run.json", b'{"seconds": "long"}'),
    "metrics-torn": ("metrics.jsonl", b'{"step": 1}\n{"step": \n{"step": 3}\n'),
    "metrics-list": ("metrics.jsonl", b"[1, 2]\n"),
    "metrics-step": ("metrics.jsonl", b'{"step": "one"}\n'),
    "metrics-true": ("metrics.jsonl", b'{"step": true}\n'),
    "metrics-huge": ("metrics.jsonl", b'{"step": ' + b"9" * 5000 + b"}\n"),
    "evaluation-empty": ("evaluations/step-000002.json", b""),
    "evaluation-list": ("evaluations/step-000002.json", b"[]"),
    "evaluation-step": ("evaluations/step-000002.json", b'{"step": null, "problems": []}'),
    "evaluation-metrics": ("evaluations/step-000002.json", b'{"step": 2, "metrics": 5}'),
    "evaluation-scores": (
        "evaluations/step-000002.json",
        b'{"step": 2, "problems": [{"id": 0, "scores": ["high"]}]}',
    ),
    "rollouts-text": ("rollouts/step-000002.parquet", b"no parquet"),
    "rollouts-empty": ("rollouts/step-000002.parquet", b""),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_files_of_a_run_are_one_line(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file, data = WRONG[name]
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*", "final", "*.html"))
    (folder / file).write_bytes(data)
    commands = [["report", str(folder), "--out", str(tmp_path / "page.html")]]
    if file.startswith("rollouts"):
        commands.append(["inspect", str(folder)])
    for arguments in commands:
        monkeypatch.setattr(sys, "argv", ["asymgrpo", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        errors = capsys.readouterr().err
        assert ended.value.code == 2, errors
        assert errors.startswith("asymgrpo: ")
        assert errors.count("\n") == 1
        assert str(folder / file) in errors
    assert not (tmp_path / "page.html").exists()
    if not file.startswith("rollouts"):
        with pytest.raises(UserError):
            compare_runs(load_runs([folder]))


def test_rollouts_with_other_columns_are_one_line(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*", "final"))
    pq.write_table(pa.table({"step": ["a"]}), folder / "rollouts/step-000002.parquet")
    with pytest.raises(UserError, match="holds no rollouts of a run"):
        RunStore(folder).rollouts(2)


BAD_STATES = {
    "empty": "",
    "list": "[]",
    "text": '"a"',
    "torn": "{",
    "deep": "[" * 100_000,
    "no-history": '{"a": 1}',
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_malformed_trainer_states_are_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(BAD_STATES[name])
    with pytest.raises(UserError) as caught:
        build_report([tmp_path], tmp_path / "page.html")
    assert "\n" not in str(caught.value)


def test_text_of_a_run_is_shown_and_not_run(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*", "final", "*.html"))
    attack = "</script><script>window.stolen=1</script><img src=x onerror=alert(1)>"
    store = RunStore(folder)
    store.update_run(label=attack, model=attack, task=attack, name="../../" + attack)
    rows = store.rollouts(2)
    store.write_rollouts(2, [row | {"prompt": attack, "completion": attack} for row in rows])
    page = build_report([folder], tmp_path / "page.html", figures=tmp_path / "figures").read_text()
    assert "<script>window.stolen" not in page
    assert "<img src=x" not in page
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html", "figures"}
