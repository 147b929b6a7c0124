"""What fits into the model's context: the checks that a server and `LLM` share. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import ProtectedRange
from gemserve.errors import AnswerTooLong, KeptTooLong, PromptTooLong, shown
from gemserve.filtering.methods import METHODS
from gemserve.filtering.planner import FilterPlanner
from gemserve.filtering.protected_budget import count_always_read


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimits:
    """The limits of one prompt of `num_tokens` tokens with these protected ranges.

    Only the tokens that all layers read must fit the model's context. `longest`: the most tokens of
    any prompt. `is_scored`: all tokens of the prompt are read, because they are scored. `answer`:
    tokens that the answer must have room for.
    """

    planner: FilterPlanner
    params: FilterParams
    num_tokens: int
    protected: Sequence[ProtectedRange]
    longest: int
    adapter: LoadedAdapter | None = None
    is_scored: bool = False
    answer: int = 1

    @property
    def context(self) -> int:
        """Tokens of the context that an adapter leaves."""
        return self.planner.context_tokens - self._num_positions

    @property
    def read(self) -> int:
        """Tokens that the answer is generated from, as far as the plan goes."""
        if self.is_scored:
            return self.num_tokens
        return self.planner.generated_from(
            self.params, self.num_tokens, self._num_protected, self._beside
        )

    @property
    def room(self) -> int:
        """Tokens that are left for an answer."""
        return self.context - self.read

    def check_prompt(self, field: str) -> None:
        """Raise `RequestError`, naming `field`, if the prompt does not fit."""
        left = self.context - 1
        limit = min(self.longest, left) if self.read == self.num_tokens else self._longest
        if self.num_tokens > limit:
            note = self._adapter_note() if left < self.longest else ""
            raise PromptTooLong(
                tokens=self.num_tokens,
                limit=limit,
                param=field,
                note=note,
                leaves_one=limit == left,
            )
        if self.read > left:
            raise KeptTooLong(
                tokens=self.num_tokens,
                kept=self.read,
                protected=self._num_protected if METHODS[self.params.method].protects else 0,
                limit=left,
                param=field,
                note=self._adapter_note(),
            )
        self._check_layer_sees()

    def with_answer(self, max_tokens: int) -> ContextLimits:
        """The limits if the answer must have room for so many tokens.

        A prompt that would be read whole, and leaves too little room then, is filtered. Raises
        `RequestError` if the filter layer does not see it.
        """
        limits = replace(self, answer=max_tokens)
        limits._check_layer_sees()
        return limits

    def check_answer(self, max_tokens: int, field: str, prompt_field: str) -> None:
        """Raise `RequestError`, naming `field`, if an answer of that length does not fit."""
        limits = self.with_answer(max_tokens)
        if max_tokens > limits.room:
            raise AnswerTooLong(
                tokens=self.num_tokens,
                read=limits.read,
                max_tokens=max_tokens,
                context=self.context,
                param=field,
                place=prompt_field,
                note=self._adapter_note(),
            )

    def _check_layer_sees(self) -> None:
        if not self.is_scored:
            self.planner.check_layer_sees(
                self.params, self.protected, self.num_tokens, self._beside, self._num_positions
            )

    @property
    def _longest(self) -> int:
        """The most tokens of a prompt of which a part is kept."""
        of_pass = self.planner.most_tokens(
            self.params, self.protected, self.num_tokens, self._beside, self._num_positions
        )
        return self.longest if of_pass is None else min(self.longest, of_pass)

    @property
    def _num_protected(self) -> int:
        return count_always_read(self.protected, self.num_tokens)

    @property
    def _num_positions(self) -> int:
        return 0 if self.adapter is None else self.adapter.num_positions

    @property
    def _beside(self) -> int:
        """Tokens of the context that must be free beside the prompt."""
        return self.answer + self._num_positions

    def _adapter_note(self) -> str:
        """What an error about a limit says about the adapter."""
        if self.adapter is None or self.adapter.num_positions == 0:
            return ""
        name, positions = shown(self.adapter.name), self.adapter.num_positions
        return f" with adapter {name} (which takes {positions})"
