"""Lets the layers of Mamba's first version go on from a recurrent state by any number of tokens.

transformers' modules do so by one token only: for more, their scan begins without a state. Here
they run with a scan that begins with the state. All else is computed by their own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_SCAN = "mamba_selective_scan"  # what transformers' modules call
_PIECE = 64  # tokens whose factors are in memory at once


def has_scan(module: nn.Module) -> bool:
    """Whether the module is a mixer of Mamba's first version."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _SCAN in code.co_names


@cache
def continuing(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of mixers with a forward that begins with the state of its cache, if it has one."""
    own: Any = inspect.unwrap(kind.forward)

    def forward(
        self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **keywords: Any
    ) -> Any:
        state = None
        if cache_params is not None and hidden_states.shape[1] > 1:
            state = cache_params.get_recurrent_state(self.layer_idx)
        if state is None:
            return kind.forward(self, hidden_states, cache_params=cache_params, **keywords)
        names = {**own.__globals__, _SCAN: _scan_from(state)}
        same = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        return same(self, hidden_states, cache_params=cache_params, **keywords)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _scan_from(state: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A scan that begins with `state`, [sequences, channels, size].

    With several heads it is [sequences, heads, channels, size], and the scan is called for one head
    after the other.
    """
    heads = iter(state.unbind(1) if state.dim() == 4 else [state])

    def scan(
        hidden_states: torch.Tensor, dt: torch.Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return selective_scan(next(heads), hidden_states, dt, *arguments, **keywords)

    return scan


def selective_scan(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 2 of Mamba (Gu and Dao, 2023): outputs [sequences, channels, tokens], and the state
    behind the last token, both in float32.

    `state`: [sequences, channels, size]. `hidden_states`, `dt` and the gate `z`: [sequences,
    channels, tokens]. `A`: [channels, size]. `B`, `C`: [sequences, size, tokens]. `D`,
    `delta_bias`: [channels]. The names are those of transformers' calls.
    """
    state, inputs = state.float(), hidden_states.float()
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    dt = functional.softplus(dt).float()
    outs = []
    for steps, some, b, c in zip(
        *(x.split(_PIECE, dim=-1) for x in (dt, inputs, B.float(), C.float())), strict=True
    ):
        # [tokens, sequences, channels, size], so that a token's numbers are side by side
        decay = (steps.permute(2, 0, 1)[..., None] * A).exp_()
        states = (steps * some).permute(2, 0, 1)[..., None] * b.permute(2, 0, 1)[:, :, None]
        for now, factor in zip(states, decay, strict=True):
            state = now.addcmul_(factor, state)
        outs.append((states @ c.permute(2, 0, 1)[..., None])[..., 0].permute(1, 2, 0))
    out = torch.cat(outs, dim=-1) + inputs * D[:, None]
    return out * functional.silu(z.float()), state.clone()
