"""Parts of a layer on a CPU, each in one call of C++: norm, gated product, rotation.

torch runs some ten operations for them, and writes what lies between to memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gemserve_kernels.cpu_step import ACTIVATIONS
from gemserve_kernels.native_library import entry, open_library

SOURCE = Path(__file__).parent / "native" / "parts.cpp"
_Int, _Double, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Heads(ctypes.Structure):
    _fields_ = (("data", _Pointer), ("head", _Int), ("token", _Int))


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The compiled functions. `lanes`: what widths must be a multiple of."""

    library: ctypes.CDLL
    lanes: int
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float32)

    def norm(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`states` [..., width] divided by their root mean square, times `weight` [width].

        Both are of one of `dtypes`. Zhang and Sennrich, 2019, equation 4.
        """
        is_half = self._is_half(states, weight)
        states, width = states.contiguous(), weight.numel()
        assert states.shape[-1] == width
        assert width % self.lanes == 0
        out = torch.empty_like(states)
        rows = states.numel() // width
        pointers = states.data_ptr(), weight.data_ptr(), out.data_ptr()
        threads = torch.get_num_threads()
        self.library.gemserve_norm(*pointers, rows, width, eps, is_half, threads)
        return out

    def gate(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """`gate` [..., width], which becomes its activation times `up`, of the same shape.

        Both are of one of `dtypes`. `activation`: one of `ACTIVATIONS`.
        """
        is_half = self._is_half(gate, up)
        assert gate.shape == up.shape
        gate, up, width = gate.contiguous(), up.contiguous(), gate.shape[-1]
        assert width % self.lanes == 0
        rows, kind = gate.numel() // width, ACTIVATIONS.index(activation)
        pointers = gate.data_ptr(), up.data_ptr()
        threads = torch.get_num_threads()
        self.library.gemserve_gated(*pointers, rows, width, kind, is_half, threads)
        return gate

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`states` [heads, tokens, width], rotated. Its two halves are the parts of the pairs.

        `cos`, `sin`: [tokens, width]. All are of one of `dtypes`. Su et al., 2021, equation 34.
        """
        heads, tokens, width = states.shape
        is_half = self._is_half(states, cos, sin)
        assert cos.shape == sin.shape == (tokens, width)
        assert states.stride(2) == 1
        assert width % (2 * self.lanes) == 0
        cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(states)
        assert out.stride(2) == 1
        self.library.gemserve_rotate(
            *(_Heads(t.data_ptr(), t.stride(0), t.stride(1)) for t in (states, out)),
            *(cos.data_ptr(), sin.data_ptr()),
            *(tokens, heads, width, is_half, torch.get_num_threads()),
        )
        return out

    def rotate_both(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`q` [heads, tokens, width] and `k` [kv_heads, tokens, width], each as by `rotate`."""
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    def _is_half(self, first: Tensor, *others: Tensor) -> bool:
        assert first.dtype in self.dtypes
        assert all(other.dtype == first.dtype for other in others)
        return first.dtype == torch.bfloat16


def open_parts() -> LayerParts:
    """Compile and load the functions. Raises `CannotCompile` with the reason."""
    library = open_library(SOURCE)
    library.gemserve_parts_lanes.restype = _Int
    entry(library, "norm", _Pointer, _Pointer, _Pointer, _Int, _Int, _Double, _Int, _Int)
    entry(library, "gated", _Pointer, _Pointer, *(_Int,) * 5)
    entry(library, "rotate", _Heads, _Heads, _Pointer, _Pointer, *(_Int,) * 5)
    return LayerParts(library, library.gemserve_parts_lanes())
