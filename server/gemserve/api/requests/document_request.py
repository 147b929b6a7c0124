"""The engine request that warms the document cache for a document."""

from __future__ import annotations

from dataclasses import replace

from gemserve.api.requests.base_bodies import FilterBody
from gemserve.api.requests.chat_body import Message
from gemserve.api.requests.chat_form import fields_renamed, plain_message
from gemserve.api.requests.document_body import DocumentBody
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.selection_body import SelectionBody
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.filter_options import MIN_KEEP, FilterOptions
from gemserve.contract.prompt_parts import Priority
from gemserve.contract.requests import Request
from gemserve.errors import RequestError
from gemserve.filtering.methods import METHODS
from gemserve.prompting.encoding import encode

_NAMES = {"messages": "text", "prompt": "text"}


def count_tokens(builder: RequestBuilder, text: str) -> int:
    """How many tokens the text alone has."""
    return len(encode(builder.tokenizer, text, add_special_tokens=False))


def warming_request(
    builder: RequestBuilder, body: DocumentBody, request_id: str, adapter: LoadedAdapter | None
) -> Request:
    """A filter pass over what questions about the document begin with: the rendered chat.

    Without a chat template that is the text alone. The pass chooses next to nothing, because only
    its keys and values matter. There is none if the filter is one that leaves nothing to the cache.
    Raises `RequestError`.
    """
    has_chat = builder.tokenizer.chat_template is not None
    if body.system is not None and not has_chat:
        raise RequestError("system: this model has no chat template", param="system")
    options = FilterOptions() if body.filter is None else body.filter.options
    evicts = METHODS[builder.planner.resolve(options).method].evictor is not None
    selection = SelectionBody.model_construct(
        model=body.model,
        filter=FilterBody(method="none") if evicts else body.filter,
        prompt=None if has_chat else body.text,
        messages=_messages(body) if has_chat else None,
    )
    with fields_renamed(_NAMES):
        (request,) = builder.build_selection(selection, request_id, adapter).requests
    params = request.filter
    if params.method != "none":
        params = replace(params, keep=MIN_KEEP, fallback=False)
    # the end of the document is no question
    protected = tuple(r for r in request.protected if r.priority is not Priority.QUESTION)
    warming = replace(request, filter=params, protected=protected, question=())
    return builder.planner.planned(warming)


def _messages(body: DocumentBody) -> list[Message]:
    messages = [plain_message("user", body.text)]
    return messages if body.system is None else [plain_message("system", body.system), *messages]
