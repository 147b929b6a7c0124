"""What of a chat is always read, and what is document, in the templates of the families."""

from __future__ import annotations

import copy
import json
import time
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoTokenizer

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS, Protect
from gemserve.contract.prompt_parts import Priority
from gemserve.errors import RequestError
from gemserve.filtering.protected_budget import always_read, protected_positions
from gemserve.model.loading.loader import BUILTIN_PATH
from gemserve.prompting.chat_protection import LONGEST_INSTRUCTIONS, MOST_MARKED
from gemserve.prompting.prompt import Prompt, chat_prompt, ids_prompt, text_prompt
from tests.chat_templates import ALTERNATING, FAMILIES, shaped_like

RULES = "Answer in one word, and never mention the weather."
ASKED = "Who is the mayor?"
DOCUMENT = " ".join(f"Line {i} speaks of the river and of the bridge." for i in range(120))
TOOL = {
    "type": "function",
    "function": {"name": "find_berth", "description": "Finds a berth.", "parameters": {}},
}
WITH_TOOLS = ("chatml", "llama3", "qwen2", "qwen3")  # and with messages of tools
NATIVE = ("llama3", "qwen2", "qwen3")
Json = dict[str, Any]


@cache
def shaped(family: str) -> Any:
    return shaped_like(AutoTokenizer.from_pretrained(BUILTIN_PATH), family)


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Json) -> Json:
    return {"role": "assistant", "content": text, **({"tool_calls": [*calls]} if calls else {})}


def call(name: str, **arguments: Any) -> Json:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str) -> Json:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def prompted(family: str, *messages: Json, **options: Any) -> Prompt:
    prompt = chat_prompt(shaped(family), messages, **options)
    assert_sound(prompt)
    return prompt


def assert_sound(prompt: Prompt) -> None:
    n = len(prompt.ids)
    assert all(0 <= r.start < r.stop <= n for r in prompt.protected)
    assert prompt.messages is not None
    assert all(0 <= place.start <= place.stop <= n for place in prompt.messages)
    neighbours = pairwise(prompt.messages)
    assert all(one.stop <= other.start for one, other in neighbours), "no overlap"
    always = set(always_read(prompt.protected, n))
    of_messages = {p for place in prompt.messages for p in range(place.start, place.stop)}
    assert set(range(n)) - of_messages <= always, "the template is always read"


def said(prompt: Prompt, positions: set[int]) -> str:
    """The text of these tokens; those that are left out show as a bar."""
    parts, last, offsets = [], -1, prompt.offsets
    for position in sorted(positions):
        low, high = offsets[position]
        parts.append(("" if position == last + 1 else "|") + prompt.text[low:high])
        last = position
    return "".join(parts)


def always_text(prompt: Prompt) -> str:
    return said(prompt, set(always_read(prompt.protected, len(prompt.ids))))


def free_text(prompt: Prompt) -> str:
    n = len(prompt.ids)
    return said(prompt, set(range(n)) - set(protected_positions(prompt.protected, n, n)))


def placed_text(prompt: Prompt) -> dict[int, str]:
    assert prompt.messages is not None
    return {
        place.index: said(prompt, {*range(place.start, place.stop)}).lstrip("|").strip()
        for place in prompt.messages
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_old_turns_are_documents_and_instructions_are_not(family: str) -> None:
    """A system message took the budget, and of a long one only a part was read."""
    messages = [system(RULES), user(f"{DOCUMENT}\n\nGo on."), assistant(DOCUMENT), user(ASKED)]
    prompt = prompted(family, *messages)
    kept, free = always_text(prompt), free_text(prompt)
    assert RULES in kept
    assert ASKED in kept
    assert "river" not in kept
    assert free.count("Line 60 speaks of the river") == 2
    assert RULES not in free
    assert placed_text(prompt) == {i: m["content"] for i, m in enumerate(messages)}
    assert prompt.messages is not None
    roles = {place.index: place.role for place in prompt.messages}
    assert roles == {0: "system", 1: "user", 2: "assistant", 3: "user"}


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_always_read_and_belong_to_the_template(family: str) -> None:
    """Of a tool's description a filter kept single words, and calls had wrong names."""
    messages = [system(RULES), user(f"{DOCUMENT}\n\n{ASKED}")]
    prompt = prompted(family, *messages, tools=[TOOL], short=96)
    kept = always_text(prompt)
    assert '"find_berth"' in kept
    assert "Finds a berth." in kept
    assert RULES in kept
    assert kept.count("river") <= 3, "the beginning of a document at most"
    assert placed_text(prompt) == {0: RULES, 1: messages[1]["content"]}
    without = prompted(family, messages[1], tools=[TOOL])
    assert "Finds a berth." in always_text(without)
    assert placed_text(without) == {0: messages[1]["content"]}, "the server's message is no message"


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_calls_are_always_read_and_say_what_is_looked_for(family: str, content: str) -> None:
    """The tokens of a call are watched: the last user's turn may be long ago, and say less."""
    found = call("find_berth", ship="Aurora", year=1912, tags=["steam", {"flag": "blue"}])
    messages = [system(RULES), user(ASKED), assistant(content, found), result(DOCUMENT)]
    prompt = prompted(family, *messages, tools=[TOOL])
    kept = always_text(prompt)
    assert "find_berth" in kept
    assert "Aurora" in kept
    assert ASKED in kept
    watched = "".join(
        prompt.text[prompt.offsets[a][0] : prompt.offsets[b - 1][1]] for a, b in prompt.question
    )
    for word in (ASKED, "find_berth", "Aurora", "1912", "steam", "blue"):
        assert word in watched, word
    assert sum(b - a for a, b in prompt.question) <= MAX_QUESTION_TOKENS
    assert "Line 60 speaks" in free_text(prompt)
    places = placed_text(prompt)
    assert places[1] == ASKED
    assert not any("Aurora" in text for text in places.values())


@pytest.mark.parametrize("family", ["chatml", "qwen2", "qwen3"])  # Llama's shows one call
def test_parallel_calls_and_their_results(family: str) -> None:
    """All of the last results count, not the last one alone."""
    calls = call("find_berth", ship="Aurora"), call("find_mayor", town="Ebbing")
    short, long = "Berth 12 at the old pier.", DOCUMENT
    prompt = prompted(
        family, user(ASKED), assistant("", *calls), result(short), result(long), tools=[TOOL]
    )
    tools = [r for r in prompt.protected if r.priority is Priority.TOOLS]
    assert [said(prompt, {*range(r.start, r.stop)}).strip("|\n") for r in tools] == [short]
    kept = always_text(prompt)
    for word in ("Aurora", "find_mayor", "Ebbing", short, ASKED):
        assert word in kept
    assert "Line 60" not in kept
    assert "Line 60 speaks" in free_text(prompt)
    # the ends of a long result say what it is: they are kept within the budget
    n = len(prompt.ids)
    everything = said(prompt, set(protected_positions(prompt.protected, n, n)))
    assert "Line 0 speaks" in everything
    assert "Line 119 speaks" in everything
    # when somebody has said something since, both are old turns
    later = prompted(
        family,
        user(ASKED),
        assistant("", *calls),
        result(short),
        result(long),
        assistant("It is Ann."),
        user("Since when?"),
        tools=[TOOL],
    )
    assert short in free_text(later)
    assert "Since when?" in always_text(later)
    assert "Aurora" in always_text(later), "calls are the template's text"


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_the_request_is_the_last_user_turn_that_says_something(family: str) -> None:
    """Of an agent's turns the last one was a reminder, and the order before it was filtered out."""
    reminder = f"<system-reminder>\n{RULES}\n</system-reminder>"
    prompt = prompted(
        family,
        user(f"<system-reminder>\nBe kind to the cat.\n</system-reminder>\n{DOCUMENT}"),
        assistant("Read."),
        user(ASKED),
        assistant("", call("find_berth", ship="Aurora")),
        result("Berth 12."),
        user(reminder),
    )
    kept = always_text(prompt)
    for text in (ASKED, reminder, "Be kind to the cat."):
        assert text in kept
    assert "Line 60 speaks" in free_text(prompt)
    watched = {i for a, b in prompt.question for i in range(a, b)}
    assert ASKED in said(prompt, watched)
    assert "weather" not in said(prompt, watched)


@pytest.mark.parametrize(
    ("opening", "rest"),
    [
        ("Observation:", ""),
        (
            "[read_file for 'berths.txt'] Result:",
            "<environment_details>\nTwo tabs\n</environment_details>",
        ),
        ("<tool_response>\n", ""),
    ],
)
def test_a_result_that_came_as_a_users_turn_is_not_the_request(opening: str, rest: str) -> None:
    """The filter looked for what a file ends with, and the task of the agent was dropped."""
    prompt = prompted(
        "qwen2",
        user(ASKED),
        assistant("Action: read_file(berths.txt)"),
        user(f"{opening}\n{DOCUMENT}\n{rest}"),
    )
    kept = always_text(prompt)
    assert ASKED in kept
    assert rest in kept
    assert "Line 60 speaks" in free_text(prompt)
    watched = {i for a, b in prompt.question for i in range(a, b)}
    assert said(prompt, watched).strip("|") == ASKED
    alone = prompted("qwen2", user(f"{opening} {DOCUMENT}"))
    assert alone.question, "without another turn it is what is asked"
    said_so = user(f"{opening}\nthe build fails.\nWhich port is closed?")
    people = prompted("qwen2", user(ASKED), assistant("Ann."), said_so)
    watched = {i for a, b in people.question for i in range(a, b)}
    assert "Which port is closed?" in said(people, watched), "behind no call it is what is asked"


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_within_messages_are_free_and_what_stands_beside_is_not(family: str) -> None:
    """Retrieval chains put documents into the system message, which was read whole or cut."""
    before, after = "You are a clerk. Use the context.", "Never guess. Speak plainly."
    content = f"{before}\n<context>\n{DOCUMENT}\n</context>\n{after}"
    prompt = prompted(family, system(content), user(ASKED))
    kept = always_text(prompt)
    for text in (before, after, ASKED, "<context>", "</context>"):
        assert text in kept
    assert "river" not in kept
    order = "Answer from the file, in French."
    asked = f"{order}\n<file>\n{DOCUMENT}\n</file>\n{ASKED}"
    kept = always_text(prompted(family, user(asked), short=96))
    assert order in kept
    assert ASKED in kept
    assert "river" not in kept


@pytest.mark.parametrize("label", ["Context:", "The context is below.\n----------------"])
def test_a_request_behind_a_document_that_nothing_closes(label: str) -> None:
    """It was taken for the end of the document: of a long order the 64 tokens that are watched."""
    points = " ".join(f"Say at point {i} what the clerk has to do." for i in range(12))
    order = f"Answer in French, and leave out the appendix. {points}"
    content = f"Be kind.\n\n{label}\n{DOCUMENT}\n\n{order}"
    kept = always_text(prompted("chatml", user(content), short=96))
    assert "Be kind." in kept
    assert order in kept
    assert "Line 60" not in kept


def test_a_system_message_without_structure_is_read_whole_up_to_a_limit() -> None:
    for count, is_whole in ((LONGEST_INSTRUCTIONS, True), (LONGEST_INSTRUCTIONS + 1, False)):
        text = ("go " * count)[: count - 2] + "on"
        prompt = prompted("chatml", system(text), user(ASKED))
        (place, _) = prompt.messages or ()
        ranges = [r for r in prompt.protected if r.priority is Priority.SYSTEM]
        if is_whole:
            assert [(r.start, r.stop) for r in ranges] == [(place.start, place.stop)]
        else:
            assert [r.stop - r.start for r in ranges] == [1024, 1024]
            assert (ranges[0].start, ranges[-1].stop) == (place.start, place.stop)


def test_a_short_last_turn_is_read_whole_and_a_chat_with_tools_counts_twice() -> None:
    order = " ".join(f"Then paint post {i}." for i in range(60))
    n = len(shaped("qwen2")(order)["input_ids"])
    for short, options, is_whole in (
        (n + 2, {}, True),
        (n - 10, {}, False),
        (n // 2 + 2, {"tools": [TOOL]}, True),
        (n // 2 - 10, {"tools": [TOOL]}, False),
    ):
        prompt = prompted("qwen2", user(order), short=short, **options)
        assert ("post 30." in always_text(prompt)) == is_whole, (short, options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_says_what_is_instruction_and_what_is_document(family: str) -> None:
    messages = [system(f"{RULES} {DOCUMENT}"), user(DOCUMENT), assistant("Read."), user(ASKED)]
    plain = prompted(family, *messages)
    assert "Line 60" in always_text(plain)  # the system message
    changed = prompted(family, *messages, protect=Protect(messages=(1,), documents=(0,)))
    kept = always_text(changed)
    assert kept.count("Line 60 speaks") == 1
    assert kept.index("Line 60 speaks") > kept.index("Line 1 speaks")
    places = placed_text(changed)
    assert places[1] == DOCUMENT
    (place,) = [p for p in changed.messages or () if p.index == 1]
    assert {*range(place.start, place.stop)} <= {*always_read(changed.protected, len(changed.ids))}
    (of_system,) = [p for p in changed.messages or () if p.index == 0]
    middle = (of_system.start + of_system.stop) // 2
    assert middle not in always_read(changed.protected, len(changed.ids))
    # a document is still asked about
    asking = prompted(family, user(f"{DOCUMENT}\n\n{ASKED}"), protect=Protect(documents=(0,)))
    assert ASKED in always_text(asking)
    assert "Line 60" not in always_text(asking)


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_enclose_what_is_read_whole(family: str) -> None:
    marked = "[[The tide is out at six.]]"
    first, second = DOCUMENT[:2000], DOCUMENT[2000:]
    content = f"{first} {marked} {second}\n\nGo on."
    messages = [user(content), assistant("Read."), user(ASKED)]
    assert marked not in always_text(prompted(family, *messages))
    pairs = (("[[", "]]"), ("The tide", "six."), ("[[", "]]"))
    for marks in (pairs[:1], pairs):
        prompt = prompted(family, *messages, protect=Protect(marks=marks))
        assert marked in always_text(prompt)
        ranges = [r for r in prompt.protected if r.priority is Priority.SYSTEM]
        assert len(ranges) == 1, "what overlaps is one range"
    prompt = text_prompt(shaped(family), content, Protect(marks=pairs))
    always = set(always_read(prompt.protected, len(prompt.ids)))
    assert marked in said(prompt, always)


@pytest.mark.parametrize(
    ("protect", "param", "message"),
    [
        (
            Protect(messages=(0, 3)),
            "filter.protect.messages.1",
            "filter.protect.messages.1=3: must be from 0 to 2, the number of a message",
        ),
        (
            Protect(documents=(9,)),
            "filter.protect.documents.0",
            "filter.protect.documents.0=9: must be from 0 to 2, the number of a message",
        ),
        (
            Protect(marks=(("river", "bridge"), ("<a>", "</a>"))),
            "filter.protect.marks.1",
            "filter.protect.marks.1=['<a>', '</a>']: the prompt has no text between these marks",
        ),
        (
            Protect(marks=(("bridge", "<end>"),)),
            "filter.protect.marks.0",
            "filter.protect.marks.0=['bridge', '<end>']: the prompt has no text between",
        ),
    ],
)
def test_what_is_not_there_cannot_be_protected(protect: Protect, param: str, message: str) -> None:
    for tools in ([], [TOOL]):
        with pytest.raises(RequestError) as caught:
            prompted(
                "chatml", user(DOCUMENT), assistant("x"), user(ASKED), protect=protect, tools=tools
            )
        assert str(caught.value).startswith(message)
        assert caught.value.param == param


def test_a_prompt_without_messages_has_no_numbers_of_messages() -> None:
    tokenizer = shaped("chatml")
    for name in ("messages", "documents"):
        protect = Protect(**{name: (0,)})
        for make in (
            lambda p: text_prompt(tokenizer, DOCUMENT, p),
            lambda p: ids_prompt(tokenizer, [9] * 50, p),
        ):
            with pytest.raises(RequestError) as caught:
                make(protect)
            assert caught.value.param == f"filter.protect.{name}"
            assert "only with messages" in str(caught.value)
    with pytest.raises(RequestError, match="token ids have no marks") as caught:
        ids_prompt(tokenizer, [9] * 50, Protect(marks=(("a", "b"),)))
    assert caught.value.param == "filter.protect.marks"


def test_too_many_texts_between_marks_are_refused() -> None:
    """A mark of one letter made millions of ranges."""
    enough = "<>" * MOST_MARKED
    text_prompt(shaped("chatml"), enough, Protect(marks=(("<", ">"),)))
    for text, marks in (
        (f"{enough}<>", (("<", ">"),)),
        (f"{enough}()", (("<", ">"), ("(", ")"))),
    ):
        with pytest.raises(RequestError, match=f"more than {MOST_MARKED} texts") as caught:
            text_prompt(shaped("chatml"), text, Protect(marks=marks))
        assert caught.value.param == f"filter.protect.marks.{len(marks) - 1}"


def test_a_chat_whose_places_cannot_be_found_is_protected_whole() -> None:
    """Else a filter could take the instructions for a document."""
    tokenizer = copy.deepcopy(shaped("chatml"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content | upper }}#{{ m.content | upper }}{% endfor %}>"
    )
    prompt = chat_prompt(tokenizer, [system(RULES), user(DOCUMENT)])
    n = len(prompt.ids)
    assert always_read(prompt.protected, n)
    assert set(always_read(prompt.protected, n)) == set(range(n))
    assert prompt.messages == ()
    # a template that repeats messages as they are is searched for the first of each
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}>"
    )
    prompt = chat_prompt(tokenizer, [system(RULES), user(DOCUMENT), user(ASKED)])
    assert placed_text(prompt) == {0: RULES, 1: DOCUMENT, 2: ASKED}
    assert "Line 60" in free_text(prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_and_absent_messages(family: str) -> None:
    for messages in ([user("")], [user(ASKED), assistant(""), user("")], [system(""), user(" ")]):
        assert_sound(chat_prompt(shaped(family), messages))
    if family not in ALTERNATING:
        assert_sound(chat_prompt(shaped(family), [user(ASKED), result(""), result(" ")]))


def test_hostile_chats_take_linear_time() -> None:
    """Each result was compared with all others, and each value looked for in the whole chat."""
    started = time.process_time()
    many = [user(ASKED), assistant("", call("f", x="y")), *[result("r")] * 9_000]
    chat_prompt(shaped("chatml"), many)
    values = {f"k{i}": f'"{i}' for i in range(50_000)}  # written with a backslash: not found as is
    chat_prompt(shaped("chatml"), [user(ASKED), assistant("", call("f", **values)), result("r")])
    nested: Any = "deep"
    for _ in range(150):
        nested = [nested]
    chat_prompt(shaped("qwen2"), [user(ASKED), assistant("", call("f", x=nested)), result("r")])
    marks = tuple((f"{i} speaks", "bridge") for i in range(64))
    protect = Protect(marks=marks)
    chat_prompt(shaped("chatml"), [user(DOCUMENT * 100), user(ASKED)], protect=Protect())
    with pytest.raises(RequestError, match="more than"):
        chat_prompt(shaped("chatml"), [user(DOCUMENT * 100), user(ASKED)], protect=protect)
    assert time.process_time() - started < 60


def test_arguments_that_are_no_json_are_protected_too() -> None:
    broken = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "Aur'}}
    for family in WITH_TOOLS:
        prompt = prompted(family, user(ASKED), assistant("", broken), result("There."))
        assert "Aur" in always_text(prompt)
        assert json.dumps("There.").strip('"') in always_text(prompt)
