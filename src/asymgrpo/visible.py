"""Text for a terminal: shown, never obeyed, and in whatever encoding the terminal has."""

from __future__ import annotations

import codecs
import io
import re
import sys

ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that act on the line or cannot be seen: controls, direction marks, zero widths."""


def visible(text: str, *, spaces: bool = False) -> str:
    """The text with acting characters as `<U+XXXX>`, line ends and tabs marked.

    >>> print(visible("a\\x1b[31m\\u202eb\\tc"))
    a<U+001B>[31m<U+202E>b⇥c
    >>> visible(" x\\n", spaces=True)
    '·x↵'
    """
    text = ACTING.sub(lambda found: f"<U+{ord(found[0]):04X}>", text)
    text = text.replace("\n", "↵").replace("\t", "⇥")
    return text.replace(" ", "·") if spaces else text


IN_ASCII = {
    "−": "-", "–": "-", "·": ".", "…": "...", "×": "x", "±": "+-", "≤": "<=", "≥": ">=",
    "∅": "<empty>", "↵": "\\n", "⇥": "\\t", "─": "-", "━": "-", "╸": "-", "╺": "-", "•": "*",
}  # fmt: skip
"""Marks of ours and of rich's, for a terminal that has no more than ASCII."""


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    r"""A codec's error handler: a mark that looks alike, else the character's number.

    >>> codecs.register_error("in-ascii", in_ascii)
    >>> "− a · ü".encode("ascii", "in-ascii")
    b'- a . \\xfc'
    """
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    text = IN_ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()
    return text, error.start + 1


def write_any_text() -> None:
    """Let standard output and error write every character in some way."""
    codecs.register_error("in-ascii", in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="in-ascii")
