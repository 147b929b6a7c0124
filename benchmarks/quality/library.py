"""Does a library find what a question needs among millions of tokens, and what does that cost?

`collect` writes what a Debian machine with Python has of documentation into a folder: the manual of
Python, licences, changelogs, READMEs and source files that the questions of `real_questions.json`
and `held_out_questions.json` are about, then man pages, documentation of packages and sources, up
to a number of tokens. Into some of them it plants natural facts, which no other text has: some are
asked for in their own words ("planted"), and some in others ("meaning").

`measure` asks a library that `gemserve library add` made of that folder. Recall: is the text that
answers among the windows that are read, when these are found by attention and words, by attention
alone, and by words alone? Answers: are they right, beside those from the best passages of a usual
retriever, of as many tokens as the filter kept, which are read whole? Retrievers are BM25 (bm25s)
and, with `--embedding FOLDER`, a model of sentence embeddings such as all-MiniLM-L6-v2, whose
mean-pooled vectors are compared by their cosine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import numpy as np
import torch

from benchmarks.quality.real_documents import (
    HELD_OUT,
    QUESTIONS,
    LeftOut,
    read_document,
    read_questions,
)
from benchmarks.shared import results
from gemserve.config import EngineConfig
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.sampling import SamplingParams
from gemserve.llm import LLM
from gemserve.synthetic.meaning_facts import PROSE_KINDS, meaning_facts
from gemserve.synthetic.words_evaluation import EVALUATION
from gemserve_library.asking import question_text
from gemserve_library.in_process import LibrariesOf
from gemserve_library.library import Library
from gemserve_library.search import score_segments
from gemserve_library.vectors import queries_of
from gemserve_train.evaluation.answer_rules import interval

ASKED = "questions.json"
CHARS_PER_TOKEN = 3.6  # of SmolLM2, in such texts
FACTS_OF_EACH = 4  # of each relation, of which `ASKED_OF_EACH` are asked for
ASKED_OF_EACH = 3
MAX_TOKENS = 32
PASSAGE_CHARS = 600
MOST_PASSAGES = 20
_BATCH = 32
_WORD = re.compile(r"\w+")
_ROFF = re.compile(r"^\.\\\".*\n|^[.'](?:\\\"|\w+)[ \t]?|\\f[BIRP]|\\(?=-)|\\&", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Asked:
    """`gold`: a text that a segment must have to answer. `kind`: where the question is from."""

    kind: str
    question: str
    answers: tuple[str, ...]
    gold: str
    file: str


def collect(folder: Path, num_tokens: int, seed: int, around: int | None) -> None:
    rng = Random(seed)
    folder.mkdir(parents=True)
    left = num_tokens * CHARS_PER_TOKEN
    texts: dict[str, str] = {}
    asked: list[Asked] = []
    for kind, path in (("real", QUESTIONS), ("held_out", HELD_OUT)):
        for question in read_questions(path):
            name = question.source.replace("/", "-") + ".txt"
            try:
                texts[name] = read_document(question.source)
            except LeftOut:
                continue
            gold = flat(question.gold[0])
            if gold in flat(texts[name]):
                asked.append(Asked(kind, question.question, question.answers, gold, name))
    if around is not None:
        for name, text in texts.items():
            texts[name] = near(text, [each.gold for each in asked if each.file == name], around)
    left -= sum(map(len, texts.values()))
    for name, text in others():
        if left <= 0:
            break
        if name not in texts and text.strip():
            texts[name] = text
            left -= len(text)
    names = sorted(name for name, text in texts.items() if len(text) > 2000)
    for relation in EVALUATION:
        subjects = rng.sample(relation.subjects, FACTS_OF_EACH)
        values = rng.sample(relation.values, FACTS_OF_EACH)
        pairs = zip(subjects, values, strict=True)
        for number, (subject, value) in enumerate(pairs):
            name = rng.choice(names)
            fact = rng.choice(relation.statements).format(s=subject, v=value)
            texts[name] = planted(texts[name], fact, rng)
            if number < ASKED_OF_EACH:
                question = relation.questions[0].format(s=subject)
                asked.append(Asked("planted", question, (value,), flat(fact), name))
    for each in meaning_facts("evaluation"):
        if each.kind in PROSE_KINDS:
            name = rng.choice(names)
            texts[name] = planted(texts[name], each.fact, rng)
            asked.append(Asked("meaning", each.question, (each.answer,), flat(each.fact), name))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
    listed = [asdict(each) for each in asked]
    (folder.parent / f"{folder.name}.{ASKED}").write_text(json.dumps(listed, indent=1))
    size = sum(map(len, texts.values()))
    print(f"{len(texts)} files, {size:,} characters, {len(asked)} questions", file=sys.stderr)


def planted(text: str, fact: str, rng: Random) -> str:
    """The text with a fact as a paragraph somewhere between its own."""
    places = [match.end() for match in re.finditer(r"\n[^\S\n]*\n", text)] or [0]
    at = rng.choice(places)
    return f"{text[:at]}{fact}\n\n{text[at:]}"


def near(text: str, golds: Sequence[str], around: int) -> str:
    """What lies within so many characters of the passages, cut between lines."""
    kept: set[int] = set()
    lines = text.splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in lines])
    for gold in golds:
        match = re.search(r"\s+".join(map(re.escape, gold.split())), text)
        assert match, "a document of a question has its passage"
        first = int(np.searchsorted(ends, max(0, match.start() - around), side="right"))
        kept.update(range(first, int(np.searchsorted(ends, match.end() + around)) + 1))
    return "".join(line for number, line in enumerate(lines) if number in kept)


def others() -> Iterator[tuple[str, str]]:
    """Further documentation, by name: in an order that mixes its sorts."""
    from pydoc_data.topics import topics

    yield from ((f"manual-{name}.txt", text) for name, text in sorted(topics.items()))
    for path in sorted(Path("/usr/share/common-licenses").iterdir()):
        yield f"licence-{path.name}.txt", path.read_text(errors="replace")
    sorts = [
        sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA")),
        sorted(Path("/usr/share/man").glob("man[1-8]/*.gz")),
        sorted(Path("/usr/share/doc").glob("*/*")),
        sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")),
        sorted((Path(__file__).parents[2]).glob("server/**/*.py")),
        sorted((Path(__file__).parents[2]).glob("docs/**/*.md")),
    ]
    Random(0).shuffle(sorts[1])
    for index in range(max(map(len, sorts))):
        for sort in sorts:
            if index < len(sort):
                path = sort[index]
                text = text_of(path)
                if text:
                    yield "-".join(path.parts[-3:]).removesuffix(".gz") + ".txt", text


def text_of(path: Path) -> str:
    """A file's text; of a man page without most of its markup."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 400_000:
        return ""
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, UnicodeDecodeError):
        return ""
    return _ROFF.sub("", text) if path.parent.name.startswith("man") else text


def flat(text: str) -> str:
    return " ".join(text.split())


class Measurement:
    """One library, the model that has read it, and the one that answers."""

    def __init__(
        self, folder: Path, model: str, reader: str | None, asked: Sequence[Asked]
    ) -> None:
        self.llm = LLM(model, EngineConfig(reader=reader))
        self.library: Library = LibrariesOf(self.llm).open(folder)
        there = {Path(file.path).name for file in self.library.files()}
        self.asked = [each for each in asked if each.file in there]

    def recall(self, counts: Sequence[int]) -> list[dict[str, Any]]:
        """Which share of the questions has its gold text among the segments, by how they are found.

        `search_ms`: the median of a search, without the pass over the question (`question_ms`).
        """
        found: dict[tuple[str, str, int], list[bool]] = {}
        times: list[float] = []
        passes: list[float] = []
        for each in self.asked:
            text = each.question if self.llm.has_chat_template else f"{each.question}\nAnswer:"
            alone = self.llm.prompt(text)
            request = self.llm.request(alone, SamplingParams(max_tokens=1), FilterOptions(), None)
            started_s = time.perf_counter()
            end = self.llm.run_to_end(LibrariesOf(self.llm).vectors.for_question(request))
            passes.append(time.perf_counter() - started_s)
            queries, heads = queries_of(end), LibrariesOf(self.llm).vectors.key_head_of
            words = question_text(request, self.llm.tokenizer)
            started_s = time.perf_counter()
            scores = score_segments([self.library], queries, heads, words)
            scores.best(counts[0])
            times.append(time.perf_counter() - started_s)
            ways = {
                "both": scores,
                "attention": replace(scores, words=np.zeros_like(scores.words)),
                "words": replace(scores, attention=None),
            }
            for way, judged in ways.items():
                for count in counts:
                    candidates = judged.best(count).candidates
                    has_gold = any(each.gold in flat(c.segment.text) for c in candidates)
                    found.setdefault((each.kind, way, count), []).append(has_gold)
        rows = []
        for (kind, way, count), hits in found.items():
            rows.append(
                {
                    "kind": kind,
                    "found_by": way,
                    "candidates": count,
                    "n": len(hits),
                    "recall": round(statistics.mean(hits), 3),
                }
            )
        rows.append(
            {
                "kind": "time",
                "search_ms": round(statistics.median(times) * 1e3, 1),
                "question_ms": round(statistics.median(passes) * 1e3, 1),
            }
        )
        return rows

    def answers(
        self,
        counts: Sequence[int],
        retrievers: Sequence[Retriever],
        seconds: float,
        places: slice,
        record: Path | None,
    ) -> list[dict[str, Any]]:
        """Right answers, beside retrievers', until the time is over: of each kind in turn.

        `places`: which of the questions, in that order.
        `record`: a file of one line an answer; those that it has are not asked for again.
        """
        ends_s = time.monotonic() + seconds
        got: dict[tuple[str, str], dict[str, Any]] = {}
        if record is not None and record.exists():
            listed = [json.loads(line) for line in record.read_text().splitlines()]
            got = {(line["question"], line["read"]): line for line in listed}
        for each in in_turn(self.asked)[places]:
            for way in [*(f"library {count}" for count in counts), *retrievers]:
                name = way if isinstance(way, str) else way.name
                if (each.question, name) in got:
                    continue
                if time.monotonic() > ends_s:
                    break
                if isinstance(way, str):
                    figures = self._answer(each, int(way.split()[-1]))
                else:
                    kept = int(got[each.question, f"library {counts[0]}"]["kept"])
                    figures = self._retrieved(each, way, kept)
                line = {"kind": each.kind, "question": each.question, "read": name, **figures}
                got[each.question, name] = line
                if record is not None:
                    with record.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        return summary(list(got.values()))

    def _answer(self, each: Asked, count: int) -> dict[str, float]:
        text = each.question if self.llm.has_chat_template else f"{each.question}\nAnswer:"
        started_s = time.perf_counter()
        prompt = LibrariesOf(self.llm).prompt(text, [self.library], candidates=count)
        built_s = time.perf_counter() - started_s
        answer = self.llm.generate(prompt, max_tokens=MAX_TOKENS)
        kept = " ".join(source.text for source in answer.filter.sources or ())
        return {
            "right": is_right(answer.text, each.answers),
            "kept": answer.filter.kept_tokens,
            "gold": each.gold in flat(kept),
            "found": answer.filter.found is not False,
            "ttft_s": built_s + answer.filter.filter_ms / 1e3,
            "total_s": time.perf_counter() - started_s,
        }

    def _retrieved(self, each: Asked, retriever: Retriever, num_tokens: int) -> dict[str, float]:
        started_s = time.perf_counter()
        passages: list[str] = []
        used = 0
        for passage in retriever.best(each.question):
            used += len(self.llm.tokenizer(passage)["input_ids"])
            if passages and used > num_tokens:
                break
            passages.append(passage)
        text = "\n\n".join([*passages, each.question])
        if not self.llm.has_chat_template:
            text += "\nAnswer:"
        prompt = self.llm.prompt(text)
        plain = FilterOptions(method="none")
        built_s = time.perf_counter() - started_s
        answer = self.llm.generate(prompt, max_tokens=MAX_TOKENS, filter=plain)
        total_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        # another beginning, so that nothing of it is cached
        fresh = self.llm.prompt(f"Read this.\n\n{text}")
        self.llm.generate(fresh, max_tokens=1, filter=plain)
        first_s = time.perf_counter() - started_s
        return {
            "right": is_right(answer.text, each.answers),
            "kept": len(prompt.ids),
            "gold": each.gold in flat(" ".join(passages)),
            "found": True,
            "ttft_s": built_s + first_s,
            "total_s": total_s,
        }


def in_turn(asked: Sequence[Asked]) -> list[Asked]:
    """Questions of each kind in turn, in an order of chance that is always the same."""
    by_kind = {kind: [a for a in asked if a.kind == kind] for kind in sorted(_kinds(asked))}
    for of_kind in by_kind.values():
        Random(1).shuffle(of_kind)
    longest = max(map(len, by_kind.values()))
    return [of[i] for i in range(longest) for of in by_kind.values() if i < len(of)]


def _kinds(asked: Sequence[Asked]) -> set[str]:
    return {each.kind for each in asked}


def summary(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kind and way, and one of all kinds, of questions that all ways answered."""
    ways = list(dict.fromkeys(line["read"] for line in lines))
    answered = {way: {line["question"] for line in lines if line["read"] == way} for way in ways}
    common = set.intersection(*answered.values()) if answered else set()
    rows = []
    for kind in [*sorted({line["kind"] for line in lines}), "all"]:
        for way in ways:
            figures = [
                line
                for line in lines
                if line["read"] == way
                and line["question"] in common
                and kind in (line["kind"], "all")
            ]
            if not figures:
                continue
            low, high = interval([float(f["right"]) for f in figures])
            rows.append(
                {
                    "kind": kind,
                    "read": way,
                    "n": len(figures),
                    "right": sum(bool(f["right"]) for f in figures),
                    "share": round(statistics.mean(f["right"] for f in figures), 3),
                    "low": round(low, 3),
                    "high": round(high, 3),
                    "tokens": round(statistics.median(f["kept"] for f in figures)),
                    "has_gold": round(statistics.mean(f["gold"] for f in figures), 3),
                    "found": round(statistics.mean(f["found"] for f in figures), 3),
                    "ttft_s": round(statistics.median(f["ttft_s"] for f in figures), 2),
                    "questions_a_second": round(
                        len(figures) / sum(f["total_s"] for f in figures), 3
                    ),
                }
            )
    return rows


def passages_of(library: Library) -> list[str]:
    """The library's text in passages of about `PASSAGE_CHARS`, as people cut it."""
    passages: list[str] = []
    index = library.index()
    for _, segment in library.segments(index.ids.tolist()).values():
        at = 0
        while at < len(segment.text):
            stop = segment.text.find("\n\n", at + PASSAGE_CHARS // 2, at + 2 * PASSAGE_CHARS)
            stop = stop + 2 if stop >= 0 else at + PASSAGE_CHARS
            passages.append(segment.text[at:stop].strip())
            at = stop
    return passages


class Retriever(Protocol):
    @property
    def name(self) -> str: ...

    def best(self, question: str) -> list[str]:
        """The passages that fit a question best, the best first."""
        ...


class Bm25:
    """By the words of the question alone."""

    name = "bm25"

    def __init__(self, passages: Sequence[str]) -> None:
        import bm25s

        self._passages = passages
        self._index = bm25s.BM25()
        self._index.index([words_of(text) for text in passages], show_progress=False)

    def best(self, question: str) -> list[str]:
        found, _ = self._index.retrieve([words_of(question)], k=MOST_PASSAGES, show_progress=False)
        return [self._passages[i] for i in found[0].tolist()]


class Embeddings:
    """By the cosine of sentence embeddings, which are the means of the last layer's states."""

    def __init__(self, passages: Sequence[str], folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.name = folder.name
        self._passages = passages
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        started_s = time.perf_counter()
        order = sorted(range(len(passages)), key=lambda i: len(passages[i]))  # little padding
        vectors = torch.cat(
            [
                self._embedded([passages[i] for i in order[start : start + _BATCH]])
                for start in range(0, len(order), _BATCH)
            ]
        )
        self._vectors = torch.empty_like(vectors)
        self._vectors[torch.tensor(order)] = vectors
        taken_s = time.perf_counter() - started_s
        print(f"{folder.name}: {len(passages)} passages in {taken_s:.0f} s", file=sys.stderr)

    def best(self, question: str) -> list[str]:
        return [self._passages[i] for i in self.order(question)[:MOST_PASSAGES]]

    def order(self, question: str) -> list[int]:
        """The indexes of all passages, the nearest first."""
        nearness = self._vectors @ self._embedded([question])[0]
        order: list[int] = nearness.argsort(descending=True).tolist()
        return order

    @torch.inference_mode()
    def _embedded(self, texts: list[str]) -> torch.Tensor:
        given = self._tokenizer(
            texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        states, mask = self._model(**given).last_hidden_state, given["attention_mask"]
        means = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(means, dim=-1)


def words_of(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def is_right(text: str, answers: Sequence[str]) -> bool:
    return all(answer.casefold() in text.casefold() for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    writing = actions.add_parser("collect")
    writing.add_argument("--out", type=Path, required=True)
    writing.add_argument("--tokens", type=int, default=3_000_000)
    writing.add_argument("--seed", type=int, default=0)
    writing.add_argument(
        "--around", type=int, help="characters beside each passage that documents are cut to"
    )
    asking = actions.add_parser("measure")
    asking.add_argument("--library", type=Path, required=True, help="the library's folder")
    asking.add_argument("--questions", type=Path, required=True, help="written by collect")
    asking.add_argument("--model", default="builtin")
    asking.add_argument("--reader", help="the model that has read it, if another one answers")
    asking.add_argument("--candidates", type=results.numbers, default=[4, 16, 64])
    asking.add_argument(
        "--answers", type=results.numbers, default=[], help="candidates to answer by"
    )
    asking.add_argument("--alone", action="store_true", help="without BM25")
    asking.add_argument("--embedding", type=Path, help="folder of an embedding model")
    asking.add_argument("--kinds", type=lambda given: given.split(","), help="such as planted")
    asking.add_argument("--most", type=int, default=1000, help="questions to answer")
    asking.add_argument("--skip", type=int, default=0, help="questions before the first one")
    asking.add_argument(
        "--record", type=Path, help="file of all answers; a second run goes on behind them"
    )
    asking.add_argument("--seconds", type=float, default=400, help="for the answers")
    asking.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    if arguments.action == "collect":
        collect(arguments.out, arguments.tokens, arguments.seed, arguments.around)
        return
    listed = json.loads(arguments.questions.read_text())
    asked = [Asked(**{**each, "answers": tuple(each["answers"])}) for each in listed]
    if arguments.kinds:
        asked = [each for each in asked if each.kind in arguments.kinds]
    measurement = Measurement(arguments.library, arguments.model, arguments.reader, asked)
    files, segments, tokens = measurement.library.totals()
    size = measurement.library.num_bytes
    rows: list[dict[str, Any]] = [
        {"kind": "library", "files": files, "windows": segments, "tokens": tokens, "bytes": size}
    ]
    if arguments.candidates:
        rows += measurement.recall(arguments.candidates)
    if arguments.answers:
        passages = passages_of(measurement.library)
        retrievers: list[Retriever] = [] if arguments.alone else [Bm25(passages)]
        if arguments.embedding is not None:
            retrievers.append(Embeddings(passages, arguments.embedding))
        rows += measurement.answers(
            arguments.answers,
            retrievers,
            arguments.seconds,
            slice(arguments.skip, arguments.skip + arguments.most),
            arguments.record,
        )
    results.finish("library", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
