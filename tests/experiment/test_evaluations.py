"""`evaluate RUN` measures what the run's own evaluation does, unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asymgrpo import cli
from asymgrpo.experiment.evaluations import Request, find_subject
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings, make_settings
from asymgrpo.experiment.store import RunStore
from asymgrpo.tasks import load_task, render_prompt
from small import make_tokenizer

PROMPT = "Well then: {question}"


def call(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(Path(words[words.index("--out") + 1]).read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose prompt, system prompt, task and sampling are all unusual."""
    folder = tmp_path_factory.mktemp("prompted") / "run"
    settings, _ = make_settings({
        "task": "arithmetic?seed=5", "prompt": PROMPT, "system_prompt": "Be brief.", "steps": 2,
        "temperature": 0.7, "top_k": 12, "max_completion_length": 20, "eval_every": 2,
        "eval_problems": 6, "eval_samples": 3, "per_device_train_batch_size": 8,
        "num_generations": 4, "steps_per_generation": 2, "report_to": "none", "lora": 2,
    })  # fmt: skip
    train_run(settings, folder)
    return folder


def test_a_run_is_measured_as_it_was_trained(run: Path, tmp_path: Path) -> None:
    final = RunStore(run).evaluations()[-1]
    assert final["sampling"]["top_k"] == 12
    words = ["evaluate", str(run), "--problems", "6", "--samples", "3", "--k", "1,2"]
    same = call(*words, "--out", str(tmp_path / "same.json"))
    keys = ("problems", "metrics", "sampling", "samples", "seed", "task", "split")
    assert {key: same[key] for key in keys} == {key: final[key] for key in keys}
    assert (same["prompt"], same["system_prompt"]) == (PROMPT, "Be brief.")
    other = call(*words, "--prompt", "{question}", "--out", str(tmp_path / "other.json"))
    assert other["problems"] != final["problems"]
    colder = call(*words, "--temperature", "0.1", "--out", str(tmp_path / "cold.json"))
    assert colder["sampling"] == final["sampling"] | {"temperature": 0.1}


def request(**changes: Any) -> Request:
    given = dict.fromkeys(Request.__dataclass_fields__) | {"split": "test"} | changes
    return Request(**given)  # type: ignore[arg-type]


def test_the_prompt_of_one_task_is_not_used_for_another(run: Path) -> None:
    subject = find_subject(request(model=str(run), task="gsm8k"), RunStore(run))
    assert (subject.task, subject.prompt, subject.task_path) == ("gsm8k", None, None)
    assert subject.system_prompt == "Be brief."


def test_what_a_model_is_measured_with(tmp_path: Path) -> None:
    subject = find_subject(request(model="tiny"), RunStore(tmp_path / "none"))
    assert (subject.task, subject.engine, subject.sampling.max_new_tokens) == (
        *("arithmetic", "native"),
        512,
    )


def test_prompts_are_kept_and_identify_the_run(run: Path) -> None:
    settings = RunSettings.from_dict(RunStore(run).run()["settings"])
    assert (settings.prompt, settings.system_prompt) == (PROMPT, "Be brief.")


def test_a_system_prompt_is_a_message_or_text_before_the_prompt() -> None:
    task, tokenizer = load_task("arithmetic"), make_tokenizer()
    row = task.examples("test")[0]
    plain = render_prompt(task, row, tokenizer)
    assert render_prompt(task, row, tokenizer, "Be brief.") == f"Be brief.\n\n{plain}"
    tokenizer.chat_template = "{{ messages }}"
    assert render_prompt(task, row, tokenizer, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": plain},
    ]
