"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them. They do not use the engine.

Texts may be longer than the model's context: see `check_tokenized_chars`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import Request, Response

from gemserve.api.access.keys import tenant_of
from gemserve.api.documents.finder import Finder
from gemserve.api.documents.store import DocumentStore
from gemserve.api.replies.reply_types import Text, TokenizerInfo, Tokens
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.long_texts import LongTexts, count_chat_chars
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.sampling_options import check_ids
from gemserve.api.requests.template_variables import check_no_variables
from gemserve.api.requests.tokenizer_bodies import DetokenizeBody, TokenizeBody, TokenizerBody
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import read_body
from gemserve.errors import RequestError, shown
from gemserve.prompting.chat_template import render_chat
from gemserve.prompting.client_text import encode_chat
from gemserve.prompting.encoding import decode, encode
from gemserve.prompting.template_roles import fit_roles
from gemserve.prompting.tools import for_template

_SLICE_TOKENS = 8192
TOKENIZE = Operation(
    summary="Tokenize a prompt or messages",
    body=TokenizeBody,
    example={"prompt": "Hello"},
    reply=Tokens,
    links={
        "text": {
            "operationId": "post_detokenize",
            "requestBody": {"tokens": "$response.body#/tokens"},
        }
    },
)
DETOKENIZE = Operation(
    summary="Turn tokens into text",
    body=DetokenizeBody,
    example={"tokens": [72, 105]},
    reply=Text,
)
TOKENIZER_INFO = Operation(summary="Describe the tokenizer", reply=TokenizerInfo)
BodyT = TypeVar("BodyT", bound=TokenizerBody)


def tokenizing_routes(
    builder: RequestBuilder, models: ModelNames, documents: DocumentStore, long_texts: LongTexts
) -> Routes:
    routes = Routes()

    async def answer(
        http: Request, body_type: type[BodyT], write: Callable[[RequestBuilder, BodyT], str]
    ) -> Response:
        tenant = tenant_of(http)
        finder = Finder(documents, tenant)

        def parse(raw: bytes) -> BodyT:
            body = parse_body(raw, body_type, finder)
            models.describe_adapter(body.model)  # an adapter changes nothing about tokens
            return body

        raw = await read_body(http)
        body = await to_thread.run_sync(parse, raw)
        async with long_texts.turn(tenant, len(raw) + finder.num_chars):
            text = await to_thread.run_sync(write, builder, body)
        return Response(text, media_type="application/json")

    @routes.add("POST", "/tokenize", TOKENIZE)
    async def post_tokenize(http: Request) -> Response:
        return await answer(http, TokenizeBody, tokenize)

    @routes.add("POST", "/detokenize", DETOKENIZE)
    async def post_detokenize(http: Request) -> Response:
        return await answer(http, DetokenizeBody, detokenize)

    @routes.add("GET", "/tokenizer_info", TOKENIZER_INFO)
    def get_tokenizer_info() -> TokenizerInfo:  # not async: runs off the event loop
        return tokenizer_info(builder)

    return routes


def tokenize(builder: RequestBuilder, body: TokenizeBody) -> str:
    """The reply's JSON. Special tokens are added to a prompt; a chat template writes its own."""
    text, encoding = _encode_body(builder, body)
    ids = encoding.ids
    strings = "null"
    if body.return_token_strs:
        strings = _json_array(ids, builder.tokenizer.convert_ids_to_tokens)
    offsets = ""
    if body.return_offsets:
        starts = [start for start, _ in encoding.offsets]
        shown_text = json.dumps(text, ensure_ascii=False)
        offsets = f', "text": {shown_text}, "offsets": {_json_array(starts)}'
    return (
        f'{{"count": {len(ids)}, "max_model_len": {builder.context_tokens}, '
        f'"tokens": {_json_array(ids)}, "token_strs": {strings}{offsets}}}'
    )


def detokenize(builder: RequestBuilder, body: DetokenizeBody) -> str:
    """The reply's JSON. Special tokens are part of the text."""
    check_ids(body.tokens, "tokens", builder.vocab_size)
    text: Text = {"prompt": decode(builder.tokenizer, body.tokens)}
    return json.dumps(text, ensure_ascii=False)


def tokenizer_info(builder: RequestBuilder) -> TokenizerInfo:
    """What `tokenizer_config.json` says, under its names; nothing about the server's files."""
    tokenizer = builder.tokenizer
    added = tokenizer.added_tokens_decoder
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        # 10^30 where the checkpoint does not say
        "model_max_length": min(tokenizer.model_max_length, builder.context_tokens),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "unk_token": tokenizer.unk_token,
        "sep_token": tokenizer.sep_token,
        "pad_token": tokenizer.pad_token,
        "cls_token": tokenizer.cls_token,
        "mask_token": tokenizer.mask_token,
        "added_tokens_decoder": {str(token): added[token].content for token in added},
        "chat_template": tokenizer.chat_template,
    }


def _encode_body(builder: RequestBuilder, body: TokenizeBody) -> tuple[str, Any]:
    """The body's prompt or messages as one text, and its encoding, as those of a request."""
    tokenizer = builder.tokenizer
    if body.messages is not None:
        if body.prompt is not None:
            raise RequestError("messages: not together with prompt", param="messages")
        plain = [message.plain for message in body.messages]
        num_chars = count_chat_chars(plain, (), body.chat_template_kwargs)
        builder.check_tokenized_chars(num_chars, "messages")
        messages, _ = for_template(tokenizer, plain, ())
        has_header = body.add_generation_prompt is not False
        variables = body.chat_template_kwargs or {}
        messages = fit_roles(tokenizer, messages, variables=variables)
        text = render_chat(
            tokenizer, messages, add_generation_prompt=has_header, variables=variables
        )
        encoding = encode(tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
        encoding, _ = encode_chat(
            tokenizer,
            text,
            encoding,
            messages,
            add_generation_prompt=has_header,
            variables=variables,
        )
        return text, encoding
    if body.add_generation_prompt is not None:
        raise RequestError(
            f"add_generation_prompt={shown(body.add_generation_prompt)}: only with messages",
            param="add_generation_prompt",
        )
    check_no_variables(body.chat_template_kwargs)
    if body.prompt is None:
        raise RequestError(
            "prompt: required, unless there are messages", param="prompt", code="missing_field"
        )
    builder.check_tokenized_chars(len(body.prompt), "prompt")
    is_adding = body.add_special_tokens is not False
    return body.prompt, encode(tokenizer, body.prompt, add_special_tokens=is_adding)


def _json_array(
    ids: Sequence[int], items: Callable[[Sequence[int]], Sequence[int | str]] = lambda ids: ids
) -> str:
    """`items` of the ids, as JSON."""
    # in slices: json.dumps keeps the interpreter lock, for a second if there are millions of ids
    slices = (ids[at : at + _SLICE_TOKENS] for at in range(0, len(ids), _SLICE_TOKENS))
    texts = (json.dumps(items(part), ensure_ascii=False)[1:-1] for part in slices)
    return f"[{', '.join(texts)}]"
