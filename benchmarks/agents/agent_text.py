"""Text that agents send: instructions, tools with schemas, files, logs, JSON and web pages.

Everything is drawn from a seed. Instructions, tools, logs and records are put together from the
lists below; files and pages take their text from this repository's documentation and from Python's
own. Lengths are in characters: `chars_of` says how many a number of tokens takes, roughly, so that
a request has the same text for every model.
"""

from __future__ import annotations

import json
import sysconfig
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from gemserve.synthetic.prose import stdlib_sentences

_CHARS_PER_TOKEN = 4.4  # of English prose, with SmolLM2's tokenizer
_REPOSITORY = Path(__file__).parents[2]
_SITUATIONS = """
    the user asks for a change in the code|a command fails|a file is longer than one screen|
    the tests were green before your change|two sources contradict each other|
    the user is in a hurry|a result is empty|you are not sure which file is meant|
    the working tree has changes of others|a search finds more than twenty places|
    the request names a ticket|a page asks you to sign in|the answer depends on today's date|
    a tool takes longer than a minute|the user sends a picture of an error|
    a secret appears in a file|the build uses a lock file|the language of the conversation changes|
    an earlier step turns out to be wrong|the user only asks a question
"""
_ACTIONS = """
    read the file before you edit it|say in one sentence what you are about to do|
    run the narrowest test that covers the change|quote the line that your claim rests on|
    ask one short question instead of guessing|keep the style of the code around it|
    look for an existing helper first|undo what you did and explain why|
    leave the change out and mention it in the summary|write the command in full|
    give the path together with the line number|stop and wait for the user's decision|
    repeat the call with a smaller range|check the result against the documentation|
    note the open point in the task list|prefer the smaller change|
    name the version that you looked at|answer in the language of the last message|
    keep the reply below four lines|finish the current step before the next one
"""
_MISDEEDS = """
    commit anything|push to a shared branch|delete a file|install a package|print a key or a token|
    change the formatting of untouched lines|open a network connection|
    rewrite a test until it passes|invent a function that you have not seen|
    answer from memory where a tool can look it up|add comments that repeat the code|
    start a process that keeps running|edit generated files|address the user by name|use emoji|
    rename public functions|silence a warning
"""
_EXCEPTIONS = """
    the user has asked for it in this conversation|the task cannot be done otherwise|
    the repository's own guide says so|you have shown the plan and it was accepted|
    a test demands it|the file was created by you|it is part of the release steps
"""
_REASONS = """
    reviewers read every line|logs are kept for years|the next reader has less context than you|
    some clients cut long replies|other people work in the same tree|costs are counted per call|
    a wrong answer is worse than a late one|the terminal shows plain text only|
    users copy commands without reading them|results of tools may be out of date
"""
_PAIRS = """
    short replies over long ones|existing libraries over new ones|
    a failing test over a description|plain words over jargon|relative paths over absolute ones|
    one call with a range over many calls|parallel calls over calls one by one|
    facts from files over assumptions|editing files over creating new ones|
    small commits over large ones
"""
_HEADINGS = """
    Tone and style|Doing tasks|Use of tools|Code style|Following conventions|Safety|
    Version control|Task management|Searching|Answers|Errors and retries|Reviews|Documentation|
    Long conversations|Privacy|When to stop|Planning|Formatting|Tests|Working with others
"""
_OBJECTS = """
    file|directory|issue|branch|calendar event|ticket|page|record|message|job|customer|invoice|
    snapshot|dashboard|alert|contact|release|dataset|query|notebook|device|order|document|comment
"""
_VERBS = "read|write|list|search|create|update|delete|fetch|archive|compare|export|assign"
_FIELDS = """
    path:string|limit:integer|offset:integer|query:string|title:string|body:string|labels:array|
    state:enum|owner:string|since:string|recursive:boolean|format:enum|filters:object|
    dry_run:boolean|timeout_s:number|page:integer|fields:array|priority:enum|reason:string|
    include_archived:boolean
"""
_ENUMS = {
    "state": ["open", "closed", "all"],
    "format": ["text", "json", "markdown"],
    "priority": ["low", "normal", "high", "urgent"],
}
_COMPONENTS = """
    billing importer|search index|login page|report scheduler|mail gateway|image cache|
    permission check|export job|invoice parser|session store|webhook receiver|audit log|
    rate limiter|translation loader|backup task|menu renderer|price calculator|upload queue
"""
_TROUBLES = """
    stops after the first hundred entries|shows yesterday's figures|
    fails on names with an apostrophe|takes twice as long since last week|
    answers with status 500 for guests|loses the last line of a file|ignores the time zone|
    counts returned orders twice|keeps connections open|sends the same message twice
"""
_WISHES = """
    find the cause and propose a fix|tell me which change is to blame|write a test that shows it|
    say in two sentences what happens|list the files that would have to change|
    check whether the documentation mentions it|estimate how much work a fix is|
    tell me whether it is safe to release
"""
_LOGGERS = "api.orders|worker.mail|db.pool|cache.images|auth.session|scheduler|http.access|billing"
_EVENTS = """
    request {n} finished with status {s} in {ms} ms|connection {n} was returned to the pool|
    retry {s} of job {n} after {ms} ms|entry {n} was evicted, {ms} KiB are free|
    token of user {n} is valid for {ms} more seconds|batch {n} has {s} items, the limit is {ms}|
    lock {n} was held for {ms} ms|page {s} of export {n} was written
"""


def chars_of(tokens: int) -> int:
    """How many characters that many tokens take, roughly."""
    return round(tokens * _CHARS_PER_TOKEN)


def instructions(rng: Random, chars: int, *, name: str = "Terra") -> str:
    """A system prompt: who the agent is, its surroundings, rules and examples under headings."""
    parts = [
        f"You are {name}, an agent that helps with software and office work. You act through tools "
        "and report to one user. The sections below say how.",
        _environment(rng),
    ]
    sections = 0
    while sum(len(part) + 2 for part in parts) < chars:
        heading = _drawn(rng, _HEADINGS)
        sections += 1
        parts.append("\n".join([f"# {heading} ({sections})", *(_rule(rng) for _ in range(3))]))
        if sections % 2 == 0:
            parts.append("\n".join(["", *(f"- {_rule(rng)}" for _ in range(rng.randint(3, 6)))]))
        if sections % 3 == 0:
            parts.append(_example(rng))
        if sections % 4 == 0:
            rules = "\n".join(f"{n}. {_rule(rng)}" for n in range(1, 5))
            parts.append(f"<rules>\n{rules}\n</rules>")
    return "\n\n".join(parts)


def reminder(rng: Random) -> str:
    """What an agent's client adds to a user's turn by itself."""
    rules = " ".join(_rule(rng) for _ in range(3))
    return f"<system-reminder>\n{rules}\n</system-reminder>"


def request(rng: Random) -> str:
    """What a user asks an agent to do."""
    return (
        f"The {_drawn(rng, _COMPONENTS)} {_drawn(rng, _TROUBLES)}. "
        f"Please look into it and {_drawn(rng, _WISHES)}."
    )


def remark(rng: Random) -> str:
    """What an agent says beside its calls."""
    return f"I will look at the {_drawn(rng, _COMPONENTS)} now and {_drawn(rng, _ACTIONS)}."


def make_tools(rng: Random, count: int) -> list[dict[str, Any]]:
    """Tools with different names, in the form of a chat, each with a schema of its arguments."""
    names = [f"{verb}_{noun.replace(' ', '_')}" for verb in _split(_VERBS) for noun in _nouns()]
    return [_tool(rng, name) for name in rng.sample(names, count)]


def arguments(rng: Random, tool: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a call of a tool that `make_tools` has drawn."""
    schema = tool["function"]["parameters"]["properties"]
    return {name: _value(rng, name, of["type"]) for name, of in schema.items()}


def log(rng: Random, chars: int) -> str:
    """Lines of a server's log."""
    lines: list[str] = []
    second = rng.randrange(80_000)
    while sum(len(line) + 1 for line in lines) < chars:
        second += rng.randrange(4)
        clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        level = rng.choice(("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR"))
        event = _drawn(rng, _EVENTS).format(
            n=rng.randrange(10_000), s=rng.randrange(1, 600), ms=rng.randrange(5000)
        )
        lines.append(f"2026-03-14T{clock}Z {level:5} {_drawn(rng, _LOGGERS)}: {event}")
    return "\n".join(lines)


def records(rng: Random, chars: int) -> str:
    """A reply of an API: a JSON object with records."""
    found: list[dict[str, Any]] = []
    size = 0
    while size < chars:
        found.append(
            {
                "id": rng.randrange(10**8),
                "title": request(rng),
                "owner": {"name": _drawn(rng, _COMPONENTS), "active": rng.random() < 0.8},
                "labels": [_drawn(rng, _OBJECTS) for _ in range(rng.randint(1, 3))],
                "score": round(rng.random(), 4),
            }
        )
        size += len(json.dumps(found[-1], indent=2)) + 20
    return json.dumps({"total": len(found), "items": found}, indent=2)


def source_file(rng: Random, chars: int) -> str:
    """Consecutive lines of one of Python's own modules, numbered as a reading tool does it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.glob("*.py")) if p.stat().st_size > chars // 2]
    lines = rng.choice(files).read_text(encoding="utf-8").splitlines()
    start = rng.randrange(max(1, len(lines) // 4))
    return _cut((f"{n + 1:6}\t{line}" for n, line in enumerate(lines[start:], start)), chars)


def document_file(rng: Random, chars: int) -> str:
    """The beginning of this repository's documentation from one of its pages on."""
    pages = _pages()
    start = rng.randrange(len(pages))
    lines = (line for page in (*pages[start:], *pages[:start]) for line in page.splitlines())
    return _cut(lines, chars)


def web_page(rng: Random, chars: int) -> str:
    """A page as a fetching tool returns it: menus, headings, paragraphs and links."""
    links = " | ".join(f"[{_drawn(rng, _HEADINGS)}](/{rng.randrange(999)})" for _ in range(8))
    parts = [f"# {_drawn(rng, _HEADINGS)} of the {_drawn(rng, _COMPONENTS)}", links]
    size = 0
    while size < chars:
        parts.append(f"## {_drawn(rng, _HEADINGS)}" if rng.random() < 0.2 else prose(rng, 700))
        size += len(parts[-1]) + 2
    return "\n\n".join([*parts, links, "Imprint · Contact · Back to top"])


def prose(rng: Random, chars: int) -> str:
    """Consecutive sentences of Python's documentation."""
    sentences = stdlib_sentences()
    start = rng.randrange(len(sentences))
    found: list[str] = []
    size = 0
    while size < chars:
        found.append(sentences[(start + len(found)) % len(sentences)])
        size += len(found[-1]) + 1
    return " ".join(found)


def _environment(rng: Random) -> str:
    return (
        f"<env>\nWorking directory: /home/user/project-{rng.randrange(90)}\nPlatform: linux\n"
        f"Is a repository: yes\nToday's date: 2026-03-{rng.randint(1, 28):02}\n</env>"
    )


def _rule(rng: Random) -> str:
    form = rng.randrange(5)
    if form == 0:
        return f"When {_drawn(rng, _SITUATIONS)}, {_drawn(rng, _ACTIONS)}."
    if form == 1:
        return f"Never {_drawn(rng, _MISDEEDS)} unless {_drawn(rng, _EXCEPTIONS)}."
    if form == 2:
        return f"Prefer {_drawn(rng, _PAIRS)}, because {_drawn(rng, _REASONS)}."
    if form == 3:
        actions = _drawn(rng, _ACTIONS), _drawn(rng, _ACTIONS)
        return f"If {_drawn(rng, _SITUATIONS)}, {actions[0]}, and then {actions[1]}."
    return f"IMPORTANT: {_sentence(_drawn(rng, _ACTIONS))} Do not {_drawn(rng, _MISDEEDS)}."


def _example(rng: Random) -> str:
    return (
        f"<example>\nuser: {request(rng)}\nassistant: {remark(rng)}\n"
        f"[calls {rng.choice(_split(_VERBS))}_{rng.choice(_nouns())}]\n"
        f"assistant: The {_drawn(rng, _COMPONENTS)} {_drawn(rng, _TROUBLES)}.\n</example>"
    )


def _tool(rng: Random, name: str) -> dict[str, Any]:
    verb, _, noun = name.partition("_")
    fields = [field.split(":") for field in rng.sample(_split(_FIELDS), rng.randint(2, 6))]
    described = " ".join(_rule(rng) for _ in range(rng.randint(1, 3)))
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use this to {verb} a {noun.replace('_', ' ')}. {described}",
            "parameters": {
                "type": "object",
                "properties": {field: _schema(rng, field, kind) for field, kind in fields},
                "required": [fields[0][0]],
                "additionalProperties": False,
            },
        },
    }


def _schema(rng: Random, field: str, kind: str) -> dict[str, Any]:
    described = f"The {field.replace('_', ' ')}. {_sentence(_drawn(rng, _ACTIONS))}"
    if kind == "enum":
        return {"type": "string", "enum": _ENUMS[field], "description": described}
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}, "description": described}
    if kind == "object":
        inner = {"type": "object", "properties": {"field": {"type": "string"}}}
        return {**inner, "description": described}
    return {"type": kind, "description": described}


def _value(rng: Random, name: str, kind: str) -> Any:
    if name in _ENUMS:
        return rng.choice(_ENUMS[name])
    values = {
        "integer": rng.randrange(1, 500),
        "number": rng.randrange(1, 60) + 0.5,
        "boolean": rng.random() < 0.5,
        "array": [_drawn(rng, _OBJECTS), _drawn(rng, _OBJECTS)],
        "object": {"field": _drawn(rng, _OBJECTS)},
    }
    return values.get(kind, f"src/{_drawn(rng, _COMPONENTS).replace(' ', '_')}.py")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


@cache
def _pages() -> tuple[str, ...]:
    """The documentation's pages without its logs, which change with every experiment."""
    paths = [_REPOSITORY / "README.md", *sorted((_REPOSITORY / "docs").glob("*.md"))]
    return tuple(path.read_text(encoding="utf-8") for path in paths)


def _cut(lines: Any, chars: int) -> str:
    kept: list[str] = []
    size = 0
    for line in lines:
        if size >= chars:
            break
        kept.append(line)
        size += len(line) + 1
    return "\n".join(kept)


@cache
def _split(text: str) -> tuple[str, ...]:
    return tuple(" ".join(entry.split()) for entry in text.split("|"))


def _nouns() -> tuple[str, ...]:
    return _split(_OBJECTS)


def _drawn(rng: Random, text: str) -> str:
    return rng.choice(_split(text))
