"""What the core is asked about its document cache: could this be pinned, and how full is it?"""

from __future__ import annotations

from dataclasses import replace

from gemserve.cost import ModelShape
from gemserve.engine.cache.document_cache import DocumentCache
from gemserve.engine.cache.state import CacheState, DiskCounts
from gemserve.engine.reuse.disk import DiskCache
from gemserve.engine.sequence.sequence import Sequence
from gemserve.errors import RequestError


def check_pin(sequence: Sequence, cache: DocumentCache, shape: ModelShape) -> None:
    """Raise `RequestError` if what is kept of a prompt could never be pinned."""
    unit, limit = shape.unit_bytes, cache.pin_limit
    size = sequence.reading_units(shape.num_layers)
    if sequence.filter_layer is not None and size > limit:
        raise RequestError(
            f"pin: {sequence.num_read} tokens take {size * unit:,} bytes; pinned documents may "
            f"take {limit * unit:,} bytes in all, half of what the server keeps documents in",
            param="pin",
        )


def state_of(cache: DocumentCache, disk: DiskCache | None, shape: ModelShape) -> CacheState:
    """The document cache at this moment: a copy that stays as it is."""
    return CacheState(
        counts=replace(cache.counts),
        disk=DiskCounts() if disk is None else replace(disk.counts),
        memory_bytes=cache.used * shape.unit_bytes,
        pinned_bytes=cache.pinned * shape.unit_bytes,
        disk_bytes=0 if disk is None else disk.folder.num_bytes,
        oldest_s=cache.oldest_s,
    )
