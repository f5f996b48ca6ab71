"""Comparisons of whole runs, made up and from real logs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from asymgrpo.errors import UserError
from asymgrpo.experiment.compare import RunData, compare_runs, load_runs, table_rows
from asymgrpo.experiment.store import RunStore

TRL_LOGS = Path(__file__).parents[3] / "shared" / "data" / "trl-logs"


def evaluation(step, correct, samples=8, **changes):
    """A record in which problem i has `correct[i]` of its samples right."""
    return {
        "step": step,
        "task": "arithmetic",
        "split": "test",
        "samples": samples,
        "sampling": {"temperature": 1.0},
        "seed": 0,
        "k": [1, 4],
        "problems": [
            {"id": i, "scores": [1.0] * int(c) + [0.0] * int(samples - c)}
            for i, c in enumerate(correct)
        ],
        **changes,
    }


def run(label, seed, *evaluations, metrics=(), **record):
    return RunData(label, label.split(" ")[0], seed, record, list(metrics), list(evaluations))


class World:
    """Runs on the same problems, with noise of problems, seeds and samples."""

    def __init__(self, seed, problems=200, seed_sd=0.03):
        self.rng = np.random.default_rng(seed)
        self.seed_sd = seed_sd
        self.difficulty = self.rng.beta(1.5, 1.5, size=problems)
        self.before = self.rng.binomial(8, self.difficulty)

    def label(self, name, seeds, gain=0.0, **record):
        taste = self.rng.normal(0, 0.05, size=len(self.difficulty))
        return [self.run(name, seed, gain + taste, **record) for seed in range(seeds)]

    def run(self, name, seed, shift, **record):
        luck = self.rng.normal(0, self.seed_sd)
        evaluations = [evaluation(0, self.before)]
        for step in (20, 40):
            chance = np.clip(self.difficulty + shift * step / 40 + luck, 0, 1)
            evaluations.append(evaluation(step, self.rng.binomial(8, chance)))
        rewards = 0.4 + 0.005 * np.arange(40) + self.rng.normal(0, 0.03, size=40)
        metrics = [
            {"step": i + 1, "reward/mean": float(r), "entropy/mean": 1.0 - 0.01 * i}
            | {f"clip/q{q}": 0.01 * q for q in range(1, 5)}
            for i, r in enumerate(rewards)
        ]
        return run(name, seed, *evaluations, metrics=metrics, status="finished", **record)


def finals_only(runs):
    """The runs with nothing but their last evaluation, to be quick."""
    return [run(r.label, r.seed, {**r.evaluations[-1], "k": [1]}, status="finished") for r in runs]


def test_no_difference_among_three_gives_few_verdicts():
    comparisons = 120
    wrong = 0
    for seed in range(comparisons):
        world = World(seed, problems=100)
        runs = [r for name in ("grpo", "ah-grpo", "sa-ah-grpo") for r in world.label(name, 3)]
        final = [p for p in compare_runs(finals_only(runs)).pairs if p.metric == "final pass@1"]
        assert len(final) == 3
        wrong += any(pair.verdict != "inconclusive" for pair in final)
    assert wrong <= stats.binom.ppf(0.99, comparisons, 0.05)


def test_a_difference_of_a_tenth_is_found_with_five_seeds():
    comparisons, found = 50, 0
    for seed in range(comparisons):
        world = World(1_000 + seed)
        runs = world.label("grpo", 5) + world.label("sa-ah-grpo", 5, gain=0.1)
        pair = compare_runs(finals_only(runs)).pair("sa-ah-grpo", "grpo")
        found += pair.verdict == "better"
    assert found >= 0.8 * comparisons


@pytest.fixture(scope="module")
def comparison():
    world = World(7, seed_sd=0.01)
    runs = world.label("sa-ah-grpo", 5, gain=0.25, seconds=30.0) + world.label("grpo", 5, gain=0.1)
    return compare_runs(runs)


def test_the_better_one_is_named(comparison):
    pair = comparison.pair("sa-ah-grpo", "grpo")
    assert pair.verdict == "better"
    assert pair.p_holm < 0.05
    assert pair.difference.low > 0
    assert (pair.seeds, pair.problems, pair.more_seeds) == ((0, 1, 2, 3, 4), 200, None)
    assert comparison.headline.startswith("sa-ah-grpo is better than grpo in final pass@1 by +0.1")
    assert comparison.headline.count(".") == comparison.headline.count("0.") + 1  # one sentence


def test_the_baseline_comes_first_and_the_metrics_are_all_there(comparison):
    assert [summary.label for summary in comparison.labels] == ["grpo", "sa-ah-grpo"]
    assert comparison.baseline == "grpo"
    metrics = [pair.metric for pair in comparison.pairs]
    assert metrics == ["final pass@1", "peak pass@1", "final pass@4"]


def test_summaries(comparison):
    grpo, other = comparison.labels
    assert grpo.before == other.before
    assert other.gain.low > 0.1
    assert other.gain.value == pytest.approx(other.after.value - other.before.value)
    assert other.peak.value >= other.after.value
    assert set(other.pass_at_k) == {1, 4}
    assert other.reward_variance.estimate.low < other.reward_variance.estimate.value
    assert other.detrended_variance.ratio.low < 1 < other.detrended_variance.ratio.high
    assert grpo.detrended_variance.ratio is None
    assert grpo.seed_variance.estimate.value > 0
    assert grpo.entropy_end.value == pytest.approx(np.mean([0.61, 0.62, 0.63, 0.64]))
    assert (grpo.collapse_step, grpo.collapsed) == (None, 0)
    assert other.quadrants.events == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert (other.seconds, grpo.seconds) == (30.0, None)
    assert comparison.target == pytest.approx(grpo.after.value)
    assert other.steps_to_target == 20.0
    assert other.reached == 5


def test_as_json_and_as_a_table(comparison):
    copy = json.loads(json.dumps(comparison.to_dict()))
    assert copy["labels"][1]["pass_at_k"]["4"]["value"] > 0
    assert copy["pairs"][0]["verdict"] == "better"
    rows = table_rows(comparison)
    assert [row["label"] for row in rows] == ["grpo", "sa-ah-grpo"]
    assert rows[1]["seeds"] == "5"
    assert rows[1]["gain"].startswith("+0.")
    assert rows[1]["clip events q1/q2/q3/q4"] == "10/20/30/40 %"
    assert (rows[0]["seconds"], rows[1]["seconds"]) == ("-", "30")


def test_pairs_are_by_seed_and_problem_not_by_place():
    world = World(3, problems=50)
    grpo, other = world.label("grpo", 3), world.label("abc-grpo", 3, gain=0.1)
    straight = compare_runs(grpo + other).pair("abc-grpo", "grpo")
    shuffled = [
        RunData(r.label, r.algorithm, r.seed, r.run, r.metrics, [
            {**e, "problems": e["problems"][::-1]} for e in reversed(r.evaluations)
        ])
        for r in reversed(other)
    ]  # fmt: skip
    turned = compare_runs(grpo + shuffled).pair("abc-grpo", "grpo")
    assert turned.difference.value == pytest.approx(straight.difference.value, abs=1e-12)
    assert turned.difference.low == pytest.approx(straight.difference.low, abs=0.02)
    assert set(turned.seeds) == {0, 1, 2}


def test_only_what_both_have_is_compared():
    world = World(4, problems=40)
    grpo, other = world.label("grpo", 3), world.label("ah-grpo", 4)
    grpo[1].evaluations[-1]["problems"].pop(5)
    pair = compare_runs(grpo + other).pair("ah-grpo", "grpo")
    assert (pair.seeds, pair.problems) == ((0, 1, 2), 39)
    assert "39 problems that all have" in pair.note


def test_one_seed_gives_an_interval_and_no_verdict():
    world = World(5)
    pair = compare_runs(world.label("grpo", 1) + world.label("ah-grpo", 1, gain=0.3)).pair(
        "ah-grpo", "grpo"
    )
    assert pair.difference.low > 0
    assert (pair.verdict, pair.p_holm, pair.more_seeds) == ("inconclusive", None, None)
    assert "one seed: only problems are resampled" in pair.note


def test_an_inconclusive_verdict_says_what_would_settle_it():
    def runs(label, shares):
        return [run(label, s, evaluation(9, [share] * 40, 100)) for s, share in enumerate(shares)]

    # +0.05 on average over three seeds with a spread of 0.05, on problems that all agree
    found = compare_runs(runs("grpo", [50] * 3) + runs("ah-grpo", [50, 55, 60]))
    pair = found.pair("ah-grpo", "grpo")
    assert pair.verdict == "inconclusive"
    # t over n seeds: smallest n with 0.05 >= (t(.975, n-1) + z(.8)) 0.05 / sqrt(n), less the three
    total = next(
        n for n in range(4, 200)
        if (stats.t.ppf(0.975, n - 1) + stats.norm.ppf(0.8)) / np.sqrt(n) <= 1
    )  # fmt: skip
    assert pair.more_seeds == total - 3
    assert f"about {pair.more_seeds} more seeds would settle it" in pair.note
    assert pair.note in found.headline
    assert found.headline.startswith("No difference from grpo in final pass@1 is established")


def test_the_verdict_goes_by_the_corrected_p_value():
    def runs(label, shares):
        return [run(label, s, evaluation(9, [share] * 40, 100)) for s, share in enumerate(shares)]

    one, two = runs("grpo", [50] * 5), runs("ah-grpo", [52, 54, 56, 50, 57])
    # all problems agree, so this is the t-test over seeds: p = 0.033
    expected = stats.ttest_1samp([0.02, 0.04, 0.06, 0.0, 0.07], 0.0).pvalue
    alone = compare_runs(one + two).pair("ah-grpo", "grpo")
    assert alone.p_value == alone.p_holm == pytest.approx(expected, abs=0.001)
    assert alone.verdict == "better"
    three = runs("abc-grpo", [51, 49, 53, 50, 48])
    among_three = compare_runs(one + two + three).pair("ah-grpo", "grpo")
    assert among_three.p_value == alone.p_value
    assert among_three.p_holm == pytest.approx(3 * alone.p_value)
    assert among_three.verdict == "inconclusive"
    assert among_three.more_seeds > 0


def test_hopeless_and_equal_pairs_say_so():
    def runs(label, shares):
        return [run(label, s, evaluation(9, [share] * 40, 100)) for s, share in enumerate(shares)]

    far = compare_runs(runs("grpo", [50] * 3) + runs("ah-grpo", [40, 61, 50]))
    assert "more than 100 more seeds" in far.pair("ah-grpo", "grpo").note
    equal = compare_runs(runs("grpo", [50, 60]) + runs("sa-ah-grpo alpha=0", [50, 60]))
    pair = equal.pair("sa-ah-grpo alpha=0", "grpo")
    assert (pair.verdict, pair.p_value, pair.note) == (
        "inconclusive",
        1.0,
        "equal on every problem",
    )


def test_problems_may_be_what_is_missing():
    rng = np.random.default_rng(8)
    shift = rng.choice([-30, 32], size=40)
    runs = [
        run(label, seed, evaluation(9, 50 + sign * shift + rng.integers(-1, 2, size=40), 100))
        for label, sign in (("grpo", 0), ("ah-grpo", 1))
        for seed in range(3)
    ]
    assert "more problems" in compare_runs(runs).pair("ah-grpo", "grpo").note


def test_different_tasks_and_settings():
    grpo = [run("grpo", s, evaluation(9, [4] * 10)) for s in range(2)]
    other_task = [run("ah-grpo", s, evaluation(9, [5] * 10, task="gsm8k")) for s in range(2)]
    pair = compare_runs(grpo + other_task).pair("ah-grpo", "grpo")
    assert (pair.difference, pair.note) == (None, "evaluated on different tasks")
    hotter = [run("ah-grpo", s, evaluation(8, [5] * 10, sampling={})) for s in range(2)]
    note = compare_runs(grpo + hotter).pair("ah-grpo", "grpo").note
    assert "different steps (8 to 9)" in note
    assert "sampled with different settings" in note
    no_seed = compare_runs([*grpo, run("ah-grpo", 7, evaluation(9, [5] * 10))])
    assert no_seed.pair("ah-grpo", "grpo").note == "no seed in common"


def test_peak_is_after_step_zero():
    better_before = [evaluation(0, [8] * 10), evaluation(5, [6] * 10), evaluation(9, [2] * 10)]
    summary = compare_runs([run("grpo", 0, *better_before)]).labels[0]
    assert summary.peak.value == 0.75
    assert summary.after.value == 0.25
    assert summary.gain.value == -0.75


def evaluated_at(name, steps, rng, difficulty):
    return [
        run(name, seed, *(evaluation(s, rng.binomial(8, difficulty), k=[1]) for s in steps))
        for seed in range(3)
    ]


def test_a_peak_of_many_evaluations_is_not_compared_with_one_of_few():
    """Equal policies, one evaluated once and one 25 times: the best of 25 is no better policy."""
    rng = np.random.default_rng(4)
    verdicts = 0
    for _ in range(20):
        difficulty = rng.beta(1.5, 1.5, size=60)
        once = evaluated_at("grpo", [25], rng, difficulty)
        often = evaluated_at("ah-grpo", range(1, 26), rng, difficulty)
        pair = compare_runs([*once, *often]).pair("ah-grpo", "grpo", "peak pass@1")
        verdicts += pair.verdict != "inconclusive"
    assert verdicts <= 3


def test_a_peak_is_of_the_steps_that_all_were_evaluated_at():
    few = [run("grpo", 0, evaluation(5, [2] * 10), evaluation(9, [3] * 10))]
    many = [run("ah-grpo", 0, *(evaluation(s, [c] * 10) for s, c in ((5, 4), (7, 8), (9, 5))))]
    pair = compare_runs([*few, *many]).pair("ah-grpo", "grpo", "peak pass@1")
    assert pair.difference.value == pytest.approx((5 - 3) / 8)  # step 7 is not grpo's
    apart = [run("ah-grpo", 0, evaluation(4, [4] * 10))]
    pair = compare_runs([*few, *apart]).pair("ah-grpo", "grpo", "peak pass@1")
    assert (pair.difference, pair.note) == (None, "not evaluated at the same steps")


@pytest.mark.parametrize("score", [float("nan"), -1.0, 2.0])
def test_a_score_outside_zero_to_one_is_told(score):
    record = {"step": 3, "problems": [{"id": 0, "scores": [1.0, score]}]}
    with pytest.raises(UserError, match="problem 0 of step 3: a score is a number from 0 to 1"):
        compare_runs([run("grpo", 0, record)])


def test_sweeps_keep_their_labels_apart():
    world = World(9, problems=30)
    runs = [r for a in (0.25, 0.5) for r in world.label(f"sa-ah-grpo alpha={a}", 2)]
    found = compare_runs(runs)
    assert found.baseline is None
    assert [s.label for s in found.labels] == ["sa-ah-grpo alpha=0.25", "sa-ah-grpo alpha=0.5"]
    assert found.labels[1].reward_variance.ratio is None
    other = compare_runs(runs, baseline="sa-ah-grpo alpha=0.5", target=0.99)
    assert other.labels[0].label == "sa-ah-grpo alpha=0.5"
    assert (other.target, other.labels[0].steps_to_target) == (0.99, None)
    with pytest.raises(UserError, match="no run is labelled 'grpo'; there are: sa-ah-grpo"):
        compare_runs(runs, baseline="grpo")


def test_what_is_missing_is_none():
    bare = compare_runs([RunData("grpo", "grpo", 0), RunData("ah-grpo", "ah-grpo", None)])
    summary = bare.labels[0]
    for name in ("before", "after", "gain", "peak", "reward_variance", "entropy_end", "quadrants"):
        assert getattr(summary, name) is None
    assert bare.headline == "The runs were not evaluated, so there is no verdict on their accuracy."
    assert bare.pair("ah-grpo", "grpo").note == "not evaluated"
    assert set(table_rows(bare)[0].values()) == {"grpo", "1", "-"}
    json.dumps(bare.to_dict())
    assert compare_runs([]).headline == "There are no runs to compare."


def test_unfinished_runs_are_noted():
    runs = [
        run("grpo", 0, evaluation(9, [4] * 5), status="interrupted"),
        run("grpo", 0, status="finished"),
    ]
    assert compare_runs(runs).labels[0].notes == (
        "1 of 2 runs not finished",
        "1 of 2 runs not evaluated",
        "several runs of one seed; pairs take the last of them",
    )


@pytest.mark.parametrize(
    ("record", "says"),
    [({"step": 3}, "lacks 'problems'"), ({"step": 3, "problems": []}, "has no scores")],
)
def test_a_broken_evaluation_is_told(record, says):
    with pytest.raises(UserError, match=says):
        compare_runs([run("grpo", 0, record)])


@pytest.mark.skipif(not TRL_LOGS.is_dir(), reason="no TRL logs here")
def test_published_logs_compare_without_evaluations():
    runs = []
    for name in ("grpo", "abc-grpo"):
        state = json.loads((TRL_LOGS / f"qwen3-1.7b-base-{name}/trainer_state.json").read_text())
        runs.append(RunData(name, name, None, metrics=state["log_history"]))
    found = compare_runs(runs)
    ratio = found.labels[1].detrended_variance.ratio
    assert 0 < ratio.low < ratio.value < ratio.high
    assert found.labels[0].collapsed == 1


def test_runs_from_disk(tmp_path):
    for seed in range(2):
        store = RunStore(tmp_path / f"grpo-{seed}")
        store.write_run({"algorithm": "grpo", "label": "grpo beta=0.1", "seed": seed})
        store.append_metrics(1, {"reward": 0.5})
        record = evaluation(0, [4] * 10)
        record.pop("step")
        store.write_evaluation(0, record)
    runs = load_runs([tmp_path / "grpo-0", tmp_path / "grpo-1"])
    assert [(r.label, r.algorithm, r.seed) for r in runs] == [
        ("grpo beta=0.1", "grpo", 0),
        ("grpo beta=0.1", "grpo", 1),
    ]
    assert compare_runs(runs).labels[0].before.value == 0.5
    with pytest.raises(UserError, match="holds no run"):
        load_runs([tmp_path / "absent"])


def test_no_torch_is_imported():
    code = "import sys, asymgrpo.experiment.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
