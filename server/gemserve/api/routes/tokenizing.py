"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's vocabulary; the engine has no part.

Texts may be longer than the model's context: only the body's size is limited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from gemserve.api.requests.base_bodies import DetokenizeBody, TokenizeBody, TokenizerBody
from gemserve.api.requests.json_body import parse
from gemserve.api.requests.model_names import Models
from gemserve.api.requests.request_builder import PromptBuilder
from gemserve.api.requests.sampling_options import check_ids
from gemserve.engine.control_tokens import spell_out
from gemserve.engine.prompt import decode, encode, find_messages, render_chat
from gemserve.engine.tools import for_template
from gemserve.errors import RequestError, shown

_PIECE_TOKENS = 8192
TextT = TypeVar("TextT", bound=TokenizerBody)


def tokenizing_routes(prompts: PromptBuilder, models: Models) -> APIRouter:
    routes = APIRouter()

    async def answer(
        http: Request, body_type: type[TextT], work: Callable[[PromptBuilder, TextT], str]
    ) -> Response:
        def respond(raw: bytes) -> Response:
            body = parse(raw, body_type)
            models.check(body.model)  # an adapter changes nothing about tokens
            text = work(prompts, body)
            return Response(text, media_type="application/json")

        try:
            raw = await http.body()
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        return await to_thread.run_sync(respond, raw)

    @routes.post("/tokenize")
    async def post_tokenize(http: Request) -> Response:
        return await answer(http, TokenizeBody, tokenize)

    @routes.post("/detokenize")
    async def post_detokenize(http: Request) -> Response:
        return await answer(http, DetokenizeBody, detokenize)

    @routes.get("/tokenizer_info")
    def get_tokenizer_info() -> dict[str, Any]:  # not async: runs off the event loop
        return tokenizer_info(prompts)

    return routes


def tokenize(prompts: PromptBuilder, body: TokenizeBody) -> str:
    """The reply's JSON. Special tokens are added to a prompt; a chat template writes its own."""
    ids = _encoding_of(prompts, body).ids
    strings = "null"
    if body.return_token_strs:
        strings = _json_array(ids, prompts.tokenizer.convert_ids_to_tokens)
    return (
        f'{{"count": {len(ids)}, "max_model_len": {prompts.context_tokens}, '
        f'"tokens": {_json_array(ids)}, "token_strs": {strings}}}'
    )


def detokenize(prompts: PromptBuilder, body: DetokenizeBody) -> str:
    """The reply's JSON. Special tokens are part of the text."""
    check_ids(body.tokens, "tokens", prompts.vocab_size)
    return json.dumps({"prompt": decode(prompts.tokenizer, body.tokens)}, ensure_ascii=False)


def tokenizer_info(prompts: PromptBuilder) -> dict[str, Any]:
    """What `tokenizer_config.json` tells, under its names; nothing about the server's files."""
    tokenizer = prompts.tokenizer
    added = tokenizer.added_tokens_decoder
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        # 10^30 where the checkpoint does not say
        "model_max_length": min(tokenizer.model_max_length, prompts.context_tokens),
        **{name: getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES},
        "added_tokens_decoder": {str(token): added[token].content for token in added},
        "chat_template": tokenizer.chat_template,
    }


def _encoding_of(prompts: PromptBuilder, body: TokenizeBody) -> Any:
    """As a request's prompt or messages would be encoded: see `engine.prompt.Prompt`."""
    tokenizer = prompts.tokenizer
    if body.messages is not None:
        if body.prompt is not None:
            raise RequestError("messages: not together with prompt", param="messages")
        plain = [message.plain for message in body.messages]
        messages, _ = for_template(tokenizer, plain, ())
        has_header = body.add_generation_prompt is not False
        text = render_chat(tokenizer, messages, add_generation_prompt=has_header)
        encoding = encode(tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
        places = find_messages(tokenizer, text, messages, add_generation_prompt=has_header)
        return spell_out(tokenizer, text, encoding, places)
    if body.add_generation_prompt is not None:
        raise RequestError(
            f"add_generation_prompt={shown(body.add_generation_prompt)}: only with messages",
            param="add_generation_prompt",
        )
    if body.prompt is None:
        raise RequestError(
            "prompt: required, unless there are messages", param="prompt", code="missing_field"
        )
    is_adding = body.add_special_tokens is not False
    return encode(tokenizer, body.prompt, add_special_tokens=is_adding)


def _json_array(
    ids: Sequence[int], items: Callable[[Sequence[int]], Sequence[int | str]] = lambda ids: ids
) -> str:
    """`items` of the ids, as JSON."""
    # in pieces: json.dumps keeps the interpreter lock, for a second if there are millions of ids
    pieces = (ids[at : at + _PIECE_TOKENS] for at in range(0, len(ids), _PIECE_TOKENS))
    listed = (json.dumps(items(piece), ensure_ascii=False)[1:-1] for piece in pieces)
    return f"[{', '.join(listed)}]"
