"""Strings that end a completion: where it is cut, and the text that is left."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .records import Rollout


def completion_text(token_ids: Sequence[int], tokenizer: Any, stop: Sequence[str] = ()) -> str:
    """The text of a completion, special tokens left out, up to the first of the `stop` strings.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens): return "".join(map(chr, ids))
    >>> completion_text([ord(letter) for letter in "72. Next:"], Letters(), [".", "Next"])
    '72'
    """
    text = str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
    places = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(places)] if places else text


def cut_at_stop(rollout: Rollout, tokenizer: Any, stop: Sequence[str]) -> Rollout:
    """The rollout up to the token that completes a stop string, as if sampling had ended there."""
    ids = rollout.token_ids

    def holds(count: int) -> bool:
        text = tokenizer.decode(list(ids[:count]), skip_special_tokens=True)
        return any(word in text for word in stop)

    if not stop or not holds(len(ids)):
        return rollout
    end = bisect_left(range(len(ids) + 1), True, key=holds)
    return replace(
        rollout,
        token_ids=ids[:end],
        logps=None if rollout.logps is None else rollout.logps[:end],
        entropies=None if rollout.entropies is None else rollout.entropies[:end],
        finished=True,
    )
