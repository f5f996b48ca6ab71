"""Runs as a trainer leaves them, simulated: several algorithms and seeds, with token traces.

The traces obey the definitions (the discount is the exponential of the summed entropy, a weight is
advantage x discount x ratio where the bound lets it pass), so that a test can recompute them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from asymgrpo.experiment.store import RunStore

VOCABULARY = 4096
GROUPS, ROLLOUTS = 4, 6
CHARACTER = {  # final pass@1, share of entropy that is left, spread of the reward
    "grpo": (0.62, 0.08, 0.060),
    "ah-grpo": (0.58, 0.20, 0.045),
    "sa-ah-grpo": (0.72, 0.32, 0.030),
    "abc-grpo": (0.66, 0.26, 0.040),
}
ALPHA = {"ah-grpo": 0.5, "sa-ah-grpo": 0.5}


def write_runs(
    folder: Path,
    algorithms: tuple[str, ...] = ("grpo", "sa-ah-grpo"),
    seeds: int = 3,
    steps: int = 200,
    save_every: int = 20,
    problems: int = 60,
) -> list[Path]:
    """`algorithms` x `seeds` runs under `folder`, each of `steps` steps."""
    paths = []
    for algorithm in algorithms:
        for seed in range(seeds):
            path = folder / f"{algorithm}-s{seed}"
            write_run(path, algorithm, seed, steps, save_every, problems)
            paths.append(path)
    return paths


def write_run(
    path: Path, algorithm: str, seed: int, steps: int, save_every: int, problems: int
) -> RunStore:
    generator = np.random.default_rng([seed, len(algorithm)])
    store = RunStore(path)
    store.write_run(run_record(path.name, algorithm, seed, steps))
    lines = []
    for step in range(1, steps + 1):
        lines.append(metrics(algorithm, step / steps, generator) | {"step": step})
        if step == 1 or step % save_every == 0:
            store.write_rollouts(step, rollouts(algorithm, step, step / steps, generator))
    # One write in place of `steps` calls to append_metrics, each of which syncs the disk.
    import json

    text = "".join(json.dumps({"step": row["step"], **row}) + "\n" for row in lines)
    (path / "metrics.jsonl").write_text(text, encoding="utf-8")
    difficulty = np.random.default_rng(7).normal(0, 1.2, problems)
    for step in sorted({0, *range(0, steps + 1, max(1, steps // 5))}):
        store.write_evaluation(step, evaluation(algorithm, step / steps, difficulty, generator))
    return store


def run_record(name: str, algorithm: str, seed: int, steps: int) -> dict[str, Any]:
    alpha = ALPHA.get(algorithm, 0.0)
    sign = {"ah-grpo": "all", "sa-ah-grpo": "negative"}.get(algorithm, "none")
    four = algorithm == "abc-grpo"
    return {
        "name": name,
        "status": "finished",
        "algorithm": algorithm,
        "label": algorithm,
        "overrides": {},
        "objective": {
            "advantage": {"baseline": "mean", "scale": "group"},
            "horizon": {"alpha": alpha, "applies_to": sign, "normalize": "vocab"},
            "ratio": {"level": "token", "clip": "four-boundary" if four else "ppo"},
            "kl": {"beta": 0.0, "estimator": "k3"},
            "aggregate": "sequence-mean",
        },
        "model": "tiny",
        "task": "arithmetic",
        "seed": seed,
        "steps": steps,
        "config": {"learning_rate": 1e-4, "num_generations": ROLLOUTS, "max_steps": steps},
        "versions": {"torch": "2.13.0", "trl": "1.16.0"},
        "device": "cpu",
        "created": "2026-01-01T00:00:00+00:00",
        "seconds": 321.0,
    }


def progress(algorithm: str, time: float) -> float:
    """Pass@1 after a share `time` of the training."""
    final = CHARACTER[algorithm][0]
    return float(0.30 + (final - 0.30) * (1 - np.exp(-4 * time)) / (1 - np.exp(-4)))


def entropy_level(algorithm: str, time: float) -> float:
    kept = CHARACTER[algorithm][1]
    return float(1.4 * (kept + (1 - kept) * np.exp(-5 * time)))


def metrics(algorithm: str, time: float, generator: np.random.Generator) -> dict[str, float]:
    spread = CHARACTER[algorithm][2]
    entropy = entropy_level(algorithm, time) * generator.lognormal(0, 0.08)
    row = {
        "reward/mean": progress(algorithm, time) + generator.normal(0, spread),
        "reward/std": 0.4 + generator.normal(0, 0.02),
        "reward/zero_variance_groups": min(1.0, 0.2 + 0.4 * time + abs(generator.normal(0, 0.05))),
        "entropy/mean": entropy,
        "entropy/positive": entropy * 0.85,
        "entropy/negative": entropy * 1.2,
        "clip/q1": 0.004 * generator.lognormal(0, 0.4),
        "clip/q2": 0.002 * generator.lognormal(0, 0.4),
        "clip/q3": 0.005 * generator.lognormal(0, 0.4),
        "clip/q4": 0.009 * generator.lognormal(0, 0.4) * (0.5 if algorithm == "abc-grpo" else 1),
        "ratio/mean": 1 + generator.normal(0, 0.002),
        "ratio/max": 1 + generator.lognormal(0, 0.3),
        "kl/mean": 0.03 * time * generator.lognormal(0, 0.2),
        "gradient/norm": 0.4 * generator.lognormal(0, 10 * spread),
        "length/mean": 60 + 40 * time + generator.normal(0, 3),
        "length/truncated": max(0.0, 0.1 - 0.08 * time + generator.normal(0, 0.01)),
        "time/rollout": 1.2 + generator.normal(0, 0.05),
        "time/update": 0.7 + generator.normal(0, 0.03),
        "tokens_per_second": 2400 + generator.normal(0, 90),
        "loss": generator.normal(0, 0.01),
        "learning_rate": 1e-4 * (1 - time),
    }
    if algorithm in ALPHA:
        row["horizon/effective"] = min(1.0, 0.45 + 0.4 * time + generator.normal(0, 0.02))
        row["horizon/removed"] = max(0.0, 0.5 - 0.35 * time + generator.normal(0, 0.02))
    return row


def evaluation(
    algorithm: str, time: float, difficulty: np.ndarray, generator: np.random.Generator
) -> dict[str, Any]:
    samples, ks = 8, [1, 2, 4, 8]
    level = np.log(progress(algorithm, time) / (1 - progress(algorithm, time)))
    chance = 1 / (1 + np.exp(-(1.4 * level - difficulty + generator.normal(0, 0.05))))
    scores = (generator.random((len(difficulty), samples)) < chance[:, None]).astype(float)
    count = scores.sum(1)
    metrics: dict[str, Any] = {}
    for k in ks:
        value = float(np.mean([1 - _choose(samples - c, k) / _choose(samples, k) for c in count]))
        metrics[f"pass@{k}"] = {"value": value, "low": value - 0.06, "high": value + 0.06}
    return {
        "task": "arithmetic",
        "split": "test",
        "samples": samples,
        "sampling": {"temperature": 1.0},
        "seed": 0,
        "k": ks,
        "metrics": metrics,
        "grader_failures": 0,
        "problems": [
            {
                "id": number,
                "scores": row.tolist(),
                "answers": ["1" if score else None for score in row],
                "lengths": [60] * samples,
                "greedy": float(row[0]),
            }
            for number, row in enumerate(scores)
        ],
    }


def _choose(n: float, k: int) -> float:
    from math import comb

    return comb(int(n), k)


def sentences(right: bool, generator: np.random.Generator) -> tuple[str, list[str]]:
    """A prompt and the tokens of an answer to it."""
    a, b, c = (int(value) for value in generator.integers(3, 40, 3))
    prompt = (
        f"A baker makes {a} trays of {b} rolls and sells {c} of them.\n"
        "How many are left? End with the number after ####."
    )
    product = a * b if right else a * b + int(generator.integers(1, 30))
    text = (
        f"First,| there| are| {a}| *| {b}| =| {product}| rolls|.|\n|"
        f"{'Then' if right else 'Wait'},| {c}| are| sold|,| so| {product}| -| {c}| =|"
        f" {product - c}| remain|.|\n\n|####| {product - c}"
    )
    if not right and generator.random() < 0.5:
        text += f"|.| Let| me| check| again|:| maybe| it| is| {product + 7}|?"
    return prompt, [*text.split("|"), "<|im_end|>"]


def rollouts(
    algorithm: str, step: int, time: float, generator: np.random.Generator
) -> list[dict[str, Any]]:
    rows = []
    for group in range(GROUPS):
        state = int(generator.integers(1 << 30))
        right = generator.random(ROLLOUTS) < progress(algorithm, time)
        right[0], right[1] = True, False
        rewards = right.astype(float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for number in range(ROLLOUTS):
            prompt, tokens = sentences(bool(right[number]), np.random.default_rng(state))
            row = trace(algorithm, tokens, float(advantages[number]), time, generator)
            row |= {"step": step, "group": group, "rollout": number, "prompt": prompt}
            row |= {"reward": float(rewards[number]), "kl": abs(generator.normal(0, 0.02))}
            row |= {"truncated": bool(generator.random() < 0.05)}
            rows.append(row)
    return rows


def trace(
    algorithm: str,
    tokens: list[str],
    advantage: float,
    time: float,
    generator: np.random.Generator,
) -> dict[str, Any]:
    length = len(tokens)
    entropies = generator.gamma(0.6, entropy_level(algorithm, time) / 0.6, length)
    ratio = np.exp(generator.normal(0, 0.11, length))
    applies = algorithm == "ah-grpo" or (algorithm == "sa-ah-grpo" and advantage < 0)
    alpha = ALPHA.get(algorithm, 0.0) * 4 if applies else 0.0  # short answers: a stronger one shows
    discount = np.exp(-alpha * np.cumsum(entropies / np.log(VOCABULARY)))
    up, down = ratio > 1.2, ratio < 0.8
    quadrant = np.where(up, 1, np.where(down, 2, 0))
    if advantage <= 0:
        quadrant = np.where(down, 3, np.where(up, 4, 0))
    ppo = (quadrant == 1) | (quadrant == 3)
    clipped = (quadrant > 0) if algorithm == "abc-grpo" else ppo
    scale = advantage / length / (GROUPS * ROLLOUTS)
    return {
        "completion": "".join(tokens),
        "advantage": advantage,
        "token_ids": [sum(map(ord, token)) % VOCABULARY for token in tokens],
        "tokens": tokens,
        "logps": (-entropies * generator.random(length)).tolist(),
        "entropies": entropies.tolist(),
        "discount": discount.tolist(),
        "ratio": ratio.tolist(),
        "weight": np.where(clipped, 0.0, scale * discount * ratio).tolist(),
        "grpo_weight": np.where(ppo, 0.0, scale * ratio).tolist(),
        "quadrant": quadrant.tolist(),
        "clipped": clipped.tolist(),
    }
