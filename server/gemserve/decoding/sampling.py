"""Draws the next tokens of a batch. A request's draws depend on its seed alone.

The order is vLLM's: logit bias and penalties, then the grammar, minimum tokens, temperature, top_k,
top_p, min_p. The request's generator gives one uniform number per token, which picks a token by
inverse cumulative probability, the best token first. All else is done for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemserve.contract.events import TokenLogprob
from gemserve.contract.prompt_parts import TokenArray
from gemserve.contract.sampling import SamplingParams
from gemserve.decoding.grammar import Matcher
from gemserve.decoding.penalties import Penalties
from gemserve.model.passes.transfer import to_device

LOWEST_LOGPROB = -9999.0  # OpenAI's for a token that cannot come


class InvalidLogits(ArithmeticError):
    """The model produced NaN, or nothing but −inf."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn token, with log-probabilities if the request wants them."""

    token: int
    logprob: TokenLogprob | None


class SamplerState:
    """One request's generator, its penalties, and its place in its grammar."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | TokenArray,
        end_ids: frozenset[int],
        matcher: Matcher | None = None,
    ) -> None:
        """`prompt_ids`: those that are penalized, ascending and each once."""
        self.params = params
        self.matcher = matcher
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % (1 << 63))
        self.penalties = Penalties(params, prompt_ids)
        self._end_ids = sorted({*end_ids, *params.stop_token_ids})
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_drawn = 0
        self._uniform: float | None = None  # for the next token

    def uniform(self) -> float:
        """The random number in [0, 1) for the next token; the same until that is noted."""
        if self._uniform is None:
            self._uniform = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        return self._uniform

    def note(self, token: int) -> None:
        """Remember a drawn token."""
        self._uniform = None
        self.penalties.note(token)
        self._num_drawn += 1
        if self.matcher is not None:
            self.matcher.advance(token)

    def bias(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that have a bias [biases], int64, and their biases, float64."""
        if self._bias is None:
            pairs = self.params.logit_bias
            tokens = to_device([token for token, _ in pairs], torch.long, device)
            self._bias = tokens, to_device([value for _, value in pairs], torch.float64, device)
        return self._bias

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [vocab] with −inf for tokens that may not come next; the input is untouched."""
        if self.matcher is not None:
            allowed = torch.from_numpy(self.matcher.allowed())[: len(logits)].to(logits.device)
            logits = logits.masked_fill(~allowed, -torch.inf)
        if self._num_drawn < self.params.min_tokens and self._end_ids:
            longer = logits.clone()
            longer[to_device(self._end_ids, torch.long, logits.device)] = -torch.inf
            # a grammar may allow nothing but the end
            if self.matcher is None or bool((longer > -torch.inf).any()):
                return longer
        return logits


def draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Draw | Exception]:
    """One token for each row of `logits` [rows, vocab], float32, or the error of a row that fails.

    The input is untouched. Rows without penalties or a grammar wait for the device once, together.
    If this raises, no token has been drawn: the same call may be made again.
    """
    given = biased(logits, states)
    rows = [_allowed(state, row) for state, row in zip(states, given, strict=True)]
    if any(row is not None for row in rows):
        blank = logits.new_full(logits.shape[1:], -torch.inf)
        given = torch.stack(
            [
                blank if isinstance(new, Exception) else old if new is None else new
                for new, old in zip(rows, given, strict=True)
            ]
        )
    best = given.max(dim=-1)
    chosen = best.indices
    drawn = [i for i, state in enumerate(states) if state.params.temperature > 0]
    if drawn:
        random = [states[i] for i in drawn]
        if len(drawn) == len(states):
            chosen = _draw_random(given, random)
        else:
            index = to_device(drawn, torch.long, logits.device)
            chosen = chosen.index_copy(0, index, _draw_random(given[index], random))
    is_valid = torch.isfinite(best.values) & ~given.isnan().any(dim=-1)
    tokens: list[int] = torch.where(is_valid, chosen, -1).tolist()
    results: list[Draw | Exception] = []
    for row, token in zip(rows, tokens, strict=True):
        if isinstance(row, Exception):
            results.append(row)
        elif token < 0:
            results.append(InvalidLogits("the model's logits are not finite"))
        else:
            results.append(Draw(token, None))
    scored = _with_logprobs(logits, states, results)
    # last, because it cannot be repeated
    return [_noted(state, result) for state, result in zip(states, scored, strict=True)]


def biased(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """`logits` [rows, vocab] after bias and penalties; the input is untouched."""
    changes = [bool(state.penalties or state.params.logit_bias) for state in states]
    if not any(changes):
        return logits
    adjusted = logits.clone()
    for row, state in enumerate(states):  # a row at a time, without a loop over its tokens
        state.penalties.apply(adjusted[row])
        if state.params.logit_bias:
            tokens, biases = state.bias(logits.device)
            adjusted[row, tokens] = (adjusted[row, tokens].double() + biases).float()
    return adjusted


def _allowed(state: SamplerState, logits: torch.Tensor) -> torch.Tensor | Exception | None:
    """The row without tokens that may not come next; None if that changes nothing."""
    try:
        allowed = state.allowed(logits)
    except Exception as error:  # from its grammar; other rows go on
        return error
    return None if allowed is logits else allowed


def _noted(state: SamplerState, result: Draw | Exception) -> Draw | Exception:
    if isinstance(result, Draw):
        try:
            state.note(result.token)
        except Exception as error:  # from its grammar, too
            return error
    return result


def _with_logprobs(
    logits: torch.Tensor, states: Sequence[SamplerState], results: list[Draw | Exception]
) -> list[Draw | Exception]:
    """Add log-probabilities; rows that want the same number get them together."""
    rows_of: dict[int, list[int]] = {}
    for row, state in enumerate(states):
        if state.params.logprobs is not None and isinstance(results[row], Draw):
            rows_of.setdefault(state.params.logprobs, []).append(row)
    for count, rows in rows_of.items():
        tokens = [result.token for row in rows if isinstance(result := results[row], Draw)]
        wanted = (
            logits
            if len(rows) == len(logits)
            else logits[to_device(rows, torch.long, logits.device)]
        )
        for row, scored in zip(rows, score_tokens(wanted, tokens, count), strict=True):
            results[row] = Draw(scored.token_id, scored)
    return results


def sorted_probabilities(
    logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the tokens that may be drawn [rows, vocab], best first, and their ids.

    Of equal logits the lower id comes first. At least the best token always stays.
    """
    scaled = _scaled(logits, params)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    limits = [(float(p.top_k or vocab_size), p.top_p if p.top_p < 1 else 2.0) for p in params]
    top_k, top_p = _columns(limits, logits.device)
    rank = torch.arange(vocab_size, device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    is_out = mass_before >= top_p
    is_out |= _is_below_min_p(probabilities, params)
    is_out[:, 0] = False
    kept = probabilities.masked_fill(is_out, 0)
    return kept / kept.sum(dim=-1, keepdim=True), ids


def _unsorted_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What the rows that neither top_k nor top_p cuts may draw, in any scale: [rows, vocab].

    Sorting a vocabulary takes longer than everything else that drawing does.
    """
    probabilities = _scaled(logits, params).softmax(-1)
    if any(p.min_p for p in params):
        return probabilities.masked_fill(_is_below_min_p(probabilities, params), 0)
    return probabilities


def _scaled(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    # below this, float32 would round a temperature to 0
    (temperature,) = _columns([(max(p.temperature, 1e-30),) for p in params], logits.device)
    # relative to the largest, or a tiny temperature overflows
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def _is_below_min_p(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    (min_p,) = _columns([(p.min_p,) for p in params], probabilities.device)
    return probabilities < min_p * probabilities.amax(dim=-1, keepdim=True)


def _columns(rows: Sequence[Sequence[float]], device: torch.device) -> list[torch.Tensor]:
    """The columns of a table of numbers, each [rows, 1], in one transfer."""
    numbers = to_device([number for row in rows for number in row], torch.float32, device)
    return list(numbers.view(len(rows), -1, 1).unbind(1))


def _draw_random(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """[rows], int64; any token where logits are not finite.

    Which rows are sorted depends on their own settings only, so that a row draws what it would
    draw alone.
    """
    chosen = torch.empty(len(states), dtype=torch.long, device=logits.device)
    is_cut = [bool(state.params.top_k) or state.params.top_p < 1 for state in states]
    for sorts in set(is_cut):
        rows = [row for row, cut in enumerate(is_cut) if cut == sorts]
        index = to_device(rows, torch.long, logits.device)
        some = logits if len(rows) == len(states) else logits[index]
        params = [states[row].params for row in rows]
        uniform = to_device([states[row].uniform() for row in rows], torch.float64, logits.device)
        if sorts:
            probabilities, ids = sorted_probabilities(some, params)
            places = _pick(probabilities, uniform)
            chosen[index] = ids.gather(-1, places[:, None])[:, 0]
        else:
            chosen[index] = _pick(_unsorted_probabilities(some, params), uniform)
    return chosen


def _pick(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Where each row's uniform number falls in its cumulative sum: [rows], int64."""
    cumulative = probabilities.double().cumsum(-1)
    place = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    # rounding must not lead past the last token that may be drawn
    positions = torch.arange(probabilities.shape[-1], device=probabilities.device)
    last = (positions * (probabilities > 0)).amax(dim=-1, keepdim=True)
    return torch.minimum(place, last)[:, 0]


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens`, one to each row of `logits` [tokens, vocab], float32.

    With the `count` likeliest of each row. The lowest is `LOWEST_LOGPROB`: JSON has no infinity.
    """
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(count)
    wanted = to_device(tokens, torch.long, logits.device)
    given = logprobs.gather(-1, wanted[:, None])[:, 0]
    values_of_tokens = given.clamp_min(LOWEST_LOGPROB).tolist()
    tops = zip(top.indices.tolist(), top.values.clamp_min(LOWEST_LOGPROB).tolist(), strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, values_of_tokens, tops, strict=True)
    ]
