"""Faults at the seams of the server: what a test puts in a seam's place, and when it strikes.

A seam is a function of the server. A test replaces it; the server has no hooks for that. The fault
strikes in the calls that belong to one request, the victim.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

DELAY_S = 0.05
ERRORS: dict[str, Callable[[], Exception]] = {
    "exception": lambda: RuntimeError("injected"),
    "memory": lambda: MemoryError("injected"),
    "device memory": lambda: torch.OutOfMemoryError("injected"),
    "disk full": lambda: OSError(errno.ENOSPC, "No space left on device (injected)"),
}


@dataclass(slots=True)
class FaultPlan:
    """One fault. It strikes while it is armed, at most `limit` times.

    `token`: one that every chunk of the victim's prompt has, and no other prompt. `passes`: the
    greenlets in which the victim's prompt is read. `numbers`: the victim's sequences.
    """

    fault: str
    token: int
    limit: int = 1_000_000
    is_armed: bool = False
    num_struck: int = 0
    passes: set[object] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Seam:
    """The function `name` of `owner`.

    `is_victims`: whether a call belongs to the victim, from the plan and the call's arguments.
    `spoil`: writes NaN into what the call has made, from its result and its arguments; it returns
    the result. `limit`: how often a fault strikes.
    """

    owner: Any
    name: str
    is_victims: Callable[..., bool]
    spoil: Callable[..., Any] | None = None
    limit: int = 1_000_000

    @contextmanager
    def replaced(self, plan: FaultPlan) -> Iterator[None]:
        """Put the plan's fault in the function's place."""
        original = getattr(self.owner, self.name)

        def replacement(*arguments: Any, **named: Any) -> Any:
            is_due = plan.is_armed and plan.num_struck < plan.limit
            if not is_due or not self.is_victims(plan, *arguments, **named):
                return original(*arguments, **named)
            plan.num_struck += 1
            if plan.fault in ERRORS:
                raise ERRORS[plan.fault]()
            if plan.fault == "delay":
                time.sleep(DELAY_S)
                return original(*arguments, **named)
            assert plan.fault == "nan"
            assert self.spoil is not None
            return self.spoil(original(*arguments, **named), *arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, replacement)
            yield
