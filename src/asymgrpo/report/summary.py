"""The comparison's numbers as the page and the tables show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asymgrpo.evaluation.intervals import Estimate
from asymgrpo.experiment.compare import compare_runs
from asymgrpo.experiment.comparison import Comparison, LabelSummary, PairResult, RunData, Variance
from asymgrpo.report.sources import Source

MISSING = "–"
FOREST_WIDTH = 190
FOREST_MARGIN = 6

Column = tuple[str, Callable[[LabelSummary], "Cell"]]


@dataclass(frozen=True)
class Cell:
    """A number as text, with its interval if it has one, and the numbers themselves."""

    value: str = MISSING
    interval: str = ""
    estimate: Estimate | None = None


@dataclass(frozen=True)
class Row:
    label: str
    colour: int
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """A row a label; the first column is the label's."""

    name: str
    columns: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Forest:
    """An interval as places on a small axis that all pairs of one measure share."""

    zero: float
    low: float
    high: float
    value: float


@dataclass(frozen=True)
class Pair:
    name: str
    measure: str
    difference: str
    interval: str
    p: str
    verdict: str
    advice: str
    forest: Forest | None


@dataclass(frozen=True)
class Summary:
    """Everything above the curves."""

    headline: str
    details: list[str]
    caption: str
    tables: list[Table]
    pairs: list[list[Pair]]
    """By measure; the first measure is the verdict's."""
    pair_caption: str


def compare_sources(sources: Sequence[Source]) -> Comparison:
    """The statistics of `experiment/compare.py`, over our runs and TRL's alike."""
    return compare_runs(
        [
            RunData(
                label=run.label,
                algorithm=run.record.get("algorithm"),
                seed=run.seed,
                run=run.record,
                metrics=run.metrics,
                evaluations=run.evaluations,
            )
            for run in sources
        ]
    )


def summarise(comparison: Comparison) -> Summary:
    """The comparison as text."""
    return Summary(
        headline=comparison.headline,
        details=[f"{s.label}: {note}" for s in comparison.labels for note in s.notes],
        caption=_caption(comparison),
        tables=tables(comparison),
        pairs=_pairs(comparison),
        pair_caption=(
            "The first less the second, paired by seed and problem. Intervals and p-values are "
            "corrected over the pairs of a measure, by Holm, as the verdict is; with one seed they "
            "are over problems alone, and there is no verdict."
        ),
    )


def tables(comparison: Comparison) -> list[Table]:
    """Held-out results and training; a column that no label has a value for is left out."""
    found = []
    for name, columns in (("Held out", _held_out(comparison)), ("Training", TRAINING)):
        made = [(title, [make(label) for label in comparison.labels]) for title, make in columns]
        made = [(title, cells) for title, cells in made if any(c.value != MISSING for c in cells)]
        if [title for title, _ in made if title != "runs"]:
            rows = [
                Row(label.label, place % 8, [cells[place] for _, cells in made])
                for place, label in enumerate(comparison.labels)
            ]
            found.append(Table(name, [name, *(title for title, _ in made)], rows))
    return found


def _held_out(comparison: Comparison) -> list[Column]:
    largest = max((k for s in comparison.labels for k in s.pass_at_k), default=1)
    columns: list[Column] = [
        ("runs", lambda s: Cell(str(len(s.seeds)))),
        ("pass@1 before", lambda s: estimate(s.before)),
        ("pass@1 after", lambda s: estimate(s.after)),
        ("gain", lambda s: estimate(s.gain, sign="+")),
        ("peak pass@1", lambda s: estimate(s.peak)),
    ]
    if largest > 1:
        columns.append((f"pass@{largest} after", lambda s: estimate(s.pass_at_k.get(largest))))
    if comparison.target is not None:
        columns.append((f"steps to pass@1 of {comparison.target:.3f}", _steps_to_target))
    return columns


def estimate(value: Estimate | None, *, sign: str = "", spec: str = ".3f") -> Cell:
    """
    >>> estimate(Estimate(0.5, 0.4, 0.6)).interval
    '0.400 to 0.600'
    """
    if value is None:
        return Cell()
    form = sign + spec
    span = ""
    if value.low is not None and value.high is not None:
        span = f"{minus(format(value.low, form))} to {minus(format(value.high, form))}"
    return Cell(minus(format(value.value, form)), span, value)


def _variance(variance: Variance | None) -> Cell:
    if variance is None:
        return Cell()
    cell = estimate(variance.estimate, spec=".2g")
    if variance.ratio is None:
        return Cell(cell.value, variance.note or cell.interval, variance.estimate)
    ratio = f"{variance.ratio.value:.2g} × baseline"
    if variance.ratio.low is not None and variance.ratio.high is not None:
        ratio += f" ({variance.ratio.low:.2g} to {variance.ratio.high:.2g})"
    return Cell(cell.value, ratio, variance.estimate)


def _collapse(summary: LabelSummary) -> Cell:
    if summary.collapse_step is None:
        return Cell("none") if summary.entropy_end is not None else Cell()
    return Cell(
        f"{summary.collapse_step:g}",
        f"{summary.collapsed} of {len(summary.seeds)} runs",
        Estimate(summary.collapse_step),
    )


def _steps_to_target(summary: LabelSummary) -> Cell:
    of = f"{summary.reached} of {len(summary.seeds)} runs"
    if summary.steps_to_target is None:
        return Cell("not reached", of) if summary.after is not None else Cell()
    return Cell(f"{summary.steps_to_target:g}", of, Estimate(summary.steps_to_target))


def _clip_events(summary: LabelSummary) -> Cell:
    events = summary.quadrants.events if summary.quadrants else None
    if events is None:
        return Cell()
    return Cell(" / ".join(f"{100 * share:.0f}" for share in events) + " %")


def _caption(comparison: Comparison) -> str:
    parts = []
    if comparison.intervals:
        parts.append(comparison.intervals)
    if comparison.baseline is not None and len(comparison.labels) > 1:
        parts.append(f"The baseline is {comparison.baseline}.")
    return " ".join(parts)


TRAINING: list[Column] = [
    ("runs", lambda s: Cell(str(len(s.seeds)))),
    ("entropy at end", lambda s: estimate(s.entropy_end)),
    ("entropy collapse", _collapse),
    ("reward variance", lambda s: _variance(s.reward_variance)),
    ("variance without trend", lambda s: _variance(s.detrended_variance)),
    ("variance over seeds", lambda s: _variance(s.seed_variance)),
    ("clip events Q1/Q2/Q3/Q4", _clip_events),
    ("seconds a run", lambda s: Cell(MISSING if s.seconds is None else f"{s.seconds:,.0f}")),
]


def _pairs(comparison: Comparison) -> list[list[Pair]]:
    by_metric: dict[str, list[PairResult]] = {}
    for pair in comparison.pairs:
        if pair.difference is not None:
            by_metric.setdefault(pair.metric, []).append(pair)
    return [[_pair(pair, alike) for pair in alike] for alike in by_metric.values()]


def _pair(pair: PairResult, alike: Sequence[PairResult]) -> Pair:
    cell = estimate(pair.difference, sign="+")
    return Pair(
        name=f"{pair.first} less {pair.second}",
        measure=pair.metric,
        difference=cell.value,
        interval=cell.interval,
        p=MISSING if pair.p_holm is None else small(pair.p_holm),
        verdict=pair.verdict,
        advice=pair.note,
        forest=_forest(pair, alike),
    )


def _forest(pair: PairResult, alike: Sequence[PairResult]) -> Forest | None:
    if pair.difference is None or pair.difference.low is None or pair.difference.high is None:
        return None
    ends = [0.0]
    for other in alike:
        if other.difference is not None:
            ends += [
                end for end in (other.difference.low, other.difference.high) if end is not None
            ]
    reach = max(abs(end) for end in ends) or 1.0

    def place(value: float) -> float:
        middle = FOREST_WIDTH / 2
        return round(middle + value / reach * (middle - FOREST_MARGIN), 1)

    found = pair.difference
    return Forest(
        place(0), place(pair.difference.low), place(pair.difference.high), place(found.value)
    )


def small(value: float) -> str:
    """
    >>> small(0.0004), small(0.0312)
    ('< 0.001', '0.031')
    """
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def minus(text: str) -> str:
    """A true minus sign for a number that people read."""
    return text.replace("-", "−")
