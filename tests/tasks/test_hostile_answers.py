"""Texts that hang, crash or flood other graders: each is graded within two seconds, anywhere."""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time

import pytest

from asymgrpo.tasks import FailureGuard
from asymgrpo.tasks.graders import SYMBOLIC, grade_math, grade_number
from asymgrpo.tasks.sandbox import CallFailedError, shared_sandbox

DEEP = 10_000
HOSTILE = {
    "tower": "9**9**9**9",
    "latex tower": "9^{9^{9^{9}}}",
    "two-storey tower": "10^{10^{10}}",
    "factorials": "100!!!",
    "deep fractions": "\\frac{" * DEEP + "1" + "}{2}" * DEEP,
    "deep roots": "\\sqrt{" * DEEP + "2" + "}" * DEEP,
    "deep brackets": "(" * DEEP + "1" + ")" * DEEP,
    "brackets that just pass": "(" * 10 + "1" + ")" * 10,
    "open boxes": "\\boxed{" * DEEP,
    "boxes in boxes": "\\boxed{" * DEEP + "1" + "}" * DEEP,
    "a megabyte of digits": "1" * 1_000_000,
    "a megabyte of braces": "{" * 1_000_000,
    "a megabyte of dollars": "$" * 1_000_000,
    "a megabyte of commas": "1," * 500_000,
    "a megabyte of minus": "-" * 1_000_000,
    "a megabyte of claims": "the answer is " * 70_000,
    "a megabyte of marks": "#### " * 200_000,
    "a megabyte of spaces": "answer is" + " " * 1_000_000,
    "long sum": "\\sum_{n=1}^{100000000} \\frac{1}{n^n}",
    "hard integral": "\\int_0^1 x^{x^x} \\sin(x^x) dx",
    "large product": "\\prod_{n=1}^{1000000} n!",
    "large power": "(x+1)^{100000} - x^{99999}",
    "a billionth power": "10^{1000000000}",
    "nested 15 deep": "(" * 15 + "1" + ")" * 15,
    "nested 12 deep": "(" * 12 + "x" + ")" * 12,
    "a large binomial": "\\binom{10000000}{5000000}",
    "factorials of factorials": "((9!)!)!",
    "a power in a power": "(2^{1000})^{1000}",
    "a long sum of large powers": "+".join(["9^{5000}"] * 40),
    "open formulas": "\\(" * 50_000,
    "a megabyte of open formulas": "\\(" * 500_000,
    "a megabyte of display formulas": "\\[" * 500_000,
    "a megabyte of formulas": "\\(1\\)" * 200_000,
    "a megabyte of single dollars": "$a" * 500_000,
    "a megabyte of dollars and lines": "$\n" * 500_000,
    "a megabyte of groups": "1" + ",234" * 250_000 + "5",
    "a megabyte of boxes": "\\boxed{1}" * 110_000,
    "a megabyte of bare boxes": "\\boxed 1 " * 110_000,
    "a megabyte of open boxes": "\\boxed{" * 140_000,
    "a megabyte of joined boxes": "\\boxed{1} or " * 75_000,
    "a megabyte of answers to": "answer to " * 100_000,
    "a megabyte of answers": "answer: " * 125_000,
    "a megabyte of or": "5 or " * 200_000,
    "a megabyte of fractions": "\\frac{1}{2}" * 90_000,
    "a megabyte of equations": "1=" * 500_000,
    "a megabyte of words": "word " * 200_000,
    "a megabyte of backslashes": "\\" * 1_000_000,
    "a megabyte of stars": "*" * 1_000_000,
    "a megabyte of minus words": "minus " * 160_000,
    "a megabyte of newlines": "\n" * 1_000_000,
    "a megabyte of dots": "1." * 500_000,
    "a megabyte after a claim": "the answer is " + "a" * 1_000_000,
    "a megabyte of numbers after a claim": "the answer is " + "7 9 " * 250_000,
    "python": "__import__('os').system('true')",
    "null and surrogates": "\x00\ud800\\boxed{\ud800}",
}
LIMIT = 2.0


def slow_or_right(text: str, wait: float = LIMIT) -> list[str]:
    """What is wrong with the grades of `text`, as it is and in a box."""
    faults = []
    for grade in (grade_number, grade_math):
        for completion in (text, f"\\boxed{{{text}}}"):
            start = time.monotonic()
            result = grade(completion, "\\frac{7}{9}")
            seconds = time.monotonic() - start
            if seconds >= wait or result.score != 0.0 or not result.reason or result.failed:
                faults.append(f"{grade.__name__}: {seconds:.1f} s, {result}")
            if result.answer is not None and len(result.answer) > 200:
                faults.append("the grade keeps the whole answer")
    return faults


def start_worker() -> None:
    """The start of the sandbox is not part of an answer."""
    assert shared_sandbox(SYMBOLIC).call("compare", "x", "x") == "equal"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_graded_in_time(name: str) -> None:
    start_worker()
    assert slow_or_right(HOSTILE[name]) == []


def test_a_time_out_is_a_wrong_answer_with_its_reason_and_the_next_answer_is_graded() -> None:
    start_worker()
    grade = grade_math(f"\\boxed{{{HOSTILE['factorials of factorials']}}}", "\\sqrt{7}")
    assert (grade.score, grade.failed) == (0.0, False)
    assert grade.reason == "the answer is beyond math-verify: no result within 1.5 s"
    after = grade_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")
    assert (after.score, after.failed) == (1.0, False)


def test_the_limit_holds_off_the_main_thread() -> None:
    start_worker()
    faults: list[str] = []

    def work(name: str) -> None:
        faults.extend(slow_or_right(HOSTILE[name], wait=3 * LIMIT))
        if grade_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}").score != 1.0:
            faults.append("a right answer was not seen")

    # As many at once as there are threads waiting for two workers, hence the longer wait.
    names = ["latex tower", "two-storey tower", "a megabyte of digits"]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
        assert not thread.is_alive()
    assert faults == []


def grade_in_worker(connection, name: str) -> None:
    start_worker()
    right = grade_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")
    connection.send((slow_or_right(HOSTILE[name]), right.score))
    connection.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_limit_holds_in_a_daemonic_worker_process(method: str) -> None:
    start_worker()  # so that a forked worker inherits, and must not use, a sandbox of ours
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=grade_in_worker, args=(theirs, "hard integral"), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == ([], 1.0)
    process.join(10)
    assert process.exitcode == 0
    assert grade_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}").score == 1.0


def test_memory_of_this_process_stays_bounded() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("a megabyte of digits", "a megabyte of commas", "deep fractions"):
        slow_or_right(HOSTILE[name])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024  # kilobytes


def test_a_policy_cannot_end_its_own_training() -> None:
    """Answers that math-verify cannot digest are wrong answers, and no failures."""
    start_worker()
    guard = FailureGuard()
    hostile = ["a billionth power", "hard integral", "a large binomial", "nested 15 deep"]
    for number in range(64):
        name = hostile[number % 4] if number < 8 else "tower"
        guard.count(grade_math(f"\\boxed{{{HOSTILE[name]}}}", "\\sqrt{3}"))
    assert (guard.failed, guard.total) == (0, 64)


def test_a_sandbox_that_never_answers_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CallFailedError("no result within 1.5 s")

    monkeypatch.setattr(shared_sandbox(SYMBOLIC), "call", fail)
    grade = grade_math("\\boxed{2\\sqrt{2}}", "\\sqrt{8}")
    assert grade.failed
    assert grade.reason == "math-verify failed: no result within 1.5 s"
