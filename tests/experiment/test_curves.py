"""Training variance, entropy and clipping, against explicit fits and known processes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from asymgrpo.experiment.comparison import RunData
from asymgrpo.experiment.curves import (
    ENTROPY,
    collapse_step,
    entropy_end,
    majority_median,
    mean_over_seeds,
    mean_seconds,
    pivotal_estimate,
    pooled_draws,
    quadrants,
    reward_variance,
    seed_variance,
    series,
    trend,
    variance_ratio,
)

TRL_LOGS = Path(__file__).parents[3] / "shared" / "data" / "trl-logs"


def logged(**columns):
    length = len(next(iter(columns.values())))
    rows = [
        {"step": i + 1, **{name.replace("__", "/"): values[i] for name, values in columns.items()}}
        for i in range(length)
    ]
    return RunData("a", None, 0, metrics=rows)


def smoother_matrix(steps):
    """The local linear fit as a matrix, one weighted regression a row."""
    reach = max(2, math.ceil(steps / 4))
    matrix = np.zeros((steps, steps))
    for i in range(steps):
        offsets = np.arange(steps) - i
        weights = np.clip(1 - np.abs(offsets / (reach + 1)) ** 3, 0, None) ** 3
        design = np.stack([np.ones(steps), offsets], axis=1)
        hat = np.linalg.solve(design.T @ (weights[:, None] * design), design.T * weights)
        matrix[i] = hat[0]
    return matrix


@pytest.mark.parametrize("steps", [8, 13, 40, 101])
def test_trend_is_a_weighted_regression_at_every_step(steps):
    values = np.random.default_rng(steps).random(steps)
    matrix = smoother_matrix(steps)
    fitted, freedom = trend(values)
    assert fitted == pytest.approx(matrix @ values, abs=1e-12)
    rest = np.eye(steps) - matrix
    assert freedom == pytest.approx(np.trace(rest.T @ rest), abs=1e-10)


def rewards(rng, steps, sd=0.05):
    rise = 0.3 * (1 - np.exp(-np.arange(steps) / (steps / 4)))
    return 0.4 + rise + rng.normal(0, sd, size=steps)


def test_detrended_variance_is_that_of_the_noise():
    rng = np.random.default_rng(0)
    found = [reward_variance(rewards(rng, 100)) for _ in range(300)]
    # the mean of 300 estimates with some 90 degrees of freedom each: 0.9 % standard error
    assert np.mean([f.detrended for f in found]) == pytest.approx(0.05**2, rel=0.04)
    assert np.mean([f.raw for f in found]) > 2 * 0.05**2


def test_raw_variance_is_numpys():
    values = np.random.default_rng(1).random(30)
    assert reward_variance(values).raw == pytest.approx(np.var(values, ddof=1))


def test_interval_of_the_detrended_variance_and_of_a_ratio():
    rng = np.random.default_rng(2)
    held = ratio_held = 0
    for _ in range(100):
        ours = [reward_variance(rewards(rng, 80), i) for i in range(2)]
        theirs = [reward_variance(rewards(rng, 80, sd=0.1), 10 + i) for i in range(2)]
        draws, other_draws = (
            pooled_draws([run.detrended_draws for run in runs]) for runs in (ours, theirs)
        )
        value, other = (np.mean([run.detrended for run in runs]) for runs in (ours, theirs))
        own, ratio = (
            pivotal_estimate(value, draws),
            pivotal_estimate(value / other, draws / other_draws),
        )
        held += own.low <= 0.05**2 <= own.high
        ratio_held += ratio.low <= 0.25 <= ratio.high
    assert held / 100 >= 0.92
    assert ratio_held / 100 >= 0.92


def test_too_few_steps_have_no_variance():
    assert reward_variance(np.ones(7)) is None
    flat = reward_variance(np.ones(8))
    assert (flat.raw, flat.detrended) == (0.0, pytest.approx(0.0, abs=1e-25))


def test_seed_variance_has_the_chi_square_interval():
    values = [0.5, 0.55, 0.62, 0.48]
    found = seed_variance(values)
    assert found.value == pytest.approx(np.var(values, ddof=1))
    assert found.low == pytest.approx(3 * found.value / stats.chi2.ppf(0.975, 3))
    assert found.high == pytest.approx(3 * found.value / stats.chi2.ppf(0.025, 3))
    assert seed_variance([0.5]) is None


def test_variance_ratio_has_the_f_interval():
    found = variance_ratio([0.5, 0.7, 0.6], [0.5, 0.52, 0.51, 0.5])
    ratio = np.var([0.5, 0.7, 0.6], ddof=1) / np.var([0.5, 0.52, 0.51, 0.5], ddof=1)
    assert found.value == pytest.approx(ratio)
    assert found.low == pytest.approx(ratio / stats.f.ppf(0.975, 2, 3))
    assert found.high == pytest.approx(ratio / stats.f.ppf(0.025, 2, 3))
    assert variance_ratio([0.5, 0.7], [0.5, 0.5]) is None
    assert variance_ratio([0.5], [0.5, 0.6]) is None


def test_mean_over_seeds_has_students_interval():
    values = [0.3, 0.5, 0.4]
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = mean_over_seeds(values)
    # on the log scale, of the same width at the mean
    half = (interval.high - interval.low) / 2
    assert math.log(found.high / 0.4) == pytest.approx(half / 0.4)
    assert math.log(0.4 / found.low) == pytest.approx(half / 0.4)
    assert mean_over_seeds([0.17, 0.446]).low > 0  # two seeds far apart
    assert mean_over_seeds([]) is None


def test_series_prefers_our_name_and_leaves_out_what_is_not_finite():
    run = logged(entropy__mean=[1.0, None, math.nan, 0.5], entropy=[9.0, 9.0, 9.0, 9.0])
    steps, values = series(run, ENTROPY)
    assert (steps.tolist(), values.tolist()) == ([1.0, 4.0], [1.0, 0.5])
    assert series(run, ["absent"])[1].size == 0


def test_entropy_at_the_end_is_the_last_tenth():
    assert entropy_end(logged(entropy=[1.0] * 18 + [0.2, 0.4])) == pytest.approx(0.3)
    assert entropy_end(RunData("a", None, 0)) is None


def test_collapse_must_last():
    dip = [1.0] * 10 + [0.01] * 5 + [1.0] * 5
    assert collapse_step(logged(entropy=dip)) is None
    assert collapse_step(logged(entropy=[1.0] * 10 + [0.01] * 10)) == 11.0
    assert collapse_step(logged(entropy=[1.0] * 19 + [0.01])) == 20.0
    # one step above a tenth within a window of three does not undo it, a loop agrees
    noisy = [1.0] * 30 + [0.05, 0.05, 0.12] * 10
    expected = None
    for i in range(59, -1, -1):
        window = noisy[max(0, i - 2) : i + 1]
        if sum(window) / len(window) >= 0.1:
            break
        expected = i + 1
    assert collapse_step(logged(entropy=noisy)) == expected
    assert collapse_step(RunData("a", None, 0)) is None


@pytest.mark.skipif(not TRL_LOGS.is_dir(), reason="no TRL logs here")
def test_published_logs_collapse_under_grpo_alone():
    steps = {}
    for name in ("grpo", "abc-grpo"):
        state = json.loads((TRL_LOGS / f"qwen3-1.7b-base-{name}/trainer_state.json").read_text())
        run = RunData(name, name, None, metrics=state["log_history"])
        steps[name] = collapse_step(run)
        assert entropy_end(run) == pytest.approx({"grpo": 0.07, "abc-grpo": 0.30}[name], abs=0.01)
    assert 100 < steps["grpo"] < 300
    assert steps["abc-grpo"] is None


def test_median_counts_those_that_never_get_there():
    assert majority_median([]) is None
    assert majority_median([10.0, 20.0]) == 15.0
    assert majority_median([None, None, 5.0]) is None


def test_quadrants_are_means_over_steps_and_runs():
    one = logged(clip__q1=[0.1, 0.3], clip__q2=[0.0, 0.0], clip__q3=[0.1, 0.1], clip__q4=[0.2, 0.2])
    two = logged(clip__q1=[0.0], clip__q2=[0.0], clip__q3=[0.1], clip__q4=[0.2])
    found = quadrants([one, two])
    assert found.tokens == pytest.approx((0.1, 0.0, 0.1, 0.2))
    assert found.events == pytest.approx((0.25, 0.0, 0.25, 0.5))


def test_quadrants_that_are_not_counted_are_not_zero():
    assert quadrants([logged(reward=[1.0])]) is None
    partial = quadrants([logged(clip__q1=[0.1], clip__q3=[0.2])])
    assert partial.tokens == (0.1, None, 0.2, None)
    assert partial.events is None
    silent = quadrants([logged(clip__q1=[0.0], clip__q2=[0.0], clip__q3=[0.0], clip__q4=[0.0])])
    assert silent.events is None


def test_seconds_of_those_that_say():
    assert mean_seconds([{"seconds": 4.0}, {"seconds": None}, {"seconds": 8}]) == 6.0
    assert mean_seconds([{}]) is None
