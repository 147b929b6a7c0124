"""A whole decode step of a Llama-like model on a CPU, in C++.

`native/step.cpp` has the step itself. It is compiled when it is first needed (`native_library`), so
it is only used on machines with a compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gemserve_kernels.kv_table import KVTable
from gemserve_kernels.native_library import CannotCompile, open_library

SOURCE = Path(__file__).parent / "native" / "step.cpp"
_BLOCK = (64, 32)  # outputs and inputs of a block of a packed matrix
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = (("data", _Pointer), ("bias", _Pointer), ("outs", _Int), ("is_packed", _Int))


_NORMS = ("input_norm", "query_norm", "key_norm", "output_norm")
_MATRICES = ("query", "key", "value", "out", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in _NORMS),
        ("window", _Int),
        *((name, _Matrix) for name in _MATRICES),
    )


_SIZES = ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "is_half")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in _SIZES),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("layer", _Pointer),
        ("norm", _Pointer),
        ("head", _Matrix),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in ("rows", "threads")),
        *((name, _Pointer) for name in ("table", "memory", "hidden", "cos", "sin", "logits")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A linear layer's weight: float32 [outs, ins], or bfloat16 in oneDNN's layout.

    `outs`: the number of outputs. `bias`: [outs] or None.
    """

    weight: torch.Tensor
    outs: int
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """A layer's weights. The norms of queries and keys are None if the model has none."""

    input_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output_norm: torch.Tensor
    window: int | None
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    out: LinearWeight
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """A model's sizes. `scale`: of attention scores. `eps`: of all norms."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


class CpuStep:
    """The decode step of one model. It keeps the weights that it was given alive."""

    def __init__(
        self,
        sizes: StepSizes,
        layers: Sequence[LayerWeights],
        norm: torch.Tensor,
        head: LinearWeight,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: of keys and values, float32 or bfloat16.

        Raises `CannotCompile` if there is no compiler or it fails, and `ValueError` for sizes and
        layouts that the step does not have.
        """
        self._library = open_library(SOURCE)
        lanes = _Int()
        size = self._library.gemserve_sizes(ctypes.byref(lanes))
        if size != sum(map(ctypes.sizeof, (_Model, _Layer, _Step))):
            raise CannotCompile("its structures differ from Python's")
        _check_sizes(sizes, lanes.value, dtype)
        self._kept: list[object] = []
        self._known: set[tuple[int, int]] = set()  # shapes of packed weights whose layout is known
        self._layers = (_Layer * len(layers))(*(self._layer(layer, sizes) for layer in layers))
        self._model = _Model(
            layers=len(layers),
            hidden=sizes.hidden,
            inner=sizes.inner,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            is_half=dtype == torch.bfloat16,
            eps=sizes.eps,
            scale=sizes.scale,
            layer=ctypes.addressof(self._layers),
            norm=self._vector(norm),
            head=self._matrix(head, sizes.hidden),
        )
        self._vocab_size = head.outs

    def __call__(
        self, hidden: torch.Tensor, kv: KVTable, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """The logits [rows, vocab], float32, of rows with these embeddings [rows, hidden].

        `cos`, `sin`: [rows, head_dim]. The rows' keys and values are stored at the ends of their
        sequences, which have at least one token.
        """
        rows = hidden.clone() if hidden.dtype == torch.float32 else hidden.float()
        cos, sin = (given.float().contiguous() for given in (cos, sin))
        logits = torch.empty(len(rows), self._vocab_size)
        step = _Step(
            rows=len(rows),
            threads=torch.get_num_threads(),
            table=kv.table.data_ptr(),
            memory=kv.rows.data_ptr(),
            hidden=rows.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            logits=logits.data_ptr(),
        )
        self._library.gemserve_step(ctypes.byref(self._model), ctypes.byref(step))
        return logits

    def _layer(self, layer: LayerWeights, sizes: StepSizes) -> _Layer:
        attended = sizes.heads * sizes.head_dim
        ins = {"out": attended, "down": sizes.inner}
        return _Layer(
            window=layer.window or 0,
            **{name: self._vector(getattr(layer, name)) for name in _NORMS},
            **{
                name: self._matrix(getattr(layer, name), ins.get(name, sizes.hidden))
                for name in _MATRICES
            },
        )

    def _matrix(self, linear: LinearWeight, ins: int) -> _Matrix:
        weight = linear.weight
        if weight.is_mkldnn:
            if (linear.outs, ins) not in self._known:
                _check_layout(weight, linear.outs, ins)
                self._known.add((linear.outs, ins))
            address = torch.ops.mkldnn.data_ptr(weight)
        elif weight.dtype == torch.float32 and weight.is_contiguous():
            address = weight.data_ptr()
        else:
            raise ValueError(f"a weight of {weight.dtype} that is not packed")
        self._kept.append(weight)
        return _Matrix(
            data=address,
            bias=self._vector(linear.bias),
            outs=linear.outs,
            is_packed=weight.is_mkldnn,
        )

    def _vector(self, values: torch.Tensor | None) -> int | None:
        if values is None:
            return None
        wide = values.detach().float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _check_sizes(sizes: StepSizes, lanes: int, dtype: torch.dtype) -> None:
    """Raise `ValueError` unless all sizes are whole vectors of `lanes` numbers."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"keys and values of {dtype}")
    attended = sizes.heads * sizes.head_dim
    for size in (sizes.hidden, sizes.inner, attended, sizes.head_dim):
        if size % lanes:
            raise ValueError(f"a size of {size}, which is not a multiple of {lanes}")
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"{sizes.heads} query heads for {sizes.kv_heads} key heads")


def _check_layout(weight: torch.Tensor, outs: int, ins: int) -> None:
    """Raise `ValueError` unless a packed weight is in blocks as the step reads them.

    oneDNN chooses the layout by shape and processor, so one weight of each shape is enough.
    """
    if outs % _BLOCK[0] or ins % _BLOCK[1] or weight.dtype != torch.bfloat16:
        raise ValueError(f"a packed weight [{outs}, {ins}] of {weight.dtype}")
    address = torch.ops.mkldnn.data_ptr(weight)
    found = (ctypes.c_int16 * (outs * ins)).from_address(address)
    numbers = torch.frombuffer(found, dtype=torch.bfloat16).view(outs // 64, ins // 2, 64, 2)
    plain = weight.to_dense().view(outs // 64, 64, ins // 2, 2)
    if not torch.equal(numbers.transpose(1, 2), plain):
        raise ValueError("packed weights in another layout")
