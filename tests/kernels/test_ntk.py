"""NTK-Attention's term, merged with attention, against Algorithm 2 in float64."""

from __future__ import annotations

import pytest
import torch

from gemserve_kernels import Partial, merge, ntk_features, ntk_part
from gemserve_kernels.attention import reference_attention
from gemserve_kernels.ntk import LEAST_SHARE


def adapter(
    heads: int, head_dim: int, r: int, s: int, *, is_signed: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z_a = torch.randn(heads, r, s, generator=generator)
    z_b = torch.randn(heads, s, head_dim, generator=generator)
    k = torch.randn(heads, r, generator=generator) + 0.1
    return z_a, z_b, k if is_signed else k.abs()


def features64(query: torch.Tensor, r: int) -> torch.Tensor:
    z, d = query.double(), query.shape[-1]
    if r == 2 * d:
        z = torch.cat([z, -z], -1)
    chosen = torch.stack([torch.as_tensor(x if x >= 0 else x.exp()) for x in z.flatten()])
    return d**-0.25 * chosen.view_as(z) + 1


def algorithm_2(
    part: Partial | None, query: torch.Tensor, z_a: torch.Tensor, z_b: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in float64, and where the clamp does nothing: [heads, queries]."""
    features = features64(query, k.shape[-1])
    numerator = features @ z_a.double() @ z_b.double()
    mass = torch.einsum("hqr,hr->hq", features, k.double())
    least = LEAST_SHARE * torch.einsum("hqr,hr->hq", features.abs(), k.double().abs())
    held = torch.maximum(mass, least)
    is_free = mass >= least
    if part is None:
        return numerator / held[..., None], is_free
    size = part.lse.double().exp()
    above = size[..., None] * part.out.double() + numerator
    return above / (size + held)[..., None], is_free


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours.double() - theirs).norm(dim=-1) / theirs.norm(dim=-1)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("shift", [-300.0, -88.0, -3.0, 0.0, 3.0, 88.0, 300.0])
@pytest.mark.parametrize(("head_dim", "r", "s"), [(32, 32, 16), (128, 128, 4), (64, 128, 16)])
def test_merged_term_equals_algorithm_2(
    head_dim: int, r: int, s: int, shift: float, is_signed: bool
) -> None:
    """e^ℓ overflows float32 at 88 and underflows at −104: neither may be taken by itself."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(4, 40, head_dim, generator=generator)
    out = torch.randn(4, 40, head_dim, generator=generator)
    part = Partial(out, torch.randn(4, 40, generator=generator) + shift)
    term = adapter(4, head_dim, r, s, is_signed=is_signed)
    ours = merge([part, ntk_part(query, *term)])
    theirs, is_free = algorithm_2(part, query, *term)
    assert is_free.float().mean() > (0.4 if is_signed else 0.999)
    assert ours.dtype == torch.float32
    assert bool(ours.isfinite().all())
    assert float(relative_error(ours, theirs)[is_free].max()) <= 1e-5


def test_denominator_is_added_not_multiplied() -> None:
    """The code in the paper's appendix multiplies by (se + φk)/se instead of dividing."""
    query, out = torch.zeros(1, 1, 16), torch.ones(1, 1, 16)
    k = torch.ones(1, 16)
    part = ntk_part(query, torch.zeros(1, 16, 1), torch.zeros(1, 1, 16), k)
    merged = merge([Partial(out, torch.zeros(1, 1)), part])
    torch.testing.assert_close(merged, torch.full_like(out, 1 / 17))  # φ(0) = 1, 16 features


@pytest.mark.parametrize("is_signed", [False, True])
def test_term_alone(is_signed: bool) -> None:
    query = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(2))
    term = adapter(3, 32, 32, 16, is_signed=is_signed)
    theirs, is_free = algorithm_2(None, query, *term)
    ours = merge([ntk_part(query, *term)])
    assert float(relative_error(ours, theirs)[is_free].max()) <= 1e-5
    assert bool(ours.isfinite().all())


def test_negative_mass_is_clamped() -> None:
    """Denominators that cross zero would turn answers to noise."""
    query = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    z_a, z_b, k = adapter(2, 16, 16, 4, is_signed=False)
    part = ntk_part(query, z_a, z_b, -k)
    least = LEAST_SHARE * torch.einsum("hqr,hr->hq", ntk_features(query, 16).abs(), k)
    assert part.mass is not None
    torch.testing.assert_close(part.mass, least)


@pytest.mark.parametrize("shift", [-300.0, 0.0, 300.0])
def test_term_without_mass_changes_nothing(shift: float) -> None:
    """An adapter that has not been trained; at ℓ = −300 everything underflowed to 0/0."""
    query, out = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    z_a, z_b, k = adapter(2, 16, 16, 4, is_signed=False)
    part = Partial(out, torch.full((2, 5), shift))
    torch.testing.assert_close(merge([part, ntk_part(query, z_a, z_b, 0 * k)]), out)


def test_features_at_and_beyond_the_jump() -> None:
    z = torch.tensor([[[-100.0, -1.0, 0.0, 1e4]]])
    step = 4**-0.25
    expected = torch.tensor([[[1.0, 1 + step * torch.e**-1, 1.0, 1 + step * 1e4]]])
    torch.testing.assert_close(ntk_features(z, 4), expected)


def test_gradient_at_the_jump_is_the_right_branch() -> None:
    z = torch.tensor([0.0, -1.0, 2.0, 1000.0], requires_grad=True)
    ntk_features(z, 4).sum().backward()
    step = 4**-0.25
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor([1.0, torch.e**-1, 1.0, 1.0]) * step)


def test_gradients_of_the_merged_output() -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64) + 0.1
    term = [t.double().requires_grad_() for t in adapter(2, 8, 8, 2, is_signed=False)]
    key, value = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64)

    def output(query: torch.Tensor, *term: torch.Tensor) -> torch.Tensor:
        part = reference_attention(query, key, value, scale=0.3)
        return merge([part, ntk_part(query, *term)])

    assert torch.autograd.gradcheck(output, (query.requires_grad_(), *term), eps=1e-4, atol=1e-3)
