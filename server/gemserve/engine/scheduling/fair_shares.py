"""How slots, places in the queue, memory and reading time are shared between tenants.

Tenants are the API keys of requests.

Between tenants, whoever has less comes first. A tenant's priorities order its own requests only.
Where all requests are of one tenant, or the server has no keys, priority and arrival decide alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gemserve.engine.sequence.sequence import LiveSequence

# A tenant may hold so many times the slots, places or memory that are free. So one alone
# leaves a quarter of them, and whoever comes next is not refused, nor waits for a long answer.
MOST_PER_FREE_SLOT = 3


def may_hold(count: int, num_free: int) -> bool:
    """May one tenant hold `count` places while `num_free` others are free?"""
    return count <= MOST_PER_FREE_SLOT * num_free


class SlotShares:
    """The slots of one admission round, and the memory that is shared beside them."""

    def __init__(
        self, running: Sequence[LiveSequence], max_running: int, capacity: int | None = None
    ) -> None:
        """`capacity`: units of memory that several tenants share; None: there is one tenant."""
        self._held = Counter(sequence.request.tenant for sequence in running)
        self._num_free = max_running - len(running)
        self._capacity = capacity
        self._units: Counter[bytes] = Counter()
        if capacity is not None:
            for sequence in running:
                self._units[sequence.request.tenant] += sequence.memory.size

    def order(self, waiting: Sequence[LiveSequence]) -> list[LiveSequence]:
        """Who is admitted first: in turn between tenants, beginning with who holds least.

        `waiting` is in the order of rank, which stays that of each tenant's requests.
        """
        if len({sequence.request.tenant for sequence in waiting}) < 2:
            return list(waiting)
        held = Counter(self._held)
        places: list[tuple[int, tuple[int, int], LiveSequence]] = []
        for sequence in waiting:
            held[sequence.request.tenant] += 1
            places.append((held[sequence.request.tenant], sequence.rank, sequence))
        return [sequence for *_, sequence in sorted(places, key=lambda place: place[:2])]

    def may_take(self, sequence: LiveSequence) -> bool:
        """Is a slot free that this sequence's tenant may have?"""
        tenant = sequence.request.tenant
        if not tenant or not self._held[tenant]:
            return self._num_free > 0
        return may_hold(self._held[tenant] + 1, self._num_free - 1)

    def may_have(self, sequence: LiveSequence, size: int) -> bool:
        """May this sequence's tenant have `size` more units of memory?

        A tenant's first sequence may have all that there is.
        """
        tenant = sequence.request.tenant
        if self._capacity is None or not tenant or not self._held[tenant]:
            return True
        num_free = self._capacity - self._units.total() - size
        return may_hold(self._units[tenant] + size, num_free)

    def take(self, sequence: LiveSequence, size: int) -> None:
        """Note that a sequence has a slot and `size` units of memory."""
        self._held[sequence.request.tenant] += 1
        self._units[sequence.request.tenant] += size
        self._num_free -= 1


class ReadingShares:
    """For how many seconds each tenant's prompts have been read.

    `parts`: for how long they are to be read, compared with each other; equally long if it does not
    say. A tenant's seconds are divided by its part.
    """

    def __init__(self) -> None:
        self.parts: Mapping[bytes, float] = {}
        self._read_s: dict[bytes, float] = {}
        self._is_first_next: dict[bytes, bool] = {}
        self._last: bytes | None = None

    def choose(self, unfinished: Iterable[LiveSequence]) -> LiveSequence:
        """The next prompt to read: of the tenant that was read for the shortest time.

        Of its prompts, the first by rank and the one nearest its end come in turn. So a huge prompt
        always advances, and short ones do not wait behind it. A chunk that has begun is finished
        before another one of the tenant's begins, so few passes hold memory at once.

        A tenant without unfinished prompts is forgotten. One that comes anew has as much to its
        account as the one that has least, so that waiting earns nothing, and it is read at once.
        """
        prompts = list(unfinished)
        tenants = {sequence.request.tenant for sequence in prompts}
        known = [seconds for tenant, seconds in self._read_s.items() if tenant in tenants]
        least = min(known, default=0.0)
        self._read_s = {tenant: self._read_s.get(tenant, least) for tenant in tenants}
        first = min(prompts, key=self._place)
        tenant = first.request.tenant
        others = [s for s in prompts if s is not first and s.request.tenant == tenant]
        is_first_next = self._is_first_next.get(tenant, True)
        kept = {each: turn for each, turn in self._is_first_next.items() if each in tenants}
        self._is_first_next = {**kept, tenant: not is_first_next}
        if others and not is_first_next:
            return min(others, key=lambda s: (s.open_tokens == 0, s.remaining))
        return first

    def note(self, sequence: LiveSequence, seconds: float) -> None:
        """Note that a prompt was read for `seconds`."""
        tenant = self._last = sequence.request.tenant
        self._read_s[tenant] = self._read_s.get(tenant, 0.0) + seconds / self._part(tenant)

    def _part(self, tenant: bytes) -> float:
        part = self.parts.get(tenant)
        return 1.0 if part is None else part / max(self.parts.values())

    def _place(self, sequence: LiveSequence) -> tuple[float, bool, tuple[int, int]]:
        tenant = sequence.request.tenant
        return self._read_s[tenant], tenant == self._last, sequence.rank
