"""From a validated body to an engine request: defaults resolved, limits checked."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemserve.api.schemas import ChatBody, CompletionBody, FilterBody, Generation
from gemserve.config import EngineConfig
from gemserve.engine.prompt import Prompt, chat_prompt, ids_prompt, text_prompt
from gemserve.errors import PromptTooLong, RequestError
from gemserve.types import FilterParams, Request, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Knows the served model's tokenizer and limits; used off the event loop."""

    tokenizer: Any
    config: EngineConfig
    context_tokens: int
    vocab_size: int
    longest_token_chars: int
    window_of: Callable[[int], int | None]  # tokens a layer sees back; None: all

    def completion(self, body: CompletionBody, request_id: str) -> Request:
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not prompt:
            raise RequestError("prompt: must not be empty", param="prompt")
        if isinstance(prompt, str):
            self._check_chars(prompt, "prompt")
            built = text_prompt(self.tokenizer, prompt)
        else:
            built = ids_prompt(self.tokenizer, self._checked_ids(prompt))
        return self._request(
            body, request_id, built, body.max_tokens, "prompt", DEFAULT_COMPLETION_TOKENS
        )

    def chat(self, body: ChatBody, request_id: str) -> Request:
        messages = [{"role": m.role, "content": m.text} for m in body.messages]
        if not any(m["content"].strip() for m in messages):
            raise RequestError("messages: must not all be empty", param="messages")
        for index, message in enumerate(messages):
            self._check_chars(message["content"], f"messages.{index}.content")
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        built = chat_prompt(self.tokenizer, messages)
        return self._request(body, request_id, built, max_tokens, "messages", DEFAULT_CHAT_TOKENS)

    def _request(
        self,
        body: Generation,
        request_id: str,
        prompt: Prompt,
        max_tokens: int | None,
        field: str,
        default_tokens: int,
    ) -> Request:
        limit = self.config.max_prompt_tokens
        assert limit is not None
        num_tokens = len(prompt.ids)
        if num_tokens > limit:
            raise PromptTooLong(tokens=num_tokens, limit=limit, param=field)
        params = self._filter_params(body.filter)
        self._check_window(params, num_tokens)
        room = self.context_tokens - self._generated_from(params, num_tokens)
        if max_tokens is None:
            max_tokens = min(default_tokens, room)
        elif max_tokens > room:
            raise RequestError(
                f"max_tokens={max_tokens}: the context of {self.context_tokens} tokens leaves room "
                f"for {room} after this prompt",
                param="max_tokens",
            )
        temperature = 1.0 if body.temperature is None else body.temperature
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=body.seed,
            stop=tuple(body.stop or ()),
            ignore_eos=body.ignore_eos,
        )
        return Request(
            request_id=request_id,
            prompt_ids=prompt.ids,
            sampling=sampling,
            filter=params,
            protected=prompt.protected,
        )

    def _generated_from(self, params: FilterParams, num_tokens: int) -> int:
        """How many prompt tokens the answer is generated after."""
        if params.method == "none" or num_tokens <= self.config.filter_min_tokens:
            return num_tokens
        return min(num_tokens, params.kept_count(num_tokens))

    def _check_window(self, params: FilterParams, num_tokens: int) -> None:
        """Refuse a filter layer that cannot see the start of this prompt."""
        assert params.layer is not None
        window = self.window_of(params.layer)
        is_filtered = params.method != "none" and num_tokens > self.config.filter_min_tokens
        if is_filtered and window is not None and window < num_tokens:
            raise RequestError(
                f"filter.layer={params.layer}: this layer sees only the last {window} tokens of a "
                f"prompt of {num_tokens}; choose another layer or filter: none",
                param="filter.layer",
            )

    def _filter_params(self, body: FilterBody | None) -> FilterParams:
        body = body or FilterBody()
        layer = self.config.filter_layer
        assert layer is not None
        if body.layer != "auto":
            if body.layer > layer:
                raise RequestError(
                    f"filter.layer={body.layer}: must be from 0 to this server's filter layer, "
                    f"{layer}",
                    param="filter.layer",
                )
            layer = body.layer
        return FilterParams(
            method=body.method or self.config.filter_method,
            keep=self.config.filter_keep if body.keep is None else body.keep,
            layer=layer,
            pooling=body.pooling,
            return_selection=body.return_selection,
        )

    def _checked_ids(self, ids: list[Any]) -> list[int]:
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt.{index}={token}: not a token id; the vocabulary has "
                    f"{self.vocab_size}, so 0 to {self.vocab_size - 1}",
                    param="prompt",
                )
        return ids

    def _check_chars(self, text: str, field: str) -> None:
        limit = self.config.max_prompt_tokens
        assert limit is not None
        fewest_tokens = len(text) // self.longest_token_chars
        if fewest_tokens > limit:
            raise PromptTooLong(tokens=fewest_tokens, limit=limit, param=field)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
