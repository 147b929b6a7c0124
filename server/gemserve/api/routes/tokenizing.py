"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them. They do not use the engine.

Texts may be longer than the model's context: see `RequestBuilder.check_tokenized_bytes`. Replies
are estimated before, written in a thread in slices, and sent so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from gemserve.api.access.keys import tenant_of
from gemserve.api.documents.document_store import DocumentStore
from gemserve.api.documents.finder import Finder
from gemserve.api.replies.large_replies import SlicedResponse, encoded_slices
from gemserve.api.replies.reply_types import Text, TokenizerInfo, Tokens
from gemserve.api.requests.answer_start_body import check_no_answer_start
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.long_texts import charge, count_chat_bytes
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.sampling_options import check_ids
from gemserve.api.requests.template_variables import check_no_variables
from gemserve.api.requests.tokenizer_bodies import DetokenizeBody, TokenizeBody, TokenizerBody
from gemserve.api.requests.tool_choice import check_tools
from gemserve.api.requests.turns import TextTurns
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import read_body
from gemserve.errors import RequestError
from gemserve.prompting.chat_template import render_chat
from gemserve.prompting.client_text import encode_chat
from gemserve.prompting.encoding import TokenLimit, decode, encode, num_bytes, token_edges
from gemserve.prompting.stopping import check_stopped
from gemserve.prompting.template_roles import fit_roles
from gemserve.prompting.tools import for_template

_SLICE_TOKENS = 8192
_ID_BYTES = 16  # of an id or an offset in a body or a reply
_STRING_BYTES = 32  # of a token's string in a reply
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
BodyT_contra = TypeVar("BodyT_contra", bound=TokenizerBody, contravariant=True)


class Write(Protocol[BodyT_contra]):
    """Returns how many tokens there are, and the reply in parts."""

    def __call__(
        self, builder: RequestBuilder, body: BodyT_contra
    ) -> tuple[int, Iterator[str]]: ...


def tokenizing_routes(
    builder: RequestBuilder, models: ModelNames, documents: DocumentStore, turns: TextTurns
) -> Routes:
    routes = Routes()

    async def answer(http: Request, body_type: type[BodyT], write: Write[BodyT]) -> Response:
        tenant = tenant_of(http)
        finder = Finder(documents, tenant)

        def parse(raw: bytes) -> tuple[BodyT, int]:
            body = parse_body(raw, body_type, finder)
            models.describe_adapter(body.model)  # an adapter changes nothing about tokens
            return body, _reply_bytes(builder, body)

        raw = await read_body(http)
        if body_type is DetokenizeBody:
            _check_ids_body(raw, builder.most_tokenized)
        run = partial(turns.run, http, tenant)
        body, size = await run(len(raw), partial(parse, raw))
        field = "tokens" if body_type is DetokenizeBody else "prompt"
        http.scope["state"]["reply"].take(size, field)

        def slices() -> tuple[int, list[bytes]]:
            num_tokens, parts = write(builder, body)
            return num_tokens, encoded_slices(parts)

        num_tokens, written = await run(len(raw) + finder.num_chars, slices)
        charge(http, num_tokens)
        http.scope["state"]["body"].release()
        return SlicedResponse(written)

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


def tokenize(builder: RequestBuilder, body: TokenizeBody) -> tuple[int, Iterator[str]]:
    """How many tokens there are, and the reply's JSON in parts.

    Special tokens are added to a prompt; a chat template writes its own.
    """
    text, encoding = _encode_body(builder, body)
    ids = encoding.ids

    def parts() -> Iterator[str]:
        yield f'{{"count": {len(ids)}, "max_model_len": {builder.context_tokens}, "tokens": '
        yield from _json_array(len(ids), lambda some: ids[some])
        yield ', "token_strs": '
        if body.return_token_strs:
            strings = builder.tokenizer.convert_ids_to_tokens
            yield from _json_array(len(ids), lambda some: strings(ids[some]))
        else:
            yield "null"
        if body.return_offsets:
            yield f', "text": {json.dumps(text, ensure_ascii=False)}, "offsets": '
            starts = token_edges(encoding)[0]
            yield from _json_array(len(starts), lambda some: starts[some].tolist())
        yield "}"

    return len(ids), parts()


def detokenize(builder: RequestBuilder, body: DetokenizeBody) -> tuple[int, Iterator[str]]:
    """How many tokens there are, and the reply's JSON. Special tokens are part of the text."""
    check_ids(body.tokens, "tokens", builder.vocab_size)
    text: Text = {"prompt": decode(builder.tokenizer, body.tokens)}
    return len(body.tokens), iter([json.dumps(text, ensure_ascii=False)])


def _check_ids_body(raw: bytes, most: int) -> None:
    """Refuse a body with too many ids before it is parsed, which would take long."""
    if len(raw) > most * _ID_BYTES:
        raise RequestError(
            f"tokens: the body has {len(raw)} bytes, the limit of what is detokenized is {most} "
            f"tokens, of {_ID_BYTES} bytes each",
            param="tokens",
            code="body_too_large",
        )


def _reply_bytes(builder: RequestBuilder, body: TokenizerBody) -> int:
    """The most bytes that the reply may take while it is written."""
    if isinstance(body, DetokenizeBody):
        num_tokens = len(body.tokens)
        if num_tokens > builder.most_tokenized:
            raise RequestError(
                f"tokens: has {num_tokens} tokens, the limit of what is detokenized is "
                f"{builder.most_tokenized}",
                param="tokens",
                code="body_too_large",
            )
        return num_tokens * builder.longest_token_chars
    assert isinstance(body, TokenizeBody)
    if body.messages is not None:
        plain = [message.plain for message in body.messages]
        size = count_chat_bytes(plain, check_tools(body.tools), body.chat_template_kwargs)
        builder.check_tokenized_bytes(size, "messages")
    else:
        size = num_bytes(body.prompt or "")
        builder.check_tokenized_bytes(size, "prompt")
    each = _ID_BYTES + body.return_token_strs * _STRING_BYTES + body.return_offsets * _ID_BYTES
    return min(size, builder.most_tokenized) * each + size


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
        given = check_tools(body.tools)
        taken, tools = for_template(tokenizer, plain, given)
        start = body.answer_start
        variables = body.chat_template_kwargs or {}
        sent = [message.message for message in taken]
        messages = fit_roles(tokenizer, sent, tools, variables)
        text = render_chat(
            tokenizer, messages, tools, add_generation_prompt=start == "header", variables=variables
        )
        is_adding = bool(body.add_special_tokens)
        limit = TokenLimit(builder.most_tokenized, "messages", is_context=False)
        encoding = encode(tokenizer, text, add_special_tokens=is_adding, limit=limit)
        text, encoding, _ = encode_chat(
            tokenizer,
            text,
            encoding,
            messages,
            tools,
            start=start,
            add_special_tokens=is_adding,
            variables=variables,
        )
        return text, encoding
    if body.tools is not None:
        raise RequestError("tools: only with messages", param="tools")
    check_no_answer_start(body)
    check_no_variables(body.chat_template_kwargs)
    if body.prompt is None:
        raise RequestError(
            "prompt: required, unless there are messages", param="prompt", code="missing_field"
        )
    is_adding = body.add_special_tokens is not False
    limit = TokenLimit(builder.most_tokenized, "prompt", is_context=False)
    return body.prompt, encode(tokenizer, body.prompt, add_special_tokens=is_adding, limit=limit)


def _json_array(length: int, items: Callable[[slice], Sequence[int | str]]) -> Iterator[str]:
    """A JSON array of so many items, in parts; `items` has those of a slice."""
    # in slices: json.dumps keeps the interpreter lock, for a second if there are millions of ids
    yield "["
    for at in range(0, length, _SLICE_TOKENS):
        check_stopped()
        part = items(slice(at, at + _SLICE_TOKENS))
        yield (", " if at else "") + json.dumps(part, ensure_ascii=False)[1:-1]
    yield "]"
