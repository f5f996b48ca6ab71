"""Verdicts on pairs of labels, paired by seed and problem. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from asymgrpo.evaluation.intervals import Estimate
from asymgrpo.experiment.comparison import PairResult, Verdict
from asymgrpo.experiment.scores import Evaluated, Scores, aligned, aligned_families
from asymgrpo.experiment.statistics import (
    ALPHA,
    MORE_SEEDS_CAP,
    PairedBootstrap,
    ends,
    holm,
    holm_levels,
    judged_levels,
    more_seeds,
    paired_bootstrap,
    problems_limit,
)

Array = NDArray[np.float64]

FINAL = "final pass@1"
PEAK = "peak pass@1"

Pick = Callable[[Evaluated], Scores]


@dataclass(frozen=True)
class _Pair:
    """A pair on its way to a result."""

    result: PairResult
    differences: Array | None = None
    """[S, P], where they can be taken."""
    families: tuple[str, ...] | None = None
    """Of the problems, where they were evaluated by family."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    draws: Array | None = None
    """Of the mean difference, in order."""


def compare_pairs(labels: Mapping[str, Sequence[Evaluated]]) -> tuple[PairResult, ...]:
    """Every later label against every earlier one, in every metric that both have."""
    results: list[PairResult] = []
    for metric, k, pick in _metrics(labels):
        pairs = [
            _difference(metric, k, pick, (later, labels[later]), (earlier, labels[earlier]))
            for earlier, later in combinations(labels, 2)
        ]
        results += _judge(_with_statistics(pairs))
    return tuple(results)


def _metrics(labels: Mapping[str, Sequence[Evaluated]]) -> list[tuple[str, int, Pick]]:
    runs = [run for label in labels.values() for run in label]
    ks = sorted(set.intersection(*(set(run.final.ks) for run in runs)) - {1}) if runs else []
    return [
        (FINAL, 1, lambda run: run.final),
        (PEAK, 1, lambda run: run.peak),
        *((f"final pass@{k}", k, lambda run: run.final) for k in ks),
    ]


def _difference(
    metric: str,
    k: int,
    pick: Pick,
    first: tuple[str, Sequence[Evaluated]],
    second: tuple[str, Sequence[Evaluated]],
) -> _Pair:
    steps = _peak_steps([*first[1], *second[1]]) if metric == PEAK else None
    if steps is not None and not steps:
        note = "not evaluated at the same steps"
        return _Pair(_inconclusive(metric, first[0], second[0], (), note))
    ours, theirs = (
        {run.seed: pick(run) if steps is None else run.peak_at(steps) for run in runs}
        for _, runs in (first, second)
    )
    seeds = [seed for seed in ours if seed in theirs]
    result = _inconclusive(metric, first[0], second[0], tuple(seeds), "")
    if not ours or not theirs:
        return _Pair(replace(result, note="not evaluated"))
    if not seeds:
        return _Pair(replace(result, note="no seed in common"))
    picked = [*(ours[seed] for seed in seeds), *(theirs[seed] for seed in seeds)]
    if len({scores.task for scores in picked}) > 1:
        return _Pair(replace(result, note="evaluated on different tasks"))
    values = aligned(picked, k)
    if values.shape[1] < 2:
        return _Pair(replace(result, note="fewer than two problems in common"))
    families = aligned_families(picked)
    if families is not None and len(set(families)) < 2:
        return _Pair(replace(result, note="fewer than two families of problems in common"))
    differences = values[: len(seeds)] - values[len(seeds) :]
    notes = _notes(picked, metric, values.shape[1])
    count = None if families is None else len(set(families))
    result = replace(result, problems=values.shape[1], families=count, note=notes)
    return _Pair(result, differences, None if families is None else tuple(families))


def _inconclusive(
    metric: str, first: str, second: str, seeds: tuple[int | None, ...], note: str
) -> PairResult:
    return PairResult(metric, first, second, None, None, None, "inconclusive", seeds, 0, None, note)


def _peak_steps(runs: Sequence[Evaluated]) -> frozenset[int] | None:
    """The steps at which all were evaluated; None where all were evaluated equally often.

    The best of many evaluations is higher than the best of few, whatever the algorithm.
    """
    if len({len(run.trained_steps) for run in runs}) <= 1:
        return None
    return frozenset.intersection(*(frozenset(run.trained_steps) for run in runs))


def _notes(picked: Sequence[Scores], metric: str, problems: int) -> str:
    notes = []
    steps = sorted({scores.step for scores in picked})
    if metric != PEAK and len(steps) > 1:
        notes.append(f"last evaluated at different steps ({steps[0]} to {steps[-1]})")
    if len({scores.drawn for scores in picked}) > 1:
        notes.append("sampled with different settings")
    if any(len(scores.problems) != problems for scores in picked):
        notes.append(f"on the {problems} problems that all have")
    return "; ".join(notes)


def _with_statistics(pairs: Sequence[_Pair]) -> list[_Pair]:
    """All pairs of one shape, and of the same families, in one bootstrap."""
    done = list(pairs)
    layouts = {(p.differences.shape, p.families) for p in pairs if p.differences is not None}
    for layout in layouts:
        places = [
            i
            for i, p in enumerate(pairs)
            if p.differences is not None and (p.differences.shape, p.families) == layout
        ]
        stacked = np.stack([d for i in places if (d := pairs[i].differences) is not None])
        found = paired_bootstrap(stacked, layout[1])
        for row, place in enumerate(places):
            done[place] = replace(
                pairs[place], statistics=_row(found, row), draws=found.draws[:, row]
            )
    return done


def _row(found: PairedBootstrap, row: int) -> dict[str, float]:
    return {name: float(column[row]) for name, column in vars(found).items() if name != "draws"}


def _judge(pairs: Sequence[_Pair]) -> list[PairResult]:
    """Verdicts of one metric, corrected over its pairs; one seed gives an interval, no verdict."""
    tested = [i for i, p in enumerate(pairs) if p.statistics and len(p.result.seeds) > 1]
    p_values = [pairs[i].statistics["p_value"] for i in tested]
    corrected = dict(zip(tested, holm(p_values), strict=True))
    levels = dict(zip(tested, holm_levels(p_values), strict=True))
    judged = dict(zip(tested, judged_levels(p_values), strict=True))
    return [
        _result(pair, corrected.get(place), levels.get(place, ALPHA), judged.get(place, ALPHA))
        for place, pair in enumerate(pairs)
    ]


def _result(pair: _Pair, p_holm: float | None, level: float, judged: float) -> PairResult:
    if not pair.statistics or pair.draws is None:
        return pair.result
    found = pair.statistics
    verdict: Verdict = "inconclusive"
    if p_holm is not None and p_holm < ALPHA:
        verdict = "better" if found["mean"] > 0 else "worse"
    needed, advice = None, ""
    if verdict == "inconclusive":
        needed, advice = _advice(pair, level)
    return replace(
        pair.result,
        difference=Estimate(
            found["mean"], *(_within_1(float(end)) for end in ends(pair.draws, judged))
        ),
        p_value=found["p_value"],
        p_holm=p_holm,
        verdict=verdict,
        more_seeds=needed,
        note="; ".join(part for part in (pair.result.note, advice) if part),
    )


def _within_1(end: float) -> float:
    """The end of an interval of a difference of rates, which is -1 at least and 1 at most."""
    return min(max(end, -1.0), 1.0)


def _advice(pair: _Pair, level: float) -> tuple[int | None, str]:
    """What would settle it: a number of seeds, and the same in words."""
    found, seeds = pair.statistics, len(pair.result.seeds)
    if pair.differences is not None and not pair.differences.any():
        return None, "equal on every problem"
    if seeds == 1:
        return None, (
            "one seed: only problems are resampled, which says how these two runs differ and not "
            "how the algorithms do; run at least 3 seeds for a verdict"
        )
    if problems_limit(found["mean"], found["problem_variance"], level):
        return None, "more problems would have to settle it, more seeds alone cannot"
    by_seeds, by_problems = found["seed_variance"], found["problem_variance"]
    needed = more_seeds(found["mean"], by_seeds, by_problems, seeds, level)
    if needed is None:
        return None, f"more than {MORE_SEEDS_CAP} more seeds would settle it"
    return needed, f"about {needed} more seed{'s' if needed > 1 else ''} would settle it"
