"""Weights in blocks of a few bits, as GGUF files have them: in memory and in products.

`native/blocks.h` says how they are laid out. Products take rows of numbers as bytes, with a scale
for every 32 of them, and are sums of integers. It is compiled when it is first needed
(`native_library`), so weights are in blocks only on machines with a compiler.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gemserve_kernels.native_library import entry, open_library
from gemserve_kernels.packed_layout import check_layout

SOURCE = Path(__file__).parent / "native" / "blocks.cpp"
TILE = 16  # outputs that are laid out together
_INPUTS = 32  # of a block
_ROWS_FLOAT, _ROWS_HALF, _PACKED_HALF = range(3)
_PANEL = 1024  # outputs that are dequantised together
_LEAST_ROWS = 64  # from which AMX's products in bfloat16 pay, dequantising included
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """A format of ggml. `type_id`: its number in files.

    `together`: blocks of 32 inputs that share their factors. `scales`: a block's own, in bytes.
    `file_bytes`: of one output's blocks that are together.
    """

    name: str
    type_id: int
    bits: int
    together: int
    scales: int
    has_minima: bool
    file_bytes: int

    @property
    def inputs(self) -> int:
        """Inputs of a matrix are a multiple of it."""
        return _INPUTS * self.together

    @property
    def data_bytes(self) -> int:
        """Bytes of the numbers of a tile's block."""
        return 2 * _INPUTS * self.bits

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a tile's blocks that are together."""
        own = 0 if self.together == 1 else TILE * (self.scales + self.has_minima)
        return 2 * TILE * (1 + self.has_minima) + self.together * own


def _format(
    name: str, type_id: int, bits: int, scales: int, minima: bool, size: int
) -> BlockFormat:
    return BlockFormat(
        name=name,
        type_id=type_id,
        bits=bits,
        together=8 if scales else 1,
        scales=scales,
        has_minima=minima,
        file_bytes=size,
    )


# in the order of `Blocks` in blocks.h
FORMATS = (
    _format("Q4_0", 2, 4, 0, False, 18),
    _format("Q4_1", 3, 4, 0, True, 20),
    _format("Q5_0", 6, 5, 0, False, 22),
    _format("Q5_1", 7, 5, 0, True, 24),
    _format("Q8_0", 8, 8, 0, False, 34),
    _format("Q4_K", 12, 4, 1, True, 144),
    _format("Q5_K", 13, 5, 1, True, 176),
    _format("Q6_K", 14, 6, 2, False, 210),
)
_BY_TYPE = {known.type_id: known for known in FORMATS}


def format_of(type_id: int) -> BlockFormat | None:
    """The format of that number in GGUF files, if weights can stay in it."""
    return _BY_TYPE.get(type_id)


def stored_bytes(kind: BlockFormat, outs: int, ins: int) -> int:
    """What a matrix [outs, ins] takes in memory."""
    return -(-outs // TILE) * (
        ins // _INPUTS * kind.data_bytes + ins // kind.inputs * kind.scale_bytes
    )


class BlockStruct(ctypes.Structure):
    """A `BlockMatrix` of the compiled code."""

    _fields_ = (
        *((name, _Pointer) for name in ("data", "scales")),
        *((name, _Int) for name in ("outs", "ins", "format")),
    )


class Blocks:
    """A matrix [outs, ins] in blocks. It does not change."""

    def __init__(self, kind: BlockFormat, raw: torch.Tensor, outs: int, ins: int) -> None:
        """`raw`: uint8, what a file has of it. Raises `CannotCompile`, or `ValueError`."""
        if ins % kind.inputs or raw.numel() != outs * (ins // kind.inputs) * kind.file_bytes:
            raise ValueError(f"{raw.numel()} bytes of {kind.name} for [{outs}, {ins}]")
        tiles, together = -(-outs // TILE), ins // kind.inputs
        self.kind, self.outs, self.ins = kind, outs, ins
        self.data = torch.zeros(tiles * (ins // _INPUTS) * kind.data_bytes, dtype=torch.uint8)
        self.scales = torch.zeros(tiles * together * kind.scale_bytes, dtype=torch.uint8)
        self._library = _library()
        raw = raw.contiguous()
        self._call("make_blocks", raw.data_ptr(), torch.get_num_threads())

    @property
    def nbytes(self) -> int:
        return self.data.numel() + self.scales.numel()

    @classmethod
    def joined(cls, matrices: Sequence[Blocks]) -> Blocks:
        """Matrices of one format, one below the other; all but the last one fill their tiles."""
        first = matrices[0]
        if len(matrices) == 1:
            return first
        if any((m.kind, m.ins) != (first.kind, first.ins) for m in matrices):
            raise ValueError("matrices of several formats or numbers of inputs")
        if any(m.outs % TILE for m in matrices[:-1]):
            raise ValueError(f"outputs that do not fill tiles of {TILE}")
        made = cls.__new__(cls)
        made.kind, made.ins, made._library = first.kind, first.ins, first._library
        made.outs = sum(m.outs for m in matrices)
        made.data = torch.cat([m.data for m in matrices])
        made.scales = torch.cat([m.scales for m in matrices])
        return made

    def part(self, first: int, outs: int) -> Blocks:
        """Outputs `first` …, of which the first one begins a tile. They share the memory."""
        if first % TILE:
            raise ValueError(f"outputs from {first} on of a matrix in tiles of {TILE}")
        made = Blocks.__new__(Blocks)
        made.kind, made.ins, made._library = self.kind, self.ins, self._library
        made.outs = outs
        tile, tiles = first // TILE, -(-outs // TILE)
        size = self.ins // _INPUTS * self.kind.data_bytes
        made.data = self.data[tile * size : (tile + tiles) * size]
        size = self.ins // self.kind.inputs * self.kind.scale_bytes
        made.scales = self.scales[tile * size : (tile + tiles) * size]
        return made

    def struct(self) -> BlockStruct:
        """It does not keep the blocks alive."""
        return BlockStruct(
            data=self.data.data_ptr(),
            scales=self.scales.data_ptr(),
            outs=self.outs,
            ins=self.ins,
            format=FORMATS.index(self.kind),
        )

    def numbers(self, dtype: torch.dtype, first: int = 0, outs: int | None = None) -> torch.Tensor:
        """Outputs `first` … as numbers [outs, ins], float32 or bfloat16; `first` begins a tile."""
        count = self.outs - first if outs is None else outs
        made = torch.empty(count, self.ins, dtype=dtype)
        self._call(
            "block_numbers", first, count, _laid(dtype), made.data_ptr(), torch.get_num_threads()
        )
        return made

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The outputs `ids` [...], as numbers [..., ins]: what an embedding looks up."""
        wanted = ids.flatten().long().contiguous()
        if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < self.outs:
            raise IndexError(f"ids from {int(wanted.min())} to {int(wanted.max())} of {self.outs}")
        made = torch.empty(len(wanted), self.ins, dtype=dtype)
        self._call("block_rows", wanted.data_ptr(), len(wanted), _laid(dtype), made.data_ptr())
        return made.view(*ids.shape, self.ins)

    def products(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., ins] times the matrix transposed: [..., outs], both float32 or bfloat16."""
        rows = x.detach().reshape(-1, self.ins).contiguous()
        if len(rows) >= _LEAST_ROWS and _has_tiles() and x.dtype == torch.bfloat16:
            made = self._by_panels(rows, bias)
        else:
            made = torch.empty(len(rows), self.outs, dtype=x.dtype)
            wide = None if bias is None else bias.detach().float().contiguous()
            address = None if wide is None else wide.data_ptr()
            given = rows.data_ptr(), len(rows), address, _laid(x.dtype), made.data_ptr()
            self._call("block_products", *given, torch.get_num_threads())
        return made.view(*x.shape[:-1], self.outs)

    def _by_panels(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same by products in bfloat16, a few outputs after the other."""
        made = torch.empty(len(rows), self.outs, dtype=rows.dtype)
        for first in range(0, self.outs, _PANEL):
            count = min(_PANEL, self.outs - first)
            some = None if bias is None else bias[first : first + count]
            made[:, first : first + count] = self._panel(rows, first, count, some)
        return made

    def _panel(
        self, rows: torch.Tensor, first: int, count: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        packed = _packed(count, self.ins)
        if packed is None:
            weight = self.numbers(rows.dtype, first, count)
            return torch.nn.functional.linear(rows, weight, bias)
        address = torch.ops.mkldnn.data_ptr(packed)
        self._call("block_numbers", first, count, _PACKED_HALF, address, torch.get_num_threads())
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return out

    def _call(self, name: str, *arguments: int | None) -> None:
        given = (None if value is None else _Int(value) for value in arguments)
        entry(self._library, name)(ctypes.byref(self.struct()), *given)


_ACCESSORS = ("__get__", "__set__")  # of a tensor's properties
_WITHOUT_NUMBERS = frozenset(
    (
        torch._has_compatible_shallow_copy_type,  # asked for each parameter by `Module.to`
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("detach", "requires_grad_", "to", "cpu", "size", "dim", "numel", "nelement"),
                *("stride", "element_size", "is_contiguous", "is_floating_point", "is_complex"),
                "__len__",
            )
        ),
    )
)


class BlockWeight(torch.Tensor):
    """A weight [outs, ins] in blocks, which takes the place of an ordinary one in a module.

    Linear layers and embeddings read the blocks. Whatever else is done with it, is done with its
    numbers in `dtype`, float32 or bfloat16. It cannot be trained.

    A weight of several experts is [experts, outs, ins], with all outputs one below the other in its
    blocks; `weight[expert]` is that expert's.
    """

    blocks: Blocks

    @staticmethod
    def __new__(cls, blocks: Blocks, dtype: torch.dtype, experts: int | None = None) -> BlockWeight:
        """Raises `ValueError` unless each expert's outputs fill whole tiles."""
        outs, ins = blocks.outs, blocks.ins
        if experts is not None and outs % (experts * TILE):
            raise ValueError(f"{outs} outputs of {experts} experts, in tiles of {TILE}")
        shape = (outs, ins) if experts is None else (experts, outs // experts, ins)
        make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
        made: BlockWeight = make(cls, shape, dtype=dtype, device="cpu")
        made.blocks = blocks
        return made

    def __init__(self, blocks: Blocks, dtype: torch.dtype, experts: int | None = None) -> None:
        super().__init__()

    @property
    def experts(self) -> int | None:
        return self.shape[0] if self.dim() == 3 else None

    def expert(self, index: int) -> BlockWeight:
        """The weight [outs, ins] of one of several experts, from 0 on."""
        count, outs, _ = self.shape
        if not 0 <= index < count:
            raise IndexError(f"expert {index} of {count}")
        return BlockWeight(self.blocks.part(index * outs, outs), self.dtype)

    @property
    def stored_bytes(self) -> int:
        return self.blocks.nbytes

    def pieces(self, outs: int) -> Iterator[torch.Tensor]:
        """All numbers in float32, [outs, ins] at a time."""
        for first in range(0, self.blocks.outs, outs):
            yield self.blocks.numbers(torch.float32, first, min(outs, self.blocks.outs - first))

    def numbers_at(self, places: torch.Tensor) -> torch.Tensor:
        """The numbers at these places of the flattened weight, in its dtype: [places]."""
        ins = self.blocks.ins
        rows = self.blocks.rows(places // ins, self.dtype)
        return rows.gather(1, (places % ins)[:, None]).squeeze(1)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockWeight({self.blocks.kind.name}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = kwargs or {}
        if func is torch.nn.functional.linear and _is_block(args, 1, given, "weight"):
            return _linear(*args, **given)
        if func is torch.nn.functional.embedding and _is_block(args, 1, given, "weight"):
            return _embedding(*args, **given)
        if func is torch.Tensor.__getitem__ and _is_expert(*args):
            return args[0].expert(int(args[1]))
        name = getattr(func, "__name__", "")
        is_written = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if is_written or name in ("__setitem__", "data_ptr", "untyped_storage"):
            raise TypeError(f"{name}: a weight in blocks has no numbers in memory")
        # what needs no numbers; views of what is not there cannot be made in inference mode
        if func not in _WITHOUT_NUMBERS and name not in _ACCESSORS:
            args, given = tree_map(_dense, (args, given))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (weight,) = args
            return BlockWeight(weight.blocks, weight.dtype, weight.experts)
        args, kwargs = tree_map(_dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def has_blocks(model: torch.nn.Module) -> bool:
    """Whether any weight is in blocks."""
    return any(isinstance(parameter, BlockWeight) for parameter in model.parameters())


def put_blocks(model: torch.nn.Module, blocks: Mapping[str, Blocks], dtype: torch.dtype) -> None:
    """Put them in the place of the parameters of those names, where others share them, too."""
    found: dict[int, torch.nn.Parameter] = {}
    for name, matrix in blocks.items():
        place = model.get_parameter(name)
        experts = place.shape[0] if place.dim() == 3 else None
        made = BlockWeight(matrix, dtype, experts)
        found[id(place)] = torch.nn.Parameter(made, requires_grad=False)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in found:
                module._parameters[name] = found[id(parameter)]


def _is_block(args: Sequence[Any], place: int, given: dict[str, Any], name: str) -> bool:
    weight = args[place] if len(args) > place else given.get(name)
    return isinstance(weight, BlockWeight)


def _linear(
    input: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if torch.is_grad_enabled() and input.requires_grad:
        raise TypeError("weights in blocks have no gradients: load the model with weights=dense")
    return weight.blocks.products(input, bias)


def _embedding(input: torch.Tensor, weight: BlockWeight, *_: Any, **__: Any) -> torch.Tensor:
    return weight.blocks.rows(input, weight.dtype)


def _is_expert(weight: Any, index: Any) -> bool:
    is_one = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.dim() == 0)
    return isinstance(weight, BlockWeight) and weight.experts is not None and is_one


def _dense(value: Any) -> Any:
    if not isinstance(value, BlockWeight):
        return value
    return value.blocks.numbers(value.dtype).view(value.shape)


def _laid(dtype: torch.dtype) -> int:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights in blocks are float32 or bfloat16 to others, not {dtype}")
    return _ROWS_HALF if dtype == torch.bfloat16 else _ROWS_FLOAT


@cache
def _has_tiles() -> bool:
    return torch.cpu._is_amx_tile_supported()


_PANELS = threading.local()


def _packed(outs: int, ins: int) -> torch.Tensor | None:
    """A matrix as oneDNN packs it, whose numbers this thread may overwrite.

    None if it packs such a matrix in a way that is not written here.
    """
    known: dict[tuple[int, int], torch.Tensor | None] = _PANELS.__dict__.setdefault("known", {})
    if (outs, ins) not in known:
        numbers = (torch.arange(outs * ins) % 251).bfloat16().view(outs, ins)
        packed = torch.ops.mkldnn._reorder_linear_weight(numbers, 1)
        try:
            check_layout(packed, outs, ins)
            known[outs, ins] = packed
        except ValueError:
            known[outs, ins] = None
    return known[outs, ins]


def check_compiled() -> None:
    """Raise `CannotCompile` if weights cannot be in blocks on this machine."""
    _library()


def _library() -> ctypes.CDLL:
    return open_library(SOURCE)
