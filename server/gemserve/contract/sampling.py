"""How tokens are drawn, and what an answer must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# "context_free": rules in Lark's notation or in llama.cpp's (GBNF)
GrammarKind = Literal["json_schema", "regex", "context_free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, and when to stop."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None
    presence_penalty: float = 0.0  # OpenAI's: subtracted, over generated tokens
    frequency_penalty: float = 0.0  # likewise
    # Hugging Face's: divides positive logits and multiplies negative ones, over the tokens of the
    # prompt and the answer; 1: off
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside each drawn token, if any


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be."""

    text: str  # a JSON schema, as JSON, or what another `kind` says
    is_strict: bool = True  # keywords that no answer can be held to are errors, not ignored
    calls: str | None = None  # the schema of a call of a function, which the answer may be instead
    is_parallel: bool = True  # or of several calls
    kind: GrammarKind = "json_schema"
    # its compiled form, if there is one: a request that has it compiles nothing
    compiled: Any = field(default=None, compare=False, repr=False)


ANY_OBJECT = Grammar('{"type": "object"}')
