"""Documents that are ranked for a query: what may change a score of a real model, and what not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gemserve.contract import filter_plan
from gemserve.contract.events import Finished, SegmentsRead
from gemserve.contract.prompt_parts import NO_BREAKS
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve_library.ranking.scores import attention_scores
from tests.model.test_segments import ANCHOR, NAMES, core_of, ids_of

QUERY = tuple(ids_of(7, 6))
DOCUMENTS = [ids_of(seed, count) for seed, count in enumerate((40, 90, 3, 64, 17, 90))]


def request(core: Core, documents: Sequence[Sequence[int]], tenant: bytes = b"") -> Request:
    ids = [token for document in documents for token in document]
    stops = np.cumsum([len(document) for document in documents]).tolist()
    ranges = list(zip([0, *stops], stops, strict=False))
    params, plan = core.planner.plan_documents(
        np.array(ids, dtype=np.int64), ranges, NO_BREAKS, anchor=ANCHOR, query=QUERY
    )
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=1),
        filter=params,
        summarizes_only=True,
        plan=plan,
        tenant=tenant,
    )


def ranges_of(documents: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    stops = np.cumsum([len(document) for document in documents]).tolist()
    return list(zip([0, *stops], stops, strict=False))


def read(core: Core, asked: Request) -> SegmentsRead:
    (last,) = core.run_alone(asked)
    assert isinstance(last, Finished)
    assert last.segments_read is not None, last.error
    core.check_integrity()
    return last.segments_read


def scores(core: Core, documents: Sequence[Sequence[int]], tenant: bytes = b"") -> list[float]:
    asked = request(core, documents, tenant)
    assert asked.plan is not None
    assert asked.plan.segments is not None
    found = read(core, asked)
    ranges = ranges_of(documents)
    return attention_scores(asked.plan.segments.segments, found.summaries, ranges).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_cached_document_has_the_same_score(name: str) -> None:
    """The second question about documents must not be answered from other numbers."""
    core = core_of(name)
    cold = scores(core, DOCUMENTS)
    asked = request(core, DOCUMENTS)
    found = read(core, asked)
    # longrope rotates by the longest text of a group, so nothing is cached
    assert found.num_cached == (0 if name == "phi3-longrope" else len(DOCUMENTS))
    assert scores(core, DOCUMENTS) == cold
    assert all(0 < score < 1 for score in cold)
    assert len(set(cold)) == len(cold)


def test_another_tenant_finds_nothing() -> None:
    core = core_of()
    assert read(core, request(core, DOCUMENTS, b"alice")).num_cached == 0
    assert read(core, request(core, DOCUMENTS, b"bob")).num_cached == 0
    assert read(core, request(core, DOCUMENTS, b"alice")).num_cached == len(DOCUMENTS)


def test_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand short documents are read in several groups, whose memory is bounded."""
    together = scores(core_of(), DOCUMENTS)
    monkeypatch.setattr(filter_plan, "GROUP_SEGMENTS", 2)
    core = core_of()
    asked = request(core, DOCUMENTS)
    assert asked.plan is not None
    assert asked.plan.segments is not None
    assert [len(group) for group in asked.plan.segments.groups] == [2, 2, 2]
    np.testing.assert_allclose(scores(core, DOCUMENTS), together, rtol=1e-5)


def test_a_long_document_is_read_in_segments() -> None:
    core = core_of()
    size = core.planner.calibration.USUAL_SEGMENT
    long = ids_of(9, 3 * size)
    asked = request(core, [DOCUMENTS[0], long, DOCUMENTS[1]])
    assert asked.plan is not None
    assert asked.plan.segments is not None
    assert len(asked.plan.segments.segments) >= 5
    assert max(segment.num_tokens for segment in asked.plan.segments.segments) <= size
    assert len(scores(core, [DOCUMENTS[0], long, DOCUMENTS[1]])) == 3


def test_an_empty_document_scores_nothing() -> None:
    found = scores(core_of(), [[], DOCUMENTS[0], []])
    assert (found[0], found[2]) == (0, 0)
    assert found[1] > 0
