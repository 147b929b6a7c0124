"""What an owner and its peers say to each other about a document's segments. No torch, no Ray.

The *owner* is the replica that answers a request. A *peer* reads some groups of the segments for
it, and sends back what the choice needs to know of each. All of it can be pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
import numpy.typing as npt

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import SegmentsRead
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import FilterPlan, Segment, SegmentPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams

# "busy": it has more to do than the owner. "adapter": it does not have the same one in memory.
# "full": its engine takes no further request. "failed": its engine could not read a group.
RefusalReason = Literal["busy", "adapter", "full", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupToRead:
    """The segments of one group. `tokens`: theirs, one segment after the other, in which they
    stand.

    `number`: of the group in the owner's plan.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShare:
    """What one peer should read. `plan`: the owner's, without its segments.

    `adapter`: its name and version. `queued_tokens`: what the owner has to do beside this request.
    """

    request_id: str
    filter: FilterParams
    plan: FilterPlan
    groups: tuple[GroupToRead, ...]
    tenant: bytes
    cache_salt: str
    adapter: tuple[str, str] | None
    priority: int
    queued_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(group.tokens) for group in self.groups)


@dataclass(frozen=True, slots=True)
class GroupRead:
    """A peer has read the group of this number."""

    number: int
    read: SegmentsRead


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer reads no more of a share. It is the last thing that it says. `detail`: for the log."""

    reason: RefusalReason
    detail: str = ""


FromPeer = GroupRead | Refused


def assign_groups(plan: SegmentPlan, replicas: Sequence[str]) -> list[str]:
    """Which replica reads each group.

    It depends on the segments' own names, so that the next question about a document finds each
    group in the cache of the same replica, whichever replica owns the request: rendezvous hashing
    (Thaler and Ravishankar, 1996), in which nobody gets more than an even share.
    """
    groups = plan.groups
    most = ceil(len(groups) / len(replicas))
    counts, chosen = dict.fromkeys(replicas, 0), list[str]()
    for group in groups:
        name = b"".join(plan.segments[index].name for index in group)
        free = [replica for replica in replicas if counts[replica] < most]
        best = max(free, key=lambda replica: (_weight(name, replica), replica))
        counts[best] += 1
        chosen.append(best)
    return chosen


def _weight(name: bytes, replica: str) -> bytes:
    return hashlib.blake2b(name + replica.encode(), digest_size=16).digest()


def share_of(request: Request, numbers: Sequence[int], queued_tokens: int) -> SegmentShare:
    """What a peer should read if it gets the groups of these numbers."""
    plan, adapter = request.plan, request.adapter
    assert plan is not None
    assert plan.segments is not None
    groups = plan.segments.groups
    return SegmentShare(
        request_id=request.request_id,
        filter=request.filter,
        plan=plan.having(
            segments=replace(plan.segments, segments=()),
            fails_open=False,
            may_read_whole=False,
        ),
        groups=tuple(_group_to_read(request, number, groups[number]) for number in numbers),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        adapter=None if adapter is None else (adapter.name, adapter.version),
        priority=request.priority,
        queued_tokens=queued_tokens,
    )


def request_for(share: SegmentShare, group: GroupToRead, adapter: LoadedAdapter | None) -> Request:
    """A peer's own request for one group."""
    assert share.plan.segments is not None
    segments = replace(share.plan.segments, segments=group.segments)
    return Request(
        request_id=f"{share.request_id}-group{group.number}",
        prompt_ids=group.tokens.tolist(),
        sampling=SamplingParams(max_tokens=1),
        filter=share.filter,
        priority=share.priority,
        summarizes_only=True,
        adapter=adapter,
        tenant=share.tenant,
        cache_salt=share.cache_salt,
        plan=share.plan.having(segments=segments),
    )


def fits(read: SegmentsRead, group: GroupToRead) -> bool:
    """Can this be what the segments of the group have shown?"""
    lengths = [segment.num_tokens for segment in group.segments]
    return [summary.shares.shape[1] for summary in read.summaries] == lengths


def _group_to_read(request: Request, number: int, indexes: range) -> GroupToRead:
    assert request.plan is not None
    assert request.plan.segments is not None
    segments, parts, start = list[Segment](), list[npt.NDArray[np.int64]](), 0
    for segment in (request.plan.segments.segments[index] for index in indexes):
        parts.append(request.tokens[segment.start : segment.stop])
        segments.append(Segment(start=start, stop=start + segment.num_tokens, name=segment.name))
        start += segment.num_tokens
    tokens = np.concatenate(parts).astype(np.int32)
    return GroupToRead(number=number, tokens=tokens, segments=tuple(segments))
