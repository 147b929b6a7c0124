"""What a filter should keep of a chat: instructions, tools and calls always, documents by choice.

Always read are the template's scaffolding, which has the tools and most calls, system messages, the
last user's request, and short results of the last calls. Documents are long user texts, results of
calls, old turns, and what a message encloses as a document: see `message_structure`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import cast

from gemserve.contract.filter_options import Protect
from gemserve.contract.prompt_parts import ChatRole, MessagePlace, Priority, ProtectedRange
from gemserve.errors import RequestError, shown
from gemserve.prompting.chat_parts import PlacedPart, RenderedChat
from gemserve.prompting.message_structure import (
    find_documents,
    find_instructions,
    request_range,
)
from gemserve.prompting.protected import (
    QUESTION_HEAD,
    QUESTION_TAIL,
    last_paragraphs,
    plain_ranges,
    question_ranges,
)
from gemserve.ranges import Ranges

# Characters of a system message without any structure. Agents' take up to 30,000; 12,000 tokens of
# English are 55,000.
LONGEST_INSTRUCTIONS = 65_536
_INSTRUCTION_ENDS = 1024  # tokens that are read of either end of a longer one
_LONGEST_RESULT = 512  # tokens of a result of the last calls that is read whole
_LONGEST_BESIDE = 2048  # tokens of a user's turn that are read beside the documents in it
MOST_MARKED = 4096  # texts between marks; ranges without end would take long
_SYSTEM = ("system", "developer")


def protect_chat(
    chat: RenderedChat, protect: Protect, short: int
) -> tuple[tuple[ProtectedRange, ...], tuple[MessagePlace, ...]]:
    """The ranges to protect, and where each message is.

    `short`: tokens up to which a user's last turn is read whole; twice as many in a chat with
    tools, where long turns are orders more often than documents.

    All of a chat is protected if it cannot be seen which text is whose. Raises `RequestError` if
    `protect` names what is not there.
    """
    _check(chat, protect)
    num_tokens = len(chat.encoding)
    if not chat.parts:
        if any(message.message["content"].strip() for message in chat.messages):
            return (ProtectedRange(0, num_tokens, Priority.FRAME),), ()
        return plain_ranges(num_tokens, has_bos=True), ()
    ranges = [ProtectedRange(0, 1, Priority.BOS)]
    places: list[MessagePlace] = []
    cursor = 0
    for placed in chat.parts:
        start, stop = chat.tokens_of(placed)
        if chat.is_continued and placed is chat.parts[-1]:  # it belongs to the answer
            role = cast(ChatRole, placed.part.role)
            places.append(MessagePlace(placed.part.index, role, start, stop))
            break
        ranges.append(ProtectedRange(cursor, start, Priority.FRAME))
        cursor = max(cursor, stop)
        if placed.part.is_written:
            ranges.append(ProtectedRange(start, stop, Priority.FRAME))
            continue
        role = cast(ChatRole, placed.part.role)
        places.append(MessagePlace(placed.part.index, role, start, stop))
        ranges += _part_ranges(chat, placed, protect, short)
        ranges += _marked(chat, placed, protect)
    ranges.append(ProtectedRange(cursor, num_tokens, Priority.QUESTION))  # the answer's header
    return tuple(r for r in ranges if r.stop > r.start), tuple(places)


def marked_ranges(text: str, protect: Protect, low: int, high: int) -> Ranges:
    """The characters of text[low:high] between marks that a request names, marks included.

    Ascending, without overlaps.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(
        at for pair in protect.marks for at in _between(text, pair, low, high)
    ):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def check_marks(text: str, protect: Protect) -> None:
    """Raise `RequestError` for marks between which nothing stands in `text`, or too many texts."""
    count = 0
    for at, pair in enumerate(protect.marks):
        found = sum(1 for _ in islice(_between(text, pair, 0, len(text)), MOST_MARKED + 1))
        count += found
        field = f"filter.protect.marks.{at}"
        if found == 0:
            raise RequestError(
                f"{field}={shown(list(pair))}: the prompt has no text between these marks",
                param=field,
            )
        if count > MOST_MARKED:
            raise RequestError(
                f"{field}={shown(list(pair))}: the prompt has more than {MOST_MARKED} texts "
                "between marks, which is the limit",
                param=field,
            )


def _between(text: str, pair: tuple[str, str], low: int, high: int) -> Iterator[tuple[int, int]]:
    opening, closing = pair
    at = text.find(opening, low, high)
    while at >= 0:
        end = text.find(closing, at + len(opening), high)
        if end < 0:
            return
        yield at, end + len(closing)
        at = text.find(opening, end + len(closing), high)


def _check(chat: RenderedChat, protect: Protect) -> None:
    count = max((part.index for m in chat.messages for part in m.parts), default=-1) + 1
    for name in ("messages", "documents"):
        for at, index in enumerate(getattr(protect, name)):
            if index >= count:
                field = f"filter.protect.{name}.{at}"
                raise RequestError(
                    f"{field}={shown(index)}: must be from 0 to {count - 1}, the number of a "
                    "message",
                    param=field,
                )
    check_marks(chat.text, protect)


def _marked(chat: RenderedChat, placed: PlacedPart, protect: Protect) -> list[ProtectedRange]:
    found = marked_ranges(chat.text, protect, placed.low, placed.high)
    return [ProtectedRange(*chat.tokens(*at), Priority.SYSTEM) for at in found]


def _part_ranges(
    chat: RenderedChat, placed: PlacedPart, protect: Protect, short: int
) -> list[ProtectedRange]:
    start, stop = chat.tokens(placed.low, placed.high)
    index, role = placed.part.index, placed.part.role
    if index in protect.messages:
        return [ProtectedRange(start, stop, Priority.SYSTEM)]
    if index in protect.documents:
        is_request = placed is chat.request
        return _request_ranges(chat, placed, short=0) if is_request else _ends(start, stop)
    if role in _SYSTEM:
        return _system_ranges(chat, placed)
    if role not in ("tool", "user"):
        return []
    tagged = [
        ProtectedRange(*chat.tokens(placed.low + low, placed.low + high), Priority.SYSTEM)
        for low, high in find_instructions(chat.text[placed.low : placed.high])
        if role == "user"
    ]
    if placed is chat.request:
        return [*tagged, *_request_ranges(chat, placed, 2 * short if chat.has_tools else short)]
    results = chat.last_results
    if not chat.is_result(placed) or not results or placed.low < results[-1].low:
        return tagged
    if stop - start <= min(short, _LONGEST_RESULT):
        return [*tagged, ProtectedRange(start, stop, Priority.TOOLS)]
    return [*tagged, *_ends(start, stop)]


def _system_ranges(chat: RenderedChat, placed: PlacedPart) -> list[ProtectedRange]:
    start, stop = chat.tokens(placed.low, placed.high)
    text = chat.text[placed.low : placed.high]
    documents = find_documents(text, is_system=True)
    if documents:
        return _beside(chat, placed, documents, Priority.SYSTEM)
    if placed.high - placed.low <= LONGEST_INSTRUCTIONS:
        return [ProtectedRange(start, stop, Priority.SYSTEM)]
    return [
        ProtectedRange(start, start + _INSTRUCTION_ENDS, Priority.SYSTEM),
        ProtectedRange(stop - _INSTRUCTION_ENDS, stop, Priority.SYSTEM),
    ]


def _request_ranges(chat: RenderedChat, placed: PlacedPart, short: int) -> list[ProtectedRange]:
    """Protect the last user's turn: all but its documents, or a document's ends and question."""
    text = chat.text[placed.low : placed.high]
    first, last = request_range(text)
    start, stop = chat.tokens(placed.low + first, placed.low + last)
    beside: list[ProtectedRange] = []
    if stop - start > short:
        documents = find_documents(text, is_system=False)
        beside = _beside(chat, placed, documents, Priority.QUESTION)
        if not documents or sum(r.stop - r.start for r in beside) > _LONGEST_BESIDE:
            beside = []
        elif documents[-1][1] < last or text[last - 1] in "`~":
            return beside
        # nothing closes the last document: what it ends with may be the request
    content = text[first:last]
    end = placed.low + last
    ends = [end - len(found.lstrip()) for found in last_paragraphs(content)]
    at_ends = question_ranges(start, stop, [chat.tokens(at, end)[0] for at in ends], short)
    return [*beside, *at_ends]


def _beside(
    chat: RenderedChat, placed: PlacedPart, documents: Ranges, priority: Priority
) -> list[ProtectedRange]:
    """Protect what stands beside the documents of a part."""
    edges = [0, *(edge for document in documents for edge in document), placed.high - placed.low]
    ranges = []
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        piece = chat.text[placed.low + low : placed.low + high]
        if piece.strip():
            at = chat.tokens(placed.low + low, placed.low + high)
            ranges.append(ProtectedRange(*at, priority))
    return ranges


def _ends(start: int, stop: int) -> list[ProtectedRange]:
    """Protect the ends of a document, which may say what it is, within the budget."""
    head = ProtectedRange(start, min(stop, start + QUESTION_HEAD), Priority.HEAD)
    return [head, ProtectedRange(max(start, stop - QUESTION_TAIL), stop, Priority.TAIL)]
