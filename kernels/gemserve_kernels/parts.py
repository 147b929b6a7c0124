"""Parts of a layer in bfloat16 on a CPU, each in one call of C++: norm, gated product, rotation.

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
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    def norm(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`states` [..., width] divided by their root mean square, times `weight` [width].

        Both are bfloat16. Zhang and Sennrich, 2019, equation 4.
        """
        assert states.dtype == weight.dtype == torch.bfloat16
        states, width = states.contiguous(), weight.numel()
        assert states.shape[-1] == width
        assert width % self.lanes == 0
        out = torch.empty_like(states)
        rows = states.numel() // width
        pointers = states.data_ptr(), weight.data_ptr(), out.data_ptr()
        self.library.gemserve_norm(*pointers, rows, width, eps, torch.get_num_threads())
        return out

    def gate(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """`gate` [..., width], which becomes its activation times `up`, of the same shape.

        Both are bfloat16. `activation`: one of `ACTIVATIONS`.
        """
        assert gate.dtype == up.dtype == torch.bfloat16
        assert gate.shape == up.shape
        gate, up, width = gate.contiguous(), up.contiguous(), gate.shape[-1]
        assert width % self.lanes == 0
        rows, kind = gate.numel() // width, ACTIVATIONS.index(activation)
        pointers = gate.data_ptr(), up.data_ptr()
        self.library.gemserve_gated(*pointers, rows, width, kind, torch.get_num_threads())
        return gate

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`states` [heads, tokens, width], rotated. Its two halves are the parts of the pairs.

        `cos`, `sin`: [tokens, width]. All are bfloat16. Su et al., 2021, equation 34.
        """
        heads, tokens, width = states.shape
        assert states.dtype == cos.dtype == sin.dtype == torch.bfloat16
        assert cos.shape == sin.shape == (tokens, width)
        assert states.stride(2) == 1
        assert width % (2 * self.lanes) == 0
        cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(states)
        assert out.stride(2) == 1
        self.library.gemserve_rotate(
            *(_Heads(t.data_ptr(), t.stride(0), t.stride(1)) for t in (states, out)),
            *(cos.data_ptr(), sin.data_ptr()),
            *(tokens, heads, width, torch.get_num_threads()),
        )
        return out

    def rotate_both(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`q` [heads, tokens, width] and `k` [kv_heads, tokens, width], each as by `rotate`."""
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


def open_parts() -> LayerParts:
    """Compile and load the functions. Raises `CannotCompile` with the reason."""
    library = open_library(SOURCE)
    library.gemserve_parts_lanes.restype = _Int
    entry(library, "norm", _Pointer, _Pointer, _Pointer, _Int, _Int, _Double, _Int)
    entry(library, "gated", _Pointer, _Pointer, _Int, _Int, _Int, _Int)
    entry(library, "rotate", _Heads, _Heads, _Pointer, _Pointer, *(_Int,) * 4)
    return LayerParts(library, library.gemserve_parts_lanes())
