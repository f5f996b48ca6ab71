"""Answers graded a second, beside math-verify on the same texts.

    python benchmarks/grading.py [--data FOLDER] [--answers N] [--workers N]

Completions have the length of GSM8K's own solutions, with the answer stated in four ways, half of
them wrong. math-verify reads the same texts with its own defaults, on one core, as its users call
it. FOLDER holds gsm8k/test.jsonl; without it the rows are made up here.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from math_verify import parse, verify

from asymgrpo.tasks import Example, Task, grade_many, load_task

STATEMENTS = (
    "#### {}",
    "The answer is {}.",
    "Therefore, the final answer is \\boxed{{{}}}.",
    "That makes ${} altogether.",
)
SHARE_OF_MATH_VERIFY = 20
"""math-verify grades one answer in so many; its rate does not depend on how many."""


def made_up_rows(folder: Path) -> Path:
    rng = random.Random(0)
    lines = []
    for _ in range(1_319):
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        steps = (
            f"First she buys {a} boxes of {b} pens, which is {a}*{b}=<<{a}*{b}={a * b}>>{a * b}."
        )
        steps = f"{steps}\nThen she adds {c} more, so {a * b}+{c}=<<{a * b}+{c}={a * b + c}>> pens."
        row = {
            "question": f"{len(lines)}: {a} times {b} plus {c}?",
            "answer": f"{steps}\n#### {a * b + c}",
        }
        lines.append(json.dumps(row))
    (folder / "test.jsonl").write_text("\n".join(lines))
    return folder


def completions(rows: list[Example], count: int) -> list[tuple[str, Example, str]]:
    """(completion, row, reference), every second one with a wrong answer."""
    made = []
    for number in range(count):
        row = rows[number % len(rows)]
        steps, _, gold = row["answer"].partition("####")
        reference = gold.strip().replace(",", "")
        stated = int(reference) + number % 2
        statement = STATEMENTS[(number // 2) % len(STATEMENTS)]
        made.append((f"{steps}\n{statement.format(stated)}", row, reference))
    return made


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path)
    options.add_argument("--answers", type=int, default=20_000)
    options.add_argument("--workers", type=int, default=2)
    chosen = options.parse_args()
    with TemporaryDirectory() as folder:
        path = chosen.data / "gsm8k" if chosen.data else made_up_rows(Path(folder))
        task: Task = load_task("gsm8k", path=path / "test.jsonl")
        made = completions(list(task.examples("test")), chosen.answers)
    texts, rows = [text for text, _, _ in made], [row for _, row, _ in made]
    time.sleep(3)  # the sandbox starts with the task, and would share the cores

    start, busy = time.perf_counter(), time.process_time()
    grades = grade_many(task, texts, rows, workers=chosen.workers)
    ours = len(grades) / (time.perf_counter() - start)
    ours_cpu = len(grades) / (time.process_time() - busy)
    expected = [float(number % 2 == 0) for number in range(len(made))]
    wrong = sum(grade.score != right for grade, right in zip(grades, expected, strict=True))

    sample = made[::SHARE_OF_MATH_VERIFY] + made[1::SHARE_OF_MATH_VERIFY]
    rights = expected[::SHARE_OF_MATH_VERIFY] + expected[1::SHARE_OF_MATH_VERIFY]
    start, busy = time.perf_counter(), time.process_time()
    verdicts = [verify(parse(reference), parse(text)) for text, _, reference in sample]
    theirs = len(sample) / (time.perf_counter() - start)
    theirs_cpu = len(sample) / (time.process_time() - busy)
    missed = sum(verdict != bool(right) for verdict, right in zip(verdicts, rights, strict=True))

    mean = sum(map(len, texts)) / len(texts)
    print(f"{len(made):,} answers, {mean:.0f} characters on average, {chosen.workers} workers")
    for name, wall, cpu, misjudged, count in (
        ("asymgrpo", ours, ours_cpu, wrong, len(made)),
        ("math-verify", theirs, theirs_cpu, missed, len(sample)),
    ):
        print(
            f"{name:<12} {wall:>8,.0f} answers/s, {cpu:>8,.0f} a second of processor time, "
            f"{misjudged} of {count:,} misjudged"
        )
    print(f"ratio {ours / theirs:.1f} (of processor time {ours_cpu / theirs_cpu:.1f})")


if __name__ == "__main__":
    main()
