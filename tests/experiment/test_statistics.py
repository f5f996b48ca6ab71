"""The paired bootstrap by simulation: how often it is wrong, how often it finds what is there."""

import math

import numpy as np
import pytest
from scipy import stats

from asymgrpo.experiment.statistics import (
    ALPHA,
    MORE_SEEDS_CAP,
    holm,
    holm_levels,
    more_seeds,
    paired_bootstrap,
    problems_limit,
)

COMPARISONS = 1_000


def simulated(rng, count, seeds, problems, *, difference, seed_sd, problem_sd=0.05, samples=8):
    """Differences [count, seeds, problems] of two algorithms evaluated on the same problems.

    Each problem has a difficulty; each algorithm is somewhat better or worse on each problem
    (problem_sd), each run as a whole (seed_sd) and each run on each problem (0.05).
    """
    difficulty = rng.beta(1.5, 1.5, size=(count, 1, problems))

    def algorithm(shift):
        chance = (
            difficulty
            + shift
            + rng.normal(0, problem_sd, size=(count, 1, problems))
            + rng.normal(0, seed_sd, size=(count, seeds, 1))
            + rng.normal(0, 0.05, size=(count, seeds, problems))
        )
        return rng.binomial(samples, np.clip(chance, 0, 1)) / samples

    return algorithm(difference) - algorithm(0.0)


def share_of_verdicts(comparisons, seeds, level=ALPHA, **noise):
    rng = np.random.default_rng(seeds)
    found = [
        paired_bootstrap(simulated(rng, 250, seeds, 200, **noise)).p_value < level
        for _ in range(comparisons // 250)
    ]
    return np.concatenate(found).mean()


NOISES = [(0.0, 0.1), (0.03, 0.0), (0.1, 0.05)]


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_no_difference_gives_few_verdicts(seeds):
    comparisons = 2_000
    shares = [
        share_of_verdicts(
            comparisons, seeds, difference=0.0, seed_sd=seed_sd, problem_sd=problem_sd
        )
        for seed_sd, problem_sd in NOISES
    ]
    # Each is an estimate from 2,000 comparisons: 99.9 % of them stay below this at a rate of 5 %.
    assert max(shares) <= stats.binom.ppf(0.999, comparisons, ALPHA) / comparisons
    assert np.mean(shares) <= ALPHA


@pytest.mark.parametrize("seed_sd", [0.02, 0.03])
def test_a_difference_is_found_with_five_seeds(seed_sd):
    assert share_of_verdicts(1_000, 5, difference=0.1, seed_sd=seed_sd) >= 0.8


def test_intervals_hold_the_true_difference():
    # mid-range difficulties, so that clipping does not bend the true difference of 0.05
    rng = np.random.default_rng(1)
    shape = (COMPARISONS, 5, 100)
    truth = 0.05
    noise = rng.normal(0, 0.03, size=(COMPARISONS, 5, 1)) + rng.normal(0, 0.2, size=shape)
    found = paired_bootstrap(truth + noise + rng.normal(0, 0.1, size=(COMPARISONS, 1, 100)))
    covered = np.mean((found.low <= truth) & (truth <= found.high))
    assert stats.binom.ppf(0.01, COMPARISONS, 0.95) / COMPARISONS <= covered <= 0.985


def test_variances_are_those_of_a_loop():
    rng = np.random.default_rng(2)
    table = rng.normal(0, 1, size=(4, 6)) + rng.normal(0, 3, size=(4, 1))
    found = paired_bootstrap(table[None])
    mean = sum(table[s, p] for s in range(4) for p in range(6)) / 24
    rows = [sum(table[s]) / 6 for s in range(4)]
    columns = [sum(table[:, p]) / 4 for p in range(6)]
    rest = sum(
        (table[s, p] - rows[s] - columns[p] + mean) ** 2 for s in range(4) for p in range(6)
    ) / (3 * 5)
    by_seed = 6 * sum((row - mean) ** 2 for row in rows) / 3
    by_problem = 4 * sum((column - mean) ** 2 for column in columns) / 5
    assert found.mean[0] == pytest.approx(mean)
    assert found.seed_variance[0] == pytest.approx(max(by_seed, rest) / 24)
    assert found.problem_variance[0] == pytest.approx(max(by_problem - rest, 0) / 24)


def test_many_seeds_and_no_problem_effect_is_students_test():
    rng = np.random.default_rng(3)
    # each seed has one difference, the same on all problems: a paired t-test over seeds
    by_seed = rng.normal(0.5, 1.0, size=8)
    found = paired_bootstrap(np.repeat(by_seed[:, None], 5, axis=1)[None])
    expected = stats.ttest_1samp(by_seed, 0.0)
    interval = expected.confidence_interval(0.95)
    assert found.p_value[0] == pytest.approx(expected.pvalue, abs=0.001)
    assert (found.low[0], found.high[0]) == pytest.approx((interval.low, interval.high), abs=0.01)


def test_exchanging_the_two_turns_the_sign():
    table = np.random.default_rng(4).normal(0.1, 0.3, size=(1, 3, 50))
    one, other = paired_bootstrap(table), paired_bootstrap(-table)
    width = one.high[0] - one.low[0]
    assert other.mean[0] == -one.mean[0]
    assert other.low[0] == pytest.approx(-one.high[0], abs=0.03 * width)
    assert other.p_value[0] == pytest.approx(one.p_value[0], abs=0.02)


def test_equal_runs_have_no_p_value_to_speak_of():
    found = paired_bootstrap(np.zeros((1, 3, 20)))
    assert (found.p_value[0], found.low[0], found.high[0]) == (1.0, 0.0, 0.0)


def test_one_seed_resamples_problems_alone():
    values = np.random.default_rng(5).normal(0.02, 0.2, size=400)
    found = paired_bootstrap(values[None, None])
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    width = interval.high - interval.low
    assert found.low[0] == pytest.approx(interval.low, abs=0.05 * width)
    assert found.high[0] == pytest.approx(interval.high, abs=0.05 * width)
    assert found.seed_variance[0] == 0


def test_bad_shapes_are_refused():
    for shape in ((3, 4), (1, 0, 5), (1, 2, 1)):
        with pytest.raises(ValueError, match="comparisons, seeds, problems"):
            paired_bootstrap(np.zeros(shape))


def naive_holm(p_values):
    """Which are rejected, step by step: the smallest at alpha / m, the next at alpha / (m - 1)."""
    rejected = set()
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] >= ALPHA / (len(p_values) - rank):
            break
        rejected.add(i)
    return rejected


def test_holm_rejects_what_the_procedure_rejects():
    rng = np.random.default_rng(6)
    for _ in range(500):
        p_values = (rng.random(rng.integers(1, 8)) ** 4).tolist()
        corrected = holm(p_values)
        assert {i for i, p in enumerate(corrected) if p < ALPHA} == naive_holm(p_values)
        assert all(own <= other <= 1 for own, other in zip(p_values, corrected, strict=True))
    assert holm([]) == []
    assert holm_levels([0.2, 0.1, 0.3]) == pytest.approx([0.025, 0.05 / 3, 0.05])


def test_the_seeds_asked_for_settle_it_four_times_in_five():
    seed_sd, difference, seeds = 0.04, 0.06, 3
    problem_variance = 0.008**2
    more = more_seeds(difference, seed_sd**2 / seeds, problem_variance, seeds, ALPHA)
    total = seeds + more
    rng = np.random.default_rng(7)
    by_seed = rng.normal(0, seed_sd, size=(COMPARISONS, total, 1))
    by_problem = rng.normal(0, 0.008 * math.sqrt(100), size=(COMPARISONS, 1, 100))
    noise = rng.normal(0, 0.02, size=(COMPARISONS, total, 100))
    found = paired_bootstrap(difference + by_seed + by_problem + noise)
    assert 0.72 <= np.mean(found.p_value < ALPHA) <= 0.9


def test_too_many_seeds_are_not_promised():
    assert more_seeds(0.0, 0.01, 0.0, 3, ALPHA) is None
    assert more_seeds(0.001, 0.01, 0.0, 3, ALPHA) is None
    assert more_seeds(0.05, 0.03**2, 0.0, 2, ALPHA) <= MORE_SEEDS_CAP
    # a stricter level asks for more
    assert more_seeds(0.05, 0.03**2, 0.0, 3, ALPHA / 6) > more_seeds(0.05, 0.03**2, 0.0, 3, ALPHA)


def test_seeds_do_not_make_up_for_problems():
    assert problems_limit(0.02, 0.02**2, ALPHA)
    assert more_seeds(0.02, 1e-9, 0.02**2, 3, ALPHA) is None
