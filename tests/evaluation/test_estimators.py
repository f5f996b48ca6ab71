"""Estimators against enumeration of every subset of samples."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asymgrpo.evaluation.estimators import avg_at_k, count_correct, maj_at_k, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n in range(1, 13):
        for c in range(n + 1):
            correct = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(correct, k))
                share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
                assert pass_at_k(n, c, k) == float(share)


def test_pass_at_k_is_exact_for_many_samples():
    assert pass_at_k(10_000, 1, 1) == 1 / 10_000
    assert pass_at_k(10_000, 10_000, 10_000) == 1.0
    assert pass_at_k(10_000, 0, 10_000) == 0.0
    # 1 - (1 - k/n)(1 - k/(n-1)) for c = 2
    exact = 1 - Fraction(10_000 - 7, 10_000) * Fraction(10_000 - 8, 9_999)
    assert pass_at_k(10_000, 2, 7) == float(exact)


def test_pass_at_k_takes_numpy_counts():
    assert pass_at_k(np.int64(4), np.int64(1), np.int64(2)) == 0.5


@pytest.mark.parametrize(
    ("n", "c", "k", "says"),
    [
        (0, 0, 1, "n must be at least 1"),
        (4, 5, 1, "c must be between 0 and n = 4, not 5"),
        (4, -1, 1, "c must be between 0"),
        (4, 1, 0, "k must be between 1 and n = 4, not 0"),
        (4, 1, 5, "k must be between 1 and n = 4, not 5"),
        (4, 1.5, 1, "c must be a whole number"),
        (4, 1, 2.0, "k must be a whole number"),
        (4, True, 1, "c must be a whole number"),
    ],
)
def test_pass_at_k_refuses(n, c, k, says):
    with pytest.raises(ValueError, match=says):
        pass_at_k(n, c, k)


def test_partial_credit_is_not_correct_but_counts_in_the_average():
    assert count_correct([1.0, 0.99, 0.0]) == 1
    assert avg_at_k([1.0, 0.5, 0.0]) == 0.5
    with pytest.raises(ValueError, match="n must be at least 1"):
        avg_at_k([])


def vote(answers, scores):
    """The majority's score of one set of samples, in fractions."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Fraction(0)
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(scores[answer] for answer in top) / Fraction(len(top))


def enumerated_majority(answers, scores, k):
    subsets = list(combinations(answers, k))
    return float(sum(vote(subset, scores) for subset in subsets) / len(subsets))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), st.data())
def test_maj_at_k_is_the_mean_vote_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    scores = {"a": Fraction(1), "b": Fraction(0), "c": Fraction(1, 4), "d": Fraction(1)}
    given_scores = [0.0 if a is None else float(scores[a]) for a in answers]
    expected = enumerated_majority(answers, scores, k)
    assert maj_at_k(answers, given_scores, k) == pytest.approx(expected, abs=1e-13)


def test_maj_at_one_is_the_mean_score_of_those_who_answer():
    answers, scores = ["4", None, "5", "4", "6"], [1.0, 0.0, 0.0, 1.0, 0.0]
    assert maj_at_k(answers, scores, 1) == pytest.approx(0.4, abs=1e-13)


def test_maj_at_k_holds_for_many_samples():
    # two answers, 600 against 400 votes: the majority of 101 is a hypergeometric tail
    answers, scores = ["r"] * 600 + ["w"] * 400, [1.0] * 600 + [0.0] * 400
    ways = sum(math.comb(600, i) * math.comb(400, 101 - i) for i in range(51, 102))
    expected = ways / math.comb(1000, 101)
    assert maj_at_k(answers, scores, 101) == pytest.approx(expected, abs=1e-10)


def test_maj_at_k_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="2 answers but 1 scores"):
        maj_at_k(["a", "b"], [1.0])


@pytest.mark.parametrize("wrong", [float("nan"), -0.5, 1.01])
def test_scores_outside_zero_to_one_are_refused(wrong):
    for estimate in (
        lambda: count_correct([1.0, wrong]),
        lambda: avg_at_k([1.0, wrong]),
        lambda: maj_at_k(["a", "b"], [1.0, wrong]),
    ):
        with pytest.raises(ValueError, match="a score is a number from 0 to 1"):
            estimate()
