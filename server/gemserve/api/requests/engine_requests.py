"""The engine requests that one HTTP request becomes: one for every choice of every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemserve.api.requests.base_bodies import MAX_CHOICES
from gemserve.contract.requests import Request
from gemserve.errors import RequestError
from gemserve.filtering.planner import FilterPlanner

# Each takes half a kilobyte of memory until the reply is written. 20 for each of 128K tokens fit.
MAX_SCORES = 4 << 20
_IDS_PER_SCORE = 16  # token ids that take as much memory, if they are returned


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequests:
    """`n` requests for each prompt; those of one prompt are next to each other.

    `echoes`: the text that each prompt's choices begin with. It is empty if they begin with none.
    `returns_ids`: the reply has the token ids of prompts and answers. `echoes_alone`: the one token
    of each answer is not shown.
    """

    requests: tuple[Request, ...]
    n: int = 1
    echoes: tuple[str, ...] = ()
    returns_ids: bool = False
    echoes_alone: bool = False

    @property
    def num_scores(self) -> int:
        """How many log-probabilities take as much memory as what is collected for the reply."""
        num_scores = _count_scores(self.requests)
        if self.returns_ids:
            num_ids = sum(len(r.prompt_ids) + r.sampling.max_tokens for r in self.requests)
            num_scores += num_ids // _IDS_PER_SCORE
        return num_scores

    @property
    def num_tokens(self) -> int:
        """How many tokens a key pays for, without those of answers."""
        return sum(len(request.prompt_ids) for request in self.requests)

    def echo_of(self, choice: int) -> str:
        return self.echoes[choice // self.n] if self.echoes else ""


def repeat_for_choices(
    planner: FilterPlanner,
    requests: Sequence[Request],
    n: int,
    echoes: Sequence[str] = (),
    *,
    returns_ids: bool = False,
    echoes_alone: bool = False,
) -> EngineRequests:
    """`n` choices of each request, each with its own id and seed, and planned.

    Raises `RequestError`.
    """
    if len(requests) * n > MAX_CHOICES:
        raise RequestError(
            f"n={n}: with {len(requests)} prompts more than {MAX_CHOICES} choices", param="n"
        )
    _check_scores(requests, n)
    if len(requests) * n == 1:
        planned = planner.planned_choices(requests)
        return EngineRequests(
            requests=planned,
            echoes=tuple(echoes),
            returns_ids=returns_ids,
            echoes_alone=echoes_alone,
        )
    choices = [_with_seed(request, place) for request in requests for place in range(n)]
    with_ids = [
        replace(request, request_id=f"{request.request_id}-{index}")
        for index, request in enumerate(choices)
    ]
    planned = planner.planned_choices(with_ids)
    return EngineRequests(
        requests=planned,
        n=n,
        echoes=tuple(echoes),
        returns_ids=returns_ids,
        echoes_alone=echoes_alone,
    )


def _count_scores(requests: Sequence[Request]) -> int:
    """How many log-probabilities these requests may get, with those of echoed prompts."""
    num_scores = 0
    for request in requests:
        if request.sampling.logprobs is not None:
            num_scores += (1 + request.sampling.logprobs) * request.sampling.max_tokens
        if request.prompt_logprobs is not None:
            num_scores += (1 + request.prompt_logprobs) * len(request.prompt_ids)
    return num_scores


def _check_scores(requests: Sequence[Request], n: int) -> None:
    num_scores = _count_scores(requests)
    if num_scores * n > MAX_SCORES:
        raise RequestError(
            f"logprobs: {num_scores * n} log-probabilities, of all choices and of prompts that are "
            f"echoed; the limit is {MAX_SCORES}. Ask for fewer alternatives, choices or tokens "
            "(max_tokens)",
            param="logprobs",
        )


def _with_seed(request: Request, place: int) -> Request:
    seed = request.sampling.seed
    if seed is None or place == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=seed + place))
