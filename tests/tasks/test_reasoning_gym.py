"""reasoning-gym's data sets: all of them, endless, split, and scored without `eval`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym")

from asymgrpo.errors import UserError  # noqa: E402
from asymgrpo.tasks import Task, load_task  # noqa: E402
from asymgrpo.tasks.gym import GymRows, _Generator, gym_names, split_of  # noqa: E402
from asymgrpo.tasks.gym_scoring import EVALUATING  # noqa: E402
from asymgrpo.tasks.safe_parsing import parse_expression  # noqa: E402

# Slow to draw from (seconds a row), so one draw of each is enough here.
SLOW = {"arc_agi", "codeio", "countdown", "futoshiki", "knight_swap", "sokoban", "zebra_puzzles"}


@pytest.mark.parametrize("name", gym_names())
def test_every_data_set_draws_by_number_and_far_out(name: str) -> None:
    generator = _Generator(name, {}, seed=1)
    numbers = [10**9 + 7] if name in SLOW else [0, 1, 2, 10**9 + 7]
    rows = [generator.draw(number) for number in numbers]
    assert all(row["question"] and {"question", "answer", "metadata"} <= set(row) for row in rows)
    assert len(rows) == 1 or len({row["question"] for row in rows}) > 1
    if name not in SLOW:
        again = _Generator(name, {}, seed=1).draw(10**9 + 7)
        assert again["question"] == rows[-1]["question"]


@pytest.fixture(scope="module")
def chain_sum() -> Task:
    return load_task("reasoning-gym:chain_sum?max_terms=2&max_digits=1&min_digits=1")


def test_the_splits_are_disjoint_even_where_few_questions_exist(chain_sum: Task) -> None:
    train = {row["question"] for row in chain_sum.examples("train")[:300]}
    test = {row["question"] for row in chain_sum.examples("test")[:300]}
    other = load_task("reasoning-gym:chain_sum?max_terms=2&max_digits=1&min_digits=1&seed=9")
    test |= {row["question"] for row in other.examples("test")[:300]}
    assert len(train) + len(test) < 400  # they do repeat, and still
    assert not train & test
    assert {split_of(question) for question in train} == {"train"}


def test_rows_are_seeded_lazy_and_indexed(chain_sum: Task) -> None:
    rows = chain_sum.examples("train")
    assert len(rows) == 1_000_000
    assert rows[999_999] == rows[-1] == rows[999_999:][0]
    with pytest.raises(IndexError):
        rows[1_000_000]
    other = load_task("reasoning-gym:chain_sum?seed=5&size=7").examples("train")
    assert len(other) == len(list(other)) == 7
    assert [row["question"] for row in other] != [row["question"] for row in rows[:7]]


def test_drawing_leaves_the_global_generators_alone() -> None:
    import random

    import numpy as np

    random.seed(3), np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3), np.random.seed(3)
    _Generator("pool_matrix", {}, seed=0).draw(12)
    assert (random.random(), np.random.rand()) == expected


def test_options_reach_the_data_set() -> None:
    rows = load_task("reasoning-gym:chain_sum?min_terms=6&max_terms=6").examples("test")
    assert all(len(re.findall(r"\d+", row["question"].split("=")[0])) == 6 for row in rows[:5])


def test_a_set_too_small_to_split_is_said() -> None:
    class OneQuestion(_Generator):
        name = "one"

        def __init__(self) -> None: ...

        def draw(self, number: int):
            return {"question": "always the same"}

    split = {"train": "test", "test": "train"}[split_of("always the same")]
    with pytest.raises(UserError, match="allow for more questions"):
        GymRows(OneQuestion(), split, 10)[0]


def test_answers_are_scored_by_the_data_sets_own_scorer(chain_sum: Task) -> None:
    row = chain_sum.examples("test")[0]
    right = row["answer"]
    assert "<answer>" in chain_sum.prompt(row)
    assert chain_sum.grade(f"<answer>{right}</answer>", row).score == 1.0
    assert chain_sum.grade(f"\\boxed{{{right}}}", row).score == 1.0
    assert chain_sum.grade(f"<answer>{right}</answer><answer>77777</answer>", row).score < 0.1
    assert chain_sum.grade("", row).reason == "no answer was found in the completion"
    assert chain_sum.grade("1" * 1_000_000, row).score == 0.0


HARMFUL = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.mark.parametrize("name", ["spiral_matrix", "countdown", "simple_integration"])
def test_scorers_that_evaluate_text_do_not_evaluate_the_models(name: str) -> None:
    """Evaluated, the text would kill the scorer's process, and the grade would be failed."""
    task = load_task(f"reasoning-gym:{name}")
    row = task.examples("test")[0]
    assert task.grade(f"<answer>{row['answer']}</answer>", row).score == 1.0
    harmful = task.grade(f"<answer>{HARMFUL}</answer>", row)
    assert not harmful.failed, harmful
    assert harmful.score < 0.1
    tower = task.grade("<answer>9**9**9**9</answer>", row)
    assert tower.score < 0.1


def test_no_other_scorer_evaluates_text() -> None:
    """Every use of an evaluating function in the package is known; a new one fails here."""
    package = Path(reasoning_gym.__file__).parent
    pattern = re.compile(r"(?<![.\w])(?:eval|exec|sympify)\(|[.\s=(]parse_expr\(")
    found = {
        ".".join(file.relative_to(package).with_suffix("").parts)
        for file in package.rglob("*.py")
        if pattern.search(file.read_text())
    }
    through_sympy = {
        "algebra.simple_integration",
        "algebra.intermediate_integration",
        "algebra.polynomial_multiplication",
        "games.puzzle24",
        "games.countdown",
    }
    own_text_only = {  # they evaluate what they generated themselves
        "code.codeio",
        "arithmetic.gsm_symbolic.generators_50_99",
        "arithmetic.gsm_symbolic.generators_00_49",
        "arithmetic.bitwise_arithmetic",
        "arithmetic.basic_arithmetic",
        "logic.propositional_logic",  # a parser of its own by that name
    }
    assert found == set(EVALUATING) | through_sympy | own_text_only


@pytest.mark.parametrize(
    "text",
    ["2*x + 3", "x**2/3 - 1.50", "-(4 + 5)*3", "sin(x)*exp(2*x)", "sqrt(8)", "7", "0.5", "1e3"],
)
def test_the_safe_parser_agrees_with_sympys(text: str) -> None:
    import sympy

    assert parse_expression(text) == sympy.parse_expr(text)


@pytest.mark.parametrize(
    "text", [HARMFUL, "x.__class__", "lambda: 1", "[1]", "9**9**9", "x if x else 1", "f'{1}'", "("]
)
def test_the_safe_parser_refuses_what_is_not_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|exponent"):
        parse_expression(text)
