"""How often the 95 % interval of an evaluation holds the true value, in simulations.

    python scripts/coverage.py

Prints the tables of `docs/evaluation.md`: few to many problems, problems in families, and
comparisons of two algorithms on problems in families.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "evaluation"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "experiment"))

from test_families import pair_coverage
from test_intervals import coverage, family_coverage

CHANCES = {"even": (0.5, 0.5), "hard": (0.3, 3.0), "easy": (5.0, 1.0)}
"""Beta distributions of a problem's chance of a right answer."""


def main() -> None:
    print(
        "| problems | " + " | ".join(f"{name}, pass@{k}" for name in CHANCES for k in (1, 4)) + " |"
    )
    for problems in (2, 3, 5, 10, 20, 30, 200):
        shares = [
            coverage(problems, 8, k, *CHANCES[name], seed=problems)
            for name in CHANCES
            for k in (1, 4)
        ]
        print(
            f"| {problems} | " + " | ".join(f"{share:.2f}" for share in shares) + " |", flush=True
        )
    print("| families | problems in each | unrelated | by family |")
    for families, size in ((10, 20), (20, 10), (40, 5), (100, 5)):
        shares = [
            family_coverage(families, size, clustered, seed=families) for clustered in (False, True)
        ]
        print(f"| {families} | {size} | {shares[0]:.2f} | {shares[1]:.2f} |", flush=True)
    print("| families | problems in each | a pair, unrelated | a pair, by family |")
    for families, size in ((10, 20), (20, 10), (40, 5), (100, 5)):
        shares = [pair_coverage(families, size, clustered, 1_000) for clustered in (False, True)]
        print(f"| {families} | {size} | {shares[0]:.2f} | {shares[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
