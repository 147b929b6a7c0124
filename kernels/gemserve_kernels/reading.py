"""Attention of many queries at once in bfloat16 on a CPU, in C++.

`native/reading.cpp` has the kernel. torch's own computes in bfloat16 at the speed of float32 on
processors that have AVX-512's bfloat16 instructions and no AMX.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gemserve_kernels.attention import Partial
from gemserve_kernels.native_library import CannotCompile, entry, open_library

SOURCE = Path(__file__).parent / "native" / "reading.cpp"
MOST_DIM = 256
_Int, _Double, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_SIZES = ("heads", "kv_heads", "queries", "keys", "dim", "is_causal", "threads")
_STRIDES = ("query_head", "query_row", "key_head", "key_row", "value_head", "value_row")


class _Reading(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in _SIZES),
        ("scale", _Double),
        *((name, _Pointer) for name in ("query", "key", "value")),
        *((name, _Int) for name in _STRIDES),
        *((name, _Pointer) for name in ("out", "lse", "scratch")),
    )


@dataclass(frozen=True, slots=True)
class ReadingAttention:
    """The compiled kernel."""

    library: ctypes.CDLL

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        """As `Attention.part`, for bfloat16 and a head_dim that is a multiple of 16, up to 256."""
        (heads, queries, dim), (kv_heads, keys, _) = query.shape, key.shape
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        assert keys > 0
        assert scale > 0
        assert dim in range(16, MOST_DIM + 1, 16)
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        out = query.new_empty(query.shape)
        lse = query.new_empty(heads, queries, dtype=torch.float32)
        size = self.library.gemserve_reading_scratch(kv_heads, keys, dim)
        scratch = torch.empty(size, dtype=torch.uint8)
        call = _Reading(
            *(heads, kv_heads, queries, keys, dim, is_causal, torch.get_num_threads(), scale),
            *(t.data_ptr() for t in (query, key, value)),
            *(stride for t in (query, key, value) for stride in t.stride()[:2]),
            *(t.data_ptr() for t in (out, lse, scratch)),
        )
        self.library.gemserve_reading(ctypes.byref(call))
        return Partial(out, lse)


def open_reading() -> ReadingAttention:
    """Compile and load the kernel. Raises `CannotCompile` with the reason."""
    library = open_library(SOURCE)
    for name in ("size", "works", "scratch"):
        getattr(library, f"gemserve_reading_{name}").restype = _Int
    library.gemserve_reading_scratch.argtypes = (_Int, _Int, _Int)
    entry(library, "reading", _Pointer)
    if not library.gemserve_reading_works():
        raise CannotCompile("the compiler knows no bfloat16 instructions of this processor")
    assert library.gemserve_reading_size() == ctypes.sizeof(_Reading)
    return ReadingAttention(library)
