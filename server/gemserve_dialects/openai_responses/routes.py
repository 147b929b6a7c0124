"""`/v1/responses`, and `/v1/responses/input_tokens`, which counts tokens without an answer."""

from __future__ import annotations

from fastapi import Request, Response

from gemserve.api.error_replies import Error
from gemserve.api.replies.answer_reader import answer_rules
from gemserve.api.replies.logprobs import TokenTexts
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.tool_choice import chat_call_rules
from gemserve.api.routes.completions import EXAMPLE_MESSAGES
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter
from gemserve.api.routes.token_counting import count_tokens
from gemserve.contract.adapters import LoadedAdapter
from gemserve.errors import ContextExceeded
from gemserve_dialects.openai_responses import reply_types as response_types
from gemserve_dialects.openai_responses.body import CountedInputBody, OpenAIResponsesBody
from gemserve_dialects.openai_responses.reply import openai_responses_reply, overflow_reply

RESPOND = Operation(
    summary="Answer an input, as a response",
    body=OpenAIResponsesBody,
    example={"input": EXAMPLE_MESSAGES, "max_output_tokens": 32},
    reply=response_types.Response,
    event=response_types.AnyEvent,
    unavailable=Error,
)


COUNT = Operation(
    summary="Count the tokens of a response's input",
    body=CountedInputBody,
    example={"input": EXAMPLE_MESSAGES},
    reply=response_types.InputTokens,
)


def openai_responses_routes(submitter: Submitter, builder: RequestBuilder) -> Routes:
    routes = Routes()
    vocabulary = TokenTexts(builder.tokenizer)

    @routes.add("POST", "/v1/responses", RESPOND)
    async def post_response(http: Request) -> Response:
        streamed: list[OpenAIResponsesBody] = []

        def build(
            body: OpenAIResponsesBody, request_id: str, adapter: LoadedAdapter | None = None
        ) -> EngineRequests:
            streamed[:] = [body] if body.stream else []
            return builder.build_as_chat(body, request_id, adapter)

        try:
            submission = await submitter.submit(http, OpenAIResponsesBody, build)
        except ContextExceeded as error:
            if not streamed:
                raise
            return overflow_reply(streamed[0], error, vocabulary)
        request = submission.reader.streams[0].request
        calls = chat_call_rules(submission.body.form.chat)
        rules = answer_rules(builder.tokenizer, request, calls)
        return await openai_responses_reply(submission.body, submission.reader, rules, vocabulary)

    @routes.add("POST", "/v1/responses/input_tokens", COUNT)
    async def post_input_tokens(http: Request) -> response_types.InputTokens:
        num_tokens = await count_tokens(http, submitter, CountedInputBody, builder.count_tokens)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    return routes
