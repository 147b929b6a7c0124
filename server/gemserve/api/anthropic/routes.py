"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

from anyio import to_thread
from fastapi import Request, Response

from gemserve.api.access.keys import tenant_of
from gemserve.api.access.request_id import request_id_of
from gemserve.api.anthropic import reply_types as message_types
from gemserve.api.anthropic.body import AnthropicBody, CountedBody
from gemserve.api.anthropic.errors import AnthropicError
from gemserve.api.anthropic.reply import anthropic_reply
from gemserve.api.documents.finder import Finder
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.tool_choice import chat_call_rules
from gemserve.api.routes.completions import EXAMPLE_MESSAGES
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter, read_body

ANSWER = Operation(
    summary="Answer messages, in Anthropic's form",
    body=AnthropicBody,
    example={"messages": EXAMPLE_MESSAGES, "max_tokens": 32},
    reply=message_types.Message,
    event=message_types.AnyEvent,
    error=AnthropicError,
    unavailable=AnthropicError,
)
COUNT = Operation(
    summary="Count the tokens of messages, in Anthropic's form",
    body=CountedBody,
    example={"messages": EXAMPLE_MESSAGES},
    reply=message_types.TokenCount,
    error=AnthropicError,
)


def anthropic_routes(submitter: Submitter, builder: RequestBuilder, models: ModelNames) -> Routes:
    routes = Routes()

    def parse(raw: bytes, finder: Finder) -> CountedBody:
        body = parse_body(raw, CountedBody, finder)
        reference = models.find_reference(body)
        if reference is not None:
            models.find_in_memory(reference)  # it changes nothing about tokens, but must be there
        return body

    @routes.add("POST", "/v1/messages", ANSWER)
    async def post_message(http: Request) -> Response:
        submission = await submitter.submit(http, AnthropicBody, builder.build_as_chat)
        rules = chat_call_rules(submission.body.form.chat)
        return await anthropic_reply(submission.body, submission.reader, rules, request_id_of(http))

    @routes.add("POST", "/v1/messages/count_tokens", COUNT)
    async def post_count(http: Request) -> message_types.TokenCount:
        tenant = tenant_of(http)
        finder = Finder(submitter.documents, tenant)
        raw = await read_body(http)
        body = await to_thread.run_sync(parse, raw, finder)
        async with submitter.long_texts.turn(tenant, len(raw) + finder.num_chars):
            return {"input_tokens": await to_thread.run_sync(builder.count_tokens, body)}

    return routes
