"""Which document is worth reading whole while there is nothing else to do. No torch.

A second question about a document shows that there may be a third. If all layers have read by then
what the questions' prompts begin with, the third is answered without a filter, and faster.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.cache.common_tokens import num_common
from gemserve.engine.cache.document_cache import FEWEST_TOKENS, DocumentCache
from gemserve.engine.sequence.sequence import LAST, LiveSequence
from gemserve.kv_layout import KVLayout

_MOST_REMEMBERED = 16  # prompts


@dataclass(slots=True, eq=False)
class Asked:
    """A prompt that was filtered, and how many of its tokens a later one began with, too."""

    request: Request
    num_common: int = 0


class IdleReading:
    """Remembers the last prompts that were filtered, and what of them is to be read whole."""

    def __init__(self, cache: DocumentCache, layout: KVLayout) -> None:
        self._cache, self._layout = cache, layout
        self._asked: OrderedDict[int, Asked] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Is there a document that was asked about twice and is not read?"""
        return any(asked.num_common for asked in self._asked.values())

    def note(self, sequence: LiveSequence) -> None:
        """Remember a prompt whose filter has chosen, if it might have been read whole."""
        request = sequence.request
        tenant, salt = request.tenant, request.cache_salt
        if not sequence.plan.may_read_whole or request.adapter is not None:
            return
        for number, asked in list(self._asked.items()):
            if (asked.request.tenant, asked.request.cache_salt) != (tenant, salt):
                continue
            count = num_common(asked.request.tokens, request.tokens)
            if 2 * count >= sequence.num_prompt and count >= FEWEST_TOKENS:
                del self._asked[number]
                most = min(max(count, asked.num_common), sequence.num_prompt)
                self._asked[sequence.order] = Asked(request, most)
                return
        self._asked[sequence.order] = Asked(request)
        while len(self._asked) > _MOST_REMEMBERED:
            self._asked.popitem(last=False)

    def forget(self, ids: Collection[str]) -> None:
        """Forget the prompts that contain these stored documents."""
        for number, asked in list(self._asked.items()):
            if not set(ids).isdisjoint(asked.request.documents):
                del self._asked[number]

    def next_request(self) -> Request | None:
        """A request that reads the document asked about last, and draws one token; None: none."""
        for asked in reversed(self._asked.values()):
            count, asked.num_common = asked.num_common, 0
            request = asked.request
            if not count or self._cache.has_forgotten(request.documents):
                continue
            if not self._cache.has_room(self._layout.left_units(count)):
                continue
            return replace(
                request,
                request_id=f"{request.request_id}-idle",
                prompt_ids=request.prompt_ids[:count],
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                filter=FilterParams(method="none", keep=count),
                priority=LAST,
                selects_only=False,
                protected=(),
                question=(),
                messages=None,
                grammar=None,
                notes=None,
                begin_within_s=math.inf,
                plan=FilterPlan(
                    reason="disabled",
                    num_kept=count,
                    budget=Budget(low=count, high=count, limit=count),
                ),
            )
        return None
