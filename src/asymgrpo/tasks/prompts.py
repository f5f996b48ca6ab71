"""From a question to the text or the messages that a model is given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Example, Task

PLACEHOLDER = "{question}"
BOXED_INSTRUCTION = (
    PLACEHOLDER + "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
)
"""The instruction of the papers on mathematical reasoning."""

Message = dict[str, str]

_COLUMN = re.compile(r"\{(\w+)\}")


def check_template(template: str) -> str:
    """`template` itself, if it has a place for the question or for a column.

    >>> check_template("Q: {question} A:"), check_template("{Body} {Question}")
    ('Q: {question} A:', '{Body} {Question}')
    """
    if not _COLUMN.search(template):
        raise UserError(
            f"the prompt template has no {PLACEHOLDER}; write it, or a column's name in braces, "
            "where it belongs"
        )
    return template


def columns_of(template: str) -> list[str]:
    """The columns that a template without `{question}` is made of; none with it.

    >>> columns_of("{Body} {Question}"), columns_of("{question} Use {braces}.")
    (['Body', 'Question'], [])
    """
    return [] if PLACEHOLDER in template else _COLUMN.findall(template)


def fill(template: str, question: str) -> str:
    r"""The template with the question in it; every other brace stays as it is.

    >>> fill("{question} Answer in \\boxed{}.", "What is 1 + 1?")
    'What is 1 + 1? Answer in \\boxed{}.'
    """
    return template.replace(PLACEHOLDER, question)


def fill_columns(template: str, row: Mapping[str, Any]) -> str:
    r"""The template with the row's columns in it, in one pass; `\boxed{}` stays as it is.

    >>> fill_columns("{Body} {Question}", {"Body": "Tom has {3} pens.", "Question": "How many?"})
    'Tom has {3} pens. How many?'
    """
    missing = [name for name in columns_of(template) if row.get(name) is None]
    if missing:
        there = ", ".join(sorted(map(str, row))) or "none"
        raise UserError(f"the prompt asks for the column {missing[0]}; the row has {there}")
    return _COLUMN.sub(lambda match: str(row[match[1]]), template)


def conversation(value: Any) -> list[Message] | None:
    """A question given as messages, up to the last one of the user; None if it is text.

    >>> conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if not isinstance(value, list | tuple):
        return None
    turns = [message for message in value if isinstance(message, dict)]
    last = max((i for i, turn in enumerate(turns) if turn.get("role") == "user"), default=-1)
    return [
        {"role": str(turn.get("role")), "content": str(turn.get("content") or "")}
        for turn in turns[: last + 1]
    ]


def message_text(value: Any) -> str:
    """A question given as text, or as the last user message of a conversation."""
    turns = conversation(value)
    if turns is None:
        return str(value)
    return turns[-1]["content"] if turns else ""


def plain_text(messages: Sequence[Message]) -> str:
    """Messages for a model without a chat template: one paragraph each.

    >>> plain_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    'Be brief.\\n\\nHi'
    """
    return "\n\n".join(message["content"] for message in messages)


def render_prompt(
    task: Task, example: Example, tokenizer: Any, system_prompt: str | None = None
) -> list[Message] | str:
    """Messages where the tokenizer has a chat template, the plain text elsewhere.

    A task with a `messages` method gives its own turns. `system_prompt` takes the place of a
    system message of the row.
    """
    own = getattr(task, "messages", None)
    messages: list[Message] = (
        own(example) if own is not None else [{"role": "user", "content": task.prompt(example)}]
    )
    if system_prompt:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system_prompt}, *others]
    return messages if getattr(tokenizer, "chat_template", None) else plain_text(messages)
