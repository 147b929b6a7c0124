"""Messages in roles and an order that a model's chat template accepts.

Many templates know no role `developer` or `tool`, want the system message first, want users and
assistants to take turns, or want ids of their own form or one call in a message. They raise an
error at other messages, or leave them out. Then the messages are changed, as little as the template
demands. A template that shows all messages as they were sent gets them unaltered, but for a
`developer` that it does not name: it would write that role behind a system prompt of its own, and
models know it as little.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, groupby
from typing import Any

from gemserve.errors import RequestError
from gemserve.prompting.chat_template import NO_VARIABLES, TemplateTooLarge, render_chat
from gemserve.prompting.tools import Message, Tool

_BETWEEN = "\n\n"
_SHORT_ID = 9  # characters
_MARK = re.compile("\ue000[0-9]{20}\ue001")
# lengths of ids, and of lists of calls: without such a condition nothing is tried in vain
_COMPARES_NINE = re.compile(r"length\s*\)*\s*[!=]=\s*9\b")
_COMPARES_ONE = re.compile(r"length\s*\)*\s*(?:[!=]=|>)\s*1\b")
_DEVELOPER = re.compile(r"""(['"])developer\1""")
Change = Callable[[Sequence[Message]], list[Message]]


def fit_roles(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> Sequence[Message]:
    """The messages as the template accepts them; as they are if nothing makes it accept them.

    If one is changed in more than its role, every message has `sources`: one `(index, start, end)`
    for each of `messages` that is in it, with the place where it stands in the content, in
    characters.
    """
    if tokenizer.chat_template is None:
        return messages
    if any(m["role"] == "developer" for m in messages) and not _names_developer(tokenizer):
        messages = _developers_as_system(messages)
    marked = [_marked(message) for message in messages]
    marks = {message["content"] for message in _easily_lost(marked)}

    def render(some: Sequence[Message]) -> str | None:
        try:
            return render_chat(tokenizer, some, tools, variables=variables)
        except TemplateTooLarge:  # however they are changed
            raise
        except RequestError:
            return None

    def shows_all(text: str | None) -> bool:
        return text is not None and marks.issubset(_MARK.findall(text))

    template = "".join(_texts_of(tokenizer))
    as_sent = render(marked)
    calls = {
        call["function"]["name"] for m in marked if _num_calls(m) > 1 for call in m["tool_calls"]
    }
    shown = calls.intersection(_MARK.findall(as_sent or ""))
    is_cut = bool(shown) and shown != calls  # the one of gpt-oss shows the first call alone
    marks |= calls if is_cut else set()
    if shows_all(as_sent) or (as_sent is None and render(messages) is not None):
        return messages
    for change in _changes(messages, template, is_cut=is_cut):
        if shows_all(render(change(marked))):
            return change(messages)
    return messages


def source_places(
    places: Sequence[tuple[int, int, int]], messages: Sequence[Message], text: str
) -> list[tuple[int, int, int]]:
    """`find_messages` of the messages that `fit_roles` was given. `messages`: what it returned.

    Where a template has rewritten a message, its whole place is that of its first source, because
    instructions come first.
    """
    found: list[tuple[int, int, int]] = []
    for index, low, high in places:
        message = messages[index]
        if "sources" not in message:
            found.append((index, low, high))
            continue
        start = message["content"].find(text[low:high])  # a template may strip blanks
        if start < 0:
            found.append((message["sources"][0][0], low, high))
            continue
        for source, first, end in message["sources"]:
            at = max(low, low + first - start)
            found.append((source, at, max(at, min(high, low + end - start))))
    return found


def _names_developer(tokenizer: Any) -> bool:
    """Does the template say anything about that role?"""
    return any(map(_DEVELOPER.search, _texts_of(tokenizer)))


def _texts_of(tokenizer: Any) -> list[str]:
    template = tokenizer.chat_template
    return [*template.values()] if isinstance(template, dict) else [template]


def _easily_lost(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages that a template must show, because it may not know that there are such.

    Users and assistants are not among them: what a template does to these its author has chosen.
    A first system message is, because some templates show it beside a user's turn only if that is
    the last message, so not while results of tools are read.
    """
    for message in messages:
        if message["role"] in ("system", "developer", "tool") and message["content"]:
            yield message


def _marked(message: Message) -> Message:
    """The message with a text in place of its own that no other message has.

    So have its calls in place of their names, if there are several.
    """
    marked = {**message, "content": _mark()} if message["content"] else message
    if _num_calls(message) < 2:
        return marked
    calls = message["tool_calls"]
    named = [{**each, "function": {**each["function"], "name": _mark()}} for each in calls]
    return {**marked, "tool_calls": named}


def _mark() -> str:
    return f"\ue000{secrets.randbelow(10**20):020}\ue001"


def _changes(messages: Sequence[Message], template: str, *, is_cut: bool) -> Iterator[Change]:
    """What can be done about the messages, the least first."""
    roles = {message["role"] for message in messages}
    steps: list[Change] = []
    if any(map(_num_calls, messages)) and _COMPARES_NINE.search(template):
        steps.append(_short_ids)
    has_several = any(_num_calls(message) > 1 for message in messages)
    if has_several and (is_cut or _COMPARES_ONE.search(template)):
        steps.append(_calls_apart)
    if "developer" in roles:
        steps.append(_developers_as_system)
    if roles & {"system", "developer"}:
        steps += [_systems_first, _systems_in_user]
    if "tool" in roles:
        steps.append(_results_as_users)
    steps.append(_neighbours_as_one)
    for count in range(1, len(steps) + 1):
        for chosen in combinations(steps, count):
            if not {_systems_first, _systems_in_user}.issubset(chosen):
                yield partial(_changed, chosen)


def _num_calls(message: Message) -> int:
    return len(message.get("tool_calls", ()))


def _changed(steps: Sequence[Change], messages: Sequence[Message]) -> list[Message]:
    changed: list[Message] = [
        {**message, "sources": [(index, 0, len(message["content"]))]}
        for index, message in enumerate(messages)
    ]
    for step in steps:
        changed = step(changed)
    return changed


def _developers_as_system(messages: Sequence[Message]) -> list[Message]:
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls as nine letters and digits, which Mistral's templates demand."""
    short: dict[str, str] = {}
    taken: set[str] = set()

    def shortened(call_id: str) -> str:
        name = call_id
        while call_id not in short:
            found = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID]
            if found not in taken:
                taken.add(found)
                short[call_id] = found
            name += "+"
        return short[call_id]

    changed: list[Message] = []
    for message in messages:
        one = dict(message)
        if calls := message.get("tool_calls"):
            one["tool_calls"] = [{**call, "id": shortened(call["id"])} for call in calls]
        if "tool_call_id" in message:
            one["tool_call_id"] = shortened(message["tool_call_id"])
        if "called" in message:
            one["called"] = {shortened(each): name for each, name in message["called"].items()}
        changed.append(one)
    return changed


def _calls_apart(messages: Sequence[Message]) -> list[Message]:
    """Each call as a message of its own, with its result behind it; the text is with the first."""
    changed: list[Message] = []
    behind = deque(messages)
    while behind:
        message = behind.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            changed.append(message)
            continue
        results: dict[str | None, list[Message]] = {}
        while behind and behind[0]["role"] == "tool":
            result = behind.popleft()
            results.setdefault(result.get("tool_call_id"), []).append(result)
        rest = {**message, "content": "", "sources": [(message["sources"][0][0], 0, 0)]}
        for number, call in enumerate(calls):
            changed.append({**(rest if number else message), "tool_calls": [call]})
            changed += results.pop(call["id"], ())
        changed += chain.from_iterable(results.values())
    return changed


def _results_as_users(messages: Sequence[Message]) -> list[Message]:
    """Results of tools as a user's messages that say which call they answer."""
    names: dict[str, str] = {}
    changed: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        names |= message.get("called", {})
        if message["role"] == "tool":
            call_id = message.get("tool_call_id", "")
            called = f"{names[call_id]} ({call_id})" if call_id in names else call_id
            label = f"Result of {called or 'a call'}:\n"
            result = {k: v for k, v in message.items() if k not in ("tool_call_id", "name")}
            changed.append({**result, "role": "user", **_joined([message], label)})
        else:
            changed.append(message)
    return changed


def _systems_first(messages: Sequence[Message]) -> list[Message]:
    """All system messages as one, at the beginning."""
    systems = [m for m in messages if m["role"] == "system"]
    others = [m for m in messages if m["role"] != "system"]
    return [{**systems[0], **_joined(systems)}, *others] if systems else others


def _systems_in_user(messages: Sequence[Message]) -> list[Message]:
    """All system messages in front of what the user says first; as a user's if nobody says any."""
    systems = [m for m in messages if m["role"] == "system"]
    others = [m for m in messages if m["role"] != "system"]
    at = next((i for i, m in enumerate(others) if m["role"] == "user"), None)
    if not systems:
        return list(messages)
    if at is None:
        return [{**systems[0], **_joined(systems), "role": "user"}, *others]
    return [*others[:at], {**others[at], **_joined([*systems, others[at]])}, *others[at + 1 :]]


def _neighbours_as_one(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message. Results of tools answer a call each, and stay."""
    merged: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        members = list(group)
        if role == "tool" or len(members) == 1:
            merged += members
            continue
        one = {**members[0], **_joined(members)}
        if calls := [call for member in members for call in member.get("tool_calls", ())]:
            one["tool_calls"] = calls
        merged.append(one)
    return merged


def _joined(messages: Sequence[Message], label: str = "") -> dict[str, Any]:
    """The contents of messages as one, behind `label`, with the places of all their sources."""
    pieces = [label]
    sources: list[tuple[int, int, int]] = []
    at = len(label)
    for index, message in enumerate(messages):
        content = message["content"]
        if index and at and content:
            pieces.append(_BETWEEN)
            at += len(_BETWEEN)
        sources += [(source, at + low, at + high) for source, low, high in message["sources"]]
        pieces.append(content)
        at += len(content)
    return {"content": "".join(pieces), "sources": sources}
