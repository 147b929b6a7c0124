"""Count the tokens of a request. It does not use the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import Request

from gemserve.api.access.keys import tenant_of
from gemserve.api.documents.finder import Finder
from gemserve.api.requests.base_bodies import FilteringBody
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.long_texts import charge
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.routes.submission import Submitter, read_body

BodyT = TypeVar("BodyT", bound=FilteringBody)


async def count_tokens(
    http: Request, submitter: Submitter, body_type: type[BodyT], count: Callable[[BodyT], int]
) -> int:
    """How many tokens the prompt of `http` has, as `count` finds from its body."""
    tenant = tenant_of(http)
    finder = Finder(submitter.documents, tenant)
    raw = await read_body(http)
    run = partial(submitter.turns.run, http, tenant)
    body = await run(len(raw), partial(_parse, raw, body_type, finder, submitter.models))
    num_tokens = await run(len(raw) + finder.num_chars, partial(count, body))
    charge(http, num_tokens)
    return num_tokens


def _parse(raw: bytes, body_type: type[BodyT], finder: Finder, models: ModelNames) -> BodyT:
    body = parse_body(raw, body_type, finder)
    reference = models.find_reference(body)
    if reference is not None:
        models.find_in_memory(reference)  # it changes nothing about tokens, but must be there
    return body
