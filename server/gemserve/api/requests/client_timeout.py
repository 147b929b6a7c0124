"""How long a client says that it waits for a reply."""

from __future__ import annotations

import math

from fastapi import Request

from gemserve.api.requests.base_bodies import ModelBody
from gemserve.errors import RequestError

HEADER = "X-Request-Timeout"
MOST_S = 86_400.0
# What OpenAI's and Anthropic's clients send: how long they wait for the next byte. A stream has one
# every few seconds, whatever happens.
_SDK_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")


def client_timeout_s(http: Request, body: ModelBody) -> float:
    """Seconds after its arrival in which a request must be answered; infinite if nothing is said.

    Raises `RequestError` if `X-Request-Timeout` is not a number of seconds.
    """
    said = http.headers.get(HEADER)
    if said is not None:
        seconds = _number(said)
        if not 0 < seconds <= MOST_S:
            raise RequestError(
                f"{HEADER}={said[:32]!r}: must be a number of seconds above 0 and up to "
                f"{MOST_S:,.0f}",
                param=HEADER,
            )
        return seconds
    if getattr(body, "stream", None):
        return math.inf
    given = (_number(http.headers.get(name, "")) for name in _SDK_HEADERS)
    return min((seconds for seconds in given if seconds > 0), default=math.inf)


def _number(text: str) -> float:
    """NaN if it is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan
