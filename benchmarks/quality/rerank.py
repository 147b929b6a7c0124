"""How well does a query's attention rank passages, beside BM25 and beside chance?

The passages of each question of `rerank_cases.py` are read as `/v1/rerank` reads them, in this
process, and ranked by several rules:

- `rerank`: the server's rule; `attention`: without words, as `/v1/score`; `words`: without
  attention;
- `pooled`: as `attention`, but one softmax over all passages; `best token`, `three tokens`: by
  fewer tokens; `empty query`: as `attention`, less what the query "N/A" looks at in each token;
- `bm25`: Okapi BM25 alone; `sieve words`: what a filter ranks passages by beside attention;
  `random`.

A row is a rule and a set: the share of questions of which a gold passage is among the first 1, 3
and 10 (`recall_1`, …), and nDCG at 10. Rules were chosen on `real`, `facts` and `sentences`; the
other sets say whether they hold. `seconds`: to read the passages for the first time.

    python benchmarks/quality/rerank.py --sets real,held_out
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality import rerank_cases
from benchmarks.quality.rerank_cases import Case
from benchmarks.shared import results
from gemserve.config import EngineConfig
from gemserve.contract.events import Finished
from gemserve.contract.filter_plan import FilterPlan, Segment, SummaryArrays
from gemserve.llm import LLM
from gemserve.prompting.ranked_texts import RankedTexts, having_query, query_ids, ranked_texts
from gemserve_library.ranking.requests import reading_request
from gemserve_library.ranking.scores import (
    BEST_TOKENS,
    attention_scores,
    relevance,
    word_shares,
)

Floats = npt.NDArray[np.float64]
DEPTHS = (1, 3, 10)
EMPTY = "N/A"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--sets", default=",".join(rerank_cases.SETS), help="default: %(default)s")
    parser.add_argument("--samples", type=int, help="questions of each set (default: all)")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    names = arguments.sets.split(",")
    for name in names:
        if name not in rerank_cases.SETS:
            raise SystemExit(f"{name!r} must be among {', '.join(rerank_cases.SETS)}")
    llm = LLM(arguments.model, EngineConfig())
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += measure(llm, name, rerank_cases.cases(name)[: arguments.samples])
    results.finish("rerank", "cpu", rows, arguments.json)


def measure(llm: LLM, name: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The rows of one set."""
    found: dict[str, list[list[float]]] = {}
    seconds: list[float] = []
    for index, case in enumerate(cases):
        results.note(f"{name} {index + 1} of {len(cases)}")
        started_s = time.monotonic()
        texts = ranked_texts(llm.tokenizer, case.question, case.passages)
        tenant = f"{name} {index}"  # documents of other cases count for nothing
        plan, read = read_documents(llm, texts, tenant)
        seconds.append(time.monotonic() - started_s)
        empty = having_query(texts, query_ids(llm.tokenizer, EMPTY))
        _, read_empty = read_documents(llm, empty, tenant)
        for rule, scores in rank(case, texts, plan, read, read_empty, index).items():
            found.setdefault(rule, []).append(judge(scores, case.gold))
    results.note("")
    size = round(statistics.mean(len(case.passages) for case in cases), 1)
    labels = {"set": name, "n": len(cases), "passages": size}
    return [
        {**labels, "rule": rule, **means(figures), "seconds": round(statistics.median(seconds), 2)}
        for rule, figures in found.items()
    ]


def read_documents(
    llm: LLM, texts: RankedTexts, tenant: str
) -> tuple[FilterPlan, tuple[SummaryArrays, ...]]:
    """What the query looks at in each passage. What the tenant has had read is not read again."""
    request = reading_request(
        llm.core.planner, texts, request_id="benchmark", tenant=tenant.encode()
    )
    *_, last = llm.core.run_alone(request)
    if not isinstance(last, Finished) or last.segments_read is None:
        raise RuntimeError(f"the request failed: {last}")
    assert request.plan is not None
    return request.plan, last.segments_read.summaries


def rank(
    case: Case,
    texts: RankedTexts,
    plan: FilterPlan,
    read: Sequence[SummaryArrays],
    read_empty: Sequence[SummaryArrays],
    seed: int,
) -> dict[str, Floats]:
    """The scores of all passages, by rule."""
    assert plan.segments is not None
    segments, ranges = plan.segments.segments, texts.ranges
    attention = attention_scores(segments, read, ranges)
    words = word_shares(texts.words, ranges)
    tokens = token_scores(segments, read, [own_total(each) for each in read])
    empty = token_scores(segments, read_empty, [own_total(each) for each in read_empty])
    less = [np.maximum(a - b, 0.0) for a, b in zip(tokens, empty, strict=True)]
    keys = np.array([each.keys for each in read], dtype=np.float64)
    sinks = np.array([each.sinks for each in read], dtype=np.float64)
    total = np.logaddexp(np.logaddexp.reduce(keys, axis=0), sinks.mean(0))
    pooled = token_scores(segments, read, [total] * len(read))
    rng = Random(seed)
    return {
        "rerank": relevance(attention, words),
        "attention": attention,
        "words": words,
        "pooled": best_tokens(segments, pooled, ranges, BEST_TOKENS),
        "best token": best_tokens(segments, tokens, ranges, 1),
        "three tokens": best_tokens(segments, tokens, ranges, 3),
        "empty query": best_tokens(segments, less, ranges, BEST_TOKENS),
        "bm25": rerank_cases.bm25(case.question, case.passages),
        "sieve words": rerank_cases.sieve_words(case.question, case.passages),
        "random": np.array([rng.random() for _ in case.passages]),
    }


def own_total(summary: SummaryArrays) -> Floats:
    """The log-sum-exp of each row's logits of one segment and its anchor: [rows]."""
    return np.logaddexp(summary.keys.astype(np.float64), summary.sinks)


def token_scores(
    segments: Sequence[Segment], read: Sequence[SummaryArrays], totals: Sequence[Floats]
) -> list[Floats]:
    """Of each segment its tokens' largest shares of any row: [tokens] each."""
    found: list[Floats] = []
    for segment, summary, total in zip(segments, read, totals, strict=True):
        scores = np.zeros(segment.num_tokens)
        shares = np.exp(summary.best - total[:, None])
        np.maximum.at(scores, summary.places.ravel(), shares.ravel())
        found.append(scores)
    return found


def best_tokens(
    segments: Sequence[Segment],
    tokens: Sequence[Floats],
    documents: Sequence[tuple[int, int]],
    count: int,
) -> Floats:
    """The sum of the best token scores of each document's best segment: [documents]."""
    scores = np.zeros(len(documents))
    stops = [stop for _, stop in documents]
    for segment, of_segment in zip(segments, tokens, strict=True):
        at = int(np.searchsorted(stops, segment.stop))
        scores[at] = max(scores[at], float(np.sort(of_segment)[-count:].sum()))
    return scores


def judge(scores: Floats, gold: frozenset[int]) -> list[float]:
    """Whether a gold passage is among the first of each of `DEPTHS`, and nDCG at the last.

    Of equal scores the later passage is first, so that a rule without an opinion gains nothing from
    the order of its document.
    """
    order = np.lexsort((-np.arange(len(scores)), -scores)).tolist()
    places = [place for place, index in enumerate(order) if index in gold]
    within = [float(min(places) < depth) for depth in DEPTHS]
    gain = sum(1 / np.log2(place + 2) for place in places if place < DEPTHS[-1])
    ideal = sum(1 / np.log2(place + 2) for place in range(min(len(gold), DEPTHS[-1])))
    return [*within, float(gain / ideal)]


def means(figures: Sequence[Sequence[float]]) -> dict[str, float]:
    names = [*(f"recall_{depth}" for depth in DEPTHS), f"ndcg_{DEPTHS[-1]}"]
    columns = zip(*figures, strict=True)
    return {n: round(statistics.mean(column), 4) for n, column in zip(names, columns, strict=True)}


if __name__ == "__main__":
    main()
