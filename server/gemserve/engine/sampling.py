"""Drawing the next tokens of a batch. Each request's draws depend on its own seed alone.

Order, as in vLLM: logit bias and penalties, then what the grammar allows, minimum tokens,
temperature, top_k, top_p, min_p.
One uniform number per drawn token, from the request's own generator, picks by inverse cumulative
probability, best token first; everything else is done for all rows at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemserve.engine.grammar import Matcher
from gemserve.types import SamplingParams, TokenLogprob


class InvalidLogits(ArithmeticError):
    """The model produced NaN, or nothing but −inf."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn token, with log-probabilities if the request wants them."""

    token: int
    logprob: TokenLogprob | None


class SamplerState:
    """One request's generator, what its penalties remember, and its place in its grammar."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        end_ids: frozenset[int],
        matcher: Matcher | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % (1 << 63))
        self._prompt = frozenset(prompt_ids) if params.repetition_penalty != 1 else frozenset()
        self._end_ids = sorted({*end_ids, *params.stop_token_ids})
        self._counts: Counter[int] = Counter()
        self._num_drawn = 0

    def uniform(self) -> float:
        """The request's next random number in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def note(self, token: int) -> None:
        """Remember a drawn token."""
        self._counts[token] += 1
        self._num_drawn += 1
        if self.matcher is not None:
            self.matcher.advance(token)

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [vocab] as they are drawn from, before temperature; the input is untouched."""
        adjusted = self._biased(logits)
        if self.matcher is not None:
            allowed = torch.from_numpy(self.matcher.allowed())[: len(logits)].to(logits.device)
            adjusted = adjusted.masked_fill(~allowed, -torch.inf)
        if self._num_drawn < self.params.min_tokens and self._end_ids:
            longer = adjusted.clone()
            longer[self._end_ids] = -torch.inf
            # a grammar may allow nothing but the end
            if self.matcher is None or bool((longer > -torch.inf).any()):
                return longer
        return adjusted

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        params = self.params
        changes: dict[int, float] = {}

        def current(token: int) -> float:
            return changes.get(token, values[token])

        touched = sorted({*(t for t, _ in params.logit_bias), *self._counts, *self._prompt})
        values = dict(zip(touched, logits[touched].tolist(), strict=True)) if touched else {}
        for token in self._prompt | set(self._counts):
            if params.repetition_penalty != 1:
                value = current(token)
                factor = params.repetition_penalty
                changes[token] = value / factor if value > 0 else value * factor
        for token, count in self._counts.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            if penalty:
                changes[token] = current(token) - penalty
        for token, bias in params.logit_bias:
            changes[token] = current(token) + bias
        if not changes:
            return logits
        adjusted = logits.clone()
        adjusted[list(changes)] = torch.tensor(list(changes.values()), device=logits.device)
        return adjusted


def draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Draw | Exception]:
    """One token for each row of `logits` [rows, vocab], float32; a row that fails, its error."""
    rows = [_adjusted(state, row) for state, row in zip(states, logits, strict=True)]
    blank = logits.new_full(logits.shape[1:], -torch.inf)
    adjusted = torch.stack([blank if isinstance(row, Exception) else row for row in rows])
    best = adjusted.max(dim=-1)
    is_valid = (torch.isfinite(best.values) & ~adjusted.isnan().any(dim=-1)).tolist()
    tokens = best.indices.tolist()
    drawn = [i for i, s in enumerate(states) if s.params.temperature > 0 and is_valid[i]]
    if drawn:
        chosen = _draw_random(adjusted[drawn], [states[i] for i in drawn])
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    results: list[Draw | Exception] = []
    for i, (state, row) in enumerate(zip(states, rows, strict=True)):
        if isinstance(row, Exception):
            results.append(row)
        elif not is_valid[i]:
            results.append(InvalidLogits("the model's logits are not finite"))
        else:
            results.append(_noted(state, logits[i], tokens[i]))
    return results


def _adjusted(state: SamplerState, logits: torch.Tensor) -> torch.Tensor | Exception:
    try:
        return state.adjust(logits)
    except Exception as error:  # its grammar's; others in the batch go on
        return error


def _noted(state: SamplerState, logits: torch.Tensor, token: int) -> Draw | Exception:
    try:
        state.note(token)
    except Exception as error:  # likewise
        return error
    return Draw(token, _logprob(logits, token, state.params.logprobs))


def sorted_probabilities(
    logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What may be drawn and how likely: probabilities [rows, vocab], best first, and token ids.

    Of equal logits the lower id comes first. At least the best token always stays.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    # below this, float32 would round it to 0
    temperature = column([max(p.temperature, 1e-30) for p in params])
    # relative to the largest, or a tiny temperature overflows
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = column([float(p.top_k or logits.shape[-1]) for p in params])
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    is_out = mass_before >= column([p.top_p if p.top_p < 1 else 2.0 for p in params])
    is_out |= probabilities < column([p.min_p for p in params]) * probabilities[:, :1]
    is_out[:, 0] = False
    kept = probabilities.masked_fill(is_out, 0)
    return kept / kept.sum(dim=-1, keepdim=True), ids


def _draw_random(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    probabilities, ids = sorted_probabilities(logits, [s.params for s in states])
    uniform = torch.tensor([s.uniform() for s in states], dtype=torch.float64)
    cumulative = probabilities.double().cumsum(-1)
    target = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    # rounding must not lead past the last token that may be drawn
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    tokens: list[int] = ids.gather(-1, torch.minimum(place, last))[:, 0].tolist()
    return tokens


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens`, one to each row of `logits` [tokens, vocab], float32.

    With the `count` likeliest of each row.
    """
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(count)
    wanted = torch.tensor(tokens, dtype=torch.long, device=logits.device)
    own = logprobs.gather(-1, wanted[:, None])[:, 0].tolist()
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, own, tops, strict=True)
    ]


def _logprob(logits: torch.Tensor, token: int, count: int | None) -> TokenLogprob | None:
    return None if count is None else score_tokens(logits[None], [token], count)[0]
