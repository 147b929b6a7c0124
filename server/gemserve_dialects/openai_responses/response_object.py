"""The response object of /v1/responses, as far as it is known."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gemserve.api.access.request_id import new_id
from gemserve.api.replies.answer_parts import AnswerChange, AnswerParts, Part
from gemserve.api.replies.answer_reader import AnswerRules
from gemserve.api.replies.citations import FileCitation, file_citations
from gemserve.api.replies.failures import NOT_BUILT, failure_body
from gemserve.api.replies.logprobs import TokenTexts, chat_logprobs
from gemserve.api.replies.reply_types import ScoredToken
from gemserve.api.replies.token_counts import (
    answer_headers,
    cached_tokens_of,
    filter_object,
    num_parts,
)
from gemserve.contract.events import Event, Filtered, Finished, TextDelta, TokenLogprob
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve_dialects.openai_responses.body import OpenAIResponsesBody
from gemserve_dialects.openai_responses.call_items import CallItems, echoed
from gemserve_dialects.openai_responses.reply_types import (
    EchoedTool,
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)


class ResponseInProgress:
    """What is known of a response so far."""

    def __init__(
        self,
        body: OpenAIResponsesBody,
        request: Request,
        rules: AnswerRules,
        vocabulary: TokenTexts,
    ) -> None:
        self.id = new_id("resp")
        self.report: FilterReport | None = None
        self.finished: Finished | None = None
        self._body, self._request, self._vocabulary = body, request, vocabulary
        self.calls = CallItems(body.called_tools)
        self._parts = AnswerParts(rules)
        self._item_ids: list[str] = []
        self._created_s = int(time.time())

    def add(self, event: Event) -> list[AnswerChange]:
        """Take an event; return what it changes of the output."""
        changes: list[AnswerChange] = []
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, TextDelta):
            changes = self._parts.push(event)
        elif isinstance(event, Finished):
            self.finished = event
            changes = self._parts.finish(has_text=True)
        for part in self._parts.parts[len(self._item_ids) :]:
            prefix = {"text": "msg", "thinking": "rs"}.get(part.kind) or self.calls.id_prefix(part)
            self._item_ids.append(new_id(prefix))
        return changes

    def headers(self) -> dict[str, str]:
        """The headers that say what was kept; none until it is known."""
        return answer_headers([] if self.report is None else [self.report], [self._request])

    def item_id(self, part: Part) -> str:
        return self._item_ids[part.index]

    def annotations_of(self, part: Part) -> list[FileCitation]:
        """Of a text that is whole; of one that has not begun there are none."""
        wanted = self._body.filter
        if self.report is None or wanted is None or not wanted.citations or not part.text:
            return []
        return file_citations(self.report.sources or (), part.text)

    def text_of(self, part: Part) -> OutputText:
        return {
            "type": "output_text",
            "text": part.text,
            "annotations": self.annotations_of(part),
            "logprobs": self.scored(part.logprobs),
        }

    def content_of(self, part: Part) -> OutputText | ReasoningText:
        """The content of a part that is no call."""
        if part.is_thinking:
            return {"type": "reasoning_text", "text": part.text}
        return self.text_of(part)

    def item(self, part: Part, *, is_open: bool = False) -> OutputItem:
        """A part as an item of the output. An open item is as it was when it was opened."""
        status: Status = "in_progress" if is_open else self._status_of(part)
        if part.is_call:
            return self.calls.item(part, self.item_id(part), status, is_open=is_open)
        if part.is_thinking:
            thought: ReasoningText = {"type": "reasoning_text", "text": part.text}
            return {
                "type": "reasoning",
                "id": self.item_id(part),
                "status": status,
                "summary": [],
                "content": [] if is_open else [thought],
            }
        return {
            "type": "message",
            "id": self.item_id(part),
            "status": status,
            "role": "assistant",
            "content": [] if is_open else [self.text_of(part)],
        }

    @property
    def num_scored(self) -> int:
        """How many tokens have log-probabilities, and parts of the filter object."""
        num_filter = 0 if self.report is None else num_parts(self.report)
        return num_filter + sum(len(part.logprobs) for part in self._parts.parts)

    def scored(self, tokens: Sequence[TokenLogprob]) -> list[ScoredToken]:
        return chat_logprobs(self._vocabulary, tokens)["content"]

    @property
    def response(self) -> Response:
        """The response with all that is known. Items are in it once the answer is whole."""
        finished, report, body = self.finished, self.report, self._body
        sampling, asked_tokens = self._request.sampling, body.max_output_tokens
        response: Response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": None if asked_tokens is None else sampling.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None,
            "service_tier": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": _format_of(body)},
            "tool_choice": _choice_of(body),
            "tools": _tools_of(body),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": [self.item(part) for part in self._parts.parts] if finished else [],
            "usage": self._usage,
        }
        if report:
            response["filter"] = filter_object(report)
        return response

    @property
    def unfinished_response(self) -> Response:
        """The response as it was before its first event."""
        return {
            **self.response,
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }

    def failed_response(self, finished: Finished) -> Response:
        message = failure_body(finished)["error"]["message"]
        return self.response_with({"code": "server_error", "message": message})

    def unbuilt_response(self) -> Response:
        """What ends a stream of which an event could not be built.

        It says nothing of what came, because that may be what nobody can write.
        """
        self.report = self.finished = None
        return self.failed_response(NOT_BUILT)

    def response_with(self, error: ResponseError) -> Response:
        return {**self.response, "status": "failed", "output": [], "error": error}

    @property
    def _usage(self) -> ResponseUsage | None:
        report, finished = self.report, self.finished
        if report is None or finished is None:
            return None
        return {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached_tokens_of(report),
                "kept_tokens": report.kept_tokens,
                "protected_tokens": report.protected_tokens,
            },
            "output_tokens": finished.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parts.num_thinking_tokens},
            "total_tokens": report.prompt_tokens + finished.completion_tokens,
        }

    @property
    def _is_cut(self) -> bool:
        return self.finished is not None and self.finished.reason == "length"

    @property
    def _status(self) -> Status:
        if self.finished is None:
            return "in_progress"
        return "incomplete" if self._is_cut else "completed"

    def _status_of(self, part: Part) -> Status:
        """Of the parts of an answer that is cut off only the last one is incomplete."""
        is_last = part is self._parts.parts[-1]
        return "incomplete" if is_last and self._is_cut else "completed"


def _format_of(body: OpenAIResponsesBody) -> dict[str, object]:
    if body.format is None:
        return {"type": "text"}
    return body.format.model_dump(by_alias=True)


def _choice_of(body: OpenAIResponsesBody) -> str | dict[str, object]:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _tools_of(body: OpenAIResponsesBody) -> list[EchoedTool]:
    tools = (echoed(tool) for tool in body.tools or ())
    return [tool for tool in tools if tool is not None]
