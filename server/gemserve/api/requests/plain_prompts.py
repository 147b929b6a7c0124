"""The prompts of a body without messages, each behind the stored document that the body names."""

from __future__ import annotations

from typing import cast

from gemserve.api.documents.finder import check_chars
from gemserve.api.documents.store import Document
from gemserve.api.requests.completion_body import CompletionBody
from gemserve.errors import RequestError

BETWEEN = "\n\n"  # between a document and the prompt
PlainPrompt = str | list[int]


def prompt_list(body: CompletionBody) -> list[PlainPrompt]:
    """One prompt or several prompts, as a list. Raises `RequestError`."""
    given = body.prompt
    if isinstance(given, str) or not given or isinstance(given[0], int):
        prompts = [cast(PlainPrompt, given)]
    else:
        prompts = cast(list[PlainPrompt], given)
    if body.document is not None:
        check_chars(len(prompts) * len(body.document.text))
    return [behind_document(prompt, body.document) for prompt in prompts]


def behind_document(prompt: PlainPrompt, document: Document | None) -> PlainPrompt:
    """The prompt behind the document's text and an empty line. Raises `RequestError`."""
    if document is None or not prompt:
        return prompt
    if not isinstance(prompt, str):
        raise RequestError(
            "document: only with a prompt that is a text, not with token ids", param="document"
        )
    return f"{document.text}{BETWEEN}{prompt}"
