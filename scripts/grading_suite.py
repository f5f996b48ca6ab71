"""Grades completions that are right or wrong by construction, beside math-verify and TRL.

    python scripts/grading_suite.py [--pairs 200000] [--others 5000] [--seed 0]

The pairs come from `tests/tasks/grammar.py`, where a label follows from how a pair was made. A
right answer that scores 0 is missed, a wrong one that scores 1 is accepted. math-verify's `verify`
and TRL's `accuracy_reward` grade the first `--others` of those pairs in which arithmetic counts
that is not worked out, as they let it. Ends with exit code 1 if ours misjudges a pair.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tasks"))

from grammar import Pair, pairs

CHUNK = 2_000
TRIES = 5
"""A busy machine may fail a grade, which says so; it is then graded again, a little later."""
SHOWN = 20
"""Misjudged pairs that are printed."""


def ours(pair: Pair) -> float:
    from asymgrpo.tasks.graders import GRADERS

    for _ in range(TRIES):
        grade = GRADERS[pair.grader](pair.completion, pair.reference, pair.unevaluated)
        if not grade.failed:
            return grade.score
        time.sleep(2.0)
    raise SystemExit(f"the grader failed: {grade.reason}: {pair}")


def by_math_verify(pair: Pair) -> float:
    from math_verify import parse, verify

    return float(verify(parse(as_latex(pair.reference)), parse(pair.completion)))


def as_latex(reference: str) -> str:
    """Both look for LaTeX between dollars."""
    return f"${reference}$" if "\\" in reference or "x" in reference else reference


def by_trl(pair: Pair) -> float:
    from trl.rewards import accuracy_reward

    completion = [[{"role": "assistant", "content": pair.completion}]]
    score = accuracy_reward(completions=completion, solution=[as_latex(pair.reference)])[0]
    return float(score or 0.0)


def group_of(pair: Pair) -> str:
    """The rule without the kind of the reference and the place of the statement."""
    rule = pair.rule.rpartition(": ")[2]
    for place in (" in a box", " in a line", " in a formula", " in a sentence"):
        rule = rule.removesuffix(place)
    return rule


def graded(
    made: Iterable[Pair], grade: Callable[[Pair], float], workers: int
) -> tuple[Counter[tuple[str, str]], list[Pair], float]:
    """Counts by rule and outcome, the misjudged pairs, and the seconds it took."""
    counts: Counter[tuple[str, str]] = Counter()
    misjudged: list[Pair] = []
    started, rest = time.monotonic(), iter(made)
    done = 0
    with ThreadPoolExecutor(workers) as pool:
        while chunk := list(islice(rest, CHUNK)):
            scores = pool.map(grade, chunk) if workers > 1 else map(grade, chunk)
            done += len(chunk)
            print(f"\r{done:,} pairs", end="", file=sys.stderr, flush=True)
            for pair, score in zip(chunk, scores, strict=True):
                group = group_of(pair)
                counts[group, "right" if pair.right else "wrong"] += 1
                if bool(score) != pair.right:
                    counts[group, "missed" if pair.right else "accepted"] += 1
                    misjudged.append(pair)
    return counts, misjudged, time.monotonic() - started


def table(columns: Sequence[tuple[str, Counter[tuple[str, str]]]]) -> list[str]:
    """Of each grader: missed of right, accepted of wrong."""
    groups = sorted({group for _, counts in columns for group, _ in counts})
    head = f"{'':20}" + "".join(f"{name:>34}" for name, _ in columns)
    second = f"{'rule':20}" + f"{'missed of right':>17}{'accepted of wrong':>17}" * len(columns)
    lines = [head, second]
    for group in [*groups, "all"]:
        line = f"{group:20}"
        for _, counts in columns:
            for outcome, of in (("missed", "right"), ("accepted", "wrong")):
                chosen = groups if group == "all" else [group]
                share = [sum(counts[g, kind] for g in chosen) for kind in (outcome, of)]
                line += f"{f'{share[0]:,} / {share[1]:,}':>17}"
        lines.append(line)
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=200_000)
    options.add_argument("--others", type=int, default=5_000)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    logging.disable(logging.WARNING)  # math-verify's, of every text it cannot read

    counts, misjudged, seconds = graded(pairs(chosen.pairs, chosen.seed), ours, workers=2)
    columns = [(f"asymgrpo ({chosen.pairs:,})", counts)]
    for name, grade in (("math-verify", by_math_verify), ("accuracy_reward", by_trl)):
        # A task's say on arithmetic that is not worked out is no option of theirs.
        same = (p for p in pairs(chosen.pairs, chosen.seed) if p.unevaluated)
        sample = islice(same, chosen.others)
        columns.append((f"{name} ({chosen.others:,})", graded(sample, grade, workers=1)[0]))
    print("\n".join(table(columns)))
    for pair in misjudged[:SHOWN]:
        print("MISSED" if pair.right else "ACCEPTED", pair)
    print(
        f"{chosen.pairs:,} pairs, {len(misjudged):,} misjudged, "
        f"{chosen.pairs / seconds:,.0f} pairs a second"
    )
    raise SystemExit(bool(misjudged))


if __name__ == "__main__":
    main()
