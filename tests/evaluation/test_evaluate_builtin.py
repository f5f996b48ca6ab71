"""Evaluation of the built-in model on the built-in task, with a real engine."""

import pytest

from asymgrpo.evaluation import evaluate, evaluate_policy
from asymgrpo.models import load_policy
from asymgrpo.rollout import Sampling, choose_engine
from asymgrpo.tasks import load_task


@pytest.fixture(scope="module")
def setting():
    policy = load_policy("tiny")
    task = load_task("arithmetic")
    test = task.examples("test")
    return policy, task, [test[index] for index in range(24)]


def evaluated(setting, engine="native", **options):
    policy, task, examples = setting
    chosen, reason = choose_engine(engine, policy.model, policy.tokenizer)
    assert reason is None
    return evaluate_policy(
        chosen,
        policy.tokenizer,
        task,
        examples,
        samples=4,
        ks=[1, 4],
        sampling=Sampling(max_new_tokens=160),
        seed=0,
        **options,
    )


def test_the_built_in_model_is_neither_helpless_nor_perfect(setting):
    record = evaluated(setting)
    assert record["grader_failures"] == 0
    assert 0.2 < record["metrics"]["pass@1"]["value"] < 0.9
    assert record["metrics"]["pass@4"]["value"] > record["metrics"]["pass@1"]["value"]
    assert all(1 <= length <= 160 for p in record["problems"] for length in p["lengths"])
    # the same problems through the other engine: other samples, about as many right
    other = evaluated(setting, engine="transformers")
    assert abs(other["metrics"]["pass@1"]["value"] - record["metrics"]["pass@1"]["value"]) < 0.25


def test_twice_and_resumed_give_the_same(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "ROLLOUTS_A_CHUNK", 40)
    whole = evaluated(setting)
    partial = tmp_path / "partial.jsonl"
    evaluated(setting, partial=partial)
    lines = partial.read_text().splitlines(keepends=True)
    partial.write_text("".join(lines[:8]) + lines[8][:20])
    assert evaluated(setting, partial=partial) == whole
