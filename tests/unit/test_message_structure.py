"""Documents and instructions within one message: by tags, separators, labels and fences."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from gemserve.prompting.message_structure import (
    FEWEST_CHARS,
    find_documents,
    find_instructions,
    request_range,
)

LONG = "\n".join(f"Line {i} speaks of the river and of the bridge." for i in range(120))
SHORT = "Line 1 speaks of the river."
ASKED = "Who is the mayor?"
ORDER = "Answer in French, in one sentence."


def documents(text: str, *, is_system: bool = False) -> list[str]:
    found = find_documents(text, is_system=is_system)
    assert list(found) == sorted(found)
    assert all(0 <= low < high <= len(text) for low, high in found)
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))
    return [text[low:high] for low, high in found]


def instructions(text: str) -> list[str]:
    return [text[low:high] for low, high in find_instructions(text)]


def request(text: str) -> str:
    low, high = request_range(text)
    return text[low:high]


@pytest.mark.parametrize("is_system", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "context",
        "documents",
        "document",
        "file",
        "Context",
        "search_results",
        "doc-3",
        "page_12",
        "retrieved_chunks",
        "knowledge-base",
        "codebase",
        "transcript",
    ],
)
def test_what_a_document_s_tags_enclose_is_a_document(name: str, is_system: bool) -> None:
    text = f"{ORDER}\n<{name}>\n{LONG}\n</{name}>\n{ASKED}"
    (found,) = documents(text, is_system=is_system)
    assert found == f"\n{LONG}\n"


@pytest.mark.parametrize(
    "name", ["b", "thinking", "answer", "contexture", "my-file-list", "example"]
)
def test_other_tags_are_none(name: str) -> None:
    """A template's own tags would take its instructions away."""
    assert documents(f"<{name}>\n{LONG}\n</{name}>\n{ASKED}") == []
    assert instructions(f"<{name}>\n{LONG}\n</{name}>\n{ASKED}") == []


@pytest.mark.parametrize(
    "text", ["<document>\n{}\n", "<document/>\n{}\n</document >", "{}\n</file>"]
)
def test_a_tag_without_its_other_encloses_nothing(text: str) -> None:
    """All that followed was a document, and with it the question."""
    assert documents(f"{text.format(LONG)}\n{ASKED}") == []


def test_a_tag_within_a_line_is_text() -> None:
    assert documents(f"Write <file> first.\n{LONG}\nThen </file> at the end.") == []


def test_tags_of_one_name_that_enclose_each_other_are_one_document() -> None:
    """The first closing tag ended it, and the rest of the file was an instruction."""
    inner = f"<file>\n{SHORT}\n</file>"
    text = f"<file>\n{inner}\n{LONG}\n{inner}\n</file>\n{ASKED}"
    assert documents(text) == [f"\n{inner}\n{LONG}\n{inner}\n"]
    unbalanced = f"<file>\n<file>\n{LONG}\n</file>\n{ASKED}"
    assert documents(unbalanced) == [f"\n<file>\n{LONG}\n"]


def test_documents_one_behind_the_other_are_one() -> None:
    parts = "\n".join(f'<document index="{i}">\n{LONG[:900]}\n</document>' for i in range(4))
    (found,) = documents(f"{ORDER}\n\n{parts}\n\n{ASKED}")
    assert found.count("<document index") == 3
    assert ORDER not in found
    assert ASKED not in found
    between = f"<file>{LONG}</file>\nBe careful with the next one.\n<file>{LONG}</file>"
    assert documents(between) == [LONG, LONG]


def test_a_short_document_is_read_whole() -> None:
    exact = "x" * FEWEST_CHARS
    assert documents(f"<file>{exact}</file>") == [exact]
    assert documents(f"<file>{exact[1:]}</file>") == []


@pytest.mark.parametrize(
    "template",
    [
        # a retrieval chain's system message
        "Use the following pieces of retrieved context to answer the question.\n"
        "----------------\n{}",
        # a query engine's template of text completion
        "Context information is below.\n---------------------\n{}\n---------------------\n"
        "Given the context information and not prior knowledge, answer the query.\n"
        "Query: Who is the mayor?\nAnswer: ",
        "The documents are these.\n==========\n{}\n==========\nAnswer from them alone.",
        "The sources are these:\n\n********\n{}\n********\nWho is the mayor?",
    ],
)
def test_separators_as_retrieval_frameworks_write_them(template: str) -> None:
    for is_system in (False, True):
        (found,) = documents(template.format(LONG), is_system=is_system)
        assert found.strip() == LONG


def test_separators_without_a_word_about_a_context_are_decoration() -> None:
    assert documents(f"Rules\n----------\n{LONG}\n----------\n{ASKED}") == []
    assert documents(f"The context:\n-------\n{LONG}") == [], "seven signs are a Markdown rule"
    short = "\n".join(LONG.split("\n")[:50])
    assert FEWEST_CHARS < len(short) < 4000
    assert documents(f"The context is below.\n--------\n{short}\n--------\n{ASKED}") == []


@pytest.mark.parametrize(
    "label",
    [
        "Context:",
        "## Context:",
        "**Context:**",
        "Retrieved documents:",
        "CONTEXT INFORMATION:",
        "  Search results:",
        "Knowledge base:",
        "*Sources*:",
    ],
)
@pytest.mark.parametrize(
    "end", ["Question: ", "Query:", "**Question:** ", "### Task: ", "User query: "]
)
def test_what_a_label_announces_is_a_document_up_to_the_next_label(label: str, end: str) -> None:
    for is_system in (False, True):
        (found,) = documents(f"{ORDER}\n\n{label}\n{LONG}\n\n{end}{ASKED}", is_system=is_system)
        assert found.strip() == LONG
        assert documents(f"{ORDER}\n{label}\n{LONG}", is_system=is_system) == [f"\n{LONG}"]


def test_a_label_within_a_sentence_is_none() -> None:
    assert documents(f"Look at the context: it is long.\n{LONG}\nQuestion: {ASKED}") == []


def test_fenced_code_is_a_document_of_a_user_s_turn_only() -> None:
    """A system message shows code as an example of what to do."""
    for fence in ("```", "~~~", "````"):
        text = f"{ORDER}\n\n{fence}python\n{LONG}\n{fence}\n\n{ASKED}"
        (found,) = documents(text)
        assert found.strip() == f"{fence}python\n{LONG}\n{fence}"
        assert documents(text, is_system=True) == []
        assert documents(f"{ORDER}\n{fence}\n{SHORT}\n{fence}\n{ASKED}") == []
        assert documents(f"{ORDER}\n{fence}\n{LONG}\n{ASKED}") == [], "nothing closes it"


@pytest.mark.parametrize(
    "name",
    [
        "system-reminder",
        "user_instructions",
        "rules",
        "environment_context",
        "system",
        "env",
        "permissions",
        "policies",
        "guidelines",
        "user-preferences",
        "skills",
        "persona",
    ],
)
def test_tagged_instructions_are_found_with_their_tags(name: str) -> None:
    block = f"<{name}>\n{ORDER}\n</{name}>"
    assert instructions(f"{block}\n{ASKED}") == [block]
    assert request(f"{block}\n\n{ASKED}") == ASKED
    assert request(f"{ASKED}\n\n{block}\n") == ASKED
    assert request(f"{block}\n{block}\n{ASKED}\n{block}\n{block}") == ASKED
    # in the middle it belongs to what is said
    assert request(f"{ASKED}\n{block}\n{ASKED}") == f"{ASKED}\n{block}\n{ASKED}"
    low, high = request_range(f"{block}\n{block}\n")
    assert low == high, "nobody has asked anything"


@pytest.mark.parametrize("indent", ["", "  ", "\t"])
def test_a_tagged_result_of_a_tool_is_no_instruction(indent: str) -> None:
    """What an agent had read before was kept whole, whatever its length."""
    block = (
        f"{indent}<system-reminder>\nResult of calling the Read tool:\n{LONG}\n</system-reminder>"
    )
    assert instructions(f"{block}\n{ASKED}") == []
    (found,) = documents(f"{block}\n{ASKED}")
    assert found == block
    assert instructions(f"{indent}<system-reminder>\nResults matter.\n</system-reminder>") != []


def test_blanks_and_nothing() -> None:
    for text in ("", " ", "\n\n\t"):
        assert documents(text) == []
        assert instructions(text) == []
        low, high = request_range(text)
        assert low == high <= len(text)
    assert request(f"\n\n  {ASKED} \n") == ASKED


HOSTILE = {
    "opening tags": "<document>\n" * 100_000,
    "tags in tags": "<document>\n" * 50_000 + "</document>\n" * 50_000,
    "opening tags of other names": "".join(f"<doc{i}>\n" for i in range(100_000)),
    "instructions of other names": "".join(f"<rule{i}>\n" for i in range(100_000)),
    "half of the tags closed": "".join(f"<doc{i}>\n<doc{i}>\n</doc{i}>\n" for i in range(30_000)),
    "instructions without end": "x\n" + "<rule>a</rule>\n" * 100_000,
    "instructions around a word": "<rule>a</rule>\n" * 50_000 + "x\n" + "<rule>a</rule>\n" * 50_000,
    "a million newlines": "\n" * 1_000_000,
    "a million blanks": " " * 1_000_000,
    "a million line ends": "\r\n" * 500_000,
    "one long separator": "-" * 1_000_000,
    "many separators": "context\n" + "--------\n" * 100_000,
    "many labels": "Context:\n" * 100_000,
    "a label without end": "context" + " " * 1_000_000 + "x",
    "a heading without end": "#" * 1_000_000,
    "many fences": "```\n" * 200_000,
    "one long fence": "`" * 1_000_000,
    "a tag without end": "<" + "a" * 1_000_000,
    "attributes without end": "<document " + "a" * 1_000_000 + "\n",
    "angles": "<" * 1_000_000,
    "neighbours": "<document>a</document>\n" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_linear_time(name: str) -> None:
    """Each of many opening tags was looked for up to the end: minutes, while nobody was served."""
    text = HOSTILE[name]
    started = time.process_time()
    for is_system in (False, True):
        find_documents(text, is_system=is_system)
    find_instructions(text)
    low, high = request_range(text)
    assert 0 <= low <= high <= len(text)
    assert time.process_time() - started < 20  # a quadratic search takes minutes


def test_documents_that_a_sentence_announces_end_before_a_label() -> None:
    """LlamaIndex's chat engine writes its system message so, and it was read whole."""
    before = "Be friendly.\n\n  Here are the relevant documents for the context:\n\n  "
    behind = "\n\n  Instruction: Based on the above documents, answer the question below.\n  "
    document = "The river runs past the houses, they say. " * 120
    text = before + document + behind
    ((low, high),) = find_documents(text, is_system=True)
    assert text[low:high].strip() == document.strip()
    for words in ("Here is how to work with documents:", "Here are the rules about the context:"):
        assert not find_documents(f"{words}\n{document}", is_system=True), "these are instructions"
