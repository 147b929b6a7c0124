"""Scales of independently read segments: which depend on other segments, and where segments end."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import window_scores as ws
from gemserve.contract.prompt_parts import TextBreaks

LOCAL = (
    *("b_own_sink", "b_capped", "b_log", "d_own_share", "f_z_window", "f_z_heads"),
    *("g_reference_8", "g_reference_own_8"),
)


def asked(num_segments: int) -> ws.Asked:
    """Segments of 12 tokens with 2 anchor tokens, seen by 3 rows of 2 heads."""
    rng = np.random.default_rng(0)
    logits = [rng.normal(size=(2, 3, 16)).astype(np.float32) for _ in range(8)]
    seen = [ws.see(each, 0, 12, 2) for each in logits]
    return ws.Asked(segments=seen[:num_segments], reference=seen[6], empty=seen[:num_segments])


def document(num_tokens: int, breaks: TextBreaks) -> ws.Document:
    return ws.Document(name="a", ids=[*range(num_tokens)], breaks=breaks)


@pytest.mark.parametrize("name", LOCAL)
def test_local_scores_stay_the_same_when_the_document_grows(name: str) -> None:
    short, long = (ws.SCALES[name](asked(count)) for count in (3, 5))
    np.testing.assert_allclose(short, long[:36], rtol=1e-5)


def test_coupled_scores_fall_when_the_document_grows() -> None:
    short, long = (ws.coupled(asked(count)) for count in (3, 5))
    assert (long[:36] < short).all()


def test_a_single_segment_has_its_own_share() -> None:
    np.testing.assert_allclose(ws.coupled(asked(1)), ws.own_share(asked(1)), rtol=1e-5)


def test_sparse_scores_are_the_coupled_ones_or_zero() -> None:
    whole, sparse = ws.coupled(asked(3)), ws.coupled_4(asked(3))
    assert ((sparse == 0) | np.isclose(sparse, whole, rtol=1e-5) | (sparse < whole)).all()
    assert sparse.max() == pytest.approx(whole.max())


def test_segments_cover_the_document_and_end_at_its_breaks() -> None:
    breaks = TextBreaks(paragraphs=(40, 90), sentences=(40, 90, 160), lines=())
    assert ws.cut_segments(document(230, breaks), 100) == [(0, 90), (90, 160), (160, 230)]


def test_segments_without_breaks_have_their_full_size() -> None:
    assert ws.cut_segments(document(25, TextBreaks()), 10) == [(0, 10), (10, 20), (20, 25)]
