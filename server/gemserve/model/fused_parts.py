"""Norms, gated MLPs and rotations of a model: each in one call of C++, or one launch on CUDA.

A module gets a subclass of its own class, as in `prepared_layers`, so its weights' names and copies
of it are as before. Each is tried beside the original on random numbers first, and what computes
something else stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gemserve.model.cpu.step_weights import ACTIVATIONS
from gemserve.model.shared_tree import shared_tree
from gemserve_kernels.native_library import CannotCompile
from gemserve_kernels.parts import open_parts

log = logging.getLogger("gemserve.model")
_ROTATE = "apply_rotary_pos_emb"  # what families call the function that their attention calls
# of a number: bfloat16 has 8 bits, float32 has 24, and the original rounds up to four times
_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-6, torch.float32: 2**-18}
_HALVES = (torch.bfloat16, torch.float16)
_ROWS = 3
_SIZES = (0.01, 1.0, 100.0)  # of the states: small ones show an epsilon, large ones show a clamp


class Parts(Hashable, Protocol):
    """What computes parts of layers: `LayerParts` or `TritonParts`, which have the contracts."""

    @property
    def device(self) -> str:
        """The type of the device that tensors must be on."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that tensors may have, all of them the same."""

    @property
    def lanes(self) -> int:
        """What widths must be a multiple of."""

    def norm(self, states: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...

    def gate(self, gate: Tensor, up: Tensor, activation: str, /) -> Tensor: ...

    def rotate_both(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, /
    ) -> tuple[Tensor, Tensor]: ...


def can_launch_parts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are fused parts for a model on this device, if it is a GPU."""
    return device.type == "cuda" and dtype in _HALVES and find_spec("triton") is not None


def with_fused_parts(model: Any, parts: Parts | None = None) -> Any:
    """The same model with all parts fused that can be; the original stays as it is.

    `model`: float32 or bfloat16 on a CPU, or as `can_launch_parts` wants it. One of another dtype,
    or without a compiler, is returned itself. `parts`: what computes them, else that for the
    model's device.
    """
    try:
        parts = parts or _parts_for({weight.device.type for weight in model.parameters()})
    except CannotCompile as error:
        log.info("norms, gates and rotations run operation by operation: %s", error)
        return model
    like = _find_weight(model, parts)
    if like is None:
        return model
    fuser = _Fuser(parts, like)
    tree, count = shared_tree(model), 0
    with torch.inference_mode():
        for module in tree.modules():
            kind = fuser.fused(module)
            if kind is not None:
                module.__class__ = kind
                count += 1
    how = "calls of compiled code" if parts.device == "cpu" else "launches of Triton's kernels"
    log.info("%d norms, gates and rotations are %s", count, how)
    return tree


def _parts_for(devices: set[str]) -> Parts:
    """What computes the parts of a model with weights on devices of these types."""
    if "cuda" not in devices:
        return open_parts()
    from gemserve_kernels.triton_parts import TritonParts

    return TritonParts()


def _find_weight(model: Any, parts: Parts) -> Tensor | None:
    """A weight that has the dtype and the device of the model's states."""
    fitting = (w for w in model.parameters() if w.dtype in parts.dtypes)
    return next((w for w in fitting if w.device.type == parts.device), None)


class _Fuser:
    """Finds the classes that modules can have instead of their own.

    `like`: a tensor of the dtype and on the device that their states have.
    """

    def __init__(self, parts: Parts, like: Tensor) -> None:
        self._parts = parts
        self._dtype, self._device = like.dtype, like.device

    def fused(self, module: Any) -> type[nn.Module] | None:
        """The class of the same module with a fused forward, or None."""
        if any(weight.device != self._device for weight in module.parameters()):
            return None  # it rests on the host, or has no memory
        return self._norm(module) or self._gate(module) or self._rotation(module)

    def _norm(self, module: Any) -> type[nn.Module] | None:
        weight = module._parameters.get("weight")
        if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
            return None
        name = next((name for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
        if name is None or weight.numel() % self._parts.lanes or weight.dtype != self._dtype:
            return None
        own: Any = type(module)  # type checkers do not know that classes of modules are hashable
        kind = _norm_class(own, name, self._parts)
        return kind if self._agree(module, kind, weight.numel()) else None

    def _gate(self, module: Any) -> type[nn.Module] | None:
        projections = ("gate_proj", "up_proj", "down_proj")
        if not all(isinstance(module._modules.get(name), nn.Linear) for name in projections):
            return None
        activation = ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
        if activation is None or module.gate_proj.out_features % self._parts.lanes:
            return None
        own: Any = type(module)
        kind = _gate_class(own, activation, self._parts)
        return kind if self._agree(module, kind, module.gate_proj.in_features) else None

    def _rotation(self, module: Any) -> type[nn.Module] | None:
        own: Any = type(module)
        forward = own.forward
        if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
            return None
        original = forward.__globals__.get(_ROTATE)
        if original is None:
            return None
        if not _rotates_halves(original, self._parts, self._dtype, self._device):
            return None
        return _rotation_class(own, self._parts)

    def _agree(self, module: nn.Module, fused: Any, width: int) -> bool:
        """Whether both classes' forwards give the module the same for random states."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(1, _ROWS, width, generator=generator)
        for size in _SIZES:
            given = (drawn * size).to(self._device, self._dtype)
            try:
                expected = type(module).forward(module, given)
                got = fused.forward(module, given)
            except Exception:  # a forward that wants more than the states, or other numbers
                return False
            if size > 1 and isinstance(expected, Tensor) and not bool(expected.isfinite().all()):
                continue  # beyond float16's range nothing can be compared, and nothing was clamped
            if not _close(got, expected):
                return False
        return True


@cache
def _norm_class(kind: type[nn.Module], eps_name: str, parts: Parts) -> type[nn.Module]:
    original = kind.forward

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if not _can_take(parts, hidden_states, self.weight):
            return original(self, hidden_states)
        return parts.norm(hidden_states, self.weight, getattr(self, eps_name))

    return _subclass(kind, forward)


@cache
def _gate_class(kind: type[nn.Module], activation: str, parts: Parts) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Any:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not _can_take(parts, gate, up):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(parts.gate(gate, up, activation))

    return _subclass(kind, forward)


@cache
def _rotation_class(kind: type[nn.Module], parts: Parts) -> type[nn.Module]:
    """The class whose forward calls our rotation in place of its module's function."""
    forward: Any = kind.forward
    names = {**forward.__globals__, _ROTATE: _rotation(forward.__globals__[_ROTATE], parts)}
    copied = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return _subclass(kind, copied)


def _rotation(original: Callable[..., Any], parts: Parts) -> Callable[..., Any]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        width = cos.shape[-1]
        is_usual = (
            not (rest or more)
            and len(q) == len(k) == 1
            and q.shape[-1] == k.shape[-1] == width
            and q.stride(-1) == k.stride(-1) == 1
            and cos.shape == (1, q.shape[2], width)
            and width % (2 * parts.lanes) == 0
            and _can_take(parts, q, k, cos, sin)
        )
        if not is_usual:
            return original(q, k, cos, sin, *rest, **more)
        rotated = parts.rotate_both(q[0], k[0], cos[0], sin[0])
        return tuple(states.unsqueeze(0) for states in rotated)

    return rotate


@cache
def _rotates_halves(
    original: Callable[..., Any], parts: Parts, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a family's function is the usual one: tried with cosines that differ everywhere."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in (*((1, heads, _ROWS, 4 * parts.lanes) for heads in (4, 2)),)
        + ((1, _ROWS, 4 * parts.lanes),) * 2
    )
    try:
        expected = original(q, k, cos, sin)
    except Exception:  # another signature, or another shape of cosines
        return False
    got = _rotation(original, parts)(q, k, cos, sin)
    return all(_close(*pair) for pair in zip(got, expected, strict=True))


def _close(got: Any, expected: Any) -> bool:
    if not (isinstance(got, Tensor) and isinstance(expected, Tensor)):
        return False
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCES[got.dtype]
    got, expected = got.float(), expected.float()
    largest = float(expected.abs().max())
    return bool(torch.allclose(got, expected, rtol=tolerance, atol=tolerance * largest))


def _can_take(parts: Parts, *tensors: Tensor) -> bool:
    """Whether they are what `parts` take, and nothing wants their gradients."""
    dtype = tensors[0].dtype
    return (
        dtype in parts.dtypes
        and all(t.dtype == dtype and t.device.type == parts.device for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def _subclass(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
