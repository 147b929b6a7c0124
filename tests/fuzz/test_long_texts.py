"""No text makes the search for sentences, code, questions or control tokens take for ever.

The server's own patterns are the only ones that a client's text meets. A pattern that backtracks
shows on few characters, repeated: quadratic work on a text of this length takes minutes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gemserve.prompting.prompt import chat_prompt, text_prompt
from tests.fuzz.cases import bounded, cases

LENGTH = 40_000
PIECES = st.sampled_from(
    (
        *(" ", "\n", "\t", "\r\n", "\u2028", "\xa0", ".", "?", "!", "-", "*", "#", ":", "`", "~"),
        *('"', "'", "(", ")", "[", "]", "1", "1.", "e.g.", "a", "A", "é", "漢", "Dr.", "please "),
        *("who ", "tell me ", "Question: ", "answer", "```", "~~~", "<|end|>", "<|", "|>", "？"),
    )
)
UNITS = st.lists(PIECES, min_size=1, max_size=4).map("".join)


@given(UNITS, UNITS, UNITS, st.booleans())
@cases(5, many_times=0.3)
def test_a_repeated_text_takes_as_long_as_its_length(
    tokenizer: Any, start: str, unit: str, end: str, is_chat: bool
) -> None:
    text = start + unit * (LENGTH // len(unit)) + end
    with bounded("long text", cpu_s=6):
        if is_chat:
            chat_prompt(tokenizer, [{"role": "user", "content": text}])
        else:
            text_prompt(tokenizer, text)
