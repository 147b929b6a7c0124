"""`/v1/filter`: what a filter would keep of a prompt, without an answer to it."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from gemserve.api.error_replies import Error
from gemserve.api.replies.reply_types import Selection
from gemserve.api.replies.selection_reply import selection_reply
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.selection_body import SelectionBody
from gemserve.api.routes.completions import EXAMPLE_MESSAGES
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter
from gemserve.prompting.encoding import decode

FILTER = Operation(
    summary="Tell what would be kept of a prompt",
    body=SelectionBody,
    example={"messages": EXAMPLE_MESSAGES, "filter": {"keep": 64, "return_selection": True}},
    reply=Selection,
    unavailable=Error,
)


def filter_routes(submitter: Submitter, builder: RequestBuilder) -> Routes:
    routes = Routes()

    @routes.add("POST", "/v1/filter", FILTER)
    async def post_filter(http: Request) -> Response:
        submission = await submitter.submit(http, SelectionBody, builder.build_selection)
        options = submission.body.filter
        return await selection_reply(
            submission.reader,
            partial(decode, builder.tokenizer, skip_special_tokens=True),
            shows_selection=options is not None and options.return_selection,
        )

    return routes
