"""From a question to the text or the messages that a model is given."""

from __future__ import annotations

from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Example, Task

PLACEHOLDER = "{question}"
BOXED_INSTRUCTION = (
    PLACEHOLDER + "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
)
"""The instruction of the papers on mathematical reasoning."""

Message = dict[str, str]


def check_template(template: str) -> str:
    """`template` itself, if it has a place for the question.

    >>> check_template("Q: {question} A:")
    'Q: {question} A:'
    """
    if PLACEHOLDER not in template:
        raise UserError(f"the prompt template has no {PLACEHOLDER}; write it where it belongs")
    return template


def fill(template: str, question: str) -> str:
    r"""The template with the question in it; every other brace stays as it is.

    >>> fill("{question} Answer in \\boxed{}.", "What is 1 + 1?")
    'What is 1 + 1? Answer in \\boxed{}.'
    """
    return template.replace(PLACEHOLDER, question)


def message_text(value: Any) -> str:
    """A question given as text, or as the last user message of a conversation."""
    if isinstance(value, list | tuple):
        turns = [message for message in value if isinstance(message, dict)]
        spoken = [turn.get("content", "") for turn in turns if turn.get("role") == "user"]
        return str(spoken[-1]) if spoken else ""
    return str(value)


def render_prompt(
    task: Task, example: Example, tokenizer: Any, system_prompt: str | None = None
) -> list[Message] | str:
    """Messages where the tokenizer has a chat template, the plain text elsewhere."""
    text = task.prompt(example)
    if getattr(tokenizer, "chat_template", None):
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return [*system, {"role": "user", "content": text}]
    return f"{system_prompt}\n\n{text}" if system_prompt else text
