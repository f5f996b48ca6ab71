"""Samples a policy on a task's problems, grades it, and says how good it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asymgrpo.errors import UserError
from asymgrpo.evaluation.estimators import (
    avg_at_k,
    count_correct,
    maj_at_k,
    pass_at_k,
)
from asymgrpo.evaluation.intervals import Estimate, bootstrap_means
from asymgrpo.evaluation.partial import PartialResults, digest
from asymgrpo.rollout.stop_strings import completion_text
from asymgrpo.tasks import FailureGuard, grade_many, reference_of, render_prompt

if TYPE_CHECKING:
    from asymgrpo.rollout.records import Engine, Rollout, Sampling
    from asymgrpo.tasks.base import Example, Grade, Task

Progress = Callable[[int, int], None]

ROLLOUTS_A_CHUNK = 512
"""Rollouts between two saves of the partial results."""
FAILURES_JUDGED_FROM = 50
"""Answers before an evaluation may stop because its grader fails on too many."""


def rollout_seed(seed: int, problem: int, sample: int) -> int:
    """The seed of one rollout, from these three alone, so that all policies get the same.

    >>> rollout_seed(0, 1, 2) == rollout_seed(0, 1, 2) != rollout_seed(0, 2, 1)
    True
    """
    text = f"evaluation {seed} {problem} {sample}"
    # 63 bits: a non-negative whole number in any 64-bit generator
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompt_ids(
    task: Task,
    example: Example,
    tokenizer: Any,
    system_prompt: str | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of an example's prompt, through the chat template where the tokenizer has one."""
    prompt = render_prompt(task, example, tokenizer, system_prompt)
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(template or {})
    )
    return [int(token) for token in encoded["input_ids"]]


@dataclass(frozen=True)
class _Evaluation:
    """What does not change from problem to problem."""

    engine: Engine
    tokenizer: Any
    task: Task
    samples: int
    sampling: Sampling
    seed: int
    greedy: bool
    log: bool

    @property
    def rollouts_a_problem(self) -> int:
        return self.samples + self.greedy

    def setting(self, model_key: str, task_key: str) -> dict[str, Any]:
        return {
            "task": [self.task.name, task_key],
            "samples": self.samples,
            "sampling": asdict(self.sampling),
            "seed": self.seed,
            "greedy": self.greedy,
            "log": self.log,
            "engine": self.engine.name,
            "model": model_key,
        }

    def run(
        self,
        indices: Sequence[int],
        prompts: Sequence[list[int]],
        examples: Sequence[Example],
        guard: FailureGuard,
        on_progress: Progress,
    ) -> list[dict[str, Any]]:
        """The problems at `indices`, sampled and graded."""
        pairs = [(i, sample) for i in indices for sample in range(self.samples)]
        rollouts = self.engine.generate(
            [prompts[i] for i, _ in pairs],
            self.sampling,
            [rollout_seed(self.seed, i, sample) for i, sample in pairs],
            on_progress,
        )
        if self.greedy:
            rollouts = rollouts + self.engine.generate(
                [prompts[i] for i in indices],
                replace(self.sampling, greedy=True),
                [rollout_seed(self.seed, i, self.samples) for i in indices],
                lambda done, _: on_progress(len(pairs) + done, 0),
            )
        owners = [i for i, _ in pairs] + (list(indices) if self.greedy else [])
        texts = [
            completion_text(rollout.token_ids, self.tokenizer, self.sampling.stop)
            for rollout in rollouts
        ]
        grades = grade_many(self.task, texts, [examples[i] for i in owners])
        for grade in sorted(grades, key=lambda grade: grade.failed):
            guard.count(grade)  # failures last: their share is judged over the whole batch
        made = [_Sample(*parts) for parts in zip(rollouts, texts, grades, strict=True)]
        sampled, greedy = made[: len(pairs)], made[len(pairs) :]
        return [
            self._problem(
                examples[index],
                sampled[place * self.samples : (place + 1) * self.samples],
                greedy[place] if self.greedy else None,
            )
            for place, index in enumerate(indices)
        ]

    def _problem(
        self, example: Example, samples: Sequence[_Sample], greedy: _Sample | None
    ) -> dict[str, Any]:
        everything = [*samples, *([] if greedy is None else [greedy])]
        grades = [sample.grade for sample in samples]
        problem: dict[str, Any] = {
            "scores": [float(grade.score) for grade in grades],
            "answers": [grade.answer for grade in grades],
            # Equal answers vote together, whatever their spelling.
            "votes": [grade.key or grade.answer for grade in grades],
            "lengths": [len(sample.rollout.token_ids) for sample in samples],
            "greedy": None if greedy is None else float(greedy.grade.score),
            "grader_failures": sum(sample.grade.failed for sample in everything),
        }
        if self.log:
            problem["log"] = [
                self._logged(example, *numbered) for numbered in enumerate(everything)
            ]
        return problem

    def _logged(self, example: Example, number: int, sample: _Sample) -> dict[str, Any]:
        """A line of the log of samples."""
        return {
            "sample": number,
            "greedy": self.sampling.greedy or number == self.samples,
            "prompt": self.tokenizer.decode(
                list(sample.rollout.prompt_ids), skip_special_tokens=False
            ),
            "completion": sample.text,
            "answer": sample.grade.answer,
            "reference": reference_of(self.task, example),
            "score": float(sample.grade.score),
            "reason": sample.grade.reason,
            "tokens": len(sample.rollout.token_ids),
            "finish": "stop" if sample.rollout.finished else "length",
        }


@dataclass(frozen=True)
class _Sample:
    """One completion and what the grader says of it."""

    rollout: Rollout
    text: str
    grade: Grade


def evaluate_policy(
    engine: Engine,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Example],
    *,
    samples: int,
    ks: Sequence[int],
    sampling: Sampling,
    seed: int,
    greedy: bool = True,
    split: str = "test",
    system_prompt: str | None = None,
    template: Mapping[str, Any] | None = None,
    cluster: str | None = None,
    log: bool = False,
    model_key: str = "",
    task_key: str = "",
    on_progress: Progress | None = None,
    partial: Path | None = None,
) -> dict[str, Any]:
    """The evaluation record of a policy: metrics with intervals, and every problem's scores.

    `on_progress(done, total)` counts rollouts. With `partial`, problems are saved there as they
    are done, and those done before under the same setting, `model_key` (which must name the
    weights), `task_key` (the task's options), prompt and row are not sampled again; the file may be
    deleted once the record is saved. `template` holds options of the chat template, as the
    trainer's `chat_template_kwargs`. `cluster` is a column that names the family of a problem;
    related problems are then resampled together. With `log`, the record has every prompt and
    completion under `log`.
    """
    ks = _checked_ks(ks, samples)
    if not examples:
        raise UserError(f"the {split} split of {task.name} has no problems to evaluate")
    families = None if cluster is None else [cluster_of(row, cluster) for row in examples]
    _check_stop(sampling.stop, tokenizer)
    evaluation = _Evaluation(
        engine, tokenizer, task, samples, sampling, seed, greedy and not sampling.greedy, log
    )
    prompts = [prompt_ids(task, row, tokenizer, system_prompt, template) for row in examples]
    saved = PartialResults(partial, evaluation.setting(model_key, task_key)) if partial else None
    problems = _evaluate_all(evaluation, prompts, examples, saved, on_progress)
    ids = _problem_ids(examples)
    for place, (problem, example) in enumerate(zip(problems, examples, strict=True)):
        problem["row"] = row_key(example)
        if families is not None:
            problem["cluster"] = families[place]
    failures = sum(problem.pop("grader_failures") for problem in problems)
    logged = [
        {"problem": i, **line}
        for i, problem in zip(ids, problems, strict=True)
        for line in problem.pop("log", ())
    ]
    record = {
        "task": task.name,
        "split": split,
        "engine": engine.name,
        "samples": samples,
        "sampling": asdict(sampling),
        "seed": seed,
        "k": ks,
        "cluster": cluster,
        "metrics": {name: estimate.as_dict() for name, estimate in summarize(problems, ks).items()},
        "grader_failures": failures,
        "problems": [{"id": i, **problem} for i, problem in zip(ids, problems, strict=True)],
    }
    return {**record, "log": logged} if log else record


def row_key(example: Example) -> str:
    """A short name for a row with all of its columns: one that is edited has another.

    >>> row = {"question": "1 + 1", "answer": "2"}
    >>> row_key(row) == row_key({**row, "answer": "3"})
    False
    """
    return digest(dict(example))[:16]


def _check_stop(stop: Sequence[str], tokenizer: Any) -> None:
    """Refuse a stop string that no text holds: special tokens are left out of it."""
    for word in stop:
        if word in getattr(tokenizer, "all_special_tokens", ()):
            raise UserError(
                f"the stop string {word!r} is a special token, which the text of a completion does "
                "not hold; leave it out, the model's own end tokens stop it"
            )


def _checked_ks(ks: Sequence[int], samples: int) -> list[int]:
    if samples < 1:
        raise UserError(f"samples must be at least 1, not {samples}")
    wrong = [k for k in ks if not 1 <= k <= samples]
    if wrong:
        raise UserError(
            f"k = {wrong[0]} needs between 1 and {samples} samples a problem; "
            f"raise the samples or leave it out"
        )
    return sorted({1, *ks})


def _evaluate_all(
    evaluation: _Evaluation,
    prompts: Sequence[list[int]],
    examples: Sequence[Example],
    saved: PartialResults | None,
    on_progress: Progress | None,
) -> list[dict[str, Any]]:
    known = saved.load() if saved else {}
    names = [digest([*pair]) for pair in zip(prompts, map(row_key, examples), strict=True)]
    done = {i: known[i, name] for i, name in enumerate(names) if (i, name) in known}
    total = len(prompts) * evaluation.rollouts_a_problem

    def report(finished: int) -> None:
        if on_progress:
            on_progress(finished, total)

    missing = [i for i in range(len(prompts)) if i not in done]
    answers = len(missing) * evaluation.rollouts_a_problem
    guard = FailureGuard(after=min(FAILURES_JUDGED_FROM, answers))
    for chunk in _chunks(missing, max(1, ROLLOUTS_A_CHUNK // evaluation.rollouts_a_problem)):
        start = len(done) * evaluation.rollouts_a_problem
        report(start)
        problems = evaluation.run(chunk, prompts, examples, guard, _onward(report, start))
        done.update(zip(chunk, problems, strict=True))
        if saved:
            # A failed grade is not kept, so that it is graded anew once the grader is mended.
            saved.append((i, names[i], done[i]) for i in chunk if not done[i]["grader_failures"])
    report(total)
    return [dict(done[i]) for i in range(len(prompts))]


def _onward(report: Callable[[int], None], start: int) -> Progress:
    return lambda done, _: report(start + done)


def _chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _problem_ids(examples: Sequence[Example]) -> list[str | int]:
    """Each example's own id if all have one and all differ, else its place."""
    ids = [example.get("id") for example in examples]
    own = [i for i in ids if isinstance(i, str | int) and not isinstance(i, bool)]
    return own if len(set(map(str, own))) == len(examples) else list(range(len(examples)))


def cluster_of(example: Example, column: str) -> str:
    """The family of a problem, by the column that names it.

    >>> cluster_of({"question": "1 + 1", "template": 7}, "template")
    '7'
    """
    if example.get(column) is None:
        there = ", ".join(sorted(map(str, example)))
        raise UserError(f"no column {column} to group related problems by; a row has {there}")
    return str(example[column])


def summarize(problems: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> dict[str, Estimate]:
    """Metrics over problems, each the mean of its per-problem estimate with a 95 % interval.

    Where every problem names its `cluster`, related problems are resampled together.

    >>> made = [{"scores": [1.0, 0.0], "answers": ["4", "5"], "greedy": 1.0}] * 3
    >>> {name: estimate.value for name, estimate in summarize(made, [1, 2]).items()}
    {'pass@1': 0.5, 'pass@2': 1.0, 'avg@2': 0.5, 'maj@2': 0.5, 'greedy': 1.0}
    """
    n = len(problems[0]["scores"])
    correct = [count_correct(problem["scores"]) for problem in problems]
    columns = {f"pass@{k}": [pass_at_k(n, c, k) for c in correct] for k in ks}
    columns[f"avg@{n}"] = [avg_at_k(problem["scores"]) for problem in problems]
    # A scorer that reads out no answers leaves nothing to vote on.
    if any(answer is not None for problem in problems for answer in problem["answers"]):
        for k in sorted({*ks, n} - {1}):
            columns[f"maj@{k}"] = [
                maj_at_k(p.get("votes", p["answers"]), p["scores"], k) for p in problems
            ]
    if all(problem["greedy"] is not None for problem in problems):
        columns["greedy"] = [problem["greedy"] for problem in problems]
    clusters = [problem.get("cluster") for problem in problems]
    related = None if None in clusters else clusters
    ends = bootstrap_means(np.array(list(columns.values()), dtype=np.float64).T, related)
    return {
        name: Estimate(*(float(part[place]) for part in ends)) for place, name in enumerate(columns)
    }
