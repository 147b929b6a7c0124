"""Fields of /v1/messages that clients send as a habit or with a beta, and that change nothing here.

Values that would have to change the answer are refused, with the reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gemserve.api.requests.base_bodies import FEW, Body, SomeTextOr, TextOr
from gemserve.api.requests.integers import Count, Natural
from gemserve.api.requests.served_types import HistoryItem, refuse_others

_Ignored = dict[str, Any]


def _null_because(reason: str) -> BeforeValidator:
    """For a field that must be null. `reason` says why nothing else is served."""

    def check(value: object) -> None:
        if value is not None:
            raise ValueError(f"is not served: {reason}")

    return BeforeValidator(check)


def _empty_because(reason: str) -> BeforeValidator:
    """For a list that must be empty."""

    def check(value: object) -> object:
        if isinstance(value, list) and value:
            raise ValueError(f"must be empty: {reason}")
        return value

    return BeforeValidator(check)


_NoItems = Annotated[list[Any], Field(max_length=0)]


class ContextEdit(BaseModel):
    """What Anthropic's servers would remove from a long conversation. Nothing is removed here."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Annotated[str, Field(pattern=r"^(clear_thinking|clear_tool_uses|compact)_[0-9]{8}$")]


class ContextManagement(HistoryItem):
    """The reply says that no edit was applied."""

    edits: Annotated[list[ContextEdit], Field(max_length=100, fail_fast=True)] | None = None


class Container(HistoryItem):
    """Where Anthropic's servers would run code."""

    id: str | None = None
    skills: Annotated[_NoItems, _empty_because("this server runs no code")] | None = None


class TaskBudget(Body):
    type: Literal["tokens"]
    total: Natural
    remaining: Natural | None = None


class NoThinking(Body):
    """Every kind is the same here: answers come without extended thinking."""

    type: Literal["disabled", "adaptive", "enabled", "between_tools"]
    budget_tokens: Count | None = None
    display: str | None = None
    block_binding: _Ignored | None = None


ThinkingOptions = Annotated[
    NoThinking, refuse_others(("disabled", "adaptive", "enabled", "between_tools"), {})
]


class FieldsWithoutEffect(Body):
    thinking: ThinkingOptions | None = None
    cache_control: _Ignored | None = None
    context_management: ContextManagement | None = None
    betas: Annotated[list[str], FEW] | None = None
    container: TextOr[Container] | None = None
    mcp_servers: Annotated[_NoItems, _empty_because("this server calls no MCP servers")] | None = (
        None
    )
    inference_geo: str | None = None
    speed: Literal["standard", "fast"] | None = None
    diagnostics: _Ignored | None = None
    fallbacks: SomeTextOr[Literal["default"], Annotated[list[_Ignored], FEW]] | None = None
    fallback_credit_token: TextOr[_Ignored] | None = None
    billing_policy: _Ignored | None = None
    compaction: Annotated[None, _null_because("this server does not summarize conversations")] = (
        None
    )
    thread: Annotated[None, _null_because("nothing is stored; send the whole conversation")] = None
