"""How long a client says that it waits for a reply."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fastapi import Request

from gemserve.errors import RequestError

HEADER = "X-Request-Timeout"
MOST_S = 86_400.0
_NUMBER = re.compile(r"\d{1,9}(\.\d{0,9})?")
# What OpenAI's and Anthropic's clients send: how long they wait for the next byte. A stream has one
# every few seconds, whatever happens.
_SDK_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")


@dataclass(frozen=True, slots=True)
class Timeout:
    """Seconds in which a request must be answered, and the name of what said so.

    `ends_s`: when they are over, of `time.monotonic()`.
    """

    seconds: float
    name: str
    ends_s: float


def timeout_of(http: Request, server_s: float, came_s: float, *, is_streamed: bool) -> Timeout:
    """The shortest of the server's and those that the client's headers name.

    `came_s`: when the request had come whole. Raises `RequestError` if `X-Request-Timeout` is not a
    number of seconds.
    """
    given = {"--request-timeout": server_s}
    said = http.headers.get(HEADER)
    if said is not None:
        seconds = _number(said)
        if not 0 < seconds <= MOST_S:
            raise RequestError(
                f"{HEADER}={said[:32]!r}: must be a number of seconds above 0 and up to "
                f"{MOST_S:,.0f}",
                param=HEADER,
            )
        given[HEADER] = seconds
    elif not is_streamed:
        waits = {name: _number(http.headers.get(name, "")) for name in _SDK_HEADERS}
        given |= {name: seconds for name, seconds in waits.items() if seconds > 0}
    name = min(given, key=given.__getitem__)
    return Timeout(given[name], name, came_s + given[name])


def _number(text: str) -> float:
    """NaN if it is not one."""
    return float(text) if _NUMBER.fullmatch(text) else math.nan
