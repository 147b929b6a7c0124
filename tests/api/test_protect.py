"""`filter.protect`, the tools of `/v1/filter` and `/tokenize`, and what replies say of messages."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve.contract.filter_options import Protect
from tests.fakes import CHAT, COMPLETIONS, MODEL, Api, data_of

pytestmark = pytest.mark.anyio
FILTER, TOKENIZE = "/v1/filter", "/tokenize"
DOCUMENT = " ".join(f"Line {i} speaks of the river." for i in range(60))
MARKED = f"{DOCUMENT[:900]} [[The tide is out at six.]] {DOCUMENT[900:]}"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": f"{DOCUMENT}\n\nGo on."},
    {"role": "assistant", "content": "Read."},
    {"role": "user", "content": "Who is the mayor?"},
]
FUNCTION = {"name": "find_berth", "description": "Finds a berth.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


async def post(api: Api, path: str, **fields: Any) -> Any:
    return await api.client.post(path, json={"model": MODEL, **fields})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_report_has_every_message_and_adds_up(api: Api, stream: bool) -> None:
    """A client could not see which message a filter had shortened."""
    fields = {"messages": MESSAGES, "tools": [TOOL], "filter": {"keep": 32}, "stream": stream}
    reply = await post(api, CHAT, **fields)
    assert reply.status_code == 200, reply.text
    report = data_of(reply)[0]["filter"] if stream else reply.json()["filter"]
    assert report["applied"]
    found = report["messages"]
    assert [(m["index"], m["role"]) for m in found] == [
        (0, "system"),
        (1, "user"),
        (2, "assistant"),
        (3, "user"),
        (None, "template"),
    ]
    for count, whole in (
        ("tokens", "prompt_tokens"),
        ("kept_tokens", "kept_tokens"),
        ("protected_tokens", "protected_tokens"),
    ):
        assert sum(message[count] for message in found) == report[whole]
    assert report["kept_tokens"] - report["protected_tokens"] == 32
    system, document, said, asked, template = found
    for always in (system, asked, template):
        assert always["kept_tokens"] == always["protected_tokens"] == always["tokens"] > 0
    assert template["tokens"] > len(FUNCTION["description"].split()), "the tools are among it"
    for free in (document, said):
        assert free["protected_tokens"] == 0
    assert document["kept_tokens"] == 32 < document["tokens"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_says_what_was_kept(api: Api, path: str) -> None:
    """Clients that read the usage alone could not tell a filtered prompt from a whole one."""
    prompt = {"prompt": MARKED} if path == COMPLETIONS else {"messages": MESSAGES}
    for number in (1, 2):
        body = (await post(api, path, **prompt, n=number, filter={"keep": 32})).json()
        report, usage = body["filter"], body["usage"]
        assert usage["prompt_tokens"] == report["prompt_tokens"]
        assert usage["prompt_tokens_details"] == {
            "cached_tokens": 0,
            "kept_tokens": report["kept_tokens"],
            "protected_tokens": report["protected_tokens"],
        }
        assert report["kept_tokens"] == report["protected_tokens"] + 32
    if path == COMPLETIONS:
        several = (await post(api, path, prompt=[MARKED, MARKED], filter={"keep": 32})).json()
        details = several["usage"]["prompt_tokens_details"]
        assert details["kept_tokens"] == 2 * report["kept_tokens"]
        assert details["protected_tokens"] == 2 * report["protected_tokens"]


@pytest.mark.parametrize("path", [CHAT, FILTER])
async def test_what_a_request_protects_is_protected(api: Api, path: str) -> None:
    options: dict[str, Any] = {"keep": 32}
    plain = (await post(api, path, messages=MESSAGES, filter=options)).json()["filter"]
    options["protect"] = {"messages": [2.0], "documents": [0], "marks": [["Line 7", "river."]]}
    reply = await post(api, path, messages=MESSAGES, filter=options)
    assert reply.status_code == 200, reply.text
    changed = reply.json()["filter"]
    before, after = (
        {m["index"]: m["protected_tokens"] for m in report["messages"]}
        for report in (plain, changed)
    )
    assert (before[0] > 0, before[1], before[2]) == (True, 0, 0)
    assert after[0] == 0
    assert 0 < after[1] < 20
    assert after[2] > 0
    request = api.core.requests[-1]
    assert request.filter == api.core.requests[0].filter, "how it is filtered is not changed"


async def test_marks_of_a_plain_prompt(api: Api) -> None:
    protect = {"marks": [["[[", "]]"]]}
    counts = []
    for options in ({"keep": 32}, {"keep": 32, "protect": protect}):
        report = (await post(api, COMPLETIONS, prompt=MARKED, filter=options)).json()["filter"]
        assert report["messages"] is None
        counts.append(report["protected_tokens"])
    assert counts[0] + 5 < counts[1] < counts[0] + 40


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [4]}, "messages.0", "=4: must be from 0 to 3, the number of a message"),
    ({"documents": [0, 9]}, "documents.1", "=9: must be from 0 to 3, the number of a message"),
    ({"messages": [-1]}, "messages.0", "=-1: Input should be greater than or equal to 0"),
    ({"messages": [0.5]}, "messages.0", "=0.5: "),
    ({"messages": ["0"]}, "messages.0", "='0': "),
    ({"messages": True}, "messages", "=True: "),
    ({"messages": [0] * 1025}, "messages", "1024"),
    ({"documents": [0] * 1025}, "documents", "1024"),
    ({"marks": [["a", "b"]] * 65}, "marks", "64"),
    ({"marks": [["<none>", "</none>"]]}, "marks.0", "the prompt has no text between these marks"),
    ({"marks": [["a"]]}, "marks.0", "at least 2"),
    ({"marks": [["a", "b", "c"]]}, "marks.0", "at most 2"),
    ({"marks": [["", "b"]]}, "marks.0.0", "at least 1 character"),
    ({"marks": [["a" * 1001, "b"]]}, "marks.0.0", "at most 1000 characters"),
    ({"other": []}, "other", "unknown"),
]


@pytest.mark.parametrize("path", [CHAT, FILTER])
@pytest.mark.parametrize(("protect", "field", "message"), BAD)
async def test_what_cannot_be_protected_is_named(
    api: Api, path: str, protect: dict[str, Any], field: str, message: str
) -> None:
    reply = await post(api, path, messages=MESSAGES, filter={"keep": 32, "protect": protect})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == f"filter.protect.{field}"
    assert error["message"].startswith(f"filter.protect.{field}")
    assert message in error["message"]
    assert api.core.requests == []


async def test_a_prompt_has_no_messages_to_protect(api: Api) -> None:
    for name in ("messages", "documents"):
        for path in (COMPLETIONS, FILTER):
            reply = await post(api, path, prompt=MARKED, filter={"protect": {name: [0]}})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, f"filter.protect.{name}")
    ids = {"prompt": [9] * 100, "filter": {"protect": {"marks": [["a", "b"]]}}}
    error = (await post(api, COMPLETIONS, **ids)).json()["error"]
    assert error["param"] == "filter.protect.marks"


async def test_protect_of_nothing_is_no_protect(api: Api) -> None:
    for protect in (None, {}, {"messages": [], "documents": [], "marks": []}):
        reply = await post(api, CHAT, messages=MESSAGES, filter={"keep": 32, "protect": protect})
        assert reply.status_code == 200, reply.text
    first, *others = [request.protected for request in api.core.requests]
    assert all(other == first for other in others)
    assert Protect() == Protect(messages=(), documents=(), marks=())


async def test_tools_count_as_they_do_in_a_chat(api: Api) -> None:
    """The tokens of tools could not be counted without asking for an answer."""
    chat = (await post(api, CHAT, messages=MESSAGES, tools=[TOOL])).json()["usage"]
    ids = list(api.core.requests[0].prompt_ids)
    kept = (await post(api, FILTER, messages=MESSAGES, tools=[TOOL], filter={"keep": 32})).json()
    assert kept["usage"]["prompt_tokens"] == chat["prompt_tokens"]
    assert list(api.core.requests[-1].prompt_ids) == ids
    counted = (await post(api, TOKENIZE, messages=MESSAGES, tools=[TOOL])).json()
    assert counted["count"] == chat["prompt_tokens"]
    assert counted["tokens"] == ids
    without = (await post(api, TOKENIZE, messages=MESSAGES)).json()
    assert without["count"] < counted["count"]
    for empty in (None, []):
        same = (await post(api, TOKENIZE, messages=MESSAGES, tools=empty)).json()
        assert same["tokens"] == without["tokens"]


@pytest.mark.parametrize("path", [FILTER, TOKENIZE])
async def test_tools_are_checked_like_those_of_a_chat(api: Api, path: str) -> None:
    reply = await post(api, path, prompt=DOCUMENT, tools=[TOOL])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tools")
    assert error["message"] == "tools: only with messages"
    for tools in ([TOOL, TOOL], [{"type": "function"}], [{"type": "search"}], [TOOL] * 1000, "all"):
        given = await post(api, path, messages=MESSAGES, tools=tools)
        of_chat = await post(api, CHAT, messages=MESSAGES, tools=tools)
        assert given.status_code == of_chat.status_code, tools
        if given.status_code != 200:
            assert given.status_code == 400
            assert given.json()["error"]["param"] == of_chat.json()["error"]["param"]


async def test_a_chat_that_is_mostly_protected_says_so(api: Api) -> None:
    """Its reason was that it is short, which it is not."""
    rules = " ".join(f"Rule {i} is never to be broken." for i in range(60))
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Go on."}]
    report = (await post(api, CHAT, messages=messages, filter={"keep": 16})).json()["filter"]
    assert (report["applied"], report["reason"]) == (False, "mostly_protected")
    assert report["kept_tokens"] == report["prompt_tokens"] == report["protected_tokens"]


@pytest.mark.parametrize("method", ["gemfilter", "snapkv", "none"])
async def test_methods_that_protect_nothing_refuse_it(api: Api, method: str) -> None:
    """It was checked, and then had no effect."""
    fields = {"method": method, "protect": {"messages": [0]}}
    reply = await api.post(CHAT, filter=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "filter.protect"), reply.text
    assert "sieve, position and random have it" in error["message"]
