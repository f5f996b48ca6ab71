"""Data, models and recipes that are wrong: one line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import small, words

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.models.model_sources import BUILT_IN

GOOD = {"question": "1 + 2 =", "answer": "3"}
RECIPE = "recipe.yaml"


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """The line in which a command refuses; it exits with 2."""
    monkeypatch.setattr(sys, "argv", ["asymgrpo", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    told = [line for line in errors.splitlines() if line.startswith("asymgrpo: ")]
    assert len(told) == 1, errors
    assert "Traceback" not in errors
    return str(told[0])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


LONG = "1 + 1 = " * 400

BAD_DATA = {
    "no-question": (lines(GOOD, {"text": "a", "answer": "3"}), "has no problem or question"),
    "no-answer": (lines({"question": "1 + 2 ="}), "has no answer or solution"),
    "empty-prompt": (lines(GOOD, {"question": "  ", "answer": "3"}), "train row 2 is empty"),
    "empty-answer": (lines({"question": "1", "answer": ""}), "the answer of train row 1 is empty"),
    "no-messages": (lines({"prompt": [1, 2], "answer": "3"}), "question of train row 1 is empty"),
    "too-long": (lines(GOOD, {**GOOD, "question": LONG}), "1 prompts (the first: train row 2)"),
    "broken-line": (lines(GOOD) + b'{"question": \n', "data.jsonl, line 2: not JSON"),
    "no-object": (lines(GOOD, [1, 2]), "data.jsonl, line 2: not a JSON object"),
    "not-utf-8": (lines(GOOD) + b'{"question": "\xff\xfe"}\n', "data.jsonl, line 2: not UTF-8"),
    "half-a-pair": (b'{"question": "\\ud800", "answer": "1"}\n', "line 1: half of a surrogate"),
    "deep": (b"[" * 100_000 + b"\n", "line 1: not JSON (nested too deep)"),
    "endless-number": (b'{"question": "1", "answer": ' + b"1" * 5000 + b"}\n", "line 1: not JSON"),
    "no-rows": (b"\n\n", "data.jsonl has no rows"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, message = BAD_DATA[name]
    (here / "data.jsonl").write_bytes(data)
    line = refused(["train", "--task", "jsonl:data.jsonl", "--set", "report_to=none"],
                   monkeypatch, capsys)  # fmt: skip
    assert message in line
    assert [path.name for path in here.iterdir()] == ["data.jsonl"]


def test_repeated_rows_and_test_questions_in_train_are_counted(here: Path) -> None:
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    (here / "train.jsonl").write_bytes(lines(*rows, rows[0], rows[1]))
    (here / "test.jsonl").write_bytes(lines(rows[2], rows[3], rows[4]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_run(small(steps=1, task="jsonl:."), here / "run")
    told = " ".join(str(each.message) for each in caught)
    assert "2 of 10 train rows repeat a question" in told
    assert "3 of 10 train rows are test questions" in told


BAD_RECIPES = {
    "list": ("- grpo\n- abc-grpo\n", "must be a mapping"),
    "text": ("grpo", "must be a mapping"),
    "empty": ("", "must be a mapping"),
    "number-keys": ("1: 2\n", "must be a mapping"),
    "torn": ("steps: [1, 2\n", "is not YAML"),
    "python": ("steps: !!python/object/apply:os.system ['true']\n", "is not YAML"),
    "no-date": ("model: 2024-99-99\n", "is not YAML"),
    "deep": ("[" * 20_000, "is not YAML"),
    "unknown": ("learning_rat: 1\n", "did you mean learning_rate"),
    "text-for-number": ("steps: many\n", "steps must be a whole number"),
    "number-for-text": ("model: 3\n", "model must be text"),
    "list-for-number": ("learning_rate: [1]\n", "learning_rate must be a number"),
    "too-large": ("learning_rate: " + "9" * 400 + "\n", "learning_rate must be a number"),
    "seed": ("seed: -1\n", "seed must be at least 0"),
    "rewards": ("reward: [1, 2]\n", "reward must be a list"),
    "engine": ("engine: fast\n", "engine must be one of"),
    "scheduler": ("lr_scheduler_type: wavy\n", "wavy"),
    "optimiser": ("optim: best\n", "best"),
}


BAD_SPECS = {
    "algorithms": ("algorithms: grpo\n", "algorithms must be a list"),
    "algorithm-numbers": ("algorithms: [1, {}]\n", "algorithms must be a list"),
    "seeds": ("seeds: several\n", "seeds must be how many"),
    "seed-list": ("seeds: [a]\n", "seeds must be how many"),
    "no-seed": ("seeds: 0\n", "at least one algorithm"),
    "sweep": ("sweep: [alpha]\n", "sweep must be a mapping"),
    "sweep-value": ("sweep: {alpha: 0.5}\n", "sweep must be a mapping"),
    "sweep-field": ("sweep: {alhpa: [0.5]}\n", "did you mean alpha"),
    "sweep-range": ("sweep: {alpha: [-1]}\nalgorithms: [ah-grpo]\n", "alpha must be at least 0"),
}


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        pytest.param(command, *case, id=f"{command}-{name}")
        for command, cases in (("train", BAD_RECIPES), ("compare", BAD_SPECS))
        for name, case in cases.items()
    ],
)
def test_bad_recipes(
    command: str,
    text: str,
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / RECIPE).write_text(text)
    assert message in refused([command, "--config", RECIPE], monkeypatch, capsys)
    assert [path.name for path in here.iterdir()] == [RECIPE]


def copied_model(folder: Path, **changes: Any) -> Path:
    """The built-in model with its tokenizer's settings changed."""
    shutil.copytree(BUILT_IN["tiny"], folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_tokenizer_without_an_end_token(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied_model(here / "model", eos_token=None)
    line = refused(["train", "--model", "model"], monkeypatch, capsys)
    assert "has no end token; set eos_token in its tokenizer_config.json" in line
    assert [path.name for path in here.iterdir()] == ["model"]


def test_a_tokenizer_without_a_pad_token_is_mended(here: Path) -> None:
    copied_model(here / "model", pad_token=None)
    train_run(small(steps=1, model=str(here / "model")), here / "run")
    assert RunStore(here / "run").run()["status"] == "finished"


def other_model(folder: Path) -> None:
    """Weights of the built-in model's kind, but of another width."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(BUILT_IN["tiny"])
    config.hidden_size, config.intermediate_size = config.hidden_size * 2, 64
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_a_checkpoint_of_another_architecture_or_damaged(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, run = small(steps=2), here / "run"
    train_run(settings, run).update_run(status="running")
    shutil.copytree(run, here / "saved")
    (checkpoint,) = run.glob("checkpoint-*")
    damages = {
        "model.safetensors": b"no weights",
        "optimizer.pt": b"no optimiser",
        "asymgrpo-0.pt": b"",
        "trainer_state.json": b"{",
    }
    other_model(here / "other")
    damages["model.safetensors "] = (here / "other/model.safetensors").read_bytes()
    for name, data in damages.items():
        shutil.rmtree(run)
        shutil.copytree(here / "saved", run)
        (checkpoint / name.strip()).write_bytes(data)
        (checkpoint / "manifest.json").unlink()  # as an earlier version saved it
        line = refused(words(settings, run), monkeypatch, capsys)
        assert f"{checkpoint} is damaged or of another model" in line, name
        assert f"rename it, for example to damaged-{checkpoint.name}, to go on" in line


def test_an_adapter_of_another_architecture(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_run(small(steps=1, lora=2), here / "run")
    other_model(here / "other")
    for path in BUILT_IN["tiny"].glob("*token*"):
        shutil.copy(path, here / "other")
    config = here / "run/final/adapter_config.json"
    record = json.loads(config.read_text()) | {"base_model_name_or_path": str(here / "other")}
    config.write_text(json.dumps(record))
    line = refused(["evaluate", "run/final", "--problems", "1"], monkeypatch, capsys)
    assert "cannot load run/final: " in line


def test_two_processes_in_one_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asymgrpo.experiment import lock

    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    with (
        lock.alone_in(here / "run"),
        pytest.raises(UserError, match="another process is running in"),
    ):
        train_run(small(steps=1), here / "run")
