"""A comparison in one sentence. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from asymgrpo.evaluation.intervals import Estimate
from asymgrpo.experiment.comparison import LabelSummary, PairResult
from asymgrpo.experiment.pairs import FINAL


def headline(
    labels: Sequence[LabelSummary], pairs: Sequence[PairResult], baseline: str | None
) -> str:
    """The verdict on the final pass@1: against the baseline, or over all pairs without one.

    >>> headline([], [], None)
    'There are no runs to compare.'
    """
    if not labels:
        return "There are no runs to compare."
    if len(labels) == 1:
        return _alone(labels[0])
    if all(label.after is None for label in labels):
        return "The runs were not evaluated, so there is no verdict on their accuracy."
    tested = [pair for pair in pairs if pair.metric == FINAL and pair.difference is not None]
    against = [pair for pair in tested if baseline is None or pair.second == baseline]
    if not against:
        return "No two of the algorithms were evaluated alike, so there is no verdict."
    settled = [pair for pair in against if pair.verdict != "inconclusive"]
    if settled:
        open_ones = len(against) - len(settled)
        others = f"; {_plural(open_ones, 'other pair')} inconclusive" if open_ones else ""
        return "; ".join(map(_settled, settled)) + others + "."
    return _unsettled(against, baseline)


def _alone(label: LabelSummary) -> str:
    if label.gain is not None and label.after is not None:
        return f"{label.label} gains {_signed(label.gain)} in pass@1, to {label.after.value:.3f}."
    if label.after is not None:
        return f"{label.label} has a pass@1 of {label.after.value:.3f}."
    return f"{label.label} is alone here and was not evaluated, so there is no verdict."


def _settled(pair: PairResult) -> str:
    assert pair.difference is not None
    return (
        f"{pair.first} is {pair.verdict} than {pair.second} in {FINAL} by "
        f"{_signed(pair.difference)}, {_plural(len(pair.seeds), 'seed')}"
    )


def _unsettled(pairs: Sequence[PairResult], baseline: str | None) -> str:
    nearest = min(pairs, key=lambda pair: 1.0 if pair.p_value is None else pair.p_value)
    assert nearest.difference is not None
    whom = f"from {baseline} " if baseline else ""
    which = "" if len(pairs) == 1 else "nearest is "
    note = f"; {nearest.note}" if nearest.note else ""
    return (
        f"No difference {whom}in {FINAL} is established: {which}{nearest.first} against "
        f"{nearest.second}, {_signed(nearest.difference)}, "
        f"{_plural(len(nearest.seeds), 'seed')}{note}."
    )


def _signed(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.3f}"
    return f"{estimate.value:+.3f} (95 % {estimate.low:+.3f} to {estimate.high:+.3f})"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
