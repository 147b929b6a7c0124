"""Build engine requests from validated bodies: fill in defaults and check limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemserve.api.requests.answer_format import answer_format
from gemserve.api.requests.answer_start_body import check_no_answer_start
from gemserve.api.requests.base_bodies import FilterBody, FilteringBody, SamplingBody
from gemserve.api.requests.chat_body import ChatBody
from gemserve.api.requests.chat_form import HasForm, fields_renamed
from gemserve.api.requests.completion_body import (
    CompletionBody,
    PlainPrompt,
    behind_document,
    prompt_list,
)
from gemserve.api.requests.engine_requests import EngineRequests, repeat_for_choices
from gemserve.api.requests.first_difference import digests_of
from gemserve.api.requests.long_texts import (
    MOST_BYTES,
    MOST_TOKENS,
    check_tokenized_bytes,
    count_chat_bytes,
    count_chat_chars,
)
from gemserve.api.requests.sampling_options import check_ids, read_sampling
from gemserve.api.requests.selection_body import SelectionBody
from gemserve.api.requests.structured_output import answer_grammar
from gemserve.api.requests.template_variables import check_no_variables
from gemserve.api.requests.tool_choice import chat_call_rules, check_tools, prompt_tools
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.filter_options import NO_PROTECT, FilterOptions, FilterParams, Protect
from gemserve.contract.requests import Request
from gemserve.contract.sampling import Grammar, SamplingParams
from gemserve.decoding.grammar import Grammars
from gemserve.errors import PromptTooLong, RequestError
from gemserve.filtering.context_limits import ContextLimits
from gemserve.filtering.methods import METHODS, find_method
from gemserve.filtering.planner import FilterPlanner
from gemserve.prompting.answer_start import AnswerStart
from gemserve.prompting.answerable import Answerable
from gemserve.prompting.encoding import TokenLimit, decode
from gemserve.prompting.excerpt_tokens import NO_EXCERPTS
from gemserve.prompting.prompt import Prompt, chat_prompt, ids_prompt, text_prompt
from gemserve.prompting.tools import Tool

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 4096
_LEAST_ANSWER = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBuilder:
    """Knows the model's tokenizer and limits. Its methods are too slow for the event loop.

    `current_planner`: the planner changes when a model is calibrated while it is served.
    """

    tokenizer: Any
    grammars: Grammars
    context_tokens: int
    vocab_size: int
    longest_token_chars: int
    current_planner: Callable[[], FilterPlanner]
    unscaled_tokens: int | None = None  # see `CausalModel.unscaled_tokens`

    @property
    def planner(self) -> FilterPlanner:
        return self.current_planner()

    @property
    def max_prompt_tokens(self) -> int:
        return self.planner.longest_prompt

    def build_completion(
        self, body: CompletionBody, request_id: str, adapter: LoadedAdapter | None = None
    ) -> EngineRequests:
        _check_best_of(body)
        is_scored = bool(body.echo) and body.logprobs is not None
        asks_to_filter = body.filter and self._resolve(body.filter).method != "none"
        if is_scored and asks_to_filter:
            raise RequestError(
                "filter: not with echo and logprobs, which score every token of the prompt",
                param="filter",
            )
        prompts = prompt_list(body)
        _check_library(body, prompts)
        fields = [f"prompt.{i}" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
        grammar = answer_grammar(answer_format(body), (), None, self.grammars)
        requests: list[Request] = []
        for prompt, field in zip(prompts, fields, strict=True):
            requests.append(
                self._request(
                    body,
                    request_id,
                    self._plain_prompt(prompt, field, _protect(body), _answerable(body)),
                    field,
                    DEFAULT_COMPLETION_TOKENS,
                    adapter=adapter,
                    logprobs=body.logprobs,
                    is_prompt_scored=is_scored,
                    grammar=grammar,
                )
            )
        echoes = [self._text_of(prompt) for prompt in prompts] if body.echo else []
        return repeat_for_choices(
            self.planner,
            requests,
            body.n or 1,
            echoes,
            returns_ids=bool(body.return_token_ids),
            echoes_alone=body.echoes_alone,
        )

    def build_chat(
        self, body: ChatBody, request_id: str, adapter: LoadedAdapter | None = None
    ) -> EngineRequests:
        if body.top_logprobs and not body.logprobs:
            raise RequestError(
                f"top_logprobs={body.top_logprobs}: needs logprobs=true", param="top_logprobs"
            )
        rules = chat_call_rules(body)
        # before the texts are tokenized: of a schema that is new, all of this is done once more
        grammar = answer_grammar(answer_format(body), body.tools or (), rules, self.grammars)
        messages = [message.plain for message in body.messages]
        prompt = self._chat_prompt(
            messages,
            "messages",
            prompt_tools(body),
            body.chat_template_kwargs,
            _protect(body),
            _answerable(body),
            body.answer_start,
        )
        request = self._request(
            body,
            request_id,
            prompt,
            "messages",
            DEFAULT_CHAT_TOKENS,
            adapter=adapter,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
            is_chat=True,
            answer_start=body.answer_start,
        )
        variables = body.chat_template_kwargs
        parts = digests_of(
            messages, prompt_tools(body), request.filter, adapter, variables, body.cache_salt
        )
        return repeat_for_choices(
            self.planner,
            [replace(request, parts=parts)],
            body.n or 1,
            returns_ids=bool(body.return_token_ids),
        )

    def build_as_chat(
        self, body: HasForm, request_id: str, adapter: LoadedAdapter | None = None
    ) -> EngineRequests:
        form = body.form
        with fields_renamed(form.names):
            return self.build_chat(form.chat, request_id, adapter)

    def count_tokens(self, body: HasForm) -> int:
        """How many tokens the prompt has. It may be longer than the context."""
        form = body.form
        with fields_renamed(form.names):
            chat_call_rules(form.chat)
            messages = [message.plain for message in form.chat.messages]
            tools = prompt_tools(form.chat)
            self.check_tokenized_bytes(count_chat_bytes(messages, tools), "messages")
            limit = TokenLimit(self.most_tokenized, "messages", is_context=False)
            return len(chat_prompt(self.tokenizer, messages, limit, tools=tools).ids)

    def build_selection(
        self, body: SelectionBody, request_id: str, adapter: LoadedAdapter | None = None
    ) -> EngineRequests:
        """A request that ends once the filter has chosen, with its selection."""
        if body.messages is not None and body.prompt is None:
            field = "messages"
            if body.document is not None:
                raise RequestError(
                    "document: only with prompt; in messages send a part of type file",
                    param="document",
                )
            messages = [message.plain for message in body.messages]
            tools = check_tools(body.tools)
            prompt = self._chat_prompt(
                messages,
                field,
                tools,
                body.chat_template_kwargs,
                _protect(body),
                _answerable(body),
                body.answer_start,
            )
        elif body.prompt is not None and body.messages is None:
            check_no_variables(body.chat_template_kwargs)
            check_no_answer_start(body)
            field = "prompt"
            if body.tools is not None:
                raise RequestError("tools: only with messages", param="tools")
            text = behind_document(body.prompt, body.document)
            _check_library(body, [text])
            prompt = self._plain_prompt(text, field, _protect(body), _answerable(body))
        else:
            raise RequestError("prompt: give either prompt or messages", param="prompt")
        limits = self._limits(body, prompt, field, adapter)
        params = replace(limits.params, return_selection=True)
        if not METHODS[params.method].has_selection:
            raise RequestError(
                f"filter.method={params.method}: keeps other tokens in every layer, so there is no "
                "selection",
                param="filter.method",
            )
        request = Request(
            request_id=request_id,
            **prompt.fields,
            sampling=SamplingParams(max_tokens=1),
            filter=params,
            selects_only=True,
            adapter=adapter,
        )
        return repeat_for_choices(self.planner, [request], 1)

    def _plain_prompt(
        self, prompt: PlainPrompt, field: str, protect: Protect, found: Answerable | None = None
    ) -> Prompt:
        if not prompt:
            raise RequestError(f"{field}: must not be empty", param=field)
        if isinstance(prompt, str):
            self.check_chars(len(prompt), field)
            limit = self._prompt_limit(field)
            if found is None:
                return text_prompt(self.tokenizer, prompt, protect, limit)
            text, excerpts = found.in_front_of(prompt), found.excerpts
            built = text_prompt(self.tokenizer, text, protect, limit, excerpts)
            return replace(built, searched=found.searched)
        check_ids(prompt, field, self.vocab_size)
        return ids_prompt(self.tokenizer, prompt, protect)

    def _text_of(self, prompt: PlainPrompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return decode(self.tokenizer, prompt, skip_special_tokens=True)

    def _chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        field: str,
        tools: Sequence[Tool],
        variables: dict[str, Any] | None,
        protect: Protect,
        found: Answerable | None = None,
        start: AnswerStart = "header",
    ) -> Prompt:
        if not any(m["content"].strip() or m.get("tool_calls") for m in messages):
            raise RequestError(f"{field}: must not all be empty", param=field)
        self.check_chars(count_chat_chars(messages, tools, variables), field)
        built = chat_prompt(
            self.tokenizer,
            messages if found is None else found.in_messages(messages),
            self._prompt_limit(field),
            tools,
            variables=variables or {},
            protect=protect,
            short=self.planner.short_message_tokens,
            excerpts=NO_EXCERPTS if found is None else found.excerpts,
            start=start,
        )
        return built if found is None else replace(built, searched=found.searched)

    def _limits(
        self,
        body: FilteringBody,
        prompt: Prompt,
        field: str,
        adapter: LoadedAdapter | None,
        *,
        is_scored: bool = False,
    ) -> ContextLimits:
        """How to filter the prompt, and what fits beside it. Raises `RequestError`."""
        params = self._resolve(body.filter)  # before a newer planner may take the place of this one
        limits = ContextLimits(
            planner=self.planner,
            params=params,
            num_tokens=len(prompt.ids),
            protected=prompt.protected,
            longest=self.max_prompt_tokens,
            adapter=adapter,
            is_scored=is_scored,
        )
        limits.check_prompt(field)
        return limits

    def _request(
        self,
        body: SamplingBody,
        request_id: str,
        prompt: Prompt,
        field: str,
        default_tokens: int,
        *,
        adapter: LoadedAdapter | None,
        logprobs: int | None = None,
        is_prompt_scored: bool = False,
        grammar: Grammar | None = None,
        is_chat: bool = False,
        answer_start: AnswerStart = "header",
    ) -> Request:
        limits = self._limits(body, prompt, field, adapter, is_scored=is_prompt_scored)
        default = self._default_answer(default_tokens, limits.read)
        max_tokens = _max_tokens(body, limits, default, field)
        count = None if logprobs is None else min(logprobs, self.vocab_size)
        sampling = replace(read_sampling(body, max_tokens, self.vocab_size), logprobs=count)
        return Request(
            request_id=request_id,
            **prompt.fields,
            sampling=sampling,
            filter=limits.params,
            priority=body.priority or 0,
            prompt_logprobs=count if is_prompt_scored else None,
            grammar=grammar,
            shows_markers=is_chat and grammar is None,
            goes_on=not is_chat or answer_start == "within",
            adapter=adapter,
        )

    def _default_answer(self, wanted: int, num_read: int) -> int:
        """The most tokens of an answer whose request does not say.

        It does not take a short prompt into the context that a model's rope is scaled for: all of
        a sequence is rotated alike, so the prompt would be read as a long one.
        """
        room = 0 if self.unscaled_tokens is None else self.unscaled_tokens - num_read
        return min(wanted, room) if room >= _LEAST_ANSWER else wanted

    def _resolve(self, body: FilterBody | None) -> FilterParams:
        options = FilterOptions() if body is None else body.options
        found = None if body is None else body.answerable
        # excerpts are read as they were added, also where other documents are read as one sequence
        if found is not None and options.window is None and self.planner.segment_size == "off":
            method = find_method(options.method or self.planner.method)
            options = replace(options, window=found.segment_size if method.reads_segments else None)
        return self.planner.resolve(options)

    @property
    def most_tokenized(self) -> int:
        """The most tokens of what is only tokenized or detokenized."""
        return max(MOST_TOKENS, self.max_prompt_tokens)

    def check_tokenized_bytes(self, size: int, field: str) -> None:
        """Refuse a text that is only tokenized, and too long for that. Raises `RequestError`."""
        most = max(MOST_BYTES, self.max_prompt_tokens * self.longest_token_chars)
        check_tokenized_bytes(size, most, field)

    def check_chars(self, num_chars: int, field: str) -> None:
        """Refuse a text that is too long whatever its tokens are, before it is tokenized."""
        limit = self.max_prompt_tokens
        fewest_tokens = num_chars // self.longest_token_chars
        if fewest_tokens > limit:
            raise PromptTooLong(
                tokens=fewest_tokens,
                limit=limit,
                param=field,
                is_least=True,
                leaves_one=self._leaves_one,
            )

    def _prompt_limit(self, field: str) -> TokenLimit:
        return TokenLimit(self.max_prompt_tokens, field, leaves_one=self._leaves_one)

    @property
    def _leaves_one(self) -> bool:
        """Whether the longest prompt is that of the context, which then has one token more."""
        return self.max_prompt_tokens == self.planner.context_tokens - 1


def _protect(body: FilteringBody) -> Protect:
    return NO_PROTECT if body.filter is None else body.filter.options.protect


def _answerable(body: FilteringBody) -> Answerable | None:
    return None if body.filter is None else body.filter.answerable


def _check_library(body: FilteringBody, prompts: Sequence[PlainPrompt]) -> None:
    """Raise `RequestError` for prompts that no library can be asked for."""
    if body.filter is None or not body.filter.libraries:
        return
    if len(prompts) > 1 or not isinstance(prompts[0], str):
        raise RequestError(
            "filter.library: only with one prompt, which is a text", param="filter.library"
        )


def _max_tokens(body: SamplingBody, limits: ContextLimits, default: int, prompt_field: str) -> int:
    """The most tokens of the answer. Raises `RequestError` if it must fit as given, and does not.

    With `truncate_max_tokens` it need not fit. What does not is lowered like the default. A prompt
    that leaves less than a short answer when it is read whole is filtered, if it can be.
    """
    wanted, name = default, None
    for field in ("max_tokens", "max_completion_tokens"):  # the newer name wins
        given = getattr(body, field, None)
        if given is not None:
            wanted, name = max(1, given), field  # of an answer without tokens, one is not shown
    if name is not None and (
        wanted <= limits.room or not getattr(body, "truncate_max_tokens", None)
    ):
        limits.check_answer(wanted, name, prompt_field)
        return wanted
    room = limits.with_answer(min(wanted, _LEAST_ANSWER)).room
    most, rest = min(wanted, room), limits.context - limits.num_tokens
    # so that the fallback can keep everything
    return min(most, rest) if limits.params.fallback and rest >= _LEAST_ANSWER else most


def _check_best_of(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of={body.best_of}: not supported, other than n={body.n or 1}", param="best_of"
        )
