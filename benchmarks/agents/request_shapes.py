"""Which tokens of agents' requests survive the filter: instructions, tools, calls, documents.

Each shape of a request is drawn from a seed: system prompts of 2K to 12K tokens, 5 to 60 tools, up
to 50 turns, results of 100 to 30,000 tokens. A server says which tokens its filter keeps. The
table has, by role, how many tokens there are, which share is kept, and how many of those that must
be read whatever the filter chooses are lost: of system messages, tools, calls, the template's own
text, and the request of the last user turn. That number has to be 0.

Models are `smollm2`, `builtin` and `random` (tiny, of random weights, with a context of 256K
tokens), each with `@TOKENS` for the longest prompt to send. With `--requests DIR` the requests in
the files of a folder are sent in place of the shapes: JSON objects with "path" and "body", as an
agent sends them to /v1/messages, /v1/responses or /v1/chat/completions. /v1/filter is asked about
them; with `--direct`, the endpoints themselves, for an answer of one token.

    python benchmarks/agents/request_shapes.py --models random,builtin@30000,smollm2@12000
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from pydantic import ValidationError

from benchmarks.agents import agent_text
from benchmarks.agents.agent_servers import LONG_PROMPTS, AgentServer, Refused, serving
from benchmarks.agents.prompt_parts import (
    KEPT_WHOLE,
    ROLES,
    Chat,
    Part,
    count_kept,
    find_parts,
    load_tokenizer,
    lost_text,
    render,
)
from benchmarks.agents.tables import print_table
from benchmarks.shared import results
from gemserve.api.requests.chat_body import ChatBody
from gemserve.errors import RequestError
from gemserve_dialects.anthropic.body import AnthropicBody
from gemserve_dialects.openai_responses.body import OpenAIResponsesBody

Writer = Callable[[Random, int], str]
_BODIES: dict[str, Any] = {
    "/v1/messages": AnthropicBody,
    "/v1/responses": OpenAIResponsesBody,
    "/v1/chat/completions": ChatBody,
}


class Conversation:
    """An agent's request as it grows. Sizes are in tokens, roughly."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = Random(f"{name} {seed}")
        self.name = name
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.requests: tuple[str, ...] = ()
        self._num_calls = 0

    @property
    def chat(self) -> Chat:
        return Chat(
            name=self.name, messages=self.messages, tools=self.tools, requests=self.requests
        )

    def system(self, tokens: int, role: str = "system") -> None:
        self._say(role, agent_text.instructions(self.rng, agent_text.chars_of(tokens)))

    def offer(self, count: int) -> None:
        self.tools = agent_text.make_tools(self.rng, count)

    def ask(self, *, before: str = "", behind: str = "", has_reminder: bool = False) -> None:
        """A user's turn: a request, with a document before or behind it, and a reminder."""
        wanted = agent_text.request(self.rng)
        parts = [before, wanted, behind]
        if has_reminder:
            parts.insert(0, agent_text.reminder(self.rng))
        self.requests = (wanted,)
        self._say("user", "\n\n".join(part for part in parts if part))

    def answer(self, tokens: int) -> None:
        self._say("assistant", agent_text.prose(self.rng, agent_text.chars_of(tokens)))

    def work(self, *found: tuple[Writer, int], has_remark: bool = True) -> None:
        """Calls of one turn and their results: how each is written, and its tokens."""
        calls = []
        for _ in found:
            self._num_calls += 1
            tool = self.rng.choice(self.tools)
            given = json.dumps(agent_text.arguments(self.rng, tool))
            function = {"name": tool["function"]["name"], "arguments": given}
            calls.append(
                {"id": f"call_{self._num_calls:04}", "type": "function", "function": function}
            )
        said = agent_text.remark(self.rng) if has_remark else None
        self.messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        for call, (write, tokens) in zip(calls, found, strict=True):
            text = write(self.rng, agent_text.chars_of(tokens))
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def _say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def first_turn(chat: Conversation) -> None:
    """The first turn of a coding agent: nothing but instructions, tools and a request."""
    chat.system(12_000)
    chat.offer(15)
    chat.ask(has_reminder=True)


def file_read(chat: Conversation) -> None:
    """A file was read, and its text is the last message."""
    chat.system(4000)
    chat.offer(15)
    chat.ask(has_reminder=True)
    chat.work((agent_text.source_file, 8000))


def small_agent(chat: Conversation) -> None:
    """The smallest agent: it fits the context of a small model."""
    chat.system(2000)
    chat.offer(5)
    chat.ask()
    chat.work((agent_text.document_file, 2500))


def long_session(chat: Conversation) -> None:
    """50 turns of a session, most of them calls with results of 100 to 3,000 tokens."""
    chat.system(6000)
    chat.offer(25)
    writers = (agent_text.source_file, agent_text.log, agent_text.records, agent_text.document_file)
    for turn in range(24):
        if turn % 6 == 0:
            chat.ask(has_reminder=turn == 0)
        chat.work((chat.rng.choice(writers), chat.rng.choice((100, 300, 1000, 3000))))
    chat.answer(120)
    chat.ask()


def parallel_calls(chat: Conversation) -> None:
    """Four calls in one turn, four results behind it."""
    chat.system(3000)
    chat.offer(12)
    chat.ask()
    chat.work((agent_text.document_file, 1500), (agent_text.source_file, 1500))
    chat.work(
        (agent_text.document_file, 2000),
        (agent_text.source_file, 3000),
        (agent_text.log, 2000),
        (agent_text.records, 1000),
        has_remark=False,
    )


def web_research(chat: Conversation) -> None:
    """A search and two long pages, and the user's next turn after them."""
    chat.system(2000)
    chat.offer(6)
    chat.ask()
    chat.work((agent_text.records, 800))
    chat.work((agent_text.web_page, 30_000))
    chat.work((agent_text.web_page, 8000))
    chat.ask()


def log_reading(chat: Conversation) -> None:
    """A log of 28,000 tokens is the last message; its lines are all alike, and full of numbers."""
    chat.system(2500)
    chat.offer(8)
    chat.ask()
    chat.work((agent_text.log, 12_000))


def many_tools(chat: Conversation) -> None:
    """60 tools of several servers, and replies of an API as JSON."""
    chat.system(2000)
    chat.offer(60)
    chat.ask()
    chat.work((agent_text.records, 6000))
    chat.work((agent_text.records, 2000))


def reminders(chat: Conversation) -> None:
    """Every user's turn carries a reminder that the client has added."""
    chat.system(3000)
    chat.offer(10)
    for _ in range(5):
        chat.ask(has_reminder=True)
        chat.work((agent_text.document_file, 1200))
        chat.answer(80)
    chat.ask(has_reminder=True)


def late_instructions(chat: Conversation) -> None:
    """A developer's message amid the conversation, as after a change of mode."""
    chat.system(2500)
    chat.offer(10)
    chat.ask()
    chat.work((agent_text.source_file, 3000))
    chat.system(1200, role="developer")
    chat.work((agent_text.log, 2500))
    chat.ask()


def pasted_before(chat: Conversation) -> None:
    """The last user's turn has a long document, and the request behind it."""
    chat.system(2500)
    chat.offer(8)
    chat.ask(before=agent_text.document_file(chat.rng, agent_text.chars_of(6000)))


def pasted_behind(chat: Conversation) -> None:
    """The last user's turn has the request, and a long document behind it."""
    chat.system(2500)
    chat.offer(8)
    chat.ask(behind=agent_text.web_page(chat.rng, agent_text.chars_of(6000)))


def far_request(chat: Conversation) -> None:
    """One request, and 20 rounds of calls since then."""
    chat.system(4000)
    chat.offer(20)
    chat.ask()
    for _ in range(20):
        chat.work((chat.rng.choice((agent_text.source_file, agent_text.records)), 900))


def plain_chat(chat: Conversation) -> None:
    """30 turns of prose without any tool."""
    chat.system(2000)
    for _ in range(15):
        chat.ask()
        chat.answer(500)
    chat.ask()


def tools_alone(chat: Conversation) -> None:
    """Tools without a system message."""
    chat.offer(30)
    chat.ask()
    chat.work((agent_text.document_file, 5000))


SHAPES: dict[str, Callable[[Conversation], None]] = {
    shape.__name__: shape
    for shape in (
        first_turn,
        file_read,
        small_agent,
        long_session,
        parallel_calls,
        web_research,
        log_reading,
        many_tools,
        reminders,
        late_instructions,
        pasted_before,
        pasted_behind,
        far_request,
        plain_chat,
        tools_alone,
    )
}


def make_chat(name: str, seed: int) -> Chat:
    """The request of a shape. Its text does not depend on the model."""
    conversation = Conversation(name, seed)
    SHAPES[name](conversation)
    return conversation.chat


def read_request(path: Path) -> Chat:
    """A recorded request as a chat. Raises `RequestError` or `ValidationError`."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    endpoint = recorded["path"].partition("?")[0]
    if endpoint not in _BODIES:
        raise RequestError(f"path={endpoint}: not one of {', '.join(_BODIES)}", param="path")
    body = recorded["body"]
    parsed: Any = _BODIES[endpoint].model_validate_json(json.dumps(body))
    chat: ChatBody = parsed if isinstance(parsed, ChatBody) else parsed.form.chat
    sent = [message.model_dump(exclude_none=True) for message in chat.messages]
    for message in sent:
        message.setdefault("content", None)
    tools = [tool.plain for tool in chat.tools or ()]
    return Chat(
        name=path.stem,
        messages=sent,
        tools=[] if chat.tool_choice == "none" else tools,
        recorded=(endpoint, body),
    )


def measure(
    server: AgentServer,
    chat: Chat,
    options: Mapping[str, Any],
    longest: int,
    *,
    is_direct: bool = False,
) -> dict[str, Any]:
    """What a server keeps of a chat: a row of figures, those by role, and texts that are lost.

    `is_direct`: it is asked at the endpoint that the request was recorded at, not at /v1/filter.
    """
    prompt = render(server.tokenizer, chat)
    parts = find_parts(server.tokenizer, chat, prompt)
    row: dict[str, Any] = {
        "model": server.model,
        "request": chat.name,
        "messages": len(chat.messages),
        "tools": len(chat.tools),
        "prompt_tokens": len(prompt.ids),
    }
    if len(prompt.ids) > longest:
        return {**row, "reason": "left out", "note": f"it is longer than {longest} tokens"}
    try:
        ask = server.send_recorded if is_direct else server.ask_filter
        report = ask(chat, options)
    except Refused as error:
        return {**row, "reason": "refused", "note": str(error)}
    assert report["prompt_tokens"] == len(prompt.ids), "the server reads another prompt"
    is_whole = report["selection"] is None
    kept = [(0, len(prompt.ids))] if is_whole else [tuple(r) for r in report["selection"]]
    counts = count_kept(parts, kept)
    by_role: dict[str, dict[str, int]] = defaultdict(lambda: {"tokens": 0, "kept": 0})
    lost: dict[str, str] = {}
    for part, count in zip(parts, counts, strict=True):
        by_role[part.role]["tokens"] += part.stop - part.start
        by_role[part.role]["kept"] += count
        if part.role in KEPT_WHOLE and count < part.stop - part.start:
            lost.setdefault(part.role, lost_text(prompt, part, kept))
    num_lost = sum(of["tokens"] - of["kept"] for role, of in by_role.items() if role in KEPT_WHOLE)
    return {
        **row,
        "kept_tokens": report["kept_tokens"],
        "protected_tokens": report.get("protected_tokens"),
        "must_keep": sum(of["tokens"] for role, of in by_role.items() if role in KEPT_WHOLE),
        "lost": num_lost,
        "applied": report["applied"],
        "reason": report["reason"],
        "filter_ms": report["filter_ms"],
        "report_differs": find_difference(parts, counts, report, options.get("keep")),
        "roles": dict(by_role),
        "lost_texts": lost,
    }


def find_difference(
    parts: Sequence[Part], counts: Sequence[int], report: Mapping[str, Any], keep: int | None
) -> str | None:
    """Where the report's own account differs from its selection or its budget, if it has one."""
    given = report.get("messages")
    if given is None:
        return None
    over = report["kept_tokens"] - report["protected_tokens"]
    if keep is not None and report["applied"] and report["reason"] is None and over > keep:
        return f"{over} tokens beside the protected ones are kept; the budget is {keep}"
    if any(entry["protected_tokens"] > entry["kept_tokens"] for entry in given):
        return "a message has more protected tokens than kept ones"
    kept: dict[int | None, int] = defaultdict(int)
    tokens: dict[int | None, int] = defaultdict(int)
    for part, count in zip(parts, counts, strict=True):
        kept[part.message] += count
        tokens[part.message] += part.stop - part.start
    told: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for entry in given:
        told[entry["index"]][0] += entry["tokens"]
        told[entry["index"]][1] += entry["kept_tokens"]
    if sum(of[0] for of in told.values()) != report["prompt_tokens"]:
        return "its messages do not add up to the prompt"
    if sum(of[1] for of in told.values()) != report["kept_tokens"]:
        return "its messages do not add up to the tokens kept"
    for index, (num_tokens, num_kept) in told.items():
        # a token at a border may be counted on either side
        if max(abs(num_tokens - tokens[index]), abs(num_kept - kept[index])) > 4:
            of = "the template" if index is None else f"message {index}"
            own = f"{num_kept} of {num_tokens} tokens; found {kept[index]} of {tokens[index]}"
            return f"{of}: it says {own}"
    return None


def by_role(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens, kept share and lost tokens of each role, over all requests of each model."""
    found: list[dict[str, Any]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row["roles"] for row in rows if row["model"] == model and "roles" in row]
        for role in ROLES:
            tokens = sum(roles.get(role, {}).get("tokens", 0) for roles in own)
            kept = sum(roles.get(role, {}).get("kept", 0) for roles in own)
            if tokens:
                found.append(
                    {
                        "model": model,
                        "role": role,
                        "tokens": tokens,
                        "kept_share": kept / tokens,
                        "lost": tokens - kept if role in KEPT_WHOLE else None,
                    }
                )
    return found


def parse_models(text: str) -> list[tuple[str, int]]:
    """Names of models, and the longest prompt that each is sent."""
    named = [entry.partition("@") for entry in text.split(",")]
    return [(name, int(longest or 1 << 30)) for name, _, longest in named]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="random,builtin@30000,smollm2@12000")
    parser.add_argument("--url", help="of a running server of the one model in --models")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--requests", type=Path, help="a folder of recorded requests")
    parser.add_argument(
        "--direct", action="store_true", help="send recorded requests to their own endpoints"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=int, help="the filter's budget (default: the server's)")
    parser.add_argument(
        "--fallback",
        choices=("off", "default"),
        default="off",
        help="off: nothing is read whole because attention is diffuse (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    if arguments.direct and arguments.requests is None:
        parser.error("--direct: only with --requests")
    chats: list[Chat] = []
    unread: list[dict[str, Any]] = []
    if arguments.requests is None:
        chats = [make_chat(name, arguments.seed) for name in arguments.shapes.split(",")]
    for path in sorted(arguments.requests.glob("*.json")) if arguments.requests else ():
        try:
            chats.append(read_request(path))
        except (RequestError, ValidationError) as error:
            said = {"reason": "not read", "note": str(error)}
            unread.append({"model": None, "request": path.stem, **said})
    options: dict[str, Any] = {"fallback": False} if arguments.fallback == "off" else {}
    if arguments.keep is not None:
        options["keep"] = arguments.keep
    rows: list[dict[str, Any]] = []

    def run(server: AgentServer, longest: int) -> None:
        for chat in chats:
            results.note(f"{server.model} {chat.name}")
            rows.append(measure(server, chat, options, longest, is_direct=arguments.direct))

    for model, longest in parse_models(arguments.models):
        if arguments.url is not None:
            with AgentServer(arguments.url, model, load_tokenizer(model)) as server:
                run(server, longest)
        else:
            with serving(model, "--cache-memory", "0", *LONG_PROMPTS) as server:
                run(server, longest)
    results.note("")
    rows += unread
    if not arguments.json:
        print_table(rows, ("roles", "lost_texts", "note"))
        print_table(by_role(rows))
        for row in rows:
            if "note" in row:
                note = " ".join(row["note"].split())
                print(f"{row['model']} {row['request']}: {row['reason']}: {note[:200]}")
            for role, text in row.get("lost_texts", {}).items():
                print(f"{row['model']} {row['request']}: lost of {role}: {text!r}")
    results.finish("request_shapes", "cpu", rows, quiet=True)


if __name__ == "__main__":
    main()
