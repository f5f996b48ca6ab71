"""Greedy decoding is a loop over the argmax, and stop strings cut where a naive reader would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asymgrpo.models import load_policy
from asymgrpo.rollout import NativeEngine, Sampling, TransformersEngine
from asymgrpo.rollout.stop_strings import completion_text
from asymgrpo.tasks import load_task

ENGINES = [NativeEngine, TransformersEngine]


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy("tiny")


@pytest.fixture(scope="module")
def prompts(policy: Any) -> list[list[int]]:
    task = load_task("arithmetic")
    rows = [task.examples("test")[index] for index in range(4)]
    return [policy.tokenizer(task.prompt(row))["input_ids"] for row in rows]


@torch.no_grad()
def most_likely(policy: Any, prompt: list[int], limit: int) -> list[int]:
    """One full forward per token, without a cache or an engine."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] == policy.tokenizer.eos_token_id:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_is_a_loop_over_the_argmax(engine: Any, policy: Any, prompts: Any) -> None:
    rollouts = engine(policy.model, policy.tokenizer).generate(
        prompts, Sampling(max_new_tokens=40, greedy=True), range(4)
    )
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        assert list(rollout.token_ids) == most_likely(policy, prompt, 40)


def cut_by_reading(policy: Any, ids: tuple[int, ...], stop: list[str]) -> tuple[int, str] | None:
    """Token by token: how many until a stop string stands in the text, and the text before it."""
    for count in range(1, len(ids) + 1):
        text = policy.tokenizer.decode(ids[:count], skip_special_tokens=True)
        found = [text.index(word) for word in stop if word in text]
        if found:
            return count, text[: min(found)]
    return None


@pytest.mark.parametrize(
    "stop", [["."], ["answer is"], [" =", "The"], ["=", " = 1"], ["nowhere in it"]]
)
def test_stop_strings_cut_as_a_reader_would(stop: list[str], policy: Any, prompts: Any) -> None:
    asked = [prompt for prompt in prompts for _ in range(8)]
    free = Sampling(max_new_tokens=48)
    stopping = Sampling(max_new_tokens=48, stop=tuple(stop))
    native, other = (
        engine(policy.model, policy.tokenizer).generate(asked, stopping, range(32))
        for engine in ENGINES
    )
    whole = NativeEngine(policy.model, policy.tokenizer).generate(asked, free, range(32))
    cuts = 0
    for one, two, full in zip(native, other, whole, strict=True):
        assert (one.token_ids, one.finished) == (two.token_ids, two.finished)
        expected = cut_by_reading(policy, full.token_ids, stop)
        text = completion_text(one.token_ids, policy.tokenizer, stop)
        if expected is None:
            assert (one, text) == (full, completion_text(full.token_ids, policy.tokenizer))
            continue
        cuts += 1
        assert (len(one.token_ids), text) == expected
        assert one.token_ids == full.token_ids[: len(one.token_ids)]
        assert (one.logps, one.finished) == (full.logps[: len(one.token_ids)], True)
        assert not any(word in text for word in stop)
    assert (cuts > 0) == (stop != ["nowhere in it"])


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"greedy": True}],
)
def test_both_engines_agree_on_every_option(filters: Any, policy: Any, prompts: Any) -> None:
    sampling = Sampling(max_new_tokens=24, temperature=0.9, **filters)
    one, other = (
        engine(policy.model, policy.tokenizer).generate(prompts, sampling, range(4))
        for engine in ENGINES
    )
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
