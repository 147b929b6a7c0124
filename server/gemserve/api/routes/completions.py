"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from fastapi import Request, Response

from gemserve.api.error_replies import Error
from gemserve.api.replies.answer_reader import answer_rules
from gemserve.api.replies.chat_format import ChatFormat
from gemserve.api.replies.choices_reply import choices_reply
from gemserve.api.replies.completion_format import CompletionFormat
from gemserve.api.replies.logprobs import TokenTexts
from gemserve.api.replies.reply_types import Chat, ChatChunk, Completion, CompletionChunk
from gemserve.api.requests.chat_body import ChatBody
from gemserve.api.requests.completion_body import CompletionBody
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.tool_choice import chat_call_rules
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter

EXAMPLE_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETE = Operation(
    summary="Complete prompts",
    body=CompletionBody,
    example={"prompt": "The capital of France is", "max_tokens": 8},
    reply=Completion,
    event=CompletionChunk | Error,
    unavailable=Error,
)
CHAT = Operation(
    summary="Answer messages",
    body=ChatBody,
    example={"messages": EXAMPLE_MESSAGES, "max_tokens": 32},
    reply=Chat,
    event=ChatChunk | Error,
    unavailable=Error,
)


def completion_routes(submitter: Submitter, builder: RequestBuilder) -> Routes:
    routes = Routes()
    vocabulary = TokenTexts(builder.tokenizer)

    @routes.add("POST", "/v1/completions", COMPLETE)
    async def post_completion(http: Request) -> Response:
        submission = await submitter.submit(http, CompletionBody, builder.build_completion)
        return await choices_reply(
            submission.body, submission.requests, submission.reader, CompletionFormat(vocabulary)
        )

    @routes.add("POST", "/v1/chat/completions", CHAT)
    async def post_chat(http: Request) -> Response:
        submission = await submitter.submit(http, ChatBody, builder.build_chat)
        request = submission.reader.streams[0].request
        rules = answer_rules(builder.tokenizer, request, chat_call_rules(submission.body))
        return await choices_reply(
            submission.body, submission.requests, submission.reader, ChatFormat(vocabulary, rules)
        )

    return routes
