"""Reward functions of the user's that go wrong."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo.errors import UserError
from asymgrpo.experiment.data import checked_reward
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore

MODULE = """
def raises(completions, **kwargs):
    raise KeyError("no such\\nthing")

def constant(completions, **kwargs):
    return [0.25] * len(completions)

def nothing(completions, **kwargs):
    return [None] * len(completions)

async def awaited(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""


def never(completions: list[str], **kwargs: Any) -> list[float]:
    time.sleep(60)
    return []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **_: [float("nan")] * 2, "returned nan; return a finite number"),
        (lambda completions, **_: [float("-inf")] * 2, "returned -inf; return a finite number"),
        (lambda completions, **_: ["good", "bad"], "returned 'good'; return a finite number"),
        (lambda completions, **_: [1.0], "returned 1 rewards for 2 completions"),
        (lambda completions, **_: None, "raised TypeError"),
        (lambda completions, **_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (never, "has not returned after 0.2 s; make it faster, or set reward_timeout"),
    ],
)
def test_a_wrong_reward_is_one_line_that_names_the_function(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        checked_reward("mine:reward", function, 0.2)(prompts=["a", "b"], completions=["c", "d"])
    assert "the reward function mine:reward " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_none_stands_for_a_completion_that_cannot_be_scored() -> None:
    reward = checked_reward("mine:reward", lambda completions, **_: [None, 1], 10)
    assert reward(completions=["a", "b"]) == [None, 1]


def by_alarm(completions: list[str], **kwargs: Any) -> list[float]:
    """As math-verify does by default: a time limit by an alarm, which only main threads may set."""

    def late(signum: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        return [float(len(text)) for text in completions]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def by_math_verify(completions: list[str], **kwargs: Any) -> list[float]:
    from math_verify import parse, verify

    return [float(verify(parse("$4$"), parse(text))) for text in completions]


async def awaited(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


async def awaited_forever(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(60)
    return []


def stubborn(completions: list[str], **kwargs: Any) -> list[float]:
    while True:
        try:
            time.sleep(60)
        except Exception:  # a grader that lives through everything
            continue


def test_rewards_with_alarms_run_in_the_main_thread() -> None:
    assert checked_reward("mine:alarm", by_alarm, 10)(completions=["a", "bc"]) == [1.0, 2.0]
    graded = checked_reward("mine:verify", by_math_verify, 60)(completions=["$2+2$", "$5$"])
    assert graded == [1.0, 0.0]


def test_a_limit_leaves_alarms_and_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGURG)
    with pytest.raises(UserError, match=r"has not returned after 0\.2 s"):
        checked_reward("mine:stubborn", stubborn, 0.2)(completions=["a"])
    assert signal.getsignal(signal.SIGURG) == before
    assert checked_reward("mine:alarm", by_alarm, 10)(completions=["a"]) == [1.0]


def test_async_rewards_stay_async() -> None:
    """TRL awaits a function that says it is a coroutine's, several of them at a time."""
    reward: Any = checked_reward("mine:awaited", awaited, 10)
    assert inspect.iscoroutinefunction(reward)
    assert asyncio.run(reward(completions=["a", "bc"])) == [1.0, 2.0]
    slow: Any = checked_reward("mine:slow", awaited_forever, 0.2)
    with pytest.raises(UserError, match=r"mine:slow has not returned after 0\.2 s"):
        asyncio.run(slow(completions=["a"]))


def test_a_limit_holds_in_another_thread_too() -> None:
    reward = checked_reward("mine:never", never, 0.2)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(UserError, match=r"has not returned after 0\.2 s"),
    ):
        pool.submit(reward, completions=["a"]).result()


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path


def test_a_run_whose_reward_raises_ends_in_one_line(rewards: Path) -> None:
    with pytest.raises(UserError, match="own_rewards:raises raised KeyError: 'no such") as caught:
        train_run(small(steps=2, reward=("own_rewards:raises",)), rewards / "run")
    assert "\n" not in str(caught.value)
    assert RunStore(rewards / "run").run()["status"] == "failed"


def test_a_run_awaits_an_async_reward(rewards: Path) -> None:
    train_run(small(steps=1, reward=("own_rewards:awaited",)), rewards / "run")
    assert RunStore(rewards / "run").metrics()[0]["reward/mean"] > 0


def test_rewards_that_are_all_none_change_nothing(rewards: Path) -> None:
    train_run(small(steps=2, reward=("own_rewards:nothing",)), rewards / "run")
    rows = RunStore(rewards / "run").metrics()
    assert [row["grad_norm"] for row in rows] == [0.0, 0.0]


def test_a_reward_that_never_changes_is_warned_of(rewards: Path) -> None:
    tiny = {"per_device_train_batch_size": 4, "steps_per_generation": 1, "max_completion_length": 4}
    settings = small(steps=21, sample_every=0, reward=("own_rewards:constant",), trainer=tiny)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_run(settings, rewards / "run")
    told = [str(each.message) for each in caught if "the reward has been" in str(each.message)]
    assert told == [
        "the reward has been 0.25 for every rollout of 20 batches, so nothing is learnt; check the "
        "reward function and the task"
    ]
