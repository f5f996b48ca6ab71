"""What a comparison of runs says: records that the terminal and the page show alike. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from asymgrpo.evaluation.intervals import Estimate

Verdict = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class RunData:
    """One run as a comparison reads it; what was not logged is simply not there."""

    label: str
    """What the run stands for; runs of one label differ by their seed only."""
    algorithm: str | None
    seed: int | None
    run: Mapping[str, Any] = field(default_factory=dict)
    """`run.json`."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """A row a step, with a whole `step`."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Evaluation records, by step."""


@dataclass(frozen=True)
class Variance:
    """A variance, and how many times the baseline's it is."""

    estimate: Estimate
    ratio: Estimate | None
    """To the baseline's; None for the baseline itself, or where it cannot be told."""
    note: str = ""
    """Why there is no ratio, where one would be expected."""


@dataclass(frozen=True)
class Quadrants:
    """Clipping by quadrant, Q1 to Q4; None where a log does not count it."""

    tokens: tuple[float | None, float | None, float | None, float | None]
    """Share of all tokens, the mean over steps and seeds."""
    events: tuple[float, float, float, float] | None
    """Share of the clip events; None if a quadrant is not counted or nothing clips."""


@dataclass(frozen=True)
class CurvePoint:
    """pass@1 at one step."""

    step: int
    estimate: Estimate
    runs: int
    """Runs that were evaluated there."""


@dataclass(frozen=True)
class LabelSummary:
    """All runs of one label."""

    label: str
    algorithm: str | None
    seeds: tuple[int | None, ...]
    """One entry per run."""
    before: Estimate | None
    """pass@1 at step 0; like all of pass@k, the mean over seeds with an interval over seeds and
    problems, or over problems alone where there is one seed."""
    after: Estimate | None
    """pass@1 at the last evaluation."""
    gain: Estimate | None
    """`after` less `before`, paired by seed and problem."""
    peak: Estimate | None
    """The best pass@1 of an evaluation after step 0."""
    pass_at_k: Mapping[int, Estimate]
    """At the last evaluation, by k."""
    before_at_k: Mapping[int, Estimate]
    """At step 0, by k."""
    curve: tuple[CurvePoint, ...]
    """pass@1 over the steps at which it was measured."""
    reward_variance: Variance | None
    """Variance over steps of the mean batch reward, the mean over seeds."""
    detrended_variance: Variance | None
    """The same after the trend is removed."""
    seed_variance: Variance | None
    """Variance over seeds of the final pass@1; None with one seed."""
    entropy_end: Estimate | None
    """Mean entropy over the last tenth of the steps."""
    collapse_step: float | None
    """Median over seeds of the step of entropy collapse; None if most did not collapse."""
    collapsed: int
    """Runs whose entropy collapsed."""
    steps_to_target: float | None
    """The first step at which the mean over all seeds reaches the target; None if it never does."""
    reached: int
    """Runs that reach the target."""
    quadrants: Quadrants | None
    seconds: float | None
    """Mean wall time of a run."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairResult:
    """`first` against `second` in one metric, paired by seed and problem."""

    metric: str
    """`final pass@1`, `peak pass@1` or `final pass@K`."""
    first: str
    second: str
    difference: Estimate | None
    """`first` less `second`, with its interval at the level of the verdict, Holm's: it leaves out 0
    where, and with two seeds or more only where, there is a verdict."""
    p_value: float | None
    p_holm: float | None
    """Corrected over the pairs of this metric; the verdict goes by this."""
    verdict: Verdict
    seeds: tuple[int | None, ...]
    """The seeds that both have."""
    problems: int
    more_seeds: int | None
    """How many more would settle an inconclusive verdict; None if settled, not known, or more than
    `MORE_SEEDS_CAP`."""
    note: str
    """What to know of the verdict, such as what would settle it; may be empty."""
    families: int | None = None
    """Families of problems, where those are resampled and not single problems."""


@dataclass(frozen=True)
class Comparison:
    """Everything that is known of some runs, side by side."""

    headline: str
    """The verdict in one sentence."""
    labels: tuple[LabelSummary, ...]
    """The baseline first."""
    pairs: tuple[PairResult, ...]
    """By metric, then by pair; `final pass@1` comes first."""
    baseline: str | None
    target: float | None
    """The pass@1 that `steps_to_target` is about."""
    cluster: str | None = None
    """The column of the problems' families, where intervals resample families."""

    @property
    def intervals(self) -> str:
        """What the intervals of pass@k and of gains are over, in a sentence."""
        seeds = [len(label.seeds) for label in self.labels if label.after is not None]
        if not seeds:
            return ""
        over = f"families of problems ({self.cluster})" if self.cluster else "problems"
        if max(seeds) == 1:
            return f"95 % intervals over {over}; one seed says nothing of other seeds."
        text = f"Means over seeds, with 95 % intervals over seeds and {over}"
        return text + (f"; over {over} alone where there is one seed." if 1 in seeds else ".")

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for JSON."""
        return {**_plain(asdict(self)), "intervals": self.intervals}

    def pair(self, first: str, second: str, metric: str = "final pass@1") -> PairResult:
        """The result for two labels, in the order in which it is stored."""
        for result in self.pairs:
            if (result.first, result.second, result.metric) == (first, second, metric):
                return result
        known = ", ".join(f"{p.first} / {p.second} / {p.metric}" for p in self.pairs) or "none"
        raise KeyError(f"no pair {first} / {second} / {metric}; there are: {known}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def table_rows(comparison: Comparison) -> list[dict[str, str]]:
    """A row a label, column name to text, for a terminal or a page; what is missing is `-`.

    >>> table_rows(Comparison("no runs", (), (), None, None))
    []
    """
    return [_row(summary) for summary in comparison.labels]


def _row(summary: LabelSummary) -> dict[str, str]:
    events = summary.quadrants.events if summary.quadrants else None
    return {
        "label": summary.label,
        "seeds": str(len(summary.seeds)),
        "pass@1 before": _with_interval(summary.before),
        "pass@1 after": _with_interval(summary.after),
        "gain": _with_interval(summary.gain, sign="+"),
        "peak": _number(summary.peak),
        "entropy at end": _number(summary.entropy_end),
        "reward variance": _variance(summary.reward_variance),
        "detrended": _variance(summary.detrended_variance),
        "over seeds": _variance(summary.seed_variance),
        "clip events q1/q2/q3/q4": (
            "/".join(f"{100 * share:.0f}" for share in events) + " %" if events else "-"
        ),
        "seconds": "-" if summary.seconds is None else f"{summary.seconds:.0f}",
    }


def _number(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f}"


def _variance(variance: Variance | None) -> str:
    return "-" if variance is None else f"{variance.estimate.value:.2g}"


def _with_interval(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return "-"
    value = format(estimate.value, sign + ".3f")
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
