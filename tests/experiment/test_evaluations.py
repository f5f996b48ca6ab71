"""`evaluate RUN` measures what the run's own evaluation does, unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.experiment.evaluations import Request, find_subject, problem_count
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings, make_settings
from asymgrpo.experiment.store import RunStore
from asymgrpo.models import load_policy
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


def evaluate(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["evaluate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_sampling_option_reaches_the_engine_and_the_record(run: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(run), "--problems", "3", "--samples", "2"]
    record = call(*words, "--top-p", "0.9", "--top-k", "7", "--min-p", "0.05",
                  "--repetition-penalty", "1.1", "--stop", ".", "--stop", "answer",
                  "--max-new-tokens", "18", "--seed", "3",
                  "--out", str(tmp_path / "r.json"))  # fmt: skip
    assert record["sampling"] == {
        "max_new_tokens": 18, "temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.05,
        "repetition_penalty": 1.1, "greedy": False, "stop": [".", "answer"],
    }  # fmt: skip
    assert (record["seed"], record["k"]) == (3, [1, 2])
    assert record["task_options"] == {"seed": 5}
    assert (record["engine"], record["device"], record["dtype"]) == ("native", "cpu", "float32")
    assert record["revision"] is None
    assert {"torch", "transformers", "asymgrpo", "python"} <= set(record["versions"])
    assert record["date"].startswith("20")


def test_temperature_0_is_one_greedy_completion(run: Path, tmp_path: Path) -> None:
    cold = call("evaluate", str(run), "--problems", "6", "--temperature", "0", "--out",
                str(tmp_path / "cold.json"))  # fmt: skip
    assert cold["sampling"]["greedy"]
    assert (cold["samples"], cold["k"], set(cold["metrics"])) == (1, [1], {"pass@1", "avg@1"})
    warm = RunStore(run).evaluations()[-1]
    assert [p["scores"][0] for p in cold["problems"]] == [p["greedy"] for p in warm["problems"]]


def test_samples_are_written_line_by_line(run: Path, tmp_path: Path) -> None:
    record = call("evaluate", str(run), "--problems", "2", "--samples", "2", "--log-samples",
                  "--stop", "=", "--out", str(tmp_path / "r.json"))  # fmt: skip
    assert "log" not in record
    lines = [json.loads(text) for text in (tmp_path / "r.samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (2 + 1)
    task = load_task("arithmetic?seed=5", prompt=PROMPT)
    for line in lines:
        row = task.examples("test")[int(line["problem"].rpartition("-")[2])]
        assert line["prompt"] == f"Be brief.\n\n{task.prompt(row)}"
        assert line["reference"] == row["answer"]
        assert task.grade(line["completion"], row).score == line["score"]
        assert "=" not in line["completion"]
        assert line["finish"] in ("stop", "length")
    assert [line["greedy"] for line in lines] == [False, False, True] * 2


def test_default_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike settings, and unlike models of one name, each have a file; equal ones share it."""
    monkeypatch.chdir(tmp_path)
    for word in ("one", "two"):
        (tmp_path / word).mkdir()
        load_policy("tiny").model.save_pretrained(tmp_path / word / "final")
        load_policy("tiny").tokenizer.save_pretrained(tmp_path / word / "final")
    few = ["--problems", "1", "--samples", "1", "--max-new-tokens", "4"]
    for words in (
        ["tiny"], ["tiny", "--seed", "1"], ["tiny", "--top-k", "3"], ["tiny", "--split", "train"],
        ["tiny", "--task", "arithmetic?seed=1"], ["tiny", "--prompt", "Q: {question}"],
        ["tiny", "--system-prompt", "Add."], ["tiny", "--cluster", "answer"],
        ["tiny", "--engine", "transformers"], ["one/final"], ["two/final"],
    ):  # fmt: skip
        evaluate(*words, *few)
    assert len(list((tmp_path / "evaluations").glob("*.json"))) == 11
    evaluate("tiny", *few)
    assert len(list((tmp_path / "evaluations").glob("*.json"))) == 11
    assert not list((tmp_path / "evaluations").glob("*.partial.jsonl"))


def test_a_task_without_end_is_measured_on_200(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    task = load_task("arithmetic?test_rows=1000000")
    assert problem_count(task, request(model="tiny"), Console(width=200)) == 200
    assert "1,000,000 rows; the first 200 are measured" in capsys.readouterr().out
    assert problem_count(task, request(model="tiny", problems=7), Console()) == 7
    assert problem_count(load_task("arithmetic"), request(model="tiny"), Console()) == 1_000
    pytest.importorskip("reasoning_gym")
    for name, count in (("chain_sum", 200), ("chain_sum?size=70", 70)):
        task = load_task(f"reasoning-gym:{name}")
        assert problem_count(task, request(model="tiny"), Console()) == count


OWN = """
from asymgrpo.tasks import Grade

class Odd:
    name = "odd"

    def __init__(self, score=1.0):
        self.score = float(score)

    def examples(self, split):
        return [{"id": n, "question": f"{n} + 1", "family": n // 4} for n in range(64)]

    def prompt(self, example):
        return example["question"]

    def grade(self, completion, example):
        return Grade(self.score, completion, "as told")
"""


@pytest.mark.parametrize("score", ["NaN", "-1", "1.5", "Infinity"])
@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_scores_outside_0_to_1_stop_a_command(command: str, score: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = {
        "evaluate": ["evaluate", "tiny", "--problems", "2", "--samples", "1", "--max-new-tokens",
                     "4"],
        "train": ["train", "--steps", "1", "--set", "report_to=none", "--set",
                  "per_device_train_batch_size=8", "--set", "num_generations=4", "--set",
                  "steps_per_generation=1", "--set", "max_completion_length=4"],
    }[command]  # fmt: skip
    words += ["--task", f"{tmp_path}/own.py:Odd?score={score}", "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="the grader of odd: a score is a number from 0 to 1, not"):
        CliRunner().invoke(cli.app, words, catch_exceptions=False)


def test_an_own_task_is_measured_by_family(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    record = call("evaluate", "tiny", "--task", f"{tmp_path}/own.py:Odd", "--samples", "1",
                  "--max-new-tokens", "2", "--cluster", "family", "--out",
                  str(tmp_path / "r.json"))  # fmt: skip
    assert record["cluster"] == "family"
    assert len({problem["cluster"] for problem in record["problems"]}) == 16
    # all 16 families agree: the exact interval of 16 draws, not of 64
    assert record["metrics"]["pass@1"]["low"] == pytest.approx(0.025 ** (1 / 16), abs=1e-12)
