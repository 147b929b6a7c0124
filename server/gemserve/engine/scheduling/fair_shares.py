"""How slots, memory and reading time are shared between tenants (`gemserve.holdings`).

Between tenants, whoever has less comes first. A tenant's priorities order its own requests only.
Where all requests are of one tenant, or the server has no keys, priority and arrival decide alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.holdings import Holdings


class SlotShares:
    """The slots of one admission round, and the memory that is shared beside them."""

    def __init__(
        self, running: Sequence[LiveSequence], max_running: int, capacity: int | None = None
    ) -> None:
        """`capacity`: units of memory that several tenants share; None: there is one tenant."""
        self._slots = Holdings(max_running)
        self._units = None if capacity is None else Holdings(capacity)
        for sequence in running:
            self.take(sequence, sequence.memory.size)

    def order(self, waiting: Sequence[LiveSequence]) -> list[LiveSequence]:
        """Who is admitted first: in turn between tenants, beginning with who holds least.

        `waiting` is in the order of rank, which stays that of each tenant's requests.
        """
        if len({sequence.request.tenant for sequence in waiting}) < 2:
            return list(waiting)
        more: Counter[bytes] = Counter()
        places: list[tuple[int, int, LiveSequence]] = []
        for sequence in waiting:
            tenant = sequence.request.tenant
            more[tenant] += 1
            place = self._slots.of(tenant) + more[tenant]
            places.append((place, sequence.order, sequence))  # priorities are a tenant's own
        return [sequence for *_, sequence in sorted(places, key=lambda place: place[:2])]

    def may_take(self, sequence: LiveSequence) -> bool:
        """Is a slot free that this sequence's tenant may have?"""
        return self._slots.free > 0 and self._slots.may_take(sequence.request.tenant)

    def may_have(self, sequence: LiveSequence, size: int) -> bool:
        """May this sequence's tenant have `size` more units of memory?

        A tenant's first sequence may have all that there is.
        """
        return self._units is None or self._units.may_take(sequence.request.tenant, size)

    def take(self, sequence: LiveSequence, size: int) -> None:
        """Note that a sequence has a slot and `size` units of memory."""
        self._slots.take(sequence.request.tenant)
        if self._units is not None:
            self._units.take(sequence.request.tenant, size)


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
            return min(others, key=lambda s: (s.open_tokens == 0, s.left_to_read))
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
