"""Inputs that nobody would write, and what reads them: only a `UserError` may come out.

Each target is a strategy and a function of one input; `scripts/fuzz.py` runs them at length.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from asymgrpo.errors import UserError
from asymgrpo.evaluation.partial import PartialResults
from asymgrpo.experiment.compare import compare_runs, load_runs
from asymgrpo.experiment.plan import parse_sweeps, plan, split_spec
from asymgrpo.experiment.settings import RunSettings, load_recipe, make_settings, parse_assignments
from asymgrpo.experiment.store import RunStore
from asymgrpo.report.sources import read_source
from asymgrpo.tasks import Grade, load_task
from asymgrpo.tasks.graders import GRADERS

HANG = 20
"""Seconds after which one input counts as a hang."""


@dataclass(frozen=True)
class Target:
    """A reader, and what to feed it."""

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]
    share: int
    """Of every 100 inputs."""


# Text and values

PIECES = [
    *"0123456789.,-+/*^_%$#=()[]{}\\ \n\t\0", "\\boxed{", "\\frac{", "\\sqrt", "\\text{", "}",
    "####", "The answer is", "answer:", "1,000", "1e400", "1e-400", "0x1f", "½", "٣", "−", "\u2028",
    "\u202e",
    "\ud800", "𝟙", "\\infty", "inf", "nan", "None", "10^{10^{10}}", "9" * 50, "1/0", "\\pi", "x^2",
    "__import__('os')", "<think>", "</think>", "a" * 300, "(" * 40, "52_8", "50\\%", "dollars",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-5, 5), st.floats(), TEXT,
    st.sampled_from([10**400, -(10**19), 2**63, "1" * 5000]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
RAW = st.binary(max_size=60) | TEXT.map(lambda text: text.encode("utf-8", "surrogatepass"))


def objects(names: list[str], values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[Any]:
    """Mappings whose keys are mostly those that a reader looks for."""
    return st.dictionaries(st.sampled_from(names) | TEXT, values, max_size=len(names) + 2)


def jsonl(rows: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Lines, most of them JSON, some torn, some neither."""
    line = st.one_of(
        rows.map(_dumps), rows.map(_dumps), st.builds(_torn, rows, st.integers(0)), RAW
    )
    return st.lists(line, max_size=5).map(b"\n".join)


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def _torn(value: Any, place: int) -> bytes:
    data = _dumps(value)
    return data[: place % (len(data) + 1)]


# Graders and tasks

PAIRS = st.tuples(TEXT, TEXT)


def graded(name: str) -> Callable[[tuple[str, str]], None]:
    def read(pair: tuple[str, str]) -> None:
        grade = GRADERS[name](*pair)
        assert isinstance(grade, Grade)
        assert 0 <= grade.score <= 1
        assert grade.answer is None or len(grade.answer) <= 200

    return read


def read_data(data: bytes) -> None:
    with folder() as place:
        (place / "data.jsonl").write_bytes(data)
        task = load_task(f"jsonl:{place / 'data.jsonl'}?grader=text")
        for row in task.examples("train"):
            task.prompt(row).encode()
            assert not task.grade("7", row).failed


def read_task_name(name: str) -> None:
    load_task(name)


def grade_arithmetic(pair: tuple[str, int]) -> None:
    task = load_task("arithmetic")
    assert isinstance(task.grade(pair[0], task.examples("train")[pair[1]]), Grade)


ROWS = objects(
    ["question", "problem", "prompt", "answer", "solution", "reward_model", "ground_truth"],
    TEXT | VALUES | st.just([{"role": "user", "content": "1 + 1"}]),
)

# Recipes and settings

KEYS = [
    "algorithm", "model", "task", "reward", "reward_timeout", "steps", "seed", "lora", "engine",
    "scorer", "eval_every", "learning_rate", "alpha", "eps1", "num_generations", "algorithms",
    "seeds", "sweep", "report_to", "max_completion_length", "lr_scheduler_type", "optim", "bf16",
    "trainer", "hub_token", "out", "max_steps", "description", "fsdp", "model_init_kwargs",
]  # fmt: skip
YAML_PIECES = [
    *KEYS, ": ", ":", "\n", "- ", "  ", "[", "]", "{", "}", "&a ", "*a",
    "!!python/object:os.system ", "<<: ", "1e-6", "2024-99-99", "0o17", "1:30", "~", "yes", "'",
    '"', "|", ">", "%", "@", "`", "#", "---\n", "\t", "\x00", "9" * 400, ".inf", ".nan", "grpo",
    "sa-ah-grpo", "!!binary x",
]  # fmt: skip
YAML = st.one_of(
    st.lists(st.sampled_from(YAML_PIECES) | st.text(max_size=4), max_size=25).map(
        lambda words: "".join(words).encode("utf-8", "surrogatepass")
    ),
    objects(KEYS).map(_dumps),
    RAW,
)


def read_recipe(data: bytes) -> None:
    with folder() as place:
        (place / "recipe.yaml").write_bytes(data)
        recipe = load_recipe(place / "recipe.yaml")
    own, shared = split_spec(recipe)
    settings, _ = make_settings(shared)
    check_settings(settings)
    names, seeds = own.get("algorithms", ["grpo"]), own.get("seeds", 1)
    if isinstance(seeds, int) and seeds < 20:
        for job in plan(names, seeds, own.get("sweep", {}), shared, Path("runs")):
            assert job.folder.parent == Path("runs")


def check_settings(settings: RunSettings) -> None:
    assert "/" not in settings.default_name
    again = json.loads(json.dumps(settings.to_dict(), default=str))
    assert again["steps"] == settings.steps


def read_words(words: list[str]) -> None:
    check_settings(make_settings(parse_assignments(words))[0])
    parse_sweeps(words)


WORDS = st.lists(
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(KEYS) | TEXT, TEXT) | TEXT,
    max_size=4,
)

# Runs on disk

RUN = objects(
    ["name", "status", "algorithm", "label", "model", "task", "seed", "steps", "config", "settings",
     "objective", "overrides", "versions", "seconds"],
)  # fmt: skip
METRICS = jsonl(
    objects(["reward", "reward/mean", "entropy", "clip/q1", "grad_norm"], SCALARS).flatmap(
        lambda row: st.just(row) | st.integers(-3, 60).map(lambda step: {"step": step, **row})
    )
)
ESTIMATE = objects(["value", "low", "high"], st.floats() | VALUES)
PROBLEM = st.fixed_dictionaries(
    {"id": st.integers(0, 3) | VALUES, "scores": st.lists(st.floats(0, 1) | SCALARS, max_size=3)},
    optional={"answers": VALUES, "lengths": VALUES, "greedy": VALUES},
)
EVALUATION = st.fixed_dictionaries(
    {"step": st.integers(0, 9)},
    optional={
        "problems": st.lists(PROBLEM, max_size=3) | VALUES,
        "metrics": st.dictionaries(st.sampled_from(["pass@1", "avg@2"]), ESTIMATE) | VALUES,
        "k": st.lists(st.integers(1, 4), max_size=2) | VALUES,
        "task": VALUES, "split": VALUES, "seed": VALUES, "sampling": VALUES,
    },
) | VALUES  # fmt: skip
FILES = st.fixed_dictionaries(
    {"run.json": RUN.map(_dumps) | st.just(b'{"label": "grpo", "seed": 0}')},
    optional={
        "metrics.jsonl": METRICS,
        "evaluations/step-000000.json": EVALUATION.map(_dumps) | RAW,
        "evaluations/step-000009.json": EVALUATION.map(_dumps) | RAW,
        "rollouts/step-000001.parquet": RAW | RAW.map(lambda data: b"PAR1" + data + b"PAR1"),
    },
)


def read_run(files: dict[str, bytes]) -> None:
    with folder() as place:
        for name, data in files.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(data)
        store = RunStore(place)
        for step in store.rollout_steps():
            with contextlib.suppress(UserError):
                store.rollouts(step)
        source = read_source(place)
        for metric in ("reward/mean", "gradient/norm"):
            source.series(metric)
        compare_runs(load_runs([place, place]))


def read_metrics(data: bytes) -> None:
    with folder() as place:
        (place / "metrics.jsonl").write_bytes(data)
        store = RunStore(place)
        rows = store.metrics()
        store.truncate_metrics(30)
        kept = [row for row in rows if row["step"] <= 30]
        assert json.dumps(store.metrics()) == json.dumps(kept)


def read_partial(data: bytes) -> None:
    with folder() as place:
        path = place / "a.partial.jsonl"
        path.write_bytes(data)
        PartialResults(path, {"seed": 0}).load()


PARTIAL = jsonl(objects(["setting", "index", "prompt", "problem"]))
STATE = objects(["log_history", "global_step", "max_steps", "num_train_epochs"]).flatmap(
    lambda state: (
        st.just(state)
        | st.lists(objects(["step", "reward", "loss", "clip_ratio/low_mean"]), max_size=4).map(
            lambda rows: {**state, "log_history": rows}
        )
    )
)


def read_state(data: bytes) -> None:
    with folder() as place:
        (place / "trainer_state.json").write_bytes(data)
        read_source(place).series("reward/mean")


TARGETS = {
    "grade-number": Target(PAIRS, graded("number"), 16),
    "grade-text": Target(PAIRS, graded("text"), 12),
    "grade-math": Target(PAIRS, graded("math"), 4),
    "grade-arithmetic": Target(st.tuples(TEXT, st.integers(0, 999)), grade_arithmetic, 8),
    "task-data": Target(jsonl(ROWS), read_data, 14),
    "task-name": Target(TEXT.map(lambda text: f"jsonl:{text}") | TEXT, read_task_name, 4),
    "recipe": Target(YAML, read_recipe, 14),
    "assignments": Target(WORDS, read_words, 8),
    "metrics": Target(METRICS, read_metrics, 6),
    "run": Target(FILES, read_run, 4),
    "partial": Target(PARTIAL, read_partial, 4),
    "trainer-state": Target(STATE.map(_dumps) | RAW, read_state, 6),
}


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for one input, in memory where there is such a place."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def feed(target: Target, value: Any) -> bool:
    """Read one input; whether it was refused."""

    def hang(number: int, frame: Any) -> None:
        raise TimeoutError(f"no answer after {HANG} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(value)
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError("more than one line") from error
        return True
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return False
