"""Which cached document gives way: one of the tenant that holds most. No torch.

If the one that was used longest ago went, whoever it is of, a tenant could flood the cache, and
nobody else's documents would be found again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemserve.engine.cache.document_cache import CachedDocument

Coming = tuple[bytes, int] | None
Spared = Collection["CachedDocument"]


def first_to_go(
    documents: Collection[CachedDocument],
    able: Collection[CachedDocument],
    coming: Coming = None,
) -> CachedDocument | None:
    """Of those that are `able`, the least recently used one of the tenant that holds most.

    `documents`: all that are held. `coming`: a tenant, and how many units it is about to get.
    """
    held: Counter[bytes] = Counter()
    for document in documents:
        held[document.key.tenant] += document.span.size
    if coming is not None:
        held[coming[0]] += coming[1]
    return max(able, key=lambda d: (held[d.key.tenant], -d.last_used), default=None)
