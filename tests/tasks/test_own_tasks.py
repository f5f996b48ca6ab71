"""Tasks and rewards in a file of one's own, prompts of several columns, worked examples, chats."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from asymgrpo.errors import UserError
from asymgrpo.tasks import Task, load_object, load_task, render_prompt

CHAT, PLAIN = SimpleNamespace(chat_template="{{ x }}"), SimpleNamespace(chat_template=None)

OWN = """
from dataclasses import dataclass
from asymgrpo.tasks import Grade
import beside

@dataclass
class Reverse:
    prompt_text: str = "Spell {} backwards."
    name: str = "reverse"

    def examples(self, split):
        return [{"word": word} for word in beside.WORDS[split]]

    def prompt(self, example):
        return self.prompt_text.format(example["word"])

    def grade(self, completion, example):
        return Grade(float(completion == example["word"][::-1]), completion, "compared")

made = Reverse()
number = 7

def brief(completions, **_):
    return [-float(len(text)) for text in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text('WORDS = {"train": ["stone"], "test": ["cloud"]}')
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def rows(path: Path, made: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def test_a_class_in_a_file_is_a_task(file: Path) -> None:
    task = load_task(f"{file}:Reverse")
    assert isinstance(task, Task)
    row = task.examples("test")[0]
    assert task.prompt(row) == "Spell cloud backwards."
    assert task.grade("duolc", row).score == 1.0
    told = load_task(f"{file}:Reverse?prompt_text=Turn {{}} round.".replace("{{}}", "{}"))
    assert told.prompt(row) == "Turn cloud round."
    assert load_task(f"{file}:made").name == "reverse"
    # the file is run once, so that its classes stay the same
    assert type(load_task(f"{file}:Reverse")) is type(task)


def test_a_function_in_a_file_is_a_reward(file: Path) -> None:
    assert load_object(f"{file}:brief")(completions=["abc"], prompts=["q"]) == [-3.0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("none.py:Reverse", "no file at"),
        ("own.py:Revers", "has no Revers; it has Reverse"),
        ("own.py:number", "is no task: it lacks name, examples, prompt, grade"),
        ("own.py:Reverse?size=3", "has no option 'size'; its options are: prompt_text, name"),
        ("own.py:made?size=3", "takes no options"),
        ("broken.py:Task", "broken.py, line 2: ZeroDivisionError"),
        ("typo.py:Task", "typo.py: SyntaxError"),
        ("fails.py:Task", "fails.py:Task: RuntimeError: no data"),
    ],
)
def test_mistakes_are_one_line(file: Path, spec: str, says: str) -> None:
    (file.parent / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    (file.parent / "typo.py").write_text("def f(:\n")
    (file.parent / "fails.py").write_text("def Task():\n    raise RuntimeError('no data')\n")
    with pytest.raises(UserError) as error:
        load_task(f"{file.parent}/{spec}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


SVAMP = {"Body": "Tom has {3} pens.", "Question": "How many pens?", "Answer": 3.0}


def test_a_prompt_of_several_columns(tmp_path: Path) -> None:
    path = rows(tmp_path / "svamp.jsonl", [SVAMP])
    name = f"jsonl:{path}?answer_column=Answer&grader=number"
    task = load_task(name, prompt="{Body} {Question} Use \\boxed{}.")
    row = task.examples("test")[0]
    assert task.prompt(row) == "Tom has {3} pens. How many pens? Use \\boxed{}."
    assert task.grade("\\boxed{3}", row).score == 1.0
    with pytest.raises(UserError, match=r"column Questoin; the row has Answer, Body, Question"):
        load_task(name, prompt="{Body} {Questoin}").examples("test")
    with pytest.raises(UserError, match=r"no \{question\}"):
        load_task(name, prompt="Answer me.")


def test_a_chat_keeps_its_system_message_and_earlier_turns(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    path = rows(tmp_path / "chat.jsonl", [{"prompt": turns, "answer": "4"}])
    task = load_task(f"jsonl:{path}", prompt="{question} Box it.")
    row = task.examples("train")[0]
    asked = [*turns[:3], {"role": "user", "content": "And 2 + 2? Box it."}]
    assert render_prompt(task, row, CHAT) == asked
    assert render_prompt(task, row, PLAIN) == (
        "Be brief.\n\nWhat is 1 + 1?\n\n2\n\nAnd 2 + 2? Box it."
    )
    other = render_prompt(task, row, CHAT, system_prompt="Think.")
    assert other == [{"role": "system", "content": "Think."}, *asked[1:]]


def test_worked_examples_stand_before_the_question(tmp_path: Path) -> None:
    made = [{"question": f"{n} + 1?", "answer": f"We add.\n#### {n + 1}"} for n in range(4)]
    rows(tmp_path / "train.jsonl", made)
    rows(tmp_path / "test.jsonl", [{"question": "9 + 1?", "answer": "#### 10"}])
    task = load_task("gsm8k", path=tmp_path, prompt="Q: {question}", shots=2)
    messages = render_prompt(task, task.examples("test")[0], CHAT)
    assert [turn["content"] for turn in messages] == [
        "Q: 0 + 1?",
        "We add.\n#### 1",
        "Q: 1 + 1?",
        "We add.\n#### 2",
        "Q: 9 + 1?",
    ]
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * 2 + ["user"]
    # a row is no example of itself
    first = render_prompt(task, task.examples("train")[0], CHAT)
    assert [turn["content"] for turn in first][::2] == ["Q: 1 + 1?", "Q: 2 + 1?", "Q: 0 + 1?"]
    with pytest.raises(UserError, match="4 train rows, too few for 4 worked examples"):
        load_task("gsm8k?shots=4", path=tmp_path).prompt(made[0])
    with pytest.raises(UserError, match="shots is a number of worked examples"):
        load_task("gsm8k?shots=many", path=tmp_path)
