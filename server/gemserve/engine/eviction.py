"""What an evictor leaves of a prompt that all layers have read."""

from __future__ import annotations

import torch

from gemserve.filtering.snapkv import SnapKV
from gemserve.model.kv import KVSpan
from gemserve.model.seam import WindowTap
from gemserve_kernels import Backend


def evict(
    evictor: SnapKV,
    window: WindowTap,
    source: KVSpan,
    keep: int,
    target: KVSpan,
    backend: Backend,
) -> None:
    """Pack into `target`, as 0..keep−1, what `evictor` chooses in each layer of `source`.

    `window` has listened to the whole prompt; `keep` is below its length. The spans may begin at
    the same place in memory.
    """
    chosen = torch.stack(
        [
            evictor.select(
                queries,
                source.read(layer, window.num_tokens)[0],
                keep,
                backend,
                scale=window.scales[layer],
                softcap=window.softcaps[layer],
            )
            for layer, queries in enumerate(window.queries)
        ]
    )
    target.pack(source, chosen, backend)
