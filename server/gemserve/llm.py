"""A model and its prompt filter in this process: for scripts and notebooks, without a server.

Answer a question about a long document:

    from gemserve.llm import LLM

    llm = LLM("smollm2")
    answer = llm.generate(f"{document}\\n\\nWho wrote the letter?", max_tokens=32)
    print(answer.text, answer.filter.kept_tokens)

Look at what the filter keeps, without an answer:

    for passage in llm.select(f"{document}\\n\\nWho wrote the letter?").passages:
        print(passage.start, passage.text)
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from gemserve.calibration.search.calibrated_core import build_calibrated_core
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Event, Filtered, Finished, FinishReason, TextDelta
from gemserve.contract.filter_options import NO_PROTECT, FilterOptions, Protect
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.progress import Progress
from gemserve.errors import GemserveError, RequestError
from gemserve.filtering.context_limits import ContextLimits
from gemserve.filtering.methods import find_method
from gemserve.prompting.prompt import Prompt, chat_prompt, text_prompt
from gemserve.prompting.tools import Message

_DEFAULT_FILTER = FilterOptions()
_DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model generated, and what the filter did to its prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    filter: FilterReport


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens start..stop−1 of a prompt, as text."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the filter keeps of a prompt, in its order."""

    passages: tuple[Passage, ...]
    filter: FilterReport


class LLM:
    """One model, which answers one prompt at a time. Not for use from several threads at once.

    >>> llm = LLM("builtin")
    >>> llm = LLM("smollm2", EngineConfig(filter_min_tokens=512))
    >>> llm = LLM(ModelConfig(model="path/to/checkpoint", dtype="bfloat16"))

    A prompt is a string, a list of chat messages, or a `Prompt`. A string becomes a user message
    if the model has a chat template; otherwise the model goes on where the string ends.

    With a `cache_dir`, close it, or use it in a `with`: until then nobody else can use the folder.
    """

    def __init__(self, model: str | ModelConfig, engine: EngineConfig | None = None) -> None:
        """Load the model. A model that is used for the first time is calibrated, as `serve` does.

        Raises `ModelError` or `ConfigError`.
        """
        chosen = ModelConfig(model=model) if isinstance(model, str) else model
        self.core: Core = build_calibrated_core(chosen, engine or EngineConfig())
        self.tokenizer = self.core.tokenizer
        self.name = chosen.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is being written to disk, and let go of `cache_dir`. Idempotent."""
        self.core.close()

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def prompt(
        self, prompt: str | Sequence[Message] | Prompt, protect: Protect = NO_PROTECT
    ) -> Prompt:
        """The prompt's token ids, and what a filter should keep of it.

        >>> num_tokens = len(llm.prompt("What is the capital of France?").ids)

        `protect` is not for a `Prompt`, which has its protected ranges.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            if not self.has_chat_template:
                return text_prompt(self.tokenizer, prompt, protect)
            prompt = [{"role": "user", "content": prompt}]
        short = self.core.planner.short_message_tokens
        return chat_prompt(self.tokenizer, prompt, protect=protect, short=short)

    def run_to_end(self, request: Request) -> Finished:
        """How a request ended that the engine takes as it is."""
        *_, end = self.core.run_alone(request)
        assert isinstance(end, Finished)
        return end

    def generate(
        self,
        prompt: str | Sequence[Message] | Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        filter: FilterOptions = _DEFAULT_FILTER,
        adapter: LoadedAdapter | None = None,
    ) -> Answer:
        """Answer a prompt; greedily, unless `temperature` is above 0.

        `max_tokens` None: 256, or as many as the context leaves room for.

        >>> print(llm.generate("What is the capital of France?", max_tokens=8).text)
        >>> llm.generate(long_prompt, filter=FilterOptions(method="none")).filter.reason
        'disabled'

        Raises `RequestError`, or `GemserveError` if the model fails.
        """
        prompt = self.prompt(prompt, filter.protect)
        if max_tokens is None:
            room = self._limits(prompt, filter, adapter).room
            max_tokens = max(1, min(_DEFAULT_MAX_TOKENS, room))
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop)
        )
        events = list(self.stream(prompt, sampling, filter=filter, adapter=adapter))
        report = _report_of(events)
        deltas = [event for event in events if isinstance(event, TextDelta)]
        (end,) = [event for event in events if isinstance(event, Finished)]
        return Answer(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=end.reason,
            filter=report,
        )

    def select(
        self,
        prompt: str | Sequence[Message] | Prompt,
        *,
        filter: FilterOptions = _DEFAULT_FILTER,
        adapter: LoadedAdapter | None = None,
    ) -> Selection:
        """What the filter keeps of a prompt; no answer is generated.

        >>> selection = llm.select(long_prompt, filter=FilterOptions(keep=256, fallback=False))
        >>> selection.filter.kept_tokens
        256
        >>> print(*(passage.text for passage in selection.passages), sep="\\n")

        Raises `RequestError`, or `GemserveError` if the filter fails.
        """
        method = filter.method or self.core.config.filter_method
        if not find_method(method).has_selection:
            raise RequestError(
                f"filter.method={method}: keeps other tokens in every layer, so there is no "
                "selection",
                param="filter.method",
            )
        prompt = self.prompt(prompt, filter.protect)
        request = self.request(
            prompt, SamplingParams(max_tokens=1), replace(filter, return_selection=True), adapter
        )
        request = replace(request, selects_only=True)
        report = _report_of(list(self.core.run_alone(request)))
        return Selection(passages=self.passages(prompt, report), filter=report)

    def stream(
        self,
        prompt: str | Sequence[Message] | Prompt,
        sampling: SamplingParams,
        *,
        filter: FilterOptions = _DEFAULT_FILTER,
        adapter: LoadedAdapter | None = None,
        field: str = "prompt",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[Event]:
        """Yield the events of an answer: `Filtered`, `TextDelta`s and one `Finished`.

        >>> for event in llm.stream("Tell me a story.", SamplingParams(max_tokens=64)):
        ...     if isinstance(event, TextDelta):
        ...         print(event.text, end="", flush=True)

        The model answers one prompt at a time, so read the events to the end. If the model fails,
        `Finished` says so. `on_progress` is told several times a second how much of the prompt is
        read, until the first token. Raises `RequestError`, naming `field` if the prompt is too
        long.
        """
        prompt = self.prompt(prompt, filter.protect)
        request = self.request(prompt, sampling, filter, adapter, field)
        return self.core.run_alone(request, on_progress)

    def passages(self, prompt: Prompt, report: FilterReport) -> tuple[Passage, ...]:
        """The text of a report's selection, as passages. Empty if the report has no selection."""
        return tuple(
            Passage(start, stop, self.tokenizer.decode(prompt.ids[start:stop]))
            for start, stop in report.selection or ()
        )

    def _limits(
        self, prompt: Prompt, filter: FilterOptions, adapter: LoadedAdapter | None
    ) -> ContextLimits:
        """The limits that a server has, too. Raises `RequestError`."""
        return ContextLimits(
            planner=self.core.planner,
            params=self.core.planner.resolve(filter),
            num_tokens=len(prompt.ids),
            protected=prompt.protected,
            longest=self.core.config.max_prompt_tokens,
            adapter=adapter,
        )

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        filter: FilterOptions,
        adapter: LoadedAdapter | None,
        field: str = "prompt",
    ) -> Request:
        """What the engine is asked for a prompt. Raises `RequestError` if it is too long."""
        limits = self._limits(prompt, filter, adapter)
        limits.check_prompt(field)
        limits.check_answer(sampling.max_tokens, "max_tokens", field)
        return Request(
            request_id=uuid.uuid4().hex,
            **prompt.fields,
            sampling=sampling,
            filter=limits.params,
            adapter=adapter,
            goes_on=prompt.messages is None,
        )


def _report_of(events: Sequence[Event]) -> FilterReport:
    """The filter's report of a finished request. Raises `GemserveError` if it failed."""
    end = events[-1]
    if isinstance(end, Finished) and end.error is not None:
        raise GemserveError(f"the request failed: {end.error}")
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    return report
