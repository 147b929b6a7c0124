"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from gemserve.api.access.request_id import request_id_of
from gemserve.api.replies.answer_reader import answer_rules
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.tool_choice import chat_call_rules
from gemserve.api.routes.completions import EXAMPLE_MESSAGES
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter
from gemserve.api.routes.token_counting import count_tokens
from gemserve.prompting import encoding
from gemserve_dialects.anthropic import reply_types as message_types
from gemserve_dialects.anthropic.body import AnthropicBody, CountedBody
from gemserve_dialects.anthropic.errors import AnthropicError
from gemserve_dialects.anthropic.reply import anthropic_reply

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


def anthropic_routes(submitter: Submitter, builder: RequestBuilder) -> Routes:
    routes = Routes()

    @routes.add("POST", "/v1/messages", ANSWER)
    async def post_message(http: Request) -> Response:
        submission = await submitter.submit(http, AnthropicBody, builder.build_as_chat)
        request = submission.reader.streams[0].request
        calls = chat_call_rules(submission.body.form.chat)
        rules = answer_rules(builder.tokenizer, request, calls)
        decode = partial(encoding.decode, builder.tokenizer)
        return await anthropic_reply(
            submission.body, submission.reader, rules, request_id_of(http), decode
        )

    @routes.add("POST", "/v1/messages/count_tokens", COUNT)
    async def post_count(http: Request) -> message_types.TokenCount:
        num_tokens = await count_tokens(http, submitter, CountedBody, builder.count_tokens)
        return {"input_tokens": num_tokens}

    return routes
