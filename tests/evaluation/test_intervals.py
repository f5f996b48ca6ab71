"""Intervals: their coverage by simulation, their limits, and the quantiles beneath them."""

import numpy as np
import pytest
from scipy import stats

from asymgrpo.evaluation.estimators import pass_at_k
from asymgrpo.evaluation.intervals import bootstrap_mean, bootstrap_means, resample_counts

DRAWS = 2_000


def coverage(problems, samples, k, a, b, seed):
    """Share of 2,000 simulated evaluations whose interval holds the true pass@k."""
    rng = np.random.default_rng(seed)
    chances = rng.beta(a, b, size=(problems, DRAWS))
    by_count = np.array([pass_at_k(samples, c, k) for c in range(samples + 1)])
    _, low, high = bootstrap_means(by_count[rng.binomial(samples, chances)])
    # E[1 - (1 - p)^k] for p ~ Beta(a, b) is 1 - prod (b + i) / (a + b + i)
    truth = 1 - np.prod([(b + i) / (a + b + i) for i in range(k)])
    return np.mean((low <= truth) & (truth <= high))


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.0, 3.0), (0.3, 3.0)])
def test_coverage_with_200_problems(a, b, k):
    assert 0.93 <= coverage(200, 8, k, a, b, seed=k) <= 0.97


@pytest.mark.parametrize(("samples", "k"), [(64, 1), (64, 8), (1, 1)])
def test_coverage_with_few_problems(samples, k):
    assert 0.93 <= coverage(30, samples, k, 0.5, 1.0, seed=samples) <= 0.975


@pytest.mark.parametrize("problems", [2, 3, 5, 12, 30])
@pytest.mark.parametrize(("a", "b", "k"), [(0.5, 0.5, 1), (0.3, 3.0, 1), (5.0, 1.0, 4)])
def test_coverage_with_very_few_problems(problems, a, b, k):
    assert coverage(problems, 8, k, a, b, seed=problems) >= 0.93


def family_coverage(families, size, clustered, seed):
    """Share of 300 evaluations of problems in families of one chance each that hold the truth."""
    rng = np.random.default_rng(seed)
    clusters = np.arange(families).repeat(size).tolist()
    held = 0
    for _ in range(300):
        chances = rng.beta(1.0, 1.5, size=families).repeat(size)
        found = bootstrap_mean(rng.binomial(8, chances) / 8, clusters if clustered else None)
        held += found.low <= 0.4 <= found.high
    return held / 300


@pytest.mark.parametrize(("families", "size"), [(10, 20), (40, 5)])
def test_coverage_with_problems_in_families(families, size):
    assert family_coverage(families, size, clustered=True, seed=families) >= 0.93
    # the same problems taken for unrelated ones: far too narrow
    assert family_coverage(families, size, clustered=False, seed=families) <= 0.8


def test_families_are_resampled_as_a_loop_would():
    """Ratios of sums over drawn families, in a loop; families of unequal size."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 6, size=40)
    clusters = [name for name, size in enumerate(sizes) for _ in range(size)]
    values = rng.random(len(clusters))
    members = [values[np.array(clusters) == name] for name in range(40)]
    means = []
    for counts in resample_counts(40):
        drawn = np.concatenate([members[i] for i in range(40) for _ in range(counts[i])])
        means.append(drawn.mean())
    bias = stats.norm.ppf(np.mean(np.array(means) < values.mean()))
    pull = np.array([(own - values.mean()).sum() for own in members])
    acceleration = (pull**3).sum() / (6 * (pull**2).sum() ** 1.5)
    z = stats.t.ppf(0.975, 39) * np.sqrt(40 / 39)
    levels = [
        stats.norm.cdf(bias + (bias + side) / (1 - acceleration * (bias + side)))
        for side in (-z, z)
    ]
    ours = bootstrap_mean(values, clusters)
    expected = np.quantile(means, levels, method="weibull")
    assert (ours.low, ours.high) == pytest.approx(tuple(expected), abs=1e-10)


def test_families_of_one_change_nothing_and_their_order_neither():
    values = np.random.default_rng(1).random(50)
    assert bootstrap_mean(values, list(range(50))) == bootstrap_mean(values)
    with pytest.raises(ValueError, match="50 problems, but 3 clusters"):
        bootstrap_mean(values, ["a", "b", "c"])


@pytest.mark.parametrize("wrong", [float("nan"), -0.1, 1.5, float("inf")])
def test_values_outside_zero_to_one_are_refused(wrong):
    with pytest.raises(ValueError, match="from 0 to 1"):
        bootstrap_mean(np.array([0.5, wrong, 1.0]))


def test_coverage_near_the_ceiling():
    # most simulated sets have pass@8 = 1 on every problem, and no resample can differ
    assert coverage(200, 8, 8, 5.0, 1.0, seed=1) >= 0.93


def test_agreeing_problems_have_the_exact_interval():
    # none of 30 right: the upper limit solves (1 - p)^30 = 0.025 (Clopper-Pearson)
    exact = stats.binomtest(0, 30).proportion_ci(0.95, method="exact")
    estimate = bootstrap_mean(np.zeros(30))
    assert estimate.low == 0.0
    assert estimate.high == pytest.approx(exact.high, abs=1e-12)
    assert bootstrap_mean(np.ones(30)).low == pytest.approx(1 - exact.high, abs=1e-12)


def test_one_problem_has_an_interval_that_says_almost_nothing():
    estimate = bootstrap_mean(np.array([0.5]))
    assert (estimate.low, estimate.high) == pytest.approx((0.0125, 0.9875))


def test_interval_agrees_with_scipy_for_many_problems():
    values = np.random.default_rng(3).beta(0.5, 1.5, size=2_000)
    ours = bootstrap_mean(values)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=5_000, rng=0, vectorized=True)
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.05 * width)


@pytest.mark.parametrize("problems", [40, 300])
def test_interval_is_bca_at_the_widened_level(problems):
    values = np.random.default_rng(problems).beta(0.5, 1.5, size=problems)
    means = [np.repeat(values, counts).mean() for counts in resample_counts(problems)]
    bias = stats.norm.ppf(np.mean(np.array(means) < values.mean()))
    # the jackknife's acceleration, by leaving out each problem in turn
    left_out = np.array([np.delete(values, i).mean() for i in range(problems)])
    pull = left_out.mean() - left_out
    acceleration = (pull**3).sum() / (6 * (pull**2).sum() ** 1.5)
    z = stats.t.ppf(0.975, problems - 1) * np.sqrt(problems / (problems - 1))
    levels = [
        stats.norm.cdf(bias + (bias + side) / (1 - acceleration * (bias + side)))
        for side in (-z, z)
    ]
    ours = bootstrap_mean(values)
    expected = np.quantile(means, levels, method="weibull")
    assert (ours.low, ours.high) == pytest.approx(tuple(expected), abs=1e-10)


def test_columns_are_treated_alone_and_repeatably():
    values = np.random.default_rng(0).random((40, 3))
    together = bootstrap_means(values)
    for column in range(3):
        alone = bootstrap_mean(values[:, column])
        assert (alone.value, alone.low, alone.high) == pytest.approx(
            tuple(part[column] for part in together), abs=1e-12
        )


def test_every_resample_has_as_many_problems_as_the_set():
    counts = resample_counts(17, 500)
    assert (counts.sum(axis=1) == 17).all()
    # each problem is drawn once a resample on average
    assert counts.mean(axis=0) == pytest.approx(np.ones(17), abs=0.2)


def test_bad_shape_is_refused():
    with pytest.raises(ValueError, match="problems, metrics"):
        bootstrap_means(np.zeros((0, 2)))
