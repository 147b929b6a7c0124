"""Documents that frameworks stuff into the system message: are they filtered, and found?

A system message that a framework has filled with documents is mostly not an instruction. Here are
ten such messages of 8K to 30K tokens, in the words of three frameworks' own templates, and shorter
ones that a small model can also read whole. Of each: is it filtered, are all of the template's
instructions kept, is the passage that answers the question kept; and the same documents with the
same question in the user's turn beside it. The shorter ones are answered, too, in both places, with
the default filter and read whole.

    python benchmarks/agents/stuffed_system.py --model smollm2 --short 20
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.agents.agent_servers import LONG_PROMPTS, AgentServer, Refused, serving
from benchmarks.agents.prompt_parts import Chat, find_text, load_tokenizer, render
from benchmarks.agents.tables import print_table
from benchmarks.shared import results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from gemserve.calibration.search.example import Example, ExampleDraw, contains, recall
from gemserve.prompting.prompt import Prompt
from gemserve.synthetic.natural_facts import KINDS
from gemserve_lab.compare import compare
from gemserve_lab.run import Outcome
from gemserve_lab.tasks.natural import natural_maker

LONG = (8000, 9000, 10_000, 12_000, 14_000, 16_000, 18_000, 21_000, 25_000, 30_000)
SHORT = (2600, 3200, 4000, 5000, 6000)
_CHUNK_CHARS = 1500  # of a retrieved passage
_OWN_WORDS = (
    "You are the assistant of a town museum. Be friendly, answer in one sentence, and never speak "
    "about prices."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How a framework writes documents into a system message: what it says before and behind them.

    `chunk`: a document among them, with `{name}`, `{n}` and `{text}`. `between`: what stands
    between two documents.
    """

    before: str
    behind: str = ""
    chunk: str = "{text}"
    between: str = "\n\n"


TEMPLATES = {
    # langchain-classic 1.0.8, the chat prompt of the question-answering "stuff" chain
    "langchain_stuff": Template(
        before="Use the following pieces of context to answer the user's question.\n"
        "If you don't know the answer, just say that you don't know, don't try to make up an "
        "answer.\n----------------\n",
    ),
    # create_stuff_documents_chain with a prompt of one's own, as applications write it
    "langchain_own": Template(
        before=f"{_OWN_WORDS}\n\nWhat the archive says:\n\n",
        behind="\n\nOnly use what the archive says. If it does not say it, answer that you do not "
        "know.",
    ),
    # llama-index-core 0.14.25, the context chat engine, which puts one's own words behind it
    "llamaindex_context": Template(
        before="Use the context information below to assist the user.\n--------------------\n",
        behind=f"\n--------------------\n{_OWN_WORDS}",
        chunk="file_name: {name}\n\n{text}",
    ),
    # llama-index-core 0.14.25, the condense-plus-context chat engine
    "llamaindex_condense": Template(
        before="\n  The following is a friendly conversation between a user and an AI assistant.\n"
        "  The assistant is talkative and provides lots of specific details from its context.\n"
        "  If the assistant does not know the answer to a question, it truthfully says it\n"
        "  does not know.\n\n  Here are the relevant documents for the context:\n\n  ",
        behind="\n\n  Instruction: Based on the above documents, provide a detailed answer for the "
        'user question below.\n  Answer "don\'t know" if not present in the document.\n  ',
        chunk="file_name: {name}\n\n{text}",
    ),
    # open-webui 0.12.4 with RAG_SYSTEM_CONTEXT; the list of its guidelines is shortened
    "open_webui": Template(
        before=f"{_OWN_WORDS}\n### Task:\nRespond to the user query using the provided context, "
        "incorporating inline citations in the format [id] **only when the <source> tag includes "
        'an explicit id attribute** (e.g., <source id="1">).\n\n### Guidelines:\n'
        "- If you don't know the answer, clearly state that.\n"
        "- If uncertain, ask the user for clarification.\n"
        "- Respond in the same language as the user's query.\n"
        "- Do not use XML tags in your response.\n\n<context>\n",
        behind="\n</context>",
        chunk='<source id="{n}" name="{name}">{text}</source>',
        between="\n",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuffed:
    """A question about documents. `gold`: the sentence that answers it; `context`: as stuffed."""

    template: str
    example: Example
    gold: str
    context: str
    system: str

    @property
    def in_system(self) -> Chat:
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.example.question},
        ]
        return Chat(name="system", messages=messages)

    @property
    def in_user(self) -> Chat:
        content = f"{self.context}\n\n{self.example.question}"
        return Chat(name="user", messages=[{"role": "user", "content": content}])


def make_stuffed(tokenizer: Any, template: str, draw: ExampleDraw) -> Stuffed:
    """A question about one natural fact, worded as nothing was calibrated on."""
    kind = KINDS[draw.index % len(KINDS)]
    example = natural_maker("evaluation", kind)(tokenizer, draw)
    ((first, last),) = example.gold
    offsets = example.prompt.offsets
    gold = example.prompt.text[offsets[first][0] : offsets[last - 1][1]].strip()
    form = TEMPLATES[template]
    chunks = [
        form.chunk.format(name=f"archive_{n:02}.txt", n=n, text=text)
        for n, text in enumerate(split_document(example.document, gold), 1)
    ]
    context = form.between.join(chunks)
    system = f"{form.before}{context}{form.behind}"
    return Stuffed(template=template, example=example, gold=gold, context=context, system=system)


def split_document(document: str, gold: str) -> list[str]:
    """The document as a retriever's passages, which end with sentences, but not within `gold`."""
    at = document.index(gold)
    chunks: list[str] = []
    start = 0
    while start < len(document):
        stop = document.find(". ", start + _CHUNK_CHARS) + 1
        if at < stop < at + len(gold):
            stop = at + len(gold)
        stop = stop if stop > 0 else len(document)
        chunks.append(document[start:stop].strip())
        start = stop
    return [chunk for chunk in chunks if chunk]


def choose(server: AgentServer, stuffed: Stuffed, chat: Chat, options: Mapping[str, Any]) -> Any:
    """What the filter does with one of the two chats: the report, recall and lost instructions."""
    prompt = render(server.tokenizer, chat)
    try:
        report = server.ask_filter(chat, options)
    except Refused as error:
        return {"prompt_tokens": len(prompt.ids), "reason": "refused", "note": str(error)}
    kept = report["selection"] or [(0, len(prompt.ids))]
    gold = find_text(prompt, stuffed.gold)
    found = {
        "prompt_tokens": report["prompt_tokens"],
        "kept": report["kept_tokens"],
        "protected": report.get("protected_tokens"),
        "applied": report["applied"],
        "reason": report["reason"],
        "recall": recall([gold], kept),
    }
    if chat.messages[0]["role"] == "system":
        words = instruction_ranges(prompt, stuffed)
        total = sum(stop - start for start, stop in words)
        share = recall(words, kept)
        found |= {"instructions": total, "lost": round(total * (1 - (share or 0)))}
    return found


def instruction_ranges(prompt: Prompt, stuffed: Stuffed) -> list[tuple[int, int]]:
    """The tokens of the template's own words, before and behind the documents."""
    form = TEMPLATES[stuffed.template]
    before = find_text(prompt, form.before.strip())
    if not form.behind.strip():
        return [before]
    end = prompt.text.index(stuffed.context[-200:].strip())
    return [before, find_text(prompt, form.behind.strip(), end)]


def answer(server: AgentServer, stuffed: Stuffed, chat: Chat, options: Mapping[str, Any]) -> Any:
    """A greedy answer, and whether it is right."""
    body = {
        "messages": chat.messages,
        "filter": options,
        "temperature": 0,
        "max_tokens": stuffed.example.max_tokens,
    }
    try:
        reply = server.post("/v1/chat/completions", body)
    except Refused as error:
        return {"score": 0.0, "text": f"refused: {error}"}
    text = reply["choices"][0]["message"]["content"] or ""
    return {"score": contains(text, stuffed.example), "text": text}


def measure(
    server: AgentServer, stuffed: Stuffed, options: Mapping[str, Any], *, has_answers: bool
) -> list[dict[str, Any]]:
    """A row for each place and filter of one question."""
    rows: list[dict[str, Any]] = []
    for chat in (stuffed.in_system, stuffed.in_user):
        labels = {
            "template": stuffed.template,
            "size": stuffed.example.num_tokens,
            "index": stuffed.example.index,
            "place": chat.name,
        }
        # what is in the user's turn is a document without being told
        given = options if chat.name == "system" else {}
        row = {**labels, "filter": "default", **choose(server, stuffed, chat, given)}
        if has_answers:
            row |= answer(server, stuffed, chat, given)
        rows.append(row)
        if has_answers:
            whole = answer(server, stuffed, chat, {"method": "none"})
            rows.append({**labels, "filter": "none", **whole})
    return rows


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over all questions of a size, by place and filter."""
    found: list[dict[str, Any]] = []
    for is_long in (False, True):
        for place in ("system", "user"):
            for name in ("default", "none"):
                own = [
                    row
                    for row in rows
                    if (row["place"], row["filter"]) == (place, name)
                    and (row["size"] >= LONG[0]) == is_long
                ]
                if own:
                    of_filter = [row for row in own if row.get("recall") is not None]
                    found.append(
                        {
                            "size": "long" if is_long else "short",
                            "place": place,
                            "filter": name,
                            "n": len(own),
                            "applied": sum(bool(row.get("applied")) for row in own),
                            "refused": sum(row.get("reason") == "refused" for row in own),
                            "instructions_lost": sum(row.get("lost") or 0 for row in own),
                            "recall": _mean(of_filter, "recall"),
                            "kept": _mean(of_filter, "kept"),
                            "score": _mean(own, "score"),
                        }
                    )
    return found


def compare_places(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences of right answers on the same questions, with 95% intervals."""
    outcomes = [_outcome(row) for row in rows if "score" in row]
    names = {outcome.method for outcome in outcomes}
    pairs = (
        ("system default", "user default"),
        ("system default", "system none"),
        ("user default", "user none"),
    )
    found: list[dict[str, Any]] = []
    for one, other in pairs:
        if {one, other} <= names:
            c = compare(outcomes, one, other)
            name = f"{one} − {other}"
            row = {"pair": name, "difference": c.difference, "low": c.low, "high": c.high, "n": c.n}
            found.append(row)
    return found


def _outcome(row: Mapping[str, Any]) -> Outcome:
    return Outcome(
        subtask=row["template"],
        prompt_tokens=row["size"],
        samples=1,
        index=row["index"],
        method=f"{row['place']} {row['filter']}",
        keep=16,
        score=row["score"],
        recall=row.get("recall"),
        kept_tokens=row.get("kept") or 0,
        depth=None,
        text=row["text"],
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a running server of that model")
    parser.add_argument("--long", type=int, default=len(LONG), help="messages beyond 8K tokens")
    parser.add_argument("--short", type=int, default=20, help="messages below 7K tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--protect",
        choices=("default", "documents"),
        default="default",
        help="documents: the request says that the system message is one (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="a file for finished questions, to go on from")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    options = {"protect": {"documents": [0]}} if arguments.protect == "documents" else {}
    names = tuple(TEMPLATES)
    done = [] if arguments.out is None else read_runs(arguments.out)
    rows: list[dict[str, Any]] = []

    def ask_all(server: AgentServer) -> None:
        for count, sizes in ((arguments.short, SHORT), (arguments.long, LONG)):
            for index in range(count):
                # shifted, so that a template does not always meet the same length
                size = sizes[(index + index // len(sizes)) % len(sizes)]
                draw = ExampleDraw(
                    seed=arguments.seed, num_tokens=size, index=index, samples=max(count, 2)
                )
                template = names[index % len(names)]
                results.note(f"{template} {size}")
                key: dict[str, Any] = {
                    "model": server.model,
                    "protect": arguments.protect,
                    "template": template,
                }
                key |= {"seed": arguments.seed, "size": size, "index": index, "of": count}
                run = find_run(done, key)
                if run is None:
                    stuffed = make_stuffed(server.tokenizer, template, draw)
                    found = measure(server, stuffed, options, has_answers=sizes is SHORT)
                    run = {**key, "rows": found}
                    if arguments.out is not None:
                        append_run(arguments.out, run)
                rows.extend(run["rows"])

    if arguments.url is None:
        with serving(arguments.model, "--cache-memory", "0", *LONG_PROMPTS) as server:
            ask_all(server)
    else:
        tokenizer = load_tokenizer(arguments.model)
        with AgentServer(arguments.url, arguments.model, tokenizer) as server:
            ask_all(server)
    results.note("")
    if not arguments.json:
        print_table(rows, ("text", "index", "note"))
        print_table(summarize(rows))
        print_table(compare_places(rows))
    results.finish("stuffed_system", "cpu", rows, quiet=True)


if __name__ == "__main__":
    main()
