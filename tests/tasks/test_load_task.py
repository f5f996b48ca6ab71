"""Names, files, the hub, prompts, and the mistakes a user can make with them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from asymgrpo.errors import UserError
from asymgrpo.tasks import (
    FailureGuard,
    Grade,
    Task,
    grade_many,
    load_task,
    render_prompt,
    task_names,
)

ROW = {"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gsm8", "gsm8k"),
        ("math-500", "math500"),
        ("aime2024", "aime24"),
        ("arithmatic", "arithmetic"),
        ("chain_sum", "reasoning-gym:chain_sum"),
        ("reasoning-gym:chain_sums", "chain_sum"),
        ("reasoning-gym:chain_sum?max_term=3", "max_terms"),
        ("reasoning-gym:chain_sum?max_terms", "name=value"),
        ("reasoning-gym:chain_sum?min_terms=9&max_terms=2", "refuses"),
        ("reasoning-gym:chain_sum?size=-1", "size"),
        ("reasoning-gym:composite", "no data set"),
        ("arithmetic?sed=1", "seed"),
        ("jsonl:", "needs a path"),
        ("gsm8k?seed=1", "takes no options"),
        ("zzz", "no task 'zzz'"),
    ],
)
def test_a_wrong_name_says_what_is_right(name: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        load_task(name)
    assert hint in one_line(error)


def test_every_plain_name_loads(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [ROW])
    for name in task_names():
        if name == "arithmetic":
            assert isinstance(load_task(name, seed=3), Task)
        elif ":" not in name:
            task = load_task(name, path=file)
            assert isinstance(task, Task)
            assert task.examples("test") == [ROW]
            assert task.grade("\\boxed{2}", ROW).score == 1.0


def test_a_folder_has_splits_and_keeps_the_fields(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [ROW | {"extra": [1]}])
    write_rows(tmp_path / "test.jsonl", [ROW | {"question": "Other?"}])
    task = load_task("gsm8k", path=tmp_path)
    assert task.examples("train") == [ROW | {"extra": [1]}]
    assert task.examples("test")[0]["question"] == "Other?"
    with pytest.raises(UserError, match="splits are train and test"):
        task.examples("validation")


def test_a_missing_split_is_said(tmp_path: Path) -> None:
    write_rows(tmp_path / "test.jsonl", [ROW])
    with pytest.raises(UserError, match=r"no train rows.*train\.jsonl"):
        load_task("gsm8k", path=tmp_path).examples("train")
    with pytest.raises(UserError, match="no train rows"):
        load_task("math500").examples("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "a", "answer": "1"}\n{"question": \n', "line 2: not JSON"),
        (b'{"question": "a", "answer": "1"}\n\n[1]\n', "line 3: not a JSON object"),
        (b'{"question": "\xff\xfe", "answer": "1"}\n', "line 1: not UTF-8"),
        (b"", "has no rows"),
        (b'{"prompts": "a", "answer": "1"}\n', "no problem or question or prompt column"),
        (b'{"question": "a", "gold": "1"}\n', "no answer or solution or reward_model column"),
        (b'{"question": " ", "answer": "1"}\n', "question of test row 1 is empty"),
        (b'{"question": "a", "answer": ""}\n', "answer of test row 1 is empty"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_broken_file_is_one_line_that_names_the_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_task("gsm8k", path=file).examples("test")
    assert message in one_line(error)


def test_a_missing_path_or_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file or folder"):
        load_task("gsm8k", path=tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"no train\.jsonl and no test\.jsonl"):
        load_task("gsm8k", path=tmp_path)


def test_duplicates_and_leaks_are_counted(tmp_path: Path) -> None:
    others = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
    write_rows(tmp_path / "train.jsonl", [*others, others[0], ROW])
    write_rows(tmp_path / "test.jsonl", [ROW | {"question": "  what is 1 + 1? "}])
    task = load_task("gsm8k", path=tmp_path)
    with pytest.warns(UserWarning, match="train rows") as caught:
        task.examples("train")
    messages = [str(warning.message) for warning in caught]
    # others[1] asks what ROW asks, so the last row repeats it, and both are in the test set.
    assert "gsm8k: 2 of 7 train rows repeat a question" in messages
    assert any("2 of 7 train rows are test questions" in message for message in messages)


def test_clean_files_warn_of_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [ROW])
    write_rows(tmp_path / "test.jsonl", [ROW | {"question": "Other?"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = load_task("gsm8k", path=tmp_path)
        task.examples("train"), task.examples("test")


def test_one_file_for_both_splits_warns_once_both_are_used(tmp_path: Path) -> None:
    task = load_task("gsm8k", path=write_rows(tmp_path / "rows.jsonl", [ROW]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.examples("train")
    with pytest.warns(UserWarning, match="1 of 1 train rows are test questions"):
        task.examples("test")


def test_the_published_data_is_clean(gsm8k: Task) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = load_task("gsm8k", path=gsm8k.source.path)  # type: ignore[attr-defined]
        assert (len(fresh.examples("train")), len(fresh.examples("test"))) == (7473, 1319)


HUB = {
    "gsm8k": ("openai/gsm8k", "main", "test", ROW),
    "math500": (
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        {"problem": "p", "solution": "so \\boxed{2}", "answer": "2"},
    ),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", {"problem": "p", "answer": "002"}),
    "aime25": ("math-ai/aime25", None, "test", {"problem": "p", "answer": "2"}),
    "amc23": ("math-ai/amc23", None, "test", {"question": "p", "answer": 2.0}),
    "dapo-math-17k": (
        "open-r1/DAPO-Math-17k-Processed",
        "all",
        "train",
        {"prompt": "p", "solution": "2", "source_prompt": [{"role": "user", "content": "q"}]},
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_the_hub_is_asked_for_the_right_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, config, split, row = HUB[name]
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options["split"]))
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task(name)
    rows = task.examples("train" if name == "dapo-math-17k" else "test")
    assert asked == [(dataset, config, split)]
    assert task.grade("\\boxed{2}", rows[0]).score == 1.0
    assert task.grade("\\boxed{3}", rows[0]).score == 0.0


def test_without_the_hub_the_error_names_task_path() -> None:
    """The test run is offline, so this is the real library's error."""
    with pytest.raises(UserError) as error:
        load_task("gsm8k").examples("test")
    assert "--task-path" in one_line(error)
    assert "openai/gsm8k" in one_line(error)


def test_other_layouts_of_a_row(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "solution": "First 7, then \\boxed{\\frac{1}{2}}."},
        {"prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": "0.5"}},
        {"problem": "c", "answer": 0.5},
    ]
    task = load_task("dapo-math-17k", path=write_rows(tmp_path / "rows.jsonl", rows))
    for row, question in zip(task.examples("train"), "abc", strict=True):
        assert task.prompt(row).startswith(f"{question}\n")
        assert task.grade("\\boxed{1/2}", row).score == 1.0


def test_jsonl_with_columns_and_a_named_grader(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "capitals.jsonl", [{"q": "Capital of Italy?", "a": "Rome"}])
    name = f"jsonl:{file}?prompt_column=q&answer_column=a&grader=text"
    task = load_task(name)
    row = task.examples("train")[0]
    assert task.prompt(row) == "Capital of Italy?"
    assert task.grade("The answer is rome.", row).score == 1.0
    same = load_task(f"jsonl:{file}", prompt_column="q", answer_column="a", grader="text")
    assert same.prompt(row) == task.prompt(row)
    with pytest.raises(UserError, match="graders are math, number, text"):
        load_task(f"jsonl:{file}?grader=maths")
    with pytest.raises(UserError, match="options are answer_column, grader, prompt_column"):
        load_task(f"jsonl:{file}?column=q")
    with pytest.raises(UserError, match="no x column; it has a, q"):
        load_task(f"jsonl:{file}?prompt_column=x&answer_column=a").examples("train")


def test_prompts(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [ROW])
    task = load_task("gsm8k", path=file)
    assert "step by step" in task.prompt(ROW)
    assert "\\boxed{}" in task.prompt(ROW)
    own = load_task("gsm8k", path=file, prompt="Q: {question}\nUse {braces}.\nA:")
    assert own.prompt(ROW) == "Q: What is 1 + 1?\nUse {braces}.\nA:"
    with pytest.raises(UserError, match=r"no \{question\}"):
        load_task("gsm8k", path=file, prompt="Answer me.")
    chat, plain = SimpleNamespace(chat_template="{{ x }}"), SimpleNamespace(chat_template=None)
    assert render_prompt(own, ROW, chat) == [{"role": "user", "content": own.prompt(ROW)}]
    assert render_prompt(own, ROW, plain) == own.prompt(ROW)


def test_a_grade_that_cannot_be_given_is_failed_and_not_zero_in_silence(tmp_path: Path) -> None:
    task = load_task("gsm8k", path=write_rows(tmp_path / "rows.jsonl", [ROW]))
    no_reference = task.grade("\\boxed{2}", {"question": "What?"})
    no_text = task.grade(None, ROW)  # type: ignore[arg-type]
    for grade in (no_reference, no_text):
        assert grade.failed
        assert "the grader broke" in grade.reason


class Broken:
    name = "broken"

    def examples(self, split: str):
        return [ROW]

    def prompt(self, example) -> str:
        return "?"

    def grade(self, completion: str, example) -> Grade:
        raise RuntimeError("no judge")


def test_grade_many_keeps_the_order_and_reports_a_broken_grader(tmp_path: Path) -> None:
    task = load_task("gsm8k", path=write_rows(tmp_path / "rows.jsonl", [ROW]))
    texts = [f"#### {number % 4}" for number in range(200)]
    scores = [grade.score for grade in grade_many(task, texts, [ROW] * 200, workers=4)]
    assert scores == [float(number % 4 == 2) for number in range(200)]
    assert grade_many(task, [], []) == []
    broken = grade_many(Broken(), ["a"], [ROW])[0]
    assert broken.failed
    assert broken.reason == "the grader broke: RuntimeError: no judge"
    with pytest.raises(ValueError, match="2 completions, but 1 examples"):
        grade_many(task, ["a", "b"], [ROW])


def test_the_guard_stops_at_more_than_five_percent_of_at_least_fifty() -> None:
    good, bad = Grade(1.0, "1", "equal"), Grade(0.0, None, "no result in time", failed=True)
    guard = FailureGuard()
    for grade in [bad] * 2 + [good] * 47:
        guard.count(grade)
    with pytest.raises(UserError, match=r"failed on 3 of 50 answers.*no result in time"):
        guard.count(bad)
    early = FailureGuard()
    for _ in range(49):
        early.count(bad)


def test_the_guard_lets_five_percent_pass() -> None:
    good, bad = Grade(1.0, "1", "equal"), Grade(0.0, None, "no result in time", failed=True)
    guard = FailureGuard()
    for number in range(1000):
        guard.count(bad if number % 20 == 19 else good)
    assert (guard.failed, guard.total) == (50, 1000)
