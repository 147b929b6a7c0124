"""NTK-Attention's term: it acts like a prefix of any length at the cost of a short one.

This is Algorithm 2 of the NTK-Attention paper for one layer. The term is added to the denominator,
as in Algorithm 2. The code in the paper's appendix multiplies by (se + φk)/se instead, which is
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve_kernels.attention import Partial, merge

LEAST_SHARE = 1e-3  # least value of the denominator's term, as a share of Σ|φ_i k_i|


def ntk_features(query: torch.Tensor, size: int) -> torch.Tensor:
    """φ(query): [..., size], in the dtype of `query`; `size` is head_dim or twice that.

    φ(z) = d^(−1/4) · (z where z ≥ 0, else e^z) + 1, element by element. It jumps by d^(−1/4) at 0;
    the gradient there is that of z ≥ 0. The paper uses 2·d features without defining them: here
    they are [φ(z); φ(−z)].
    """
    head_dim = query.shape[-1]
    assert size in (head_dim, 2 * head_dim)
    z = query if size == head_dim else torch.cat([query, -query], dim=-1)
    # e^z of a large z is infinite and would make the gradient NaN, even though z is chosen
    chosen = torch.where(z >= 0, z, z.clamp(max=0).exp())
    return chosen * head_dim**-0.25 + 1


def ntk_part(query: torch.Tensor, z_a: torch.Tensor, z_b: torch.Tensor, k: torch.Tensor) -> Partial:
    """The part (0, φ(q)·Z, φ(q)·k) of attention, where Z = Z_A·Z_B.

    `query`: [heads, queries, head_dim], after RoPE; `z_a`: [heads, r, s]; `z_b`: [heads, s,
    head_dim]; `k`: [heads, r]; the last three are float32, one for each query head.

    The mass φ(q)·k is at least `LEAST_SHARE` · Σ|φ_i k_i|, because the output would be arbitrary
    with a denominator near or below zero. While k ≥ 0, as after training, the bound is never
    reached. Where k is all zero there is no part, and Z does not count.
    """
    features = ntk_features(query.double(), k.shape[-1])  # [heads, queries, r]
    out = features.to(z_a.dtype) @ z_a @ z_b
    # float64, because the sum may be a thousandth of its terms
    column = k.double().unsqueeze(-1)  # [heads, r, 1]
    mass = (features @ column).squeeze(-1)
    least = LEAST_SHARE * (features.abs() @ column.abs()).squeeze(-1)
    mass = torch.maximum(mass, least).to(z_a.dtype)
    lse = torch.where(mass > 0, 0.0, -torch.inf)
    return Partial(out, lse, mass)


def merge_ntk(
    parts: Sequence[Partial],
    query: torch.Tensor,
    z_a: torch.Tensor,
    z_b: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor:
    """Join parts of keys and values with the term: [heads, queries, head_dim].

    The result has the dtype of the first part. The other arguments are those of `ntk_part`. Each
    query needs at least one part or term that is not empty.
    """
    assert all(part.mass is None for part in parts)
    return merge([*parts, ntk_part(query, z_a, z_b, k)])
