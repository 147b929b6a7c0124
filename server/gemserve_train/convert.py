"""Converts a prefix of many positions to an NTK adapter that acts like it.

The paper's closed form (its equation 4) has the wrong scale for the paper's own φ: φ(0)·φ(0) is d,
not 1. So Z and k are fitted. First each layer is fitted to the attention that sampled queries pay
to the prefix. Then all layers together are fitted to what the model predicts after the prefix; see
`distill.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gemserve.errors import AdapterError
from gemserve_kernels import Partial, merge, ntk_part
from gemserve_train.conversion_texts import ConversionText
from gemserve_train.distill import DistillConfig, Teacher, distill
from gemserve_train.forward import logits_with_gradients
from gemserve_train.parameters import LARGEST_LSE, NTKParameters

_QUERIES = 256  # queries of a step of fitting the layers
_MAX_TESTED = 1024  # held-out queries on which the layers' errors are measured


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
    distill_minutes: float | None = None
    batch_size: int = 8
    seed: int = 0

    @property
    def distilling(self) -> DistillConfig:
        return DistillConfig(
            steps=self.distill_steps,
            rate=self.distill_rate,
            batch_size=self.batch_size,
            max_minutes=self.distill_minutes,
            seed=self.seed + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Relative errors ‖out − out*‖ / ‖out*‖ of attention in each layer, on held-out queries.

    out* is attention with the prefix. For `without`, out is attention without the prefix; for
    `fitted`, it is attention with the term in its place.
    """

    without: list[float]
    fitted: list[float]


def num_held_out(texts: Sequence[ConversionText]) -> int:
    """How many of the texts, the last ones, are held out for measuring: an eighth."""
    return max(1, len(texts) // 8)


def convert(
    teacher: Teacher,
    texts: Sequence[ConversionText],
    config: ConvertConfig,
    progress: Callable[[str], None],
) -> tuple[NTKParameters, Fit]:
    """Fit a term to the teacher's prefix on `texts`, but for those that are held out.

    Raises `AdapterError` for a single text, and if the prefix draws more attention than float32
    can hold.
    """
    if len(texts) < 2:
        raise AdapterError("there is 1 text to fit on; must be at least 2, as one is held out")
    num_leads = {text.num_lead for text in texts}
    if len(num_leads) != 1:
        raise AdapterError("the texts to fit on begin with different numbers of template tokens")
    parameters, fit = _fit_layers(teacher, texts, config, num_leads.pop())
    progress("layers fitted")
    distill(teacher, parameters, texts[: -num_held_out(texts)], config.distilling)
    return parameters, fit


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
    teacher: Teacher, texts: Sequence[ConversionText], max_queries: int
) -> _Attention:
    """Record some of the texts' queries, and their attention to the prefix and to the text.

    At most `max_queries` in each layer. The others are not kept: all layers of all tokens together
    would take gigabytes.
    """
    model, prefix = teacher.model, teacher.prefix
    every = max(1, -(-sum(len(text.after) for text in texts) // max_queries))
    by_layer: dict[int, list[_Attention]] = {}
    before = 0  # tokens of the texts before this one
    for text in texts:
        chosen = torch.arange(-before % every, len(text.after), every, device=model.device)
        before += len(text.after)

        def record(
            layer: int,
            query: torch.Tensor,
            to_text: Partial,
            to_prefix: Partial,
            chosen: torch.Tensor = chosen,
        ) -> None:
            sample = _Attention(query, to_text, to_prefix).at(chosen)
            by_layer.setdefault(layer, []).append(sample)

        ids = torch.tensor([text.after], device=model.device)
        logits_with_gradients(model, prefix, ids, record)
    layers = [_joined(by_layer.pop(layer), dim=1) for layer in range(model.num_layers)]
    return _joined(layers, dim=0)


def _joined(samples: Sequence[_Attention], dim: int) -> _Attention:
    def joined(parts: list[Partial]) -> Partial:
        return Partial(
            torch.cat([part.out for part in parts], dim), torch.cat([p.lse for p in parts], dim)
        )

    return _Attention(
        torch.cat([sample.queries for sample in samples], dim),
        joined([sample.text for sample in samples]),
        joined([sample.prefix for sample in samples]),
    )


def _fit_layers(
    teacher: Teacher, texts: Sequence[ConversionText], config: ConvertConfig, num_lead: int
) -> tuple[NTKParameters, Fit]:
    """Minimise the relative error of attention's output, in each head separately."""
    model, prefix = teacher.model, teacher.prefix
    shape, held_out = model.shape, num_held_out(texts)
    sample = _sample_attention(teacher, texts[:-held_out], config.max_queries)
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
        chosen = torch.randint(sample.queries.shape[1], (_QUERIES,), generator=generator)
        error = _errors(parameters, sample.at(chosen.to(model.device))).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
    tested = _sample_attention(teacher, texts[-held_out:], _MAX_TESTED)
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
