"""Which questions does a filter fail on, and what does it keep of the passages that answer them?

The cases are our own and stand in the folder `answer_cases`, a file for each kind:

- `other_words`: the question shares no content word with the fact that answers it;
- `meaning`, `code`, `tables`, `spoken`: the same with facts for evaluations, which no calibration
  has seen, in prose, code, tables and nine languages. Decoys have the question's words and are
  about other matters; prose has them in half of the cases, the others always;
- `function_ends`: the last line of a function of Python's library, which is asked for by what its
  docstring says it does, among other functions;
- `words`: facts for evaluations that are asked for in their own words; `several`: two of them that
  one question asks for;
- `real`: the 120 questions of `real_documents.py` about documents of this machine;
- `languages`: nine languages; the question stands behind its document, in front of it, between two
  documents, or is an order without a question mark;
- `conversations`: five user turns about one document, of which the later ones cannot be understood
  without the earlier ones. Each turn is a case, with right answers in the turns before it;
- `everything`: lists, counts and summaries, which need the whole document.

A *way* is a name with the filter options of a request, NAME=JSON. NAME alone is `default` (no
options) or a method of requests. `bm25`, `oracle`, `embedding` (with `--embedding FOLDER`) and
`draft` (with `--draft MODEL`) choose outside of the engine, with `keep` as their only option. Under
`alone` the model reads nothing but the question and what answers it, which shows whether it can
answer at all.

    python benchmarks/quality/answer_cases.py --ways default,none,bm25 --out cases.jsonl
    python benchmarks/quality/answer_cases.py --kinds languages --out cases.jsonl \
        --ways 'default,one_pass={"method":"sieve","window":"off"},few={"method":"bm25","keep":256}'

All ways answer a case before the next case comes. Each answer is a line in the file `--out` at
once; what is there for the same prompt and options is not measured again. `right` is the share of
the expected answers that the text contains: of lists and summaries the share of what is listed, of
all others 0 or 1. No way finds what another one has left in the document cache. With `--shared`
questions about the same facts follow one another behind the same document, and a way finds what it
has read before, so that many answers take little time. Their times then say nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from pydantic import ValidationError

from benchmarks.quality import real_documents as real
from benchmarks.quality.draft_attention import DraftAttention
from benchmarks.quality.library import Embeddings
from benchmarks.shared import results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from benchmarks.shared.timed_answers import answer
from gemserve.api.requests.base_bodies import FilterBody
from gemserve.calibration.search.example import Example, contains, find_spans, recall
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import FilterOptions
from gemserve.errors import RequestError
from gemserve.filtering.protected_budget import count_always_read
from gemserve.llm import LLM
from gemserve.prompting.prompt import Prompt
from gemserve.synthetic.code import stdlib_functions
from gemserve.synthetic.meaning_facts import (
    PROSE_KINDS,
    MeaningFact,
    facts_in,
    filler_in,
    languages_of,
    meaning_facts,
)
from gemserve.synthetic.natural_facts import lead_in
from gemserve.synthetic.prose import topics_sentences
from gemserve.synthetic.words_evaluation import EVALUATION
from gemserve_lab.methods_compared import CHOSEN_OUTSIDE, PASSAGE_TOKENS, filled

FOLDER = Path(__file__).with_name("answer_cases")
PLACES = ("end", "front", "between", "order")
MAX_TOKENS = 32
EVERYTHING_TOKENS = 96
OWN_WORDS_TOKENS = 96  # with 32, models that say first what they will do never come to the answer
OTHERS = 4  # facts that a document has beside the one in question, in `other_words`
ALONE = "alone"  # the way without filler
_NAME = re.compile(r"[\w:. -]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question, and what its document is made of.

    `labels`: what the summary groups cases by. `answers`: each must be given, in one of its forms.
    `facts`: passages that stand in the document at even distances, in their order. `gold`: those
    that the answer needs, in their order; empty if it needs everything. `filler`: what stands
    around the facts, never the same passage twice. `joint`: between two passages. `document`: a
    real document, which has no other facts and no filler. `length`: tokens of the prompt, if the
    case has a length of its own. `shares`: the name of the document, which other cases have, too;
    empty: none has. `earlier`: the turns before, each with the right answer.
    """

    kind: str
    name: str
    labels: Mapping[str, str]
    question: str
    answers: tuple[tuple[str, ...], ...]
    facts: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()
    filler: Callable[[], Iterator[str]] | None = None
    joint: str = "\n\n"
    document: str = ""
    length: int | None = None
    shares: str = ""
    place: str = "end"
    earlier: tuple[tuple[str, str], ...] = ()
    max_tokens: int = MAX_TOKENS

    def messages(self, llm: LLM, length: int, *, is_alone: bool = False) -> list[dict[str, str]]:
        """The chat, with a document that makes a prompt of about `length` tokens.

        `is_alone`: the document is what answers the question, and nothing else.
        """
        if is_alone:
            return self._chat(self.gold or self.facts)
        if self.filler is None:
            return self._chat([self.document])
        bare = len(llm.prompt(self._chat(self.facts)).ids)
        return self._chat(self._filled(llm, (self.length or length) - bare))

    def _chat(self, passages: Sequence[str]) -> list[dict[str, str]]:
        first = self.earlier[0][0] if self.earlier else self.question
        at = {"front": 0, "between": len(passages) // 2}.get(self.place, len(passages))
        parts = [self.joint.join(passages[:at]), first, self.joint.join(passages[at:])]
        messages = [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]
        following = [question for question, _ in self.earlier[1:]] + [self.question]
        for (_, reply), question in zip(self.earlier, following, strict=False):
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": question})
        return messages

    def _filled(self, llm: LLM, room: int) -> list[str]:
        """The facts in filler of at most `room` tokens."""
        assert self.filler is not None
        encode = llm.tokenizer.backend_tokenizer.encode
        taken: list[str] = []
        for passage in self.filler():
            room -= len(encode(self.joint + passage, add_special_tokens=False).ids)
            if room < 0:
                break
            taken.append(passage)
        for index in reversed(range(len(self.facts))):
            at = round((index + 0.5) / len(self.facts) * len(taken))
            taken.insert(at, self.facts[index])
        return taken


def read_file(kind: str) -> Any:
    """The contents of a kind's data file."""
    return json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


def draw_notes(words: Mapping[str, Any], name: str) -> Iterator[str]:
    """Short notes in one language, each of three sentences and none of them twice.

    Every sentence is a form of `words` whose slots are filled at random. The forms of a note come
    in random order, and a combination of them comes again only after all others.
    """
    rng = Random(name)
    forms = list(product(words["openings"], words["middles"], words["closings"]))
    rng.shuffle(forms)
    return _distinct(
        words["joint"].join(_fill(form, words, rng) for form in three) for three in cycle(forms)
    )


def draw_topics(topics: Sequence[Mapping[str, Any]], name: str) -> Iterator[str]:
    """Notes of three sentences about each topic in turn, none of them twice."""
    rng = Random(name)
    words = read_file("languages")["English"]
    return _distinct(
        " ".join(_fill(form, words, rng) for form in rng.sample(topic["sentences"], 3))
        for topic in cycle(topics)
    )


def _fill(form: str, words: Mapping[str, Any], rng: Random) -> str:
    chosen = {slot: rng.choice(entries) for slot, entries in words["words"].items()}
    text = form.format(**chosen) + words["stop"]
    return text[0].upper() + text[1:]


def _distinct(passages: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for passage in passages:
        if passage not in seen:
            seen.add(passage)
            yield passage


def draw_prose(name: str) -> Iterator[str]:
    """Sentences of Python's language reference from a random one on."""
    sentences = topics_sentences()
    start = Random(name).randrange(len(sentences))
    yield from (*sentences[start:], *sentences[:start])


def other_words() -> Iterator[Case]:
    """Each fact stands among `OTHERS` other ones, at another place for each question."""
    entries = read_file("other_words")
    english = read_file("languages")["English"]
    for index, entry in enumerate(entries):
        others = [entries[(index + i) % len(entries)]["fact"] for i in range(1, OTHERS + 1)]
        at = index % (OTHERS + 1)
        name = f"other words {index + 1}"
        yield Case(
            kind="other_words",
            name=name,
            labels={},
            question=entry["question"],
            answers=(tuple(entry["answers"]),),
            facts=(*others[:at], entry["fact"], *others[at:]),
            gold=(entry["fact"],),
            filler=partial(draw_notes, english, name),
        )


def meaning() -> Iterator[Case]:
    """Facts in prose, without and with decoys in turn."""
    facts = meaning_facts("evaluation")
    of_kinds = [[fact for fact in facts if fact.kind == kind] for kind in PROSE_KINDS]
    prose = [fact for turn in zip(*of_kinds, strict=True) for fact in turn]
    for has_decoys in (False, True):
        for index in range(len(prose)):
            label = "decoys" if has_decoys else "no decoys"
            yield _by_meaning(prose, index, label, has_decoys=has_decoys)


def words() -> Iterator[Case]:
    """Facts of one relation, each asked for in its own words."""
    yield from _in_own_words("words", 1)


def several() -> Iterator[Case]:
    yield from _in_own_words("several", 2)


def _in_own_words(kind: str, count: int) -> Iterator[Case]:
    """The questions ask for `count` of the facts that a document has."""
    size = OTHERS + 1
    for number, relation in enumerate(EVALUATION):
        document = f"{kind} document {number + 1}"
        rng = Random(document)
        subjects, values = rng.sample(relation.subjects, size), rng.sample(relation.values, size)
        facts = [
            rng.choice(relation.statements).format(s=subject, v=value)
            for subject, value in zip(subjects, values, strict=True)
        ]
        form = rng.choice(relation.questions)
        for index in range(size):
            asked = [(index + i) % size for i in range(count)]
            first, *rest = (form.format(s=subjects[i]).removesuffix("?") for i in asked)
            yield Case(
                kind=kind,
                name=f"{kind} {number + 1}.{index + 1}",
                labels={},
                question=", ".join([first, *(lead_in("and ", each) for each in rest)]) + "?",
                answers=tuple((values[i],) for i in asked),
                facts=tuple(facts),
                gold=tuple(facts[i] for i in sorted(asked)),
                filler=partial(draw_notes, read_file("languages")["English"], document),
                shares=document,
                max_tokens=OWN_WORDS_TOKENS,
            )


def code() -> Iterator[Case]:
    functions = [fact for fact in meaning_facts("evaluation") if fact.kind == "code"]
    for index in range(len(functions)):
        case = _by_meaning(functions, index, "code", has_decoys=True)
        filler = partial(_shuffled, stdlib_functions(), case.shares)
        yield replace(case, kind="code", filler=filler, joint="\n\n\n")


def function_ends() -> Iterator[Case]:
    every = stdlib_functions()
    described = [(text, *parts) for text in every if (parts := _described(text))]
    for index, (text, says, last) in enumerate(Random(1).sample(described, len(described))):
        others = [other for other in every if other != text]
        name = f"function {index + 1}"
        yield Case(
            kind="function_ends",
            name=name,
            labels={},
            question=f"Here is what a function does: {says} What is its last line?",
            answers=((last.strip(),),),
            facts=(text,),
            gold=(last,),
            filler=partial(_shuffled, others, name),
            joint="\n\n\n",
        )


def _described(text: str) -> tuple[str, str] | None:
    """What a function of some length does, and its last line, which it has once."""
    (node,) = ast.parse(text).body[:1] or [None]
    if not isinstance(node, ast.FunctionDef) or not 500 <= len(text) <= 2600:
        return None
    says = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    last = text.rstrip().splitlines()[-1]
    is_telling = 25 < len(says) < 200 and len(last.strip()) > 12 and text.count(last) == 1
    return (says, last) if is_telling else None


def tables() -> Iterator[Case]:
    of_tables = [fact for fact in meaning_facts("evaluation") if fact.kind == "table"]
    for index in range(len(of_tables)):
        yield replace(_by_meaning(of_tables, index, "tables", has_decoys=True), kind="tables")


def spoken() -> Iterator[Case]:
    """Facts and decoys of one language, in notes of its filler."""
    for place in ("end", "front"):
        for language in languages_of("evaluation"):
            facts = facts_in(language, "evaluation")
            for index in range(len(facts)):
                case = _by_meaning(facts, index, language, has_decoys=True)
                filler = partial(_notes_of, filler_in(language), case.shares)
                labels = {"language": language, "place": place}
                yield replace(
                    case,
                    kind="spoken",
                    name=f"{case.name} {place}",
                    labels=labels,
                    filler=filler,
                    place=place,
                )


def _by_meaning(facts: Sequence[MeaningFact], index: int, label: str, *, has_decoys: bool) -> Case:
    """The question about one fact, which stands among others of its sort.

    A document has `OTHERS` + 1 facts, and as many questions.
    """
    asked, number = facts[index], index // (OTHERS + 1)
    start = number * (OTHERS + 1)
    chosen = [facts[(start + i) % len(facts)] for i in range(OTHERS + 1)]
    texts = [fact.fact for fact in chosen]
    if has_decoys:
        texts += [fact.decoy for fact in chosen]
    document = f"{label} document {number + 1}"
    Random(document).shuffle(texts)
    return Case(
        kind="meaning",
        name=f"{label} {index + 1}",
        labels={"sort": label},
        question=asked.question,
        answers=((asked.answer,),),
        facts=tuple(texts),
        gold=(asked.gold,),
        filler=partial(draw_notes, read_file("languages")["English"], document),
        shares=document,
    )


def _shuffled(passages: Sequence[str], name: str) -> Iterator[str]:
    yield from Random(name).sample(passages, len(passages))


def _notes_of(sentences: Sequence[str], name: str) -> Iterator[str]:
    """Notes of three of the sentences each, none of them twice."""
    rng = Random(name)
    return _distinct(" ".join(rng.sample(sentences, 3)) for _ in cycle([None]))


def real_questions() -> Iterator[Case]:
    """The real questions and the held-out ones, each with its context."""
    for path in (real.QUESTIONS, real.HELD_OUT):
        lines, left_out = real.make_lines(real.read_questions(path))
        print(*left_out, sep="\n", file=sys.stderr)
        for index, (_, line) in enumerate(lines):
            yield Case(
                kind="real",
                name=f"{path.stem} {index + 1}",
                labels={"set": path.stem},
                question=line["question"],
                answers=tuple((answer,) for answer in line["answers"]),
                gold=(line["gold"],),
                document=line["context"],
            )


def languages() -> Iterator[Case]:
    """Each document has all facts of its language; the one in question moves through it."""
    for language, words in read_file("languages").items():
        facts = [entry["fact"] for entry in words["facts"]]
        for index, entry in enumerate(words["facts"]):
            for place in PLACES:
                name = f"{language} {index + 1}"
                question = entry["asked_as_order" if place == "order" else "question"]
                yield Case(
                    kind="languages",
                    name=f"{name} {place}",
                    labels={"language": language, "place": place},
                    question=question,
                    answers=(tuple(entry["answers"]),),
                    facts=tuple(facts),
                    gold=(entry["fact"],),
                    filler=partial(draw_notes, words, name),
                    place=place,
                )


def conversations() -> Iterator[Case]:
    """Every turn of every conversation. Those about documents that are not here are left out."""
    for index, entry in enumerate(read_file("conversations")):
        name = entry.get("source") or entry["title"]
        try:
            shared, golds = _conversation(entry, f"conversation {index}")
        except real.LeftOut as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        turns = entry["turns"]
        for number, (turn, gold) in enumerate(zip(turns, golds, strict=True)):
            document = "real document" if "source" in entry else "facts in prose"
            yield Case(
                kind="conversations",
                name=f"{name}, turn {number + 1}",
                labels={"document": document, "turn": f"turn {number + 1}"},
                question=turn["question"],
                answers=(tuple(turn["answers"]),),
                gold=gold,
                length=entry["length"],
                earlier=tuple((before["question"], before["reply"]) for before in turns[:number]),
                **shared,
            )


def _conversation(
    entry: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """What the cases of a conversation have in common, and the gold of each turn."""
    turns = entry["turns"]
    if "source" not in entry:
        facts = {"facts": tuple(entry["facts"]), "joint": " ", "filler": partial(draw_prose, name)}
        return facts, [tuple(turn["gold"]) for turn in turns]
    document, golds = cut_document(
        entry["source"], [turn["gold"] for turn in turns], entry["length"]
    )
    return {"document": document}, [(gold,) for gold in golds]


def cut_document(
    source: str, quotations: Sequence[Sequence[str]], length: int
) -> tuple[str, list[str]]:
    """A part of a document with all quotations, and for each the lines that it stands in.

    A quotation of two parts is all from the first to the second. Raises `LeftOut`.
    """
    text = real.read_document(source)
    paragraphs = real.split_paragraphs(text)
    places = [real.find_gold(text, paragraphs, quotation) for quotation in quotations]
    first, last = min(low for low, _ in places), max(high for _, high in places)
    start, stop = real.cut(paragraphs, first, last, length, 0.5)
    document = text[paragraphs[start].start : paragraphs[stop].stop].strip("\n")
    return document, [_lines_of(document, quotation) for quotation in quotations]


def _lines_of(text: str, quotation: Sequence[str]) -> str:
    low, high = len(text), 0
    for part in quotation:
        found = re.compile(r"\s+".join(map(re.escape, part.split()))).search(text, high)
        assert found is not None  # `find_gold` has found it
        low, high = min(low, found.start()), found.end()
    start, stop = text.rfind("\n", 0, low) + 1, text.find("\n", high)
    return text[start : stop if stop >= 0 else len(text)].strip()


def everything() -> Iterator[Case]:
    """Lists and counts over facts in notes, and questions about topics over notes about them."""
    data = read_file("everything")
    english = read_file("languages")["English"]
    for index, entry in enumerate(data["cases"]):
        name = f"everything {index + 1}"
        case = Case(
            kind="everything",
            name=name,
            labels={"ask": entry["ask"]},
            question=entry["question"],
            answers=(),
            max_tokens=EVERYTHING_TOKENS,
        )
        if entry["ask"] == "topics":
            topics = [data["topics"][topic] for topic in entry["topics"]]
            yield replace(
                case,
                answers=tuple(tuple(topic["terms"]) for topic in topics),
                filler=partial(draw_topics, topics, name),
            )
            continue
        forms, items = entry["facts"], entry["items"]
        facts = tuple(forms[i % len(forms)].format(item=item) for i, item in enumerate(items))
        is_list = entry["ask"] == "list"
        yield replace(
            case,
            answers=tuple((item,) for item in items) if is_list else (tuple(entry["answers"]),),
            facts=facts,
            gold=facts,
            filler=partial(draw_notes, english, name),
        )


class Embedding:
    """Keeps the passages whose sentence embeddings are nearest to the question's, as BM25 does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, tokenizer: Any, example: Example, keep: int) -> tuple[int, ...]:
        ids = list(example.prompt.ids)
        starts = range(0, len(ids), PASSAGE_TOKENS)
        texts = [tokenizer.decode(ids[s : s + PASSAGE_TOKENS]) for s in starts]
        best = Embeddings(texts, self._folder).order(example.question)
        ranked = (
            p for i in best for p in range(starts[i], min(starts[i] + PASSAGE_TOKENS, len(ids)))
        )
        return filled(example, ranked, keep)


OUTSIDE = dict(CHOSEN_OUTSIDE)  # what chooses outside of the engine

KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "other_words": other_words,
    "meaning": meaning,
    "words": words,
    "several": several,
    "code": code,
    "function_ends": function_ends,
    "tables": tables,
    "spoken": spoken,
    "real": real_questions,
    "languages": languages,
    "conversations": conversations,
    "everything": everything,
}


@dataclass(frozen=True, slots=True)
class Way:
    """How a prompt is read.

    `given`: the options as they were given. `method`: what chooses outside of the engine, or
    `ALONE`; empty if the engine does.
    """

    name: str
    given: Mapping[str, Any]
    options: FilterOptions
    method: str = ""


def read_ways(text: str) -> list[Way]:
    """The ways of the command line. Raises `SystemExit` for one that is wrong."""
    ways: list[Way] = []
    at = 0
    while at < len(text):
        name = _NAME.match(text, at)
        if name is None:
            raise SystemExit(f"--ways: {text[at:]!r} must begin with a name")
        at = name.end()
        given: Any = {} if name[0] == "default" else {"method": name[0]}
        if text[at : at + 1] == "=":
            try:
                given, at = json.JSONDecoder().raw_decode(text, at + 1)
            except ValueError as error:
                raise SystemExit(f"--ways: {name[0]} is not followed by JSON: {error}") from None
        if text[at : at + 1] not in ("", ","):
            raise SystemExit(f"--ways: a comma must follow {name[0]}, not {text[at:]!r}")
        at += 1
        ways.append(_way(name[0], given))
    return ways


def _way(name: str, given: Any) -> Way:
    try:
        if isinstance(given, dict) and given.get("method") in (*OUTSIDE, ALONE):
            method = given["method"]
            rest = {key: value for key, value in given.items() if key != "method"}
            if set(rest) - {"keep"} or (rest and method == ALONE):
                raise SystemExit(f"--ways: {name}: {method} has no such option: {rest}")
            keep = FilterBody.model_validate(rest).keep
            return Way(name, given, FilterOptions(method="none", keep=keep), method)
        options = FilterBody.model_validate(given).options
    except ValidationError as error:
        raise SystemExit(f"--ways: {name}: {error}") from None
    return Way(name, given, replace(options, return_selection=True))


@dataclass(frozen=True, slots=True)
class Asked:
    """A case as the model reads it, and where its gold is."""

    case: Case
    prompt: Prompt
    gold: tuple[tuple[int, int], ...]
    digest: str = field(default="")


def ask(llm: LLM, case: Case, length: int, way: Way) -> Asked:
    """The prompt of a case, made as for an HTTP request with the same messages."""
    messages = case.messages(llm, length, is_alone=way.method == ALONE)
    prompt = llm.prompt(messages)
    gold = find_spans(prompt, case.gold, _start_of(case, prompt))
    text = json.dumps([messages, case.answers, case.gold, case.max_tokens])
    return Asked(case, prompt, gold, hashlib.sha256(text.encode()).hexdigest()[:16])


def _start_of(case: Case, prompt: Prompt) -> int:
    """The character that the first fact with gold begins at; other passages may have its words."""
    first = next(iter(case.gold), "")
    at = (prompt.text.find(fact) for fact in case.facts if first in fact)
    return max(0, next(at, 0))  # alone there is nothing but gold


def measure(llm: LLM, asked: Asked, way: Way, *, is_shared: bool) -> dict[str, Any]:
    """The answer and its figures. If the server would refuse the prompt, only the reason.

    `is_shared`: cases of one document may find what the way has read of it.
    """
    case, prompt, num_tokens = asked.case, asked.prompt, len(asked.prompt.ids)
    options, chosen_s = way.options, 0.0
    kept: Sequence[tuple[int, int]] | None = ((0, num_tokens),)
    if way.method in OUTSIDE:
        started_s = monotonic()
        positions = _choose(llm, asked, way)
        prompt = Prompt([prompt.ids[position] for position in positions], ())
        kept = [(position, position + 1) for position in positions]
        chosen_s = monotonic() - started_s
    if way.method:
        options = FilterOptions(method="none")
    try:
        document = case.shares if is_shared and case.shares else case.name
        made = answer(llm.core, prompt, options, case.max_tokens, f"{document} {way.name}")
    except RequestError as error:
        return {"impossible": str(error)}
    report = made.report
    if not way.method and (report.applied or report.selection is not None):
        kept = report.selection
    return {
        "right": round(score(made.text, case.answers), 4),
        "recall": _rounded(None if kept is None else recall(asked.gold, kept)),
        "prompt_tokens": num_tokens,
        "kept_tokens": len(prompt.ids) if way.method else report.kept_tokens,
        "reason": report.reason,
        "coverage": _rounded(report.coverage),
        "windows": report.windows,
        "choose_s": _rounded(chosen_s + made.choose_s),
        "ttft_s": _rounded(None if made.ttft_s is None else chosen_s + made.ttft_s),
        "seconds": _rounded(chosen_s + made.total_s),
        "answer": made.text,
    }


def _choose(llm: LLM, asked: Asked, way: Way) -> tuple[int, ...]:
    case, prompt = asked.case, asked.prompt
    example = Example(
        subtask=case.kind,
        num_tokens=len(prompt.ids),
        index=0,
        prompt=prompt,
        question=case.question,
        answers=(),
        gold=asked.gold,
        max_tokens=case.max_tokens,
    )
    return choose_outside(llm, example, way)


def choose_outside(llm: LLM, example: Example, way: Way) -> tuple[int, ...]:
    """The positions that a method outside of the engine keeps, as `gemserve eval` asks it."""
    prompt = example.prompt
    keep = llm.core.config.filter_keep if way.options.keep is None else way.options.keep
    documents = len(prompt.ids) - count_always_read(prompt.protected, len(prompt.ids))
    budget = min(documents, llm.core.planner.calibration.most_kept(keep, documents))
    return OUTSIDE[way.method](llm.tokenizer, example, budget)


def score(text: str, answers: Sequence[Sequence[str]]) -> float:
    """The share of the expected answers that the text contains in one of their forms."""
    return statistics.mean(any(_is_in(form, text) for form in forms) for forms in answers)


def _is_in(form: str, text: str) -> bool:
    example = Example(
        subtask="", num_tokens=0, index=0, prompt=_NO_PROMPT, question="", answers=(form,)
    )
    return contains(text, example) == 1.0


_NO_PROMPT = Prompt((), ())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kind and way, and for each label of the kind's cases and way."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        for group in ("all", *row["labels"].values()):
            groups.setdefault((row["kind"], group, row["way"]), []).append(row)
    places = {key: i for i, key in enumerate(groups)}
    kinds = list(KINDS)

    def place(key: tuple[str, str, str]) -> tuple[int, bool, int]:
        first = min(i for other, i in places.items() if other[:2] == key[:2])
        return kinds.index(key[0]), key[1] != "all", first

    ordered = sorted(groups, key=lambda key: (place(key), places[key]))
    return [_figures(*key, groups[key]) for key in ordered]


def _figures(kind: str, group: str, way: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if "impossible" not in row]
    recalls = [row["recall"] for row in measured if row["recall"] is not None]
    figures: dict[str, Any] = {"kind": kind, "group": group, "way": way, "n": len(measured)}
    if len(measured) < len(rows):
        figures["impossible"] = len(rows) - len(measured)
    if not measured:
        return figures
    return figures | {
        "right": round(statistics.mean(row["right"] for row in measured), 4),
        "recall": round(statistics.mean(recalls), 4) if recalls else None,
        "found": sum(value >= 0.9 for value in recalls) if recalls else None,
        "prompt_tokens": round(statistics.mean(row["prompt_tokens"] for row in measured)),
        "kept_tokens": round(statistics.median(row["kept_tokens"] for row in measured)),
        "choose_s": _median(row["choose_s"] for row in measured),
        "ttft_s": _median(row["ttft_s"] or row["seconds"] for row in measured),
        "seconds": _median(row["seconds"] for row in measured),
        "reasons": dict(Counter(str(row["reason"]) for row in measured)),
    }


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 4)


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Right answers over the median time to the first token, a point for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawing, axis = plt.subplots(figsize=(7, 4.2))
    for row in rows:
        n, right = row["n"], row["right"]
        error = (right * (1 - right) / n) ** 0.5  # of the mean of n answers that are right or wrong
        axis.errorbar(row["ttft_s"], right, yerr=error, fmt="o", capsize=3)
        axis.annotate(row["way"], (row["ttft_s"], right), xytext=(6, 6), textcoords="offset points")
    axis.set(xscale="log", xlabel="seconds to the first token, median", ylim=(0, 1))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.margins(x=0.15)  # for the last name
    axis.set_ylabel("share of right answers")
    axis.grid(visible=True, which="both", alpha=0.2)
    axis.set_title(title, fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, dpi=100)


def pick(cases: Sequence[Case], samples: int | None) -> list[Case]:
    """`samples` of the cases, spread evenly over them; all if None."""
    if samples is None or samples >= len(cases):
        return list(cases)
    return [cases[int((i + 0.5) * len(cases) / samples)] for i in range(samples)]


def pick_documents(cases: Sequence[Case], samples: int | None) -> list[Case]:
    """About as many, but all cases of a document or none."""
    documents: dict[str, list[Case]] = {}
    for case in cases:
        documents.setdefault(case.shares or case.name, []).append(case)
    count = None if samples is None else max(1, round(samples * len(documents) / len(cases)))
    firsts = pick([some[0] for some in documents.values()], count)
    return [case for first in firsts for case in documents[first.shares or first.name]]


def settings_of(arguments: argparse.Namespace, way: Way) -> dict[str, Any]:
    """The options that a way's answers depend on. None: the default, and in files without it."""
    embedding = arguments.embedding if way.method == "embedding" else None
    return {
        "shared": arguments.shared or None,
        "weights": None if arguments.weights == "auto" else arguments.weights,
        "calibrate": None if arguments.calibrate == "auto" else arguments.calibrate,
        "reader": arguments.reader,
        "draft": arguments.draft if way.method == "draft" else None,
        "embedding": None if embedding is None else str(embedding),
    }


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.embedding is not None:
        OUTSIDE["embedding"] = Embedding(arguments.embedding)
    if arguments.draft is not None:
        OUTSIDE["draft"] = DraftAttention(arguments.draft)
    ways, kinds = read_ways(arguments.ways), arguments.kinds.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise SystemExit(f"--kinds: {kind!r} must be among {', '.join(KINDS)}")
    settings = EngineConfig(
        calibrate=arguments.calibrate, kv_memory_bytes=2 << 30, reader=arguments.reader
    )
    llm = LLM(ModelConfig(model=arguments.model, weights=arguments.weights), settings)
    finished = [] if arguments.out is None else read_runs(arguments.out)
    finished = [row for row in finished if "impossible" not in row]  # they are tried again
    rows: list[dict[str, Any]] = []
    choose = pick_documents if arguments.shared else pick
    for kind in kinds:
        for case in choose(list(KINDS[kind]()), arguments.samples):
            for way in ways:
                asked = ask(llm, case, arguments.length, way)
                key: dict[str, Any] = {
                    "kind": kind,
                    "case": case.name,
                    "way": way.name,
                    "options": dict(way.given),
                    "length": arguments.length,
                    "model": arguments.model,
                    "digest": asked.digest,
                    **settings_of(arguments, way),
                }
                row = find_run(finished, key)
                if row is None:
                    results.note(f"{case.name} {way.name}")
                    row = (
                        key
                        | {"labels": dict(case.labels)}
                        | measure(llm, asked, way, is_shared=arguments.shared)
                    )
                    if arguments.out is not None:
                        append_run(arguments.out, row)
                    if not arguments.json:
                        results.note("")
                        print(json.dumps(row, ensure_ascii=False), flush=True)
                rows.append(row)
    summary = summarize(rows)
    if arguments.picture is not None:
        of_kind = [row for row in summary if (row["kind"], row["group"]) == (kinds[0], "all")]
        draw(of_kind, arguments.title, arguments.picture)
    results.finish("answer_cases", "cpu", summary, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument(
        "--weights", choices=("auto", "dense"), default="auto", help="as of `serve`"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument(
        "--ways", default="default,none,bm25", help="NAME or NAME=JSON (default: %(default)s)"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        help="tokens of a prompt; conversations have their own lengths (default: %(default)s)",
    )
    parser.add_argument("--calibrate", default="auto", help="as of `serve` (default: %(default)s)")
    parser.add_argument("--reader", help="a model that reads for it, as of `serve`")
    parser.add_argument("--draft", help="a model whose answer's attention chooses")
    parser.add_argument("--embedding", type=Path, help="folder of an embedding model")
    parser.add_argument(
        "--shared", action="store_true", help="questions about one document find what was read"
    )
    parser.add_argument("--samples", type=int, help="cases of each kind (default: all)")
    parser.add_argument("--out", type=Path, help="a line for each answer; what is there stands")
    parser.add_argument(
        "--picture", type=Path, help="right answers over time, of the first kind; without --shared"
    )
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--json", action="store_true", help="only the result line")
    return parser


if __name__ == "__main__":
    main()
