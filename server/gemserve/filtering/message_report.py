"""How much a filter kept of each message of a chat. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemserve.contract.reports import MessageReport
from gemserve.contract.requests import Request


def report_messages(
    request: Request, kept: Sequence[int] | None
) -> tuple[MessageReport, ...] | None:
    """What `kept`, ascending positions, holds of each message. None: the prompt is no chat.

    `kept` None: everything is kept. The last report is of what the template writes beside them.
    """
    if request.messages is None:
        return None
    num_tokens = len(request.prompt_ids)
    is_kept = np.ones(num_tokens, dtype=np.bool_)
    if kept is not None:
        is_kept[:] = False
        is_kept[np.asarray(kept, dtype=np.int64)] = True
    is_protected = np.zeros(num_tokens, dtype=np.bool_)
    if request.plan is not None and request.plan.budget.protected:
        for each in request.protected:
            within = slice(max(0, each.start), max(0, each.stop))
            is_protected[within] |= each.is_always_read
    is_beside = np.ones(num_tokens, dtype=np.bool_)
    reports = []
    for place in request.messages:
        within = slice(place.start, place.stop)
        is_beside[within] = False
        reports.append(
            MessageReport(
                index=place.index,
                role=place.role,
                tokens=place.stop - place.start,
                kept_tokens=int(is_kept[within].sum()),
                protected_tokens=int(is_protected[within].sum()),
            )
        )
    template = MessageReport(
        index=None,
        role="template",
        tokens=int(is_beside.sum()),
        kept_tokens=int(is_kept[is_beside].sum()),
        protected_tokens=int(is_protected[is_beside].sum()),
    )
    return (*reports, template)
