"""Model text for a terminal: shown, never obeyed."""

from __future__ import annotations

import re

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
