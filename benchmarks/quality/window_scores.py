"""On what scale are the scores of windows compared that were read independently of each other?

`read` draws examples, reads each document window by window through the lower layers, asks the
questions at the end of every window, and stores the logits of the heads that look. `judge` ranks
passages by every scale from the stored logits, so that all scales see the same readings.

A window is read as anchor + text + blank line + question, with positions from 0. Its text does not
depend on the question, so every question of an example is asked of the same keys. Long documents
are an example's own windows beside those of a pool of other text, which is read once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.quality import real_documents
from benchmarks.shared import results
from gemserve.calibration import files
from gemserve.calibration.search.example import ExampleDraw
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.prompt_parts import TextBreaks
from gemserve.cost import filter_units
from gemserve.engine.build import assemble, load_for
from gemserve.engine.core import Core
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.model.adapter import NO_ADAPTER
from gemserve.model.passes.attention import ChunkRows, ForwardContext
from gemserve.model.passes.kv import KVSpan
from gemserve.model.passes.query_tap import FilterLayerReached, FilterTap, QueryTap
from gemserve.prompting.text_breaks import find_breaks
from gemserve.synthetic.natural_facts import (
    FILLERS,
    KINDS,
    VOCABULARIES,
    VocabularyName,
    draw_facts,
)
from gemserve.synthetic.natural_facts import lead_in as begin_with
from gemserve.synthetic.problems import Answer, Problem
from gemserve_lab.tasks.haystack import draw_filler, hide
from gemserve_lab.tasks.natural import DISTRACTORS, LEADS

Array = npt.NDArray[np.float32]
CALIBRATION = Path(files.__file__).with_name("shipped") / "smollm2.json"
CHUNK = 1024  # tokens of a pass over a whole prompt
ROOM = 128  # tokens of a question and what is around it
OVERLAP = 128  # tokens of the segment before, at most
# the first statement leads to the second, which shares no name with the question
PAIRS: tuple[tuple[str, str, str, str], ...] = (
    (
        "The key to the cellar is kept by the gardener.",
        "The gardener is called Anna Weber.",
        "What is the name of the person who keeps the key to the cellar?",
        "Anna Weber",
    ),
    (
        "The winner of the spelling contest comes from the village of Ostrava Mill.",
        "Ostrava Mill lies at the foot of Mount Kessel.",
        "At the foot of which mountain does the winner of the spelling contest live?",
        "Mount Kessel",
    ),
    (
        "The old lighthouse was bought by the ferry company.",
        "The ferry company has its office in Brackwater Lane.",
        "In which street is the office of the owner of the old lighthouse?",
        "Brackwater Lane",
    ),
    (
        "The school choir is led by the baker's daughter.",
        "The baker's daughter studied music in Lisbon.",
        "In which city did the leader of the school choir study?",
        "Lisbon",
    ),
    (
        "The blue parcel was addressed to the dentist.",
        "The dentist moved to Harrow Street 14 last spring.",
        "What is the address of the person the blue parcel was meant for?",
        "Harrow Street 14",
    ),
    (
        "The recipe for the plum cake was written by the postmaster.",
        "The postmaster was born in 1931.",
        "In which year was the author of the recipe for the plum cake born?",
        "1931",
    ),
    (
        "The broken window was repaired by the youngest apprentice.",
        "The youngest apprentice is Tomas Lindqvist.",
        "Who repaired the broken window, by name?",
        "Tomas Lindqvist",
    ),
    (
        "The museum's new director used to work at the aquarium.",
        "The aquarium is in the town of Selby Sands.",
        "In which town did the museum's new director work before?",
        "Selby Sands",
    ),
    (
        "The green rowing boat belongs to the chess club.",
        "The chess club meets on Thursday evenings.",
        "When do the owners of the green rowing boat meet?",
        "Thursday evenings",
    ),
    (
        "The mayor's speech was translated by a librarian from Malta.",
        "The librarian from Malta can be reached under extension 417.",
        "Under which extension can the translator of the mayor's speech be reached?",
        "417",
    ),
    (
        "The wedding photographs were taken by the butcher's nephew.",
        "The butcher's nephew lives above the flower shop.",
        "Where does the photographer of the wedding live?",
        "above the flower shop",
    ),
    (
        "The stray dog was adopted by the night watchman.",
        "The night watchman named his dog Biscuit.",
        "What is the stray dog called now?",
        "Biscuit",
    ),
    (
        "The bridge was designed by the same engineer as the water tower.",
        "The water tower was the work of Helena Brandt.",
        "Who designed the bridge?",
        "Helena Brandt",
    ),
    (
        "The expedition's maps are stored with the cook.",
        "The cook sleeps in cabin number 9.",
        "In which cabin are the maps of the expedition?",
        "cabin number 9",
    ),
    (
        "The violin in the shop window was made by the clockmaker.",
        "The clockmaker learned his trade in Geneva.",
        "In which city did the maker of the violin in the shop window learn his trade?",
        "Geneva",
    ),
    (
        "The prize for the best pumpkin went to the retired pilot.",
        "The retired pilot grows everything behind the old railway station.",
        "Where did the winner of the pumpkin prize grow it?",
        "behind the old railway station",
    ),
)
DIFFUSE = "What is this text about?"
EMPTY = "N/A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text as tokens, its breaks, and half-open token ranges that an answer needs."""

    name: str
    ids: list[int]
    breaks: TextBreaks
    gold: tuple[tuple[int, int], ...] = ()
    questions: tuple[tuple[str, str], ...] = ()  # kind and text; "true" is what gold answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How segments are read. `anchor`: "bos", "template" or "overlap" (template and overlap)."""

    size: int
    anchor: str = "template"

    @property
    def name(self) -> str:
        return f"{self.anchor}{self.size}"


READINGS = {
    reading.name: reading
    for reading in (
        *(Reading(size=size) for size in (512, 1000, 2000, 4000)),
        Reading(size=1000, anchor="bos"),
        Reading(size=1000, anchor="overlap"),
    )
}


# ---------------------------------------------------------------------------------------- examples


def as_document(
    tokenizer: Any,
    name: str,
    text: str,
    gold: Sequence[tuple[int, int]] = (),
    questions: Sequence[tuple[str, str]] = (),
) -> Document:
    """`gold`: half-open ranges of characters."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts = np.array([low for low, _ in encoding.offsets])
    ends = np.array([high for _, high in encoding.offsets])
    spans = tuple(
        (int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(starts, high)))
        for low, high in gold
    )
    breaks = find_breaks([(0, text)], starts.tolist())
    return Document(
        name=name, ids=encoding.ids, breaks=breaks, gold=spans, questions=tuple(questions)
    )


def natural_document(
    tokenizer: Any, vocabulary: VocabularyName, draw: ExampleDraw, distractors: int
) -> Document:
    """One fact among `distractors` others of its form. Kinds of fact take turns."""
    rng = draw.rng(f"windows {vocabulary} {distractors}")
    relations = VOCABULARIES[vocabulary]
    kind = KINDS[draw.index % len(KINDS)]
    enough = [
        r for r in relations if min(len(r.subjects), len(r.values)) > distractors and r.kind == kind
    ]
    enough = enough or [r for r in relations if min(len(r.subjects), len(r.values)) > distractors]
    relation = rng.choice(enough)
    problem, others = draw_facts(rng, relation, 1, distractors)
    lead = rng.choice(LEADS[vocabulary])
    # asked in the same form about a subject that is not there, and in another form
    foreign = [r for r in relations if r.kind == relation.kind and r is not relation]
    stranger = rng.choice(rng.choice(foreign).subjects)
    strange = rng.choice(relation.questions).format(s=stranger)
    far = rng.choice([r for r in relations if r.kind != relation.kind])
    farther = rng.choice(far.questions).format(s=rng.choice(far.subjects))
    questions = [
        ("true", begin_with(lead, problem.question)),
        ("empty", EMPTY),
        ("absent_same", begin_with(lead, strange)),
        ("absent_other", begin_with(lead, farther)),
        ("diffuse", DIFFUSE),
    ]
    depth = (draw.index % draw.samples + rng.random()) / draw.samples
    name = "natural" if distractors == DISTRACTORS else "near"
    return _hidden(tokenizer, name, draw, rng, problem, others, depth, vocabulary, questions)


def pair_document(tokenizer: Any, vocabulary: VocabularyName, draw: ExampleDraw) -> Document:
    """Two facts that answer only together, among two other such pairs."""
    rng = draw.rng("windows pairs")
    count = len(PAIRS)
    own, *rest = ((draw.index + step) % count for step in (0, 3, 7, 11, 13))
    first, second, question, answer = PAIRS[own]
    problem = Problem(
        kind="pair",
        statements=(first, second),
        question=question,
        answers=(Answer(answer, 1, second.index(answer)),),
        gold=(0, 1),
    )
    others = [statement for i in rest[:2] for statement in PAIRS[i][:2]]
    questions = [
        ("true", question),
        ("empty", EMPTY),
        ("absent_same", PAIRS[rest[2]][2]),
        ("absent_other", PAIRS[rest[3]][2]),
        ("diffuse", DIFFUSE),
    ]
    return _hidden(tokenizer, "pairs", draw, rng, problem, others, None, vocabulary, questions)


def _hidden(
    tokenizer: Any,
    name: str,
    draw: ExampleDraw,
    rng: Random,
    problem: Problem,
    others: Sequence[str],
    depth: float | None,
    vocabulary: VocabularyName,
    questions: Sequence[tuple[str, str]],
) -> Document:
    sentences = FILLERS[vocabulary]()
    example = hide(
        tokenizer, name, draw, rng, problem, others=others, depth=depth, sentences=sentences
    )
    text = example.document
    spans: list[tuple[int, int]] = []
    at = 0
    for index in problem.gold:
        at = text.index(problem.statements[index], at)
        spans.append((at, at + len(problem.statements[index])))
    return as_document(tokenizer, f"{name}_{draw.num_tokens}_{draw.index}", text, spans, questions)


def real_docs(tokenizer: Any) -> list[Document]:
    """The questions about real documents. What is asked of another document has no answer."""
    lines, _ = real_documents.make_lines(real_documents.read_questions())
    documents: list[Document] = []
    for i, (source, line) in enumerate(lines):
        low = line["context"].index(line["gold"])
        foreign = [other["question"] for name, other in lines if name != source]
        questions = [
            ("true", line["question"]),
            ("empty", EMPTY),
            ("absent_same", foreign[(7 * i) % len(foreign)]),
            ("absent_other", foreign[(11 * i + 5) % len(foreign)]),
            ("diffuse", DIFFUSE),
        ]
        gold = [(low, low + len(line["gold"]))]
        documents.append(as_document(tokenizer, f"real_{i}", line["context"], gold, questions))
    return documents


def pool_document(tokenizer: Any, kind: str, num_tokens: int) -> Document:
    """Other text of the same sort: sentences of a filler, or other documents of the machine."""
    if kind in FILLERS:
        sentences = FILLERS[kind]()  # type: ignore[index]
        text = " ".join(draw_filler(tokenizer, sentences, num_tokens, Random(f"pool {kind}")))
    else:
        sources = ("source/argparse", "manual/import", "licence/GPL-1", "source/ast")
        share = num_tokens // len(sources)
        cut = [real_documents.read_document(source) for source in sources]
        encode = tokenizer.backend_tokenizer.encode
        parts = []
        for each in cut:
            offsets = encode(each, add_special_tokens=False).offsets
            parts.append(each[: offsets[min(share, len(offsets) - 1)][1]])
        text = "\n\n".join(parts)
    return as_document(tokenizer, f"pool_{kind}", text)


def reference_document(tokenizer: Any) -> Document:
    """A text that no example has: what scores are like where nothing is to be found."""
    return as_document(tokenizer, "reference", real_documents.read_document("licence/Apache-2.0"))


# ----------------------------------------------------------------------------------------- reading


def cut_segments(document: Document, size: int) -> list[tuple[int, int]]:
    """Segments of up to `size` tokens that end at a paragraph, a sentence or a line if they can."""
    total, start = len(document.ids), 0
    segments: list[tuple[int, int]] = []
    breaks = document.breaks
    while total - start > size:
        stop = start + size
        for level in (breaks.paragraphs, breaks.sentences, breaks.lines):
            near = [b for b in level if start + size // 2 < b <= start + size]
            if near:
                stop = near[-1]
                break
        segments.append((start, stop))
        start = stop
    return [*segments, (start, total)]


@dataclass(slots=True)
class ReadSegment:
    """The keys and values of a segment. `start`, `stop`: its place in the document."""

    start: int
    stop: int
    num_anchor: int
    num_tokens: int
    kv: KVSpan


class Reader:
    """Reads segments through the lower layers, and asks questions behind them."""

    def __init__(self, core: Core, heads: Sequence[tuple[int, int]]) -> None:
        self.model, self.tokenizer, self.heads = core.model, core.tokenizer, tuple(heads)
        self.layer = max(layer for layer, _ in heads)
        self.layers = sorted({layer for layer, _ in heads})
        template = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "\x00"}], tokenize=False, add_generation_prompt=True
        )
        before, _, behind = template.partition("\x00")
        self.before, self.behind, self.blank = map(self.encode, (before, behind, "\n\n"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def read(self, document: Document, reading: Reading) -> list[ReadSegment]:
        return [
            self._segment(document, start, stop, reading)
            for start, stop in cut_segments(document, reading.size)
        ]

    def _segment(self, document: Document, start: int, stop: int, reading: Reading) -> ReadSegment:
        anchor = self.before[:1] if reading.anchor == "bos" else self.before
        if reading.anchor == "overlap":
            breaks = document.breaks
            edges = [*breaks.paragraphs, *breaks.sentences]
            near = [b for b in edges if start - OVERLAP <= b < start]
            anchor = [*anchor, *document.ids[min(near, default=start) : start]]
        ids = [*anchor, *document.ids[start:stop]]
        kv = self._kv(len(ids) + ROOM)
        for low in range(0, len(ids), CHUNK):
            self._run(ids[low : low + CHUNK], low, kv, [])
        return ReadSegment(start, stop, len(anchor), len(ids), kv)

    def _kv(self, capacity: int) -> KVSpan:
        units = filter_units(self.layer)
        memory = self.model.new_memory(units * capacity)
        return memory.pass_kv(0, num_units=units, capacity=capacity)

    @torch.inference_mode()
    def _run(
        self, ids: Sequence[int], slot: int, kv: KVSpan, rows: Sequence[int], ahead: int = 0
    ) -> QueryTap:
        """As `CausalModel.filter_chunk`, at positions that are `ahead` of the slots."""
        model, queries = self.model, self.model.new_query_tap(self.layers, rows)
        tap = FilterTap(layer=self.layer, queries=queries, num_tokens=slot + len(ids) + ahead)
        if not ahead:
            model.filter_chunk(ids, start=slot, kv=kv, tap=tap)
            return queries
        context = ForwardContext(
            rows=ChunkRows(kv=kv, start=slot), backend=model.backend, filter_tap=tap
        )
        positions = range(slot + ahead, slot + ahead + len(ids))
        try:
            lower = model._lower_decoder(tap, NO_ADAPTER)
            lower(**model._inputs(ids, positions), context=context)
        except FilterLayerReached:
            return queries
        raise AssertionError("the filter layer was not reached")

    @torch.inference_mode()
    def ask(self, segment: ReadSegment, question: str, position: int | None = None) -> Array:
        """Logits [heads, rows, keys]: rows of the question and then of the template's end.

        `position`: of the first token behind the segment, if not the next one.
        """
        ids = [*self.blank, *self.encode(question), *self.behind]
        slot = segment.num_tokens
        rows = range(slot + len(self.blank), slot + len(ids))
        ahead = 0 if position is None else position - slot
        tap = self._run(ids, slot, segment.kv, rows, ahead)
        return self._logits(tap, segment.kv, slot + len(ids))

    def _logits(self, tap: QueryTap, kv: KVSpan, count: int) -> Array:
        future = torch.arange(count)[None] > torch.tensor(tap.rows)[:, None]
        logits = []
        for layer, head in self.heads:
            queries, keys = tap.of(layer), kv.keys(layer, count)
            group = head * keys.shape[0] // queries.shape[0]
            scores = queries[head].float() @ keys[group].float().T * tap.scales[layer]
            logits.append(scores.masked_fill(future, -torch.inf))
        return torch.stack(logits).numpy()

    def whole(self, document: Document, kinds: Sequence[str]) -> dict[str, Array]:
        """The scores that `sieve` has today, by kind of question: [heads, tokens]."""
        ids = [*self.before, *document.ids]
        if len(ids) + ROOM > self.model.context_tokens:
            return {}
        kv = self._kv(len(ids) + ROOM)
        for low in range(0, len(ids), CHUNK):
            self._run(ids[low : low + CHUNK], low, kv, [])
        return {
            f"whole/{kind}": self._whole_scores(len(ids), kv, text)
            for kind, text in document.questions
            if kind in kinds
        }

    @torch.inference_mode()
    def _whole_scores(self, slot: int, kv: KVSpan, question: str) -> Array:
        asked = [*self.blank, *self.encode(question)]
        rows = range(slot + len(self.blank), slot + len(asked))
        tap = self._run(asked, slot, kv, rows)
        count = slot + len(asked)
        evidence = Evidence(
            num_tokens=count,
            layers={
                layer: LayerEvidence(
                    queries=tap.of(layer),
                    keys=kv.keys(layer, count),
                    scale=tap.scales[layer],
                    softcap=tap.softcaps[layer],
                    move_keys=self.model.key_mover(layer, count),
                )
                for layer in self.layers
            },
            rows=tap.rows,
            backend=self.model.backend,
            protected=(),
        )
        scores = [Sieve().score_of_heads(evidence, [head]) for head in self.heads]
        return torch.stack(scores)[:, len(self.before) : slot].numpy()


def breaks_of(document: Document) -> dict[str, tuple[int, ...]]:
    breaks = document.breaks
    return {
        "paragraphs": breaks.paragraphs,
        "sentences": breaks.sentences,
        "lines": breaks.lines,
    }


SEGMENTED = ("true", "empty", "absent_same", "absent_other", "diffuse")


def store(
    reader: Reader,
    document: Document,
    readings: Sequence[Reading],
    pools: dict[str, list[ReadSegment]],
    references: dict[str, ReadSegment],
    folder: Path,
    *,
    pool: Document | None,
    whole: bool,
) -> None:
    """Read a document in each way, and write the logits of every question to one file."""
    path = folder / f"{document.name}.npz"
    if path.exists():
        return
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {
        "name": document.name,
        "num_tokens": len(document.ids),
        "gold": document.gold,
        "breaks": breaks_of(document),
        "pool_breaks": None if pool is None else breaks_of(pool),
        "num_behind": len(reader.behind),
        "heads": reader.heads,
        "readings": {},
    }
    for reading in readings:
        own = reader.read(document, reading)
        others = pools.get(reading.name, [])
        facts["readings"][reading.name] = {
            "own": [(w.start, w.stop, w.num_anchor) for w in own],
            "pool": [(w.start, w.stop, w.num_anchor) for w in others],
            "reference": [(w.start, w.stop, w.num_anchor) for w in [references[reading.name]]],
        }
        parts = {"own": own, "pool": others, "reference": [references[reading.name]]}
        for kind, question in document.questions:
            if kind not in ("true", "empty") and reading.name not in pools:
                continue
            for part, segments in parts.items():
                for i, segment in enumerate(segments):
                    arrays[f"{reading.name}/{kind}/{part}/{i}"] = reader.ask(segment, question)
            if kind == "true" and reading.anchor == "template":
                end = len(reader.before) + reading.size
                for i, segment in enumerate(own):
                    arrays[f"{reading.name}/fixed/own/{i}"] = reader.ask(segment, question, end)
    if whole:
        arrays |= reader.whole(document, SEGMENTED)
    arrays["facts"] = np.array(json.dumps(facts))
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.rename(path)


def draw_documents(
    tokenizer: Any, task: str, vocabulary: VocabularyName, num_tokens: int, samples: int, skip: int
) -> Iterator[Document]:
    if task == "real":
        documents = real_docs(tokenizer)
        yield from documents[skip % 4 :: 4][:samples]
        return
    for index in range(skip, skip + samples):
        draw = ExampleDraw(seed=0, num_tokens=num_tokens, index=index, samples=max(samples, 1))
        if task == "pairs":
            yield pair_document(tokenizer, vocabulary, draw)
        else:
            count = DISTRACTORS if task == "natural" else 9
            yield natural_document(tokenizer, vocabulary, draw, count)


def read(arguments: argparse.Namespace) -> None:
    model = ModelConfig(model="smollm2")
    engine = EngineConfig(calibrate=str(CALIBRATION))
    core = assemble(load_for(model, engine), engine)
    reader, tokenizer = Reader(core, parse_heads(arguments.heads)), core.tokenizer
    readings = [READINGS[name] for name in arguments.readings.split(",")]
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    reference = reference_document(tokenizer)
    references = {r.name: reader.read(reference, r)[0] for r in readings}
    kind = "real" if arguments.task == "real" else arguments.vocabulary
    pools: dict[str, list[ReadSegment]] = {}
    pool = None
    if arguments.pool_tokens:
        pool = pool_document(tokenizer, kind, arguments.pool_tokens)
        pooled = arguments.pooled.split(",")
        pools = {r.name: reader.read(pool, r) for r in readings if r.name in pooled}
    documents = draw_documents(
        tokenizer,
        arguments.task,
        arguments.vocabulary,
        arguments.tokens,
        arguments.samples,
        arguments.skip,
    )
    for document in documents:
        store(
            reader,
            document,
            readings,
            pools,
            references,
            folder,
            pool=pool,
            whole=not arguments.no_whole,
        )
        results.note(f"{document.name} done")


# ----------------------------------------------------------------------------------------- judging

NUM_REFERENCE = 8.0  # how many reference segments a question's rows are compared with


@dataclass(frozen=True, slots=True)
class Seen:
    """What a question's rows saw of one segment, in nats: of its tokens, and of its anchor.

    `logits`: [heads, rows, tokens]. `sink`, `mass`: log-sum-exp over the anchor and over the
    tokens, [heads, rows, 1]. `rest`: over everything that the rows see.
    """

    logits: Array
    sink: Array
    mass: Array
    rest: Array


@dataclass(frozen=True, slots=True)
class Asked:
    """A question asked of all segments; of a reference text; and an empty one asked of both."""

    segments: list[Seen]
    reference: Seen
    empty: list[Seen]

    @property
    def sink(self) -> Array:
        """The sinks' average over the segments."""
        return np.mean([w.sink for w in self.segments], axis=0)

    @property
    def mass(self) -> Array:
        return np.logaddexp.reduce([w.mass for w in self.segments])


def lse(logits: Array) -> Array:
    top = logits.max(-1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(-1, keepdims=True))


def see(logits: Array, start: int, stop: int, num_anchor: int) -> Seen:
    inner = logits[..., num_anchor : num_anchor + stop - start]
    return Seen(inner, lse(logits[..., :num_anchor]), lse(inner), lse(logits))


def best(of_segments: Iterator[Array]) -> Array:
    """The largest over heads and rows: [tokens]."""
    return np.concatenate([each.max((0, 1)) for each in of_segments])


def moments(logits: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    return logits.mean(axes, keepdims=True), logits.std(axes, keepdims=True)


def coupled(asked: Asked) -> Array:
    total = np.logaddexp(asked.mass, asked.sink)
    return best(np.exp(w.logits - total) for w in asked.segments)


def coupled_sparse(asked: Asked, count: int) -> Array:
    """As `coupled`, but each row and head of a segment remembers its `count` best tokens only."""
    total = np.logaddexp(asked.mass, asked.sink)

    def strongest(seen: Seen) -> Array:
        least = np.partition(seen.logits, -min(count, seen.logits.shape[-1]))
        least = least[..., -min(count, seen.logits.shape[-1]), None]
        return np.where(seen.logits >= least, np.exp(seen.logits - total), 0)

    return best(map(strongest, asked.segments))


def coupled_4(asked: Asked) -> Array:
    return coupled_sparse(asked, 4)


def coupled_16(asked: Asked) -> Array:
    return coupled_sparse(asked, 16)


def mean_mass(asked: Asked) -> Array:
    """As `coupled`, but beside one average segment in place of all: at most their number."""
    mass = asked.mass - np.float32(np.log(len(asked.segments)))
    total = np.logaddexp(mass, asked.sink)
    return best(np.exp(w.logits - total) for w in asked.segments)


def coupled_first(asked: Asked) -> Array:
    """The sum is that of the first four segments, so that later ones change nothing before them."""
    mass = np.logaddexp.reduce([w.mass for w in asked.segments[:4]])
    total = np.logaddexp(mass, asked.segments[0].sink)
    return best(np.exp(w.logits - total) for w in asked.segments)


def head_mass(asked: Asked) -> Array:
    """A constant sum for each head in place of the document's: its average on other text."""
    mass = asked.reference.mass - asked.reference.sink
    total = np.logaddexp(
        asked.sink + np.median(mass, axis=1, keepdims=True) + np.log(8), asked.sink
    )
    return best(np.exp(w.logits - total) for w in asked.segments)


def own_sink(asked: Asked) -> Array:
    return best(np.exp(w.logits - w.sink) for w in asked.segments)


def own_sink_capped(asked: Asked) -> Array:
    return best(1 / (1 + np.exp(w.sink - w.logits)) for w in asked.segments)


def own_sink_log(asked: Asked) -> Array:
    return best(w.logits - w.sink for w in asked.segments)


def mean_sink(asked: Asked) -> Array:
    sink = asked.sink
    return best(np.exp(w.logits - sink) for w in asked.segments)


def own_share(asked: Asked) -> Array:
    return best(np.exp(w.logits - np.logaddexp(w.mass, w.sink)) for w in asked.segments)


def own_share_all(asked: Asked) -> Array:
    return best(np.exp(w.logits - w.rest) for w in asked.segments)


def less_empty(asked: Asked) -> Array:
    def by_head(seen: Seen) -> Array:
        return (seen.logits - seen.sink).max(1, keepdims=True)

    pairs = zip(asked.segments, asked.empty, strict=True)
    return best(by_head(segment) - by_head(empty) for segment, empty in pairs)


def z_segment(asked: Asked) -> Array:
    def scaled(seen: Seen) -> Array:
        mean, std = moments(seen.logits, (2,))
        return (seen.logits - mean) / std

    return best(map(scaled, asked.segments))


def z_rows(asked: Asked) -> Array:
    """Mean and deviation of each row and head are those on the reference text."""
    mean, std = moments(asked.reference.logits, (2,))
    return best((w.logits - mean) / std for w in asked.segments)


def z_heads(asked: Asked) -> Array:
    """One mean and deviation of each head, on the reference text."""
    mean, std = moments(asked.reference.logits, (1, 2))
    return best((w.logits - mean) / std for w in asked.segments)


def z_heads_sink(asked: Asked) -> Array:
    mean, std = moments(asked.reference.logits - asked.reference.sink, (1, 2))
    return best((w.logits - w.sink - mean) / std for w in asked.segments)


def reference_share(asked: Asked, count: float = NUM_REFERENCE) -> Array:
    """As if every segment stood beside `count` reference segments."""
    mass = asked.reference.mass + np.float32(np.log(count))
    return best(np.exp(w.logits - np.logaddexp(mass, w.sink)) for w in asked.segments)


def reference_share_1(asked: Asked) -> Array:
    return reference_share(asked, 1)


def reference_own(asked: Asked) -> Array:
    """A share of the segment, its sink, and the reference segments: at most 1."""
    mass = asked.reference.mass + np.float32(np.log(NUM_REFERENCE - 1))
    totals = [np.logaddexp(np.logaddexp(mass, w.mass), w.sink) for w in asked.segments]
    return best(np.exp(w.logits - t) for w, t in zip(asked.segments, totals, strict=True))


def reference_own_1(asked: Asked) -> Array:
    mass = asked.reference.mass
    totals = [np.logaddexp(np.logaddexp(mass, w.mass), w.sink) for w in asked.segments]
    return best(np.exp(w.logits - t) for w, t in zip(asked.segments, totals, strict=True))


SCALES: dict[str, Callable[[Asked], Array]] = {
    "a_coupled": coupled,
    "a_sparse_4": coupled_4,
    "a_sparse_16": coupled_16,
    "a_first_4": coupled_first,
    "a_mean_mass": mean_mass,
    "g_head_mass": head_mass,
    "b_own_sink": own_sink,
    "b_capped": own_sink_capped,
    "b_log": own_sink_log,
    "c_mean_sink": mean_sink,
    "d_own_share": own_share,
    "d_with_question": own_share_all,
    "e_less_empty": less_empty,
    "f_z_window": z_segment,
    "f_z_rows": z_rows,
    "f_z_heads": z_heads,
    "f_z_heads_sink": z_heads_sink,
    "g_reference_8": reference_share,
    "g_reference_1": reference_share_1,
    "g_reference_own_8": reference_own,
    "g_reference_own_2": reference_own_1,
}


class Stored:
    """A file of logits."""

    def __init__(self, path: Path, heads: Sequence[tuple[int, int]]) -> None:
        self.arrays = np.load(path)
        self.facts = json.loads(str(self.arrays["facts"]))
        known = [tuple(head) for head in self.facts["heads"]]
        self.heads = [known.index(head) for head in heads]
        self.gold: list[tuple[int, int]] = [(a, b) for a, b in self.facts["gold"]]

    def segments(self, reading: str, part: str) -> list[tuple[int, int, int]]:
        return [(a, b, c) for a, b, c in self.facts["readings"][reading][part]]

    def has(self, reading: str, kind: str, part: str) -> bool:
        return f"{reading}/{kind}/{part}/0" in self.arrays

    def seen(self, reading: str, kind: str, part: str, behind: bool) -> list[Seen]:
        """`behind`: with the rows of the template's end."""
        found: list[Seen] = []
        for i, segment in enumerate(self.segments(reading, part)):
            logits = self.arrays[f"{reading}/{kind}/{part}/{i}"][self.heads]
            if not behind:
                logits = logits[:, : -self.facts["num_behind"]]
            found.append(see(logits, *segment))
        return found

    def asked(self, reading: str, kind: str, parts: Sequence[str], behind: bool = False) -> Asked:
        other = "true" if kind == "fixed" else kind
        return Asked(
            segments=[s for part in parts for s in self.seen(reading, kind, part, behind)],
            reference=self.seen(reading, other, "reference", behind)[0],
            empty=[s for part in parts for s in self.seen(reading, "empty", part, behind)],
        )

    def breaks(self, parts: Sequence[str]) -> TextBreaks:
        own = self.facts["breaks"]
        if "pool" not in parts:
            return TextBreaks(**{level: tuple(each) for level, each in own.items()})
        at, pool = self.facts["num_tokens"], self.facts["pool_breaks"]
        return TextBreaks(
            **{
                level: tuple(sorted({*own[level], *([at] if level == "paragraphs" else [])}))
                + tuple(b + at for b in pool[level] if b)
                for level in own
            }
        )


def recall(scores: Array, breaks: TextBreaks, gold: Sequence[tuple[int, int]], keep: int) -> float:
    order, _ = SIEVE.order(torch.from_numpy(scores), breaks, keep)
    kept = set(order[:keep].tolist())
    needed = [t for start, stop in gold for t in range(start, stop)]
    return sum(t in kept for t in needed) / len(needed)


SIEVE = Sieve()
BUDGETS: dict[str, Callable[[int], int]] = {
    "n/16": lambda n: n // 16,
    "n/32": lambda n: n // 32,
    "256": lambda n: 256,
    "512": lambda n: 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One example under one reading: which question, of which segments, with which rows."""

    reading: str
    kind: str = "true"
    parts: tuple[str, ...] = ("own",)
    behind: bool = False

    @property
    def name(self) -> str:
        rows = "+end" if self.behind else ""
        return f"{self.reading}{rows}{'' if self.kind == 'true' else '/' + self.kind}"


def judge_file(
    path: Path, heads: Sequence[tuple[int, int]], scales: Sequence[str], pooled: bool
) -> list[dict[str, Any]]:
    stored = Stored(path, heads)
    gold = stored.gold[-1:] if path.name.startswith("pairs") else stored.gold
    parts = ("own", "pool") if pooled else ("own",)
    cases = [
        Case(reading=reading, kind=kind, parts=parts, behind=behind)
        for reading in stored.facts["readings"]
        for kind, behind in (("true", False), ("true", True), ("fixed", False))
        if all(stored.has(reading, kind, part) for part in parts)
    ]
    breaks = stored.breaks(parts)
    rows: list[dict[str, Any]] = []
    if not pooled and "whole/true" in stored.arrays:
        scores = stored.arrays["whole/true"][stored.heads].max(0)
        rows.append({"case": "whole", "scale": "one pass", **recalls(scores, breaks, gold)})
    for case in cases:
        asked = stored.asked(case.reading, case.kind, parts, case.behind)
        for name in scales:
            scores = np.ascontiguousarray(SCALES[name](asked), dtype=np.float32)
            figures = recalls(scores, breaks, gold)
            rows.append({"case": case.name, "scale": name, **figures})
    return rows


def recalls(scores: Array, breaks: TextBreaks, gold: Sequence[tuple[int, int]]) -> dict[str, float]:
    return {name: recall(scores, breaks, gold, keep(len(scores))) for name, keep in BUDGETS.items()}


def judge(arguments: argparse.Namespace) -> None:
    heads = parse_heads(arguments.heads)
    scales = [name for name in SCALES if any(name.startswith(p) for p in arguments.scales)]
    cells: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for folder in arguments.folders:
        for path in sorted(folder.glob("*.npz")):
            if path.name.endswith(".partial.npz"):
                continue
            task = path.name.rsplit("_", 1)[0]
            for row in judge_file(path, heads, scales, arguments.pooled):
                figures = {name: row[name] for name in BUDGETS}
                cells.setdefault((task, row["case"], row["scale"]), []).append(figures)
    rows = [
        {
            "task": task,
            "case": case,
            "scale": scale,
            "n": len(figures),
            **{name: round(float(np.mean([f[name] for f in figures])), 3) for name in BUDGETS},
        }
        for (task, case, scale), figures in cells.items()
    ]
    results.finish("window_scores", "cpu", rows, arguments.json)


def parse_heads(text: str) -> list[tuple[int, int]]:
    return [(int(layer), int(head)) for layer, head in (h.split(".") for h in text.split(","))]


# ---------------------------------------------------------------------------------------- coverage

BEST = 512  # tokens
CHOSEN_BY = "a_coupled"  # what was kept, whatever scale the coverage is measured on


def coverages(scores: Array, breaks: TextBreaks) -> dict[str, float]:
    """What might say that something was found, of scores that are not negative."""
    tensor = torch.from_numpy(scores)
    _, ranks = SIEVE.order(tensor, breaks, len(scores) // 16)
    _, starts = np.unique(ranks.numpy(), return_index=True)
    of_passages = np.sort(ranks.numpy()[starts])[::-1]
    near = SIEVE._best_near(tensor).sort(descending=True, stable=True).indices
    total = max(float(scores.sum()), 1e-9)
    top = float(of_passages[0])
    return {
        "best sixteenth": SIEVE.coverage(tensor),
        "best 512 tokens": float(tensor[near[:BEST]].sum()) / total,
        "best passage": top,
        "best over tenth": top / max(float(of_passages[min(9, len(of_passages) - 1)]), 1e-9),
        "best over median": top / max(float(np.median(of_passages)), 1e-9),
        "best over sixteenth": top
        / max(float(of_passages[min(len(of_passages) - 1, len(of_passages) // 16)]), 1e-9),
        "passage share": top / max(float(of_passages.sum()), 1e-9),
    }


def cover(arguments: argparse.Namespace) -> None:
    heads = parse_heads(arguments.heads)
    parts_of = {"own": ("own",), "pooled": ("own", "pool")}
    found: dict[tuple[str, str, str, str], list[tuple[str, str, float]]] = {}
    for folder in arguments.folders:
        for path in sorted(folder.glob("*.npz")):
            if path.name.endswith(".partial.npz") or path.name.startswith("pairs"):
                continue
            stored = Stored(path, heads)
            task = path.name.split("_")[0]
            for length, parts in parts_of.items():
                breaks = stored.breaks(parts)
                for kind in SEGMENTED:
                    if kind == "empty":
                        continue
                    by_scale: dict[tuple[str, str], Array] = {}
                    choosing: dict[str, Array] = {}
                    if length == "own" and f"whole/{kind}" in stored.arrays:
                        whole = stored.arrays[f"whole/{kind}"][stored.heads].max(0)
                        by_scale["whole", "one pass"] = choosing["whole"] = whole
                    for reading in arguments.readings:
                        if not all(stored.has(reading, kind, part) for part in parts):
                            continue
                        asked = stored.asked(reading, kind, parts)
                        choosing[reading] = SCALES[CHOSEN_BY](asked)
                        for scale in arguments.scales:
                            by_scale[reading, scale] = SCALES[scale](asked)
                    for (reading, scale), each in by_scale.items():
                        scores = np.ascontiguousarray(each, dtype=np.float32)
                        label = kind
                        if kind == "true":
                            chosen = np.ascontiguousarray(choosing[reading], dtype=np.float32)
                            kept = recall(chosen, breaks, stored.gold, len(scores) // 16)
                            label = "found" if kept > 0.9 else "missed"
                        for name, value in coverages(scores, breaks).items():
                            key = (length, reading, scale, name)
                            found.setdefault(key, []).append((label, task, value))
    rows = [
        {"length": key[0], "reading": key[1], "scale": key[2], "coverage": key[3]}
        | apart(cases, arguments.bound)
        for key, cases in found.items()
    ]
    results.finish("window_coverage", "cpu", rows, arguments.json)


def apart(cases: Sequence[tuple[str, str, float]], bound: float | None) -> dict[str, Any]:
    """How well a figure tells found facts from questions that were not answered.

    Without a `bound` it is the one that distrusts a twentieth of the found ones.
    """
    by_label: dict[str, Array] = {}
    for label, _, value in cases:
        by_label[label] = np.append(by_label.get(label, []), value)
    good = by_label.get("found", np.array([np.nan]))
    if bound is None:
        bound = float(np.quantile(good, 0.05))
    figures: dict[str, Any] = {
        "found": len(good),
        "lowest": round(float(good.min()), 3),
        "median": round(float(np.median(good)), 3),
        "bound": round(bound, 3),
        "found distrusted": round(float((good < bound).mean()), 2),
    }
    for label in ("missed", "absent_same", "absent_other", "diffuse"):
        bad = by_label.get(label, np.array([]))
        if not len(bad):
            continue
        above = (good[:, None] > bad[None]).mean() + 0.5 * (good[:, None] == bad[None]).mean()
        figures[f"{label} area"] = round(float(above), 2)
        figures[f"{label} distrusted"] = round(float((bad < bound).mean()), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(required=True)
    reading = actions.add_parser("read", help="read examples, and store logits")
    reading.add_argument("folder", type=Path)
    reading.add_argument("--task", choices=("natural", "near", "pairs", "real"), required=True)
    reading.add_argument("--vocabulary", choices=FILLERS, default="confirmation")
    reading.add_argument("--tokens", type=int, default=4096)
    reading.add_argument("--samples", type=int, default=12)
    reading.add_argument("--skip", type=int, default=0)
    reading.add_argument("--readings", default=",".join(READINGS))
    reading.add_argument("--pooled", default="template1000,template2000")
    reading.add_argument("--pool-tokens", type=int, default=25_000)
    reading.add_argument("--heads", default="2.4,5.5,7.7,8.0")
    reading.add_argument("--no-whole", action="store_true")
    reading.set_defaults(run=read)
    judging = actions.add_parser("judge", help="rank passages by every scale")
    judging.add_argument("folders", type=Path, nargs="+")
    judging.add_argument("--heads", default="7.7,8.0")
    judging.add_argument("--scales", type=lambda text: text.split(","), default=[""])
    judging.add_argument("--pooled", action="store_true", help="with the windows of the pool")
    judging.add_argument("--json", action="store_true", help="only the result line")
    judging.set_defaults(run=judge)
    covering = actions.add_parser("cover", help="tell found facts from missed and absent ones")
    covering.add_argument("folders", type=Path, nargs="+")
    covering.add_argument("--heads", default="7.7,8.0")
    covering.add_argument("--readings", type=lambda text: text.split(","), default=["template1000"])
    covering.add_argument("--scales", type=lambda text: text.split(","), default=["a_coupled"])
    covering.add_argument("--bound", type=float, help="if one was chosen before")
    covering.add_argument("--json", action="store_true", help="only the result line")
    covering.set_defaults(run=cover)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
