"""Keeps tokens and keys out of what a run writes. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"

_SECRET_NAME = re.compile(r"(^|_)(token|secret|password|passwd|credentials?|api_?key)$", re.I)
_NO_SECRET = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token$", re.I)
_SHORTEST = 8
"""Characters below which an environment's value is too common a word to look for."""


def redacted(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` without secrets: by the name of a field, or as a value of a secret variable.

    >>> redacted({"hub_token": "hf_123", "eos_token": "</s>", "model_init_kwargs": {"token": "x"}})
    {'hub_token': '(redacted)', 'eos_token': '</s>', 'model_init_kwargs': {'token': '(redacted)'}}
    """
    known = [
        value for name, value in os.environ.items() if _is_secret(name) and len(value) >= _SHORTEST
    ]
    return {key: _clean(key, value, known) for key, value in record.items()}


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.search(name)


def _clean(name: str, value: Any, known: list[str]) -> Any:
    if value is None:
        return None
    if _is_secret(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: _clean(str(key), item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean("", item, known) for item in value]
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, REDACTED)
    return value
