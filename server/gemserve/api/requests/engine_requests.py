"""What one HTTP request asks of the engine: a request per choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemserve.api.requests.base_bodies import MAX_CHOICES
from gemserve.errors import RequestError
from gemserve.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests, `n` for each prompt and those of one prompt together.

    `echoes`: what the text of each prompt's choices begins with; empty: with nothing.
    """

    requests: tuple[Request, ...]
    n: int = 1
    echoes: tuple[str, ...] = ()

    @property
    def is_one_prompt(self) -> bool:
        return len(self.requests) == self.n

    def echo_of(self, choice: int) -> str:
        return self.echoes[choice // self.n] if self.echoes else ""


def ask(requests: Sequence[Request], n: int, echoes: Sequence[str] = ()) -> Asked:
    """`n` choices of each request, with seeds of their own. Raises `RequestError`."""
    if len(requests) * n > MAX_CHOICES:
        raise RequestError(
            f"n={n}: with {len(requests)} prompts more than {MAX_CHOICES} choices", param="n"
        )
    if len(requests) * n == 1:
        return Asked(requests=tuple(requests), echoes=tuple(echoes))
    choices = [_choice(request, place) for request in requests for place in range(n)]
    numbered = [
        replace(request, request_id=f"{request.request_id}-{index}")
        for index, request in enumerate(choices)
    ]
    return Asked(requests=tuple(numbered), n=n, echoes=tuple(echoes))


def _choice(request: Request, place: int) -> Request:
    seed = request.sampling.seed
    if seed is None or place == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=seed + place))
