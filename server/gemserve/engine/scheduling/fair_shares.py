"""How slots, places in the queue and reading time are shared between tenants.

Tenants are the API keys of requests.

Between tenants, whoever has less comes first. A tenant's priorities order its own requests only.
Where all requests are of one tenant, or the server has no keys, priority and arrival decide alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from gemserve.engine.sequence.sequence import Sequence

# A tenant may hold so many times the slots, or places in the queue, that are free. So one alone
# leaves a quarter of them, and whoever comes next is not refused, nor waits for a long answer.
MOST_PER_FREE_SLOT = 3


def may_hold(count: int, num_free: int) -> bool:
    """May one tenant hold `count` places while `num_free` others are free?"""
    return count <= MOST_PER_FREE_SLOT * num_free


class SlotShares:
    """The slots of one admission round."""

    def __init__(self, running: Items[Sequence], max_running: int) -> None:
        self._held = Counter(sequence.request.tenant for sequence in running)
        self._num_free = max_running - len(running)

    def order(self, waiting: Items[Sequence]) -> list[Sequence]:
        """Who is admitted first: in turn between tenants, beginning with who holds least.

        `waiting` is in the order of rank, which stays that of each tenant's requests.
        """
        if len({sequence.request.tenant for sequence in waiting}) < 2:
            return list(waiting)
        held = Counter(self._held)
        places: list[tuple[int, tuple[int, int], Sequence]] = []
        for sequence in waiting:
            held[sequence.request.tenant] += 1
            places.append((held[sequence.request.tenant], sequence.rank, sequence))
        return [sequence for *_, sequence in sorted(places, key=lambda place: place[:2])]

    def may_take(self, sequence: Sequence) -> bool:
        """Is a slot free that this sequence's tenant may have?"""
        tenant = sequence.request.tenant
        if not tenant or not self._held[tenant]:
            return self._num_free > 0
        return may_hold(self._held[tenant] + 1, self._num_free - 1)

    def take(self, sequence: Sequence) -> None:
        self._held[sequence.request.tenant] += 1
        self._num_free -= 1


class ReadingShares:
    """How many tokens of each tenant's prompts have been read."""

    def __init__(self) -> None:
        self._read: dict[bytes, int] = {}

    def first(self, unfinished: Iterable[Sequence]) -> Sequence:
        """The next prompt to read: of the tenant of which least was read, the first by rank.

        A tenant without unfinished prompts is forgotten. One that comes anew has as much to its
        account as the one that has least, so that waiting earns nothing.
        """
        prompts = list(unfinished)
        tenants = {sequence.request.tenant for sequence in prompts}
        known = [count for tenant, count in self._read.items() if tenant in tenants]
        least = min(known, default=0)
        self._read = {tenant: self._read.get(tenant, least) for tenant in tenants}
        return min(prompts, key=lambda s: (self._read[s.request.tenant], s.rank))

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.tenant
        self._read[tenant] = self._read.get(tenant, 0) + num_tokens
