"""What stands around a passage where the model says how likely a question about it is.

The model is asked for a question that the passage answers, as in Sachan et al., "Improving Passage
Retrieval with Zero-Shot Question Generation", 2022, section 2. It need not write one: how likely it
is to write the user's question tells how well the passage answers that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gemserve.errors import RequestError
from gemserve.prompting.chat_template import find_messages, render_chat
from gemserve.prompting.encoding import encode
from gemserve.types import NO_FRAME, QuestionFrame

_ORDER = "\n\nWrite one question that the text above answers."
_PASSAGE = "a"


def question_frame(tokenizer: Any) -> QuestionFrame:
    """The tokens before a passage, and those between it and the question."""
    return _frame(tokenizer, getattr(tokenizer, "chat_template", None))


@lru_cache(maxsize=16)
def _frame(tokenizer: Any, template: Any) -> QuestionFrame:
    if template is None:
        bos = getattr(tokenizer, "bos_token_id", None)
        return QuestionFrame(before=() if bos is None else (bos,), after=_ids(tokenizer, "\n\n"))
    messages = [{"role": "user", "content": _PASSAGE + _ORDER}]
    try:
        text = render_chat(tokenizer, messages)
    except RequestError:  # a template that wants something else first
        return NO_FRAME
    places = find_messages(tokenizer, text, messages)
    if not places:
        return NO_FRAME
    at = places[0][1]
    return QuestionFrame(
        before=_ids(tokenizer, text[:at]), after=_ids(tokenizer, text[at + len(_PASSAGE) :])
    )


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(encode(tokenizer, text, add_special_tokens=False).ids)
