"""Where the answer to a chat begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gemserve.errors import RequestError
from gemserve.prompting.tools import Message

# behind the chat template's own beginning of an answer, behind the last message, or within it
AnswerStart = Literal["header", "behind", "within"]
CONTINUES = "continue_final_message"


def end_of_last(
    text: str, messages: Sequence[Message], places: Sequence[tuple[int, int, int]]
) -> int:
    """The character of the rendered `text` where its last message ends, which is continued.

    `places`: see `find_messages`. Raises `RequestError` if the message has no text, or is not
    shown as it was sent.
    """
    content = messages[-1]["content"].strip()
    if not content:
        raise RequestError(f"{CONTINUES}=true: the last message has no text", param=CONTINUES)
    if places and places[-1][0] == len(messages) - 1:
        _, low, high = places[-1]
        is_shown = text[low:high].strip() == content
    else:
        low = text.rfind(content)
        high, is_shown = low + len(content), low >= 0
    if not is_shown:
        raise RequestError(
            f"{CONTINUES}=true: the model's chat template does not show the last message as it was "
            "sent",
            param=CONTINUES,
        )
    return high
