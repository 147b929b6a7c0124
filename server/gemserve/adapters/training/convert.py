"""Converts a prefix of many positions to an NTK adapter that acts like it.

The paper's closed form (its equation 4) has the wrong scale for the paper's own φ: φ(0)·φ(0) is d,
not 1. So Z and k are fitted. First each layer is fitted to the attention that sampled queries pay
to the prefix. Then all layers together are fitted to the model's predictions after the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gemserve.adapters.prefix import Prefix
from gemserve.adapters.training.conversion_texts import ConversionText
from gemserve.adapters.training.forward import logits_with_gradients
from gemserve.adapters.training.parameters import LARGEST_LSE, NTKParameters, Parameters
from gemserve.errors import AdapterError
from gemserve.model.adapter import NO_ADAPTER
from gemserve.model.causal_model import CausalModel
from gemserve_kernels import Partial, merge, ntk_part


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """`fit_steps` for each layer, on `max_queries` queries, then `distill_steps` for all layers."""

    r: int
    s: int = 16
    fit_steps: int = 600
    fit_rate: float = 0.02
    max_queries: int = 4096
    distill_steps: int = 200
    distill_rate: float = 2e-3
    batch_size: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Relative errors ‖out − out*‖ / ‖out*‖ of attention in each layer, on held-out queries.

    out* is attention with the prefix. For `without`, out is attention without the prefix; for
    `fitted`, it is attention with the term in its place.
    """

    without: list[float]
    fitted: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often answers are the same as after the prefix, on held-out texts.

    `top1`: share of an answer's tokens with the same likeliest token; `answers`: share of answers
    in which all tokens agree; `kl`: mean Kullback-Leibler divergence from the prefix's
    distribution, in nats.
    """

    top1: float
    answers: float
    kl: float


def convert(
    model: CausalModel,
    prefix: Prefix,
    texts: Sequence[ConversionText],
    config: ConvertConfig,
    progress: Callable[[str], None],
) -> tuple[NTKParameters, Fit]:
    """Fit a term to `prefix` on `texts`, of which an eighth is held out for measuring.

    Raises `AdapterError` for a single text, and if the prefix draws more attention than float32
    can hold.
    """
    if len(texts) < 2:
        raise AdapterError("there is 1 text to fit on; must be at least 2, as one is held out")
    num_leads = {text.num_lead for text in texts}
    if len(num_leads) != 1:
        raise AdapterError("the texts to fit on begin with different numbers of template tokens")
    parameters, fit = _fit_layers(model, prefix, texts, config, num_leads.pop())
    progress("layers fitted")
    if config.distill_steps:
        _distill(model, prefix, parameters, texts, config)
    return parameters, fit


@torch.no_grad()
def agreement(
    model: CausalModel, prefix: Prefix, other: Parameters | None, texts: Sequence[ConversionText]
) -> Agreement:
    """Compare answers after the prefix with answers after `other` (None: neither)."""
    same = total = whole = 0
    divergence = 0.0
    for text in texts:
        after, ids = (torch.tensor([tokens]) for tokens in (text.after, text.ids))
        wanted = text.answer(logits_with_gradients(model, prefix, after)[0])
        adapter = NO_ADAPTER if other is None else other.adapter()
        ours = text.answer(logits_with_gradients(model, adapter, ids)[0])
        agreed = wanted.argmax(-1) == ours.argmax(-1)
        same += int(agreed.sum())
        whole += int(agreed.all())
        divergence += float(_kl(wanted, ours).sum())
        total += len(wanted)
    return Agreement(top1=same / total, answers=whole / len(texts), kl=divergence / total)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Sampled queries, and their attention to their own text and to the prefix.

    The heads of all layers are one dimension: [layers · heads, queries, …].
    """

    queries: torch.Tensor
    text: Partial
    prefix: Partial

    def at(self, chosen: torch.Tensor) -> _Attention:
        return _Attention(
            self.queries[:, chosen],
            Partial(self.text.out[:, chosen], self.text.lse[:, chosen]),
            Partial(self.prefix.out[:, chosen], self.prefix.lse[:, chosen]),
        )


@torch.no_grad()
def _sample_attention(
    model: CausalModel, prefix: Prefix, texts: Sequence[ConversionText], max_queries: int
) -> _Attention:
    """Record the texts' queries, and their attention to the prefix and to the text."""
    queries: dict[int, list[torch.Tensor]] = {}
    parts: dict[int, list[tuple[Partial, Partial]]] = {}

    def record(layer: int, query: torch.Tensor, to_text: Partial, to_prefix: Partial) -> None:
        queries.setdefault(layer, []).append(query)
        parts.setdefault(layer, []).append((to_text, to_prefix))

    for text in texts:
        logits_with_gradients(model, prefix, torch.tensor([text.after]), record)
    layers = range(model.num_layers)
    to_text, to_prefix = (
        Partial(
            torch.cat([torch.cat([pair[side].out for pair in parts[i]], 1) for i in layers]),
            torch.cat([torch.cat([pair[side].lse for pair in parts[i]], 1) for i in layers]),
        )
        for side in (0, 1)
    )
    sample = _Attention(torch.cat([torch.cat(queries[i], 1) for i in layers]), to_text, to_prefix)
    total = sample.queries.shape[1]
    step = max(1, -(-total // max_queries))
    return sample.at(torch.arange(0, total, step))


def _fit_layers(
    model: CausalModel,
    prefix: Prefix,
    texts: Sequence[ConversionText],
    config: ConvertConfig,
    num_lead: int,
) -> tuple[NTKParameters, Fit]:
    """Minimise the relative error of attention's output, in each head separately."""
    shape = model.shape
    held_out = max(1, len(texts) // 8)
    sample = _sample_attention(model, prefix, texts[:-held_out], config.max_queries)
    largest = float(sample.prefix.lse.max())
    if largest > LARGEST_LSE:
        raise AdapterError(
            f"the prefix's log-sum-exp reaches {largest:.1f}, the limit is {LARGEST_LSE:g}: a "
            "term of such weight is beyond float32"
        )
    scale = sample.prefix.lse.median(dim=1).values.exp().view(shape.num_layers, shape.num_heads)
    parameters = NTKParameters(
        shape,
        config.r,
        config.s,
        config.seed,
        scale=scale,
        positions=max(0, prefix.num_positions - num_lead),
    ).to(model.device)
    with torch.no_grad():  # start with the prefix's mean weight and mean output
        parameters.log_k.fill_(torch.tensor(1.0 / (2 * config.r)).expm1().log().item())
        parameters.z_a[..., 0] = F.softplus(parameters.log_k)
        mean = sample.prefix.out.mean(1).view(shape.num_layers, shape.num_heads, -1)
        parameters.z_b[..., 0, :] = mean
    optimizer = torch.optim.Adam(parameters.parameters(), lr=config.fit_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.fit_steps)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.fit_steps):
        chosen = torch.randint(sample.queries.shape[1], (256,), generator=generator)
        error = _errors(parameters, sample.at(chosen)).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
    tested = _sample_attention(model, prefix, texts[-held_out:], config.max_queries)
    with torch.no_grad():
        fitted, without = (
            _errors(given, tested).sqrt().view(shape.num_layers, -1).mean(1).tolist()
            for given in (parameters, None)
        )
    return parameters, Fit(without=without, fitted=fitted)


def _errors(parameters: NTKParameters | None, sample: _Attention) -> torch.Tensor:
    """Σ‖out − out*‖² / Σ‖out*‖² over queries: [layers · heads]."""
    wanted = merge([sample.text, sample.prefix])
    parts = [sample.text]
    if parameters is not None:
        term = (t.flatten(0, 1) for t in parameters.tensors().values())
        parts.append(ntk_part(sample.queries, *term))
    off = (merge(parts) - wanted).square().sum((1, 2))
    return off / wanted.square().sum((1, 2)).clamp_min(1e-12)


def _distill(
    model: CausalModel,
    prefix: Prefix,
    parameters: NTKParameters,
    texts: Sequence[ConversionText],
    config: ConvertConfig,
) -> None:
    """Minimise the divergence from the model's predictions after the prefix."""
    held_out = max(1, len(texts) // 8)
    taught = texts[:-held_out]
    optimizer = torch.optim.Adam(parameters.parameters(), lr=config.distill_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.distill_steps)
    generator = torch.Generator().manual_seed(config.seed + 1)
    # computed once, because the prefix is long and never changes
    after_prefix: dict[int, torch.Tensor] = {}
    for _ in range(config.distill_steps):
        picked = torch.randint(len(taught), (config.batch_size,), generator=generator).tolist()
        loss = torch.zeros((), device=model.device)
        for index in picked:
            text = taught[index]
            if index not in after_prefix:
                with torch.no_grad():
                    after = torch.tensor([text.after])
                    logits = logits_with_gradients(model, prefix, after)[0]
                    # a copy, because a view would keep all logits in memory
                    after_prefix[index] = text.answer(logits).clone()
            ours = logits_with_gradients(model, parameters.adapter(), torch.tensor([text.ids]))[0]
            loss = loss + _kl(after_prefix[index], text.answer(ours)).mean() / len(picked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _kl(wanted: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """The divergence of the distributions at each token: [tokens]."""
    return F.kl_div(
        ours.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
