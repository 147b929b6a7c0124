"""Requests that arrive at a fleet: when, and about which documents. Seeded.

Times are a Poisson process. A share of the requests brings a document that nobody has sent before
or sends again. The others ask about documents of a catalogue, whose popularity falls as a power of
their rank (Zipf). The share of new documents is that of Mooncake's published trace of Kimi (arXiv
2407.00079, table 1): however large a cache is, it finds about half of what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """`documents`: in the catalogue; `zipf`: the power of their rank; `new_share`: see above."""

    requests_per_s: float
    documents: int = 1_000
    zipf: float = 1.0
    new_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. Documents of the catalogue have ranks from 0, new ones have numbers beyond it."""

    time_s: float
    document: int


def arrivals(load: OfferedLoad, num_requests: int, seed: int) -> Iterator[Arrival]:
    """The same requests for the same seed, whatever fleet they are sent to."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / load.requests_per_s, num_requests))
    weights = np.arange(1, load.documents + 1, dtype=np.float64) ** -load.zipf
    ranks = random.choice(load.documents, num_requests, p=weights / weights.sum())
    is_new = random.random(num_requests) < load.new_share
    documents = np.where(is_new, load.documents + np.arange(num_requests), ranks)
    yield from map(Arrival, times.tolist(), documents.tolist())
