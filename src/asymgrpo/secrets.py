"""Keeps tokens, keys and passwords out of what a run writes. No torch."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

REDACTED = "(redacted)"

_KINDS = r"token|secret|password|passwd|credentials?|api_?key|access_?key|private_?key"
_SECRET_FIELD = re.compile(rf"(^|_)({_KINDS})$|(^|_)secret_", re.I)
_NO_SECRET = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token$", re.I)
_SECRET_VARIABLE = re.compile(rf"(^|_)({_KINDS})(_|$)", re.I)
_SHORTEST = 8
"""Characters below which an environment's value is too common a word to look for."""
_IN_URL = re.compile(r"(?<=://)[^\s/?#]+@")
"""Who logs in, and with what, before the host of a URL."""
_IN_QUERY = re.compile(
    rf"([?&](?:[\w-]*(?:{_KINDS}|signature)|key|sig|auth)=)[^&#\s]+", re.I
)  # fmt: skip


def redacted(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` without secrets: by a field's name, in a URL, or as the value of a secret variable.

    >>> redacted({"hub_token": "hf_123", "eos_token": "</s>", "model_init_kwargs": {"token": "x"}})
    {'hub_token': '(redacted)', 'eos_token': '</s>', 'model_init_kwargs': {'token': '(redacted)'}}
    >>> redacted({"url": "https://me:pass@host/a?b=1&api_key=k"})
    {'url': 'https://(redacted)@host/a?b=1&api_key=(redacted)'}
    """
    known = _values_in_environment()
    return {key: _clean(str(key), value, known) for key, value in record.items()}


@contextlib.contextmanager
def without_secrets(owner: Any, name: str) -> Iterator[None]:
    """Within, the attribute `name` of `owner` is a copy of it that holds no secret.

    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(args=SimpleNamespace(hub_token="hf_123"))
    >>> with without_secrets(trainer, "args"):
    ...     print(trainer.args.hub_token)
    (redacted)
    >>> trainer.args.hub_token
    'hf_123'
    """
    original = getattr(owner, name)
    cleaned = copy.copy(original)
    for key, value in redacted(vars(original)).items():
        cleaned.__dict__[key] = value
    setattr(owner, name, cleaned)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _values_in_environment() -> list[str]:
    """Values of variables whose names say that they are secret, longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name)
        and len(value) >= _SHORTEST
        and not (value.startswith("/") and os.path.exists(value))  # where one lies, not one itself
    }
    return sorted(found, key=len, reverse=True)


def _clean(name: str, value: Any, known: list[str]) -> Any:
    if value is None:
        return None
    if _SECRET_FIELD.search(name) and not _NO_SECRET.search(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: _clean(str(key), item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean("", item, known) for item in value]
    return _clean_text(value, known) if type(value) is str else value


def _clean_text(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, REDACTED)
    text = _IN_URL.sub(f"{REDACTED}@", text)
    return _IN_QUERY.sub(rf"\1{REDACTED}", text)
