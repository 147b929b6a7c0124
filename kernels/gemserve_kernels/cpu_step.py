"""A whole decode step of a model on a CPU, in C++.

`native/step.cpp` has the step itself. It is compiled when it is first needed (`native_library`), so
it is only used on machines with a compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from gemserve_kernels.blocks import TILE, BlockStruct, BlockWeight
from gemserve_kernels.kv_table import KVTable
from gemserve_kernels.native_library import CannotCompile, entry, open_library
from gemserve_kernels.packed_layout import PACKED_BLOCK, check_layout

SOURCE = Path(__file__).parent / "native" / "step.cpp"
MATRICES = ("query", "key", "value", "out", "gate", "up", "down")
ACTIVATIONS = ("silu", "gelu_tanh")
_LEAST_UNIT = 16  # outputs of a turned matrix are a multiple of it
_PLAIN, _PLAIN_HALF, _PACKED, _TURNED, _TURNED_HALF, _IN_BLOCKS = range(6)
_NORMS = (
    *("input_norm", "query_norm", "key_norm", "queries_norm", "keys_norm"),
    *("attended_norm", "output_norm", "fed_norm"),
)
_Int, _Double, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = (("data", _Pointer), ("bias", _Pointer), ("outs", _Int), ("layout", _Int))


class _LowRank(ctypes.Structure):
    _fields_ = (("a", _Pointer), ("b", _Pointer), ("rank", _Int), ("scale", _Double))


class _LayerTerms(ctypes.Structure):
    _fields_ = (("shift", _Pointer), ("added", _LowRank * len(MATRICES)))


class _Terms(ctypes.Structure):
    _fields_ = (
        ("layer", _Pointer),
        ("head", _LowRank),
        *((name, _Pointer) for name in ("keys", "values")),
        ("prefix", _Int),
        *((name, _Pointer) for name in ("z_a", "z_b", "k")),
        *((name, _Int) for name in ("features", "rank")),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("router", "gate_up", "down")),
        *((name, _Int) for name in ("count", "chosen", "inner", "is_normed")),
        *((name, _Double) for name in ("limit", "alpha")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in (*_NORMS, "sinks")),
        *((name, _Int) for name in ("window", "place", "rope")),
        ("experts", _Pointer),
        *((name, _Matrix) for name in MATRICES),
    )


_SIZES = ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "rotated", "is_half")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in (*_SIZES, "activation")),
        *((name, _Double) for name in ("eps", "scale", "softcap", "residual")),
        ("layer", _Pointer),
        ("norm", _Pointer),
        ("head", _Matrix),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in ("rows", "threads")),
        *((name, _Pointer) for name in ("table", "window_table", "memory")),
        *((name, _Pointer) for name in ("hidden", "cos", "sin", "logits")),
        ("terms", _Pointer),
    )


_STRUCTURES = (_Model, _Layer, _Step, _Experts, _Terms, _LayerTerms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A linear layer's weight [outs, ins]: in float32, bfloat16, as oneDNN packs it, or in blocks.

    `outs`: the number of outputs. `first`: the first of them, if several matrices are in one.
    `bias`: [outs] or None.
    """

    weight: torch.Tensor
    outs: int
    first: int = 0
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The experts of a layer, of which a router chooses `chosen` for each row.

    `router`: [experts, hidden], whose bias may be None. `gate_up`: [experts, 2 · inner, hidden],
    `down`: [experts, hidden, inner], both without biases, and maybe in blocks. `is_normed`: the
    weights of a row's experts sum to 1. With a `limit` they are those of gpt-oss: matrices are
    transposed, gate and up are the even and odd outputs, and both are clamped; `alpha` is in their
    activation.
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    inner: int
    chosen: int
    is_normed: bool
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """A layer's weights. Norms that the model does not have are None.

    `query_norm`, `key_norm`: of each head; `queries_norm`, `keys_norm`: of all heads together.
    `attended_norm`, `fed_norm`: of what attention and the rest of the layer add. `output_norm`: of
    what the rest of the layer takes. `sinks`: [heads]. `rope`: which rotation it has, None: none.
    `gate`, `up` and `down` are None if there are `experts`.
    """

    input_norm: torch.Tensor | None
    output_norm: torch.Tensor | None
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    out: LinearWeight
    gate: LinearWeight | None = None
    up: LinearWeight | None = None
    down: LinearWeight | None = None
    experts: ExpertWeights | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    queries_norm: torch.Tensor | None = None
    keys_norm: torch.Tensor | None = None
    attended_norm: torch.Tensor | None = None
    fed_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None
    rope: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """A model's sizes. `scale`: of attention scores. `eps`: of all norms.

    `inner`: of layers without experts, or 0. `rotated`: how many numbers of a head are rotated.
    `softcap` bounds scores, if it is not 0. `residual`: times what a layer adds. `activation`: one
    of `ACTIVATIONS`.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    eps: float
    scale: float
    softcap: float = 0.0
    residual: float = 1.0
    activation: str = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A product that is added to a matrix: `a` [rank, ins], `b` [outs, rank], times `scale`."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTerms:
    """What an adapter adds to the rows that have it.

    `shifts`: by layer, [hidden], what is added to the layer's input. `added`: by layer and name of
    the matrix (`MATRICES`), and `head`, to matrices. `keys`, `values`: a prefix, [layers, kv_heads,
    prefix, head_dim]. `z_a`, `z_b`, `k`: NTK-Attention's term in each layer, see `ntk_part`.
    """

    shifts: Mapping[int, torch.Tensor]
    added: Mapping[tuple[int, str], LowRank]
    head: LowRank | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    z_a: torch.Tensor | None = None
    z_b: torch.Tensor | None = None
    k: torch.Tensor | None = None


class PreparedTerms:
    """`RowTerms` where the step reads them. Tensors are copied only to change their layout."""

    def __init__(self, terms: RowTerms, num_layers: int, dtype: torch.dtype) -> None:
        """`dtype`: of the model's keys and values."""
        self._kept: list[object] = []
        self._dtype = dtype
        layers = (_LayerTerms * num_layers)()
        for layer, shift in terms.shifts.items():
            layers[layer].shift = self._address(shift, torch.float32)
        for (layer, name), low_rank in terms.added.items():
            layers[layer].added[MATRICES.index(name)] = self._low_rank(low_rank)
        self._kept.append(layers)
        has_layers = bool(terms.shifts or terms.added)
        prefix = 0 if terms.keys is None else terms.keys.shape[2]
        features, rank = (0, 0) if terms.z_a is None else terms.z_a.shape[2:]
        self._terms = _Terms(
            layer=ctypes.addressof(layers) if has_layers else None,
            head=_LowRank() if terms.head is None else self._low_rank(terms.head),
            keys=self._address(terms.keys, dtype),
            values=self._address(terms.values, dtype),
            prefix=prefix,
            **{
                name: self._address(getattr(terms, name), torch.float32)
                for name in ("z_a", "z_b", "k")
            },
            features=features,
            rank=rank,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._terms)

    def _low_rank(self, term: LowRank) -> _LowRank:
        return _LowRank(
            a=self._address(term.a, self._dtype),
            b=self._address(term.b.T, self._dtype),
            rank=term.a.shape[0],
            scale=term.scale,
        )

    def _address(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().to(dtype).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


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
        library = open_library(SOURCE)
        self._run = entry(library, "step", _Pointer, _Pointer)
        lanes = _Int()
        size = library.gemserve_sizes(ctypes.byref(lanes))
        if size != sum(map(ctypes.sizeof, _STRUCTURES)):
            raise CannotCompile("its structures differ from Python's")
        _check_sizes(sizes, layers, lanes.value, dtype)
        self._kept: list[object] = []
        self._known: set[tuple[int, ...]] = set()  # shapes of packed weights whose layout is known
        places = _places(layers)
        self._layers = (_Layer * len(layers))(
            *(self._layer(*pair, sizes) for pair in zip(layers, places, strict=True))
        )
        self._has_windows = any(layer.window for layer in layers)
        self._model = _Model(
            layers=len(layers),
            is_half=dtype == torch.bfloat16,
            layer=ctypes.addressof(self._layers),
            norm=self._vector(norm),
            head=self._matrix(head, sizes.hidden),
            activation=ACTIVATIONS.index(sizes.activation),
            **{
                field.name: getattr(sizes, field.name)
                for field in fields(sizes)
                if field.name != "activation"
            },
        )
        self._vocab_size, self.dtype, self.num_layers = head.outs, dtype, len(layers)

    def prepared(self, terms: RowTerms) -> PreparedTerms:
        """What an adapter adds, for the calls to come."""
        return PreparedTerms(terms, self.num_layers, self.dtype)

    def __call__(
        self,
        hidden: torch.Tensor,
        kv: KVTable,
        cos: torch.Tensor,
        sin: torch.Tensor,
        terms: Sequence[PreparedTerms | None],
        windows: KVTable | None = None,
    ) -> torch.Tensor:
        """The logits [rows, vocab], float32, of rows with these embeddings [rows, hidden].

        `kv`: in the layers without a sliding window. `windows`: in those that have one.

        `cos`, `sin`: [rotations, rows, rotated]. `terms`: what each row's adapter adds. The rows'
        keys and values are stored at the ends of their sequences, which have at least one token.
        """
        assert windows is not None or not self._has_windows
        rows = hidden.clone() if hidden.dtype == torch.float32 else hidden.float()
        cos, sin = (given.float().contiguous() for given in (cos, sin))
        logits = torch.empty(len(rows), self._vocab_size)
        addresses = (_Pointer * len(terms))(*(None if t is None else t.address for t in terms))
        step = _Step(
            rows=len(rows),
            threads=torch.get_num_threads(),
            table=kv.table.data_ptr(),
            window_table=None if windows is None else windows.table.data_ptr(),
            memory=kv.rows.data_ptr(),
            hidden=rows.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            logits=logits.data_ptr(),
            terms=ctypes.addressof(addresses),
        )
        self._run(ctypes.byref(self._model), ctypes.byref(step))
        return logits

    def _layer(self, layer: LayerWeights, place: int, sizes: StepSizes) -> _Layer:
        attended = sizes.heads * sizes.head_dim
        ins = {"out": attended, "down": sizes.inner}
        matrices = {name: getattr(layer, name) for name in MATRICES}
        return _Layer(
            window=layer.window or 0,
            place=place,
            rope=-1 if layer.rope is None else layer.rope,
            experts=None if layer.experts is None else self._experts(layer.experts, sizes.hidden),
            **{name: self._vector(getattr(layer, name)) for name in (*_NORMS, "sinks")},
            **{
                name: self._matrix(matrix, ins.get(name, sizes.hidden))
                for name, matrix in matrices.items()
                if matrix is not None
            },
        )

    def _experts(self, experts: ExpertWeights, hidden: int) -> int:
        count, is_turned = len(experts.router), bool(experts.limit)
        if isinstance(experts.gate_up, BlockWeight) and experts.inner % TILE:
            raise ValueError(f"experts of {experts.inner} in tiles of {TILE}")
        made = _Experts(
            router=self._plain(experts.router, experts.router_bias, count),
            gate_up=self._plain(
                experts.gate_up, experts.gate_up_bias, 2 * experts.inner, is_turned
            ),
            down=self._plain(experts.down, experts.down_bias, hidden, is_turned),
            count=count,
            chosen=experts.chosen,
            inner=experts.inner,
            is_normed=experts.is_normed,
            limit=experts.limit,
            alpha=experts.alpha,
        )
        self._kept.append(made)
        return ctypes.addressof(made)

    def _matrix(self, linear: LinearWeight, ins: int) -> _Matrix:
        weight = linear.weight
        bias = None if linear.bias is None else linear.bias[linear.first :][: linear.outs]
        if isinstance(weight, BlockWeight):
            return self._in_blocks(weight, linear.first, linear.outs, bias)
        if not weight.is_mkldnn:
            return self._plain(weight[linear.first :][: linear.outs], bias, linear.outs)
        shape = tuple(weight.shape)
        if shape not in self._known:
            check_layout(weight, *shape)
            self._known.add(shape)
        if linear.first % PACKED_BLOCK[0] or linear.outs % PACKED_BLOCK[0]:
            raise ValueError(f"outputs {linear.first} to {linear.first + linear.outs} of blocks")
        self._kept.append(weight)
        return _Matrix(
            data=torch.ops.mkldnn.data_ptr(weight) + linear.first * ins * weight.element_size(),
            bias=self._vector(bias),
            outs=linear.outs,
            layout=_PACKED,
        )

    def _in_blocks(
        self, weight: BlockWeight, first: int, outs: int, bias: torch.Tensor | None
    ) -> _Matrix:
        """Outputs `first` … of a weight, or of each of several experts' weights."""
        count = weight.experts or 1
        step = weight.blocks.outs // count
        structs = (BlockStruct * count)(
            *(weight.blocks.part(i * step + first, outs).struct() for i in range(count))
        )
        self._kept += [weight.blocks, structs]
        return _Matrix(
            data=ctypes.addressof(structs), bias=self._vector(bias), outs=outs, layout=_IN_BLOCKS
        )

    def _plain(
        self, weight: torch.Tensor, bias: torch.Tensor | None, outs: int, is_turned: bool = False
    ) -> _Matrix:
        """A matrix, or the first one of several that follow each other."""
        if isinstance(weight, BlockWeight) and not is_turned:
            return self._in_blocks(weight, 0, outs, bias)
        layouts = (
            {torch.float32: _TURNED, torch.bfloat16: _TURNED_HALF}
            if is_turned
            else {torch.float32: _PLAIN, torch.bfloat16: _PLAIN_HALF}
        )
        is_unknown = isinstance(weight, BlockWeight) or weight.dtype not in layouts
        if is_unknown or not weight.is_contiguous():
            raise ValueError(f"a weight of {weight.dtype}, or one that is a view")
        if is_turned and outs % _LEAST_UNIT:
            raise ValueError(f"{outs} outputs, which is not a multiple of {_LEAST_UNIT}")
        self._kept.append(weight)
        return _Matrix(
            data=weight.data_ptr(),
            bias=self._vector(bias),
            outs=outs,
            layout=layouts[weight.dtype],
        )

    def _vector(self, values: torch.Tensor | None) -> int | None:
        if values is None:
            return None
        wide = values.detach().float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _places(layers: Sequence[LayerWeights]) -> list[int]:
    """Each layer's place in its table: among those with a sliding window, or those without."""
    are_windowed = [bool(layer.window) for layer in layers]
    return [are_windowed[:index].count(kind) for index, kind in enumerate(are_windowed)]


def _check_sizes(
    sizes: StepSizes, layers: Sequence[LayerWeights], lanes: int, dtype: torch.dtype
) -> None:
    """Raise `ValueError` unless all sizes are whole vectors of `lanes` numbers."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"keys and values of {dtype}")
    attended = sizes.heads * sizes.head_dim
    inner = (layer.experts.inner for layer in layers if layer.experts is not None)
    for size in (sizes.hidden, sizes.inner, attended, sizes.head_dim, *inner):
        if size % lanes:
            raise ValueError(f"a size of {size}, which is not a multiple of {lanes}")
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"{sizes.heads} query heads for {sizes.kv_heads} key heads")
