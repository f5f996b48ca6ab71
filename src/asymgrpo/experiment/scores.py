"""A run's evaluations as arrays: one value a problem, aligned over runs. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asymgrpo.errors import UserError
from asymgrpo.evaluation.estimators import check_scores, count_correct, pass_at_k
from asymgrpo.experiment.comparison import RunData

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """One evaluation: for every problem its samples and how many of them are correct."""

    step: int
    problems: tuple[str, ...]
    samples: tuple[int, ...]
    correct: tuple[int, ...]
    ks: tuple[int, ...]
    task: tuple[Any, Any]
    """Task and split: scores of two that differ do not compare."""
    drawn: tuple[Any, ...]
    """How samples were drawn."""
    families: tuple[str, ...] | None = None
    """The family of each problem, where the evaluation was made by family."""
    cluster: str | None = None
    """The column that names the families."""

    def pass_at(self, k: int) -> Array:
        """pass@k of every problem."""
        known = {pair: pass_at_k(*pair, k) for pair in set(self._counts)}
        return np.array([known[pair] for pair in self._counts])

    @cached_property
    def _counts(self) -> list[tuple[int, int]]:
        return list(zip(self.samples, self.correct, strict=True))

    @cached_property
    def pass_at_1(self) -> float:
        """The mean over its problems."""
        return float(self.pass_at(1).mean())


def read_scores(evaluation: Mapping[str, Any]) -> Scores:
    """The scores in an evaluation record.

    >>> record = {"step": 5, "task": "t", "problems": [{"id": 1, "scores": [1.0, 0.0]}]}
    >>> read_scores(record).pass_at(1).tolist()
    [0.5]
    """
    try:
        problems = evaluation["problems"]
        rows = [(_name(row), row["scores"]) for row in problems]
        step = int(evaluation["step"])
    except (KeyError, TypeError) as error:
        raise UserError(f"an evaluation record lacks {error}; evaluate the run anew") from None
    if not rows or not all(scores for _, scores in rows):
        raise UserError(f"the evaluation of step {step} has no scores; evaluate the run anew")
    for name, scores in rows:
        try:
            check_scores(scores)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"problem {name} of step {step}: {error}; evaluate the run anew"
            ) from None
    samples = tuple(len(scores) for _, scores in rows)
    named = [row.get("cluster") for row in problems]
    return Scores(
        step=step,
        problems=tuple(name for name, _ in rows),
        samples=samples,
        correct=tuple(count_correct(scores) for _, scores in rows),
        ks=tuple(k for k in evaluation.get("k", ()) if k <= min(samples)),
        task=(evaluation.get("task"), evaluation.get("split")),
        drawn=(repr(evaluation.get("sampling")), evaluation.get("seed"), samples[0]),
        families=None if None in named else tuple(map(str, named)),
        cluster=evaluation.get("cluster"),
    )


def _name(row: Mapping[str, Any]) -> str:
    """A problem of the same id whose row was edited in between is another problem."""
    return f"{row['id']} {row['row']}" if "row" in row else str(row["id"])


@dataclass(frozen=True)
class Evaluated:
    """A run that was evaluated at least once."""

    seed: int | None
    evaluations: tuple[Scores, ...]
    """By step."""

    @property
    def first(self) -> Scores | None:
        """Before training, if that was measured."""
        return self.evaluations[0] if self.evaluations[0].step == 0 else None

    @property
    def final(self) -> Scores:
        return self.evaluations[-1]

    @property
    def peak(self) -> Scores:
        """The best of those after step 0, the earliest of equals."""
        return self.peak_at(self.trained_steps)

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """The steps after 0 that were evaluated; step 0 where there is no other."""
        steps = tuple(scores.step for scores in self.evaluations)
        return tuple(step for step in steps if step > 0) or steps

    def peak_at(self, steps: Collection[int]) -> Scores:
        """The best of `steps`: the more of them, the higher a peak comes out by chance."""
        chosen = [scores for scores in self.evaluations if scores.step in steps]
        return max(chosen, key=lambda scores: scores.pass_at_1)

    def first_step_at(self, target: float) -> float | None:
        """The first evaluated step with this pass@1."""
        reached = (s.step for s in self.evaluations if s.pass_at_1 >= target)
        return next((float(step) for step in reached), None)


def evaluated_runs(runs: Sequence[RunData]) -> list[Evaluated]:
    """The runs that have evaluations.

    >>> evaluated_runs([RunData("grpo", "grpo", 0)])
    []
    """
    return [
        Evaluated(
            run.seed,
            tuple(sorted((read_scores(e) for e in run.evaluations), key=lambda s: s.step)),
        )
        for run in runs
        if run.evaluations
    ]


def aligned(scores: Sequence[Scores], k: int) -> Array:
    """pass@k of the problems that all `scores` have: [len(scores), P].

    >>> one = read_scores({"step": 0, "problems": [{"id": i, "scores": [i]} for i in (0, 1)]})
    >>> two = read_scores({"step": 0, "problems": [{"id": i, "scores": [1]} for i in (1, 2)]})
    >>> aligned([one, two], 1).tolist()
    [[1.0], [1.0]]
    """
    if len({s.problems for s in scores}) == 1:
        return np.stack([s.pass_at(k) for s in scores])
    order = _common(scores)
    values = [dict(zip(s.problems, s.pass_at(k).tolist(), strict=True)) for s in scores]
    return np.array([[own[name] for name in order] for own in values]).reshape(len(scores), -1)


def _common(scores: Sequence[Scores]) -> list[str]:
    """The problems that all have, in the order of the first."""
    shared = set.intersection(*(set(s.problems) for s in scores))
    return [name for name in scores[0].problems if name in shared]


def aligned_families(scores: Sequence[Scores]) -> list[str] | None:
    """The family of every problem that `aligned` gives, as those that were told them have it.

    None where no evaluation has families.

    >>> rows = [{"id": i, "scores": [1], "cluster": i // 2} for i in range(4)]
    >>> aligned_families([read_scores({"step": 0, "problems": rows})])
    ['0', '0', '1', '1']
    """
    told = [s for s in scores if s.families is not None]
    if not told:
        return None
    columns = sorted({str(s.cluster) for s in told})
    if len(columns) > 1:
        raise UserError(
            f"the runs were evaluated by unlike families ({' and '.join(columns)}); "
            "run the comparison again with one --cluster"
        )
    known: dict[str, str] = {}
    for s in told:
        known |= dict(zip(s.problems, s.families or (), strict=True))
    # A problem that was never told one is a family of its own.
    return [known.get(name, f"problem {name}") for name in _common(scores)]
