"""`messages` and `system` of /v1/messages: texts, calls of tools, and what the calls gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gemserve.api.replies.citations import CitedDocument
from gemserve.api.requests.base_bodies import TextOr
from gemserve.api.requests.chat_body import CalledFunction, Message, ToolCall
from gemserve.api.requests.chat_form import plain_message
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.omitted_parts import (
    OMITTED,
    OmittedPart,
    but_not,
    first_of_last_turn,
    omitted,
    or_omitted,
)
from gemserve.api.requests.served_types import TEXT_ONLY, HistoryItem, of_type, refuse_others
from gemserve.errors import RequestError

_REASONS = dict.fromkeys(("image", "document", "search_result"), TEXT_ONLY)
_STORED_ONLY = "is not read: store the text with POST /v1/documents, and send its file_id"
_OTHER_BLOCKS = "is not served: this server runs no tools, and reads texts and results of tools"
# Claude Code's first line, for Anthropic's accounts. It differs from conversation to conversation,
# so no two would begin alike, and the document cache would find nothing of one for another.
_ATTRIBUTION = "x-anthropic-billing-header:"
_BETWEEN_BLOCKS = "\n\n"


class Block(HistoryItem):
    """`cache_control` has no effect."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None
    parsed_output: Any = None  # Anthropic's SDK adds it to a reply


class FileSource(HistoryItem):
    type: Literal["file"]
    file_id: DocumentReference


class TextSource(HistoryItem):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Annotated[str, Field(min_length=1)]


class OtherSource(OmittedPart):
    """A document that is not read: a file, an address, or blocks."""

    type: Literal["base64", "url", "content"]


class CitationsWish(HistoryItem):
    enabled: bool | None = None


class DocumentBlock(Block):
    """A document: a stored one in place of its text, or a text.

    `title` and `context` stand in front of it. `citations`: the answer says what of it was kept.
    """

    type: Literal["document"]
    source: Annotated[
        Annotated[FileSource, of_type("file")]
        | Annotated[TextSource, of_type("text")]
        | Annotated[OtherSource, of_type(OMITTED)],
        or_omitted(("file", "text")),
        refuse_others(("file", "text", "base64", "url", "content"), {}),
    ]
    title: str | None = None
    context: str | None = None
    citations: CitationsWish | None = None

    @property
    def text(self) -> str:
        return _BETWEEN_BLOCKS.join(filter(None, (self.title, self.context, self.document_text)))

    @property
    def document_text(self) -> str:
        source = self.source
        if isinstance(source, OtherSource):
            return omitted(self.type)
        return source.file_id.text if isinstance(source, FileSource) else source.data


class SearchResult(Block):
    """What a search of the client's found, as text. `citations` has no effect."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(fail_fast=True)]
    citations: CitationsWish | None = None

    @property
    def text(self) -> str:
        texts = (block.text for block in self.content)
        return _BETWEEN_BLOCKS.join(filter(None, (self.title, self.source, *texts)))


class ToolUse(Block):
    """A call that an earlier answer asked for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: TextOr[dict[str, Any]] | None = None  # a text of JSON, or nothing
    caller: dict[str, Any] | None = None


Text = Annotated[TextBlock, refuse_others(("text",), _REASONS, otherwise=_OTHER_BLOCKS)]
Texts = TextOr[Annotated[list[Text], Field(fail_fast=True)]]


class ToolReference(Block):
    """A tool that a search of the client's found. Every tool is in the prompt in any case."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"You can call the tool {self.tool_name}."


class OmittedResult(OmittedPart):
    model_config = ConfigDict(
        json_schema_extra=but_not("text", "tool_reference", "document", "search_result")
    )


ResultBlock = Annotated[
    Annotated[TextBlock, of_type("text")]
    | Annotated[ToolReference, of_type("tool_reference")]
    | Annotated[DocumentBlock, of_type("document")]
    | Annotated[SearchResult, of_type("search_result")]
    | Annotated[OmittedResult, of_type(OMITTED)],
    or_omitted(("text", "tool_reference", "document", "search_result")),
]


class ToolResult(Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[Annotated[list[ResultBlock], Field(fail_fast=True)]] | None = None
    is_error: bool | None = None


class Thinking(Block):
    """How another model came to an earlier answer. It is left out of the prompt."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


_BLOCKS = (
    *("text", "document", "search_result", "tool_use", "tool_result", "thinking"),
    "redacted_thinking",
)


class OmittedBlock(OmittedPart):
    """A block of another type, such as those of tools that Anthropic's servers run."""

    model_config = ConfigDict(json_schema_extra=but_not(*_BLOCKS))


ContentBlock = Annotated[
    Annotated[TextBlock, of_type("text")]
    | Annotated[DocumentBlock, of_type("document")]
    | Annotated[SearchResult, of_type("search_result")]
    | Annotated[ToolUse, of_type("tool_use")]
    | Annotated[ToolResult, of_type("tool_result")]
    | Annotated[Thinking, of_type("thinking")]
    | Annotated[Thinking, of_type("redacted_thinking")]
    | Annotated[OmittedBlock, of_type(OMITTED)],
    or_omitted(_BLOCKS),
]
TextLike = TextBlock | DocumentBlock | SearchResult | ToolReference | OmittedPart


class ConversationMessage(HistoryItem):
    role: Literal["user", "assistant", "system"]
    content: TextOr[Annotated[list[ContentBlock], Field(fail_fast=True)]]


def chat_messages(
    system: str | Sequence[TextBlock] | None, said: Sequence[ConversationMessage]
) -> list[Message]:
    """The system prompt and the messages as those of a chat. Raises `RequestError`.

    Each result of a tool is a message of its own, as in a chat.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    instructions = _BETWEEN_BLOCKS.join(filter(None, map(_without_attribution, texts)))
    messages = [plain_message("system", instructions)] if instructions else []
    last = first_of_last_turn([message.role for message in said])
    for index, message in enumerate(said):
        messages += _of_message(message, f"messages.{index}", is_last=index >= last)
    if said[-1].role == "assistant":
        field = f"messages.{len(said) - 1}"
        raise RequestError(
            f"{field}: the last message must not be the assistant's: this server does not continue "
            "answers",
            param=field,
        )
    return messages


def cited_documents(said: Sequence[ConversationMessage]) -> list[CitedDocument]:
    """The documents of which the answer should say what was kept."""
    blocks = (
        block
        for message in said
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, DocumentBlock)
    )
    cited = []
    for index, block in enumerate(blocks):
        if block.citations is None or not block.citations.enabled:
            continue
        if isinstance(block.source, OtherSource):
            continue
        stored = block.source.file_id if isinstance(block.source, FileSource) else None
        cited.append(
            CitedDocument(
                index=index,
                text=block.document_text,
                title=block.title or (None if stored is None else stored.name),
                file_id=None if stored is None else stored.id,
            )
        )
    return cited


def _without_attribution(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def text_of(content: str | Sequence[TextLike] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return _BETWEEN_BLOCKS.join(block.text for block in content)


def _of_message(message: ConversationMessage, field: str, *, is_last: bool) -> Iterator[Message]:
    if isinstance(message.content, str):
        yield plain_message(message.role, message.content)
        return
    texts: list[TextLike] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        _check_role(block, message.role, f"{field}.content.{index}")
        if is_last and message.role == "user":
            _check_read(block, f"{field}.content.{index}")
        if isinstance(block, (TextBlock, DocumentBlock, SearchResult, OmittedPart)):
            texts.append(block)
        elif isinstance(block, ToolUse):
            calls.append(_call(block))
        elif isinstance(block, ToolResult):
            if texts:
                yield plain_message(message.role, text_of(texts))
                texts = []
            yield _result(block)
    if texts or calls or not message.content:
        said = plain_message(message.role, text_of(texts))
        said.tool_calls = calls or None
        yield said


def _check_read(block: Block | OmittedPart, field: str) -> None:
    """Raise `RequestError` for what a user has sent last, and is not read."""
    if isinstance(block, OmittedPart):
        kind = block.type
        raise RequestError(f"{field}: {kind} {_REASONS.get(kind, _OTHER_BLOCKS)}", param=field)
    if isinstance(block, DocumentBlock) and isinstance(block.source, OtherSource):
        field = f"{field}.source"
        raise RequestError(f"{field}: {block.source.type} {_STORED_ONLY}", param=field)


def _check_role(block: Block | OmittedPart, role: str, field: str) -> None:
    roles: tuple[tuple[type[Block], str], ...] = (
        (ToolUse, "assistant"),
        (ToolResult, "user"),
        (DocumentBlock, "user"),
    )
    for kind, wanted in roles:
        if isinstance(block, kind) and role != wanted:
            raise RequestError(f"{field}: only in a message with role {wanted}", param=field)


def _call(block: ToolUse) -> ToolCall:
    function = CalledFunction.model_construct(name=block.name, arguments=block.input)
    return ToolCall.model_construct(id=block.id, type="function", function=function)


def _result(block: ToolResult) -> Message:
    text = text_of(block.content)
    return Message.model_construct(
        role="tool",
        content=f"Error: {text}" if block.is_error else text,
        tool_call_id=block.tool_use_id,
    )
