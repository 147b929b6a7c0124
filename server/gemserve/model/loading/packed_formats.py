"""Matrices that GPTQ, AWQ or compressed-tensors packed into integers of 32 bits.

A weight is scale · (code − zero point), with a code of 4 or 8 bits. Inputs in a group share a scale
and a zero point. The three methods differ in what lies where:

    GPTQ                words hold 8 inputs of an output; zero points are stored less 1
    AWQ (gemm)          words hold 8 outputs of an input, in the order 0 2 4 6 1 3 5 7
    compressed-tensors  words hold 8 inputs of an output; codes and zero points are stored plus 8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemserve.errors import shown
from gemserve_kernels.blocks import FORMATS, BlockFormat, Blocks

METHODS = ("gptq", "awq", "compressed-tensors")  # of `quant_method`
_INPUTS = 32  # of a block
_WORD = 32  # bits
_ROWS = 1024  # that are dequantised together
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has its first output, its second one …
_FORMATS = {known.name: known for known in FORMATS}
_KINDS = {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}  # by bits and symmetry
_LARGEST = torch.finfo(torch.float16).max

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a checkpoint's matrices are packed.

    `group`: inputs that share a scale; None: all inputs of an output. `zeros_less`: what GPTQ
    subtracts from a zero point that it stores.
    """

    method: str
    bits: int
    group: int | None
    is_symmetric: bool
    zeros_less: int = 0

    @property
    def kind(self) -> BlockFormat:
        """The blocks that hold the same numbers."""
        return _FORMATS[_KINDS[self.bits, self.is_symmetric]]

    @property
    def per_word(self) -> int:
        return _WORD // self.bits

    @property
    def needed(self) -> tuple[str, ...]:
        """The last parts of the names of a matrix's tensors."""
        if self.method != "compressed-tensors":
            return "qweight", "scales", "qzeros"
        zeros = () if self.is_symmetric else ("weight_zero_point",)
        return "weight_packed", "weight_scale", "weight_shape", *zeros

    @property
    def order(self) -> str:
        """The last part of the name of the tensor that says which group an input belongs to."""
        return "weight_g_idx" if self.method == "compressed-tensors" else "g_idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Numbers scale · (code − zero point), [outs, ins].

    codes: uint8 [outs, ins]. scales: float16, bfloat16 or float32 [outs, groups]. zeros: uint8
    [outs, groups]. `group`: inputs of a group; the last one may have fewer.
    """

    packing: Packing
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """All numbers [outs, ins], computed in float32 and rounded to `dtype`."""
        made = torch.empty(self.codes.shape, dtype=dtype)
        groups = torch.arange(self.codes.shape[1]) // self.group
        for first in range(0, len(made), _ROWS):
            rows = slice(first, first + _ROWS)
            zeros, scales = self.zeros[rows, groups].float(), self.scales[rows, groups].float()
            made[rows] = (self.codes[rows].float() - zeros) * scales
        return made

    def blocks(self) -> Blocks:
        """The same numbers in blocks of 32 inputs. The number of inputs is a multiple of 32.

        Scales are rounded to float16, and so are the minima −scale · zero point of blocks that have
        any. Raises `ValueError` for scales that are too large for it.
        """
        outs, ins = self.codes.shape
        groups = torch.arange(0, ins, _INPUTS) // self.group
        scales = self.scales.half()
        minima = (-self.zeros.float() * scales.float()).half()
        self._check_half(scales, minima)
        parts = [scales, minima] if self.packing.kind.has_minima else [scales]
        bytes_of = [some[:, groups, None].contiguous().view(torch.uint8) for some in parts]
        few = self.codes.unflatten(1, (-1, _INPUTS))
        if self.packing.bits == 8:
            bytes_of.append(few ^ 0x80)  # code − 128 as a signed byte
        else:
            low, high = few.chunk(2, dim=-1)
            bytes_of.append(low | high << 4)
        return Blocks(self.packing.kind, torch.cat(bytes_of, dim=-1).flatten(), outs, ins)

    def _check_half(self, scales: torch.Tensor, minima: torch.Tensor) -> None:
        is_lost = self.scales.isfinite() & ~(scales.isfinite() & minima.isfinite())
        if is_lost.any():
            largest = float(self.scales[is_lost].abs().max())
            raise ValueError(
                f"scales of {largest:.3g} with zero points of up to {int(self.zeros.max())}, which "
                f"float16 cannot hold in blocks: their product must be at most {_LARGEST:.0f}, or "
                "weights=dense"
            )


def read_packing(settings: Mapping[str, Any]) -> Packing:
    """How a `quantization_config` with a method of `METHODS` packs matrices.

    Raises `ValueError` with the setting, its value and what it must be.
    """
    packing = _SETTINGS[settings["quant_method"]](settings)
    if (packing.bits, packing.is_symmetric) not in _KINDS:
        raise ValueError(f"{packing.bits} bits with zero points: must be symmetric, or have 4 bits")
    return packing


def _gptq(settings: Mapping[str, Any]) -> Packing:
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _check("checkpoint_format", form, ("gptq", "gptq_v2"))
    _check("is_marlin_format", settings.get("is_marlin_format") or False, (False,))
    return Packing(
        method="gptq",
        bits=_check("bits", settings.get("bits"), (4, 8)),
        group=_group(settings.get("group_size", 128)),
        is_symmetric=_check("sym", settings.get("sym", True), (True, False)),
        zeros_less=1 if form == "gptq" else 0,
    )


def _awq(settings: Mapping[str, Any]) -> Packing:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    _check("version", version, ("gemm",))
    _check("zero_point", settings.get("zero_point", True), (True,))
    return Packing(
        method="awq",
        bits=_check("bits", settings.get("bits", 4), (4,)),
        group=_group(settings.get("group_size", 128)),
        is_symmetric=False,
    )


def _compressed(settings: Mapping[str, Any]) -> Packing:
    _check("format", settings.get("format"), ("pack-quantized",))
    for name, part in (
        ("kv_cache_scheme", settings.get("kv_cache_scheme")),
        ("sparsity_config", _part(settings, "sparsity_config").get("format")),
        ("transform_config", _part(settings, "transform_config").get("config_groups")),
    ):
        _check(name, part or None, (None, "dense"))
    found = {
        name: _of_group(name, group) for name, group in _part(settings, "config_groups").items()
    }
    if len(set(found.values())) != 1:
        raise ValueError(
            f"config_groups has {len(set(found.values()))} ways of packing; must be one"
        )
    return next(iter(found.values()))


def _of_group(name: str, group: Any) -> Packing:
    """How matrices of a group in compressed-tensors' `config_groups` are packed."""
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"{where}={shown(group)}: must have weights")
    for activations in ("input_activations", "output_activations"):
        _check(f"{where}.{activations}", group.get(activations), (None,))
    _check(f"{where}.format", group.get("format"), (None, "pack-quantized"))
    weights, where = group["weights"], f"{where}.weights"
    _check(f"{where}.type", weights.get("type", "int"), ("int",))
    strategy = _check(f"{where}.strategy", weights.get("strategy"), ("group", "channel"))
    size = weights.get("group_size") if strategy == "group" else -1
    return Packing(
        method="compressed-tensors",
        bits=_check(f"{where}.num_bits", weights.get("num_bits"), (4, 8)),
        group=_group(size, f"{where}.group_size"),
        is_symmetric=_check(f"{where}.symmetric", weights.get("symmetric", True), (True, False)),
    )


_SETTINGS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={shown(found)}: must be an object")
    return found


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not any(type(value) is type(known) and value == known for known in allowed):
        names = " or ".join("null" if known is None else str(known) for known in allowed)
        raise ValueError(f"{name}={shown(value)}: must be {names}")
    return value


def _group(size: Any, name: str = "group_size") -> int | None:
    if type(size) is int and size == -1:
        return None
    if type(size) is not int or size < _INPUTS or size % _INPUTS:
        raise ValueError(f"{name}={shown(size)}: must be a multiple of {_INPUTS}, or -1")
    return size


def unpack(packing: Packing, parts: Parts) -> PackedMatrix:
    """A matrix of its tensors, which have the names of `packing.needed`, and of `order` if any.

    Raises `ValueError` if their shapes do not fit, or if groups do not follow each other.
    """
    first = packing.needed[0]
    if parts[first].dtype != torch.int32 or parts[first].dim() != 2:
        raise ValueError(f"{first} is {_described(parts[first])}: must be int32 of two axes")
    outs, ins = _size(packing, parts)
    if outs < 1 or ins < 1:
        raise ValueError(f"a matrix of {outs} outputs and {ins} inputs: both must be at least 1")
    group = packing.group or ins
    num_groups = -(-ins // group)
    _check_shapes(packing, parts, outs, ins, num_groups)
    _check_order(packing, parts, ins, group)
    codes, zeros, scales = _READERS[packing.method](packing, parts)
    zeros = zeros[:outs].contiguous()
    middle = 1 << (packing.bits - 1)
    if packing.is_symmetric and not (zeros == middle).all():
        raise ValueError(f"qzeros has zero points other than {middle}, and sym is true")
    return PackedMatrix(
        packing=packing,
        codes=codes[:, :ins].contiguous(),
        scales=scales.contiguous(),
        zeros=zeros,
        group=group,
    )


def _size(packing: Packing, parts: Parts) -> tuple[int, int]:
    """Outputs and inputs of a matrix."""
    rows, columns = parts[packing.needed[0]].shape
    if packing.method == "gptq":
        return columns, rows * packing.per_word
    if packing.method == "awq":
        return columns * packing.per_word, rows
    shape = parts["weight_shape"]
    if shape.numel() != 2 or shape.is_floating_point():
        raise ValueError(f"weight_shape is {_described(shape)}: must be two whole numbers")
    outs, ins = shape.flatten().tolist()
    return outs, ins


def _check_shapes(packing: Packing, parts: Parts, outs: int, ins: int, num_groups: int) -> None:
    """Raise `ValueError` unless tensors have the shapes of a matrix [outs, ins]."""
    words = -(-outs // packing.per_word)
    wanted: dict[str, tuple[int, int]]
    if packing.method == "compressed-tensors":
        wanted = {
            "weight_packed": (outs, -(-ins // packing.per_word)),
            "weight_scale": (outs, num_groups),
            "weight_zero_point": (words, num_groups),
        }
    else:
        wanted = {"scales": (num_groups, outs), "qzeros": (num_groups, words)}
    for name, shape in wanted.items():
        if name not in packing.needed:
            continue
        found, is_scale = parts[name], "scale" in name
        is_kind = found.is_floating_point() if is_scale else found.dtype == torch.int32
        if tuple(found.shape) != shape or not is_kind:
            kind = "a floating-point dtype" if is_scale else "int32"
            raise ValueError(
                f"{name} is {_described(found)}: must be {kind} {list(shape)} for a matrix of "
                f"{outs} outputs and {ins} inputs in groups of {packing.group or ins}"
            )


def _check_order(packing: Packing, parts: Parts, ins: int, group: int) -> None:
    """Raise `ValueError` if inputs of a group are not beside each other."""
    order = parts.get(packing.order)
    if order is None or bool((order <= 0).all()):  # what is not used is 0 or −1
        return
    if order.shape != (ins,) or not torch.equal(order.long(), torch.arange(ins) // group):
        setting = "actorder" if packing.method == "compressed-tensors" else "desc_act"
        raise ValueError(
            f"{packing.order} says that groups of {group} inputs are not beside each other, as "
            f"{setting} makes them: such an order is not read, must be without"
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _read_gptq(packing: Packing, parts: Parts) -> _Read:
    """Codes [outs, ins], zero points [outs, groups] and scales [outs, groups]."""
    codes = _numbers_of(parts["qweight"].t(), packing.bits).flatten(1)
    # adding to whole words also undoes what a zero point of 0 borrowed from the next one
    ones = sum(packing.zeros_less << at for at in range(0, _WORD, packing.bits))
    zeros = _numbers_of(parts["qzeros"] + ones, packing.bits).flatten(1).t()
    return codes, zeros, parts["scales"].t()


def _read_awq(packing: Packing, parts: Parts) -> _Read:
    return _outputs_of(parts["qweight"]), _outputs_of(parts["qzeros"]), parts["scales"].t()


def _outputs_of(words: torch.Tensor) -> torch.Tensor:
    """The numbers in AWQ's words [inputs, b]: uint8 [8 · b, inputs]."""
    words = words.t().contiguous()
    made = torch.empty(len(words), len(_AWQ_ORDER), words.shape[1], dtype=torch.uint8)
    for output, place in enumerate(_AWQ_ORDER):
        made[:, output] = words >> 4 * place & 15
    return made.flatten(0, 1)


def _read_compressed(packing: Packing, parts: Parts) -> _Read:
    codes = _numbers_of(parts["weight_packed"], packing.bits).flatten(1)
    scales = parts["weight_scale"]
    if packing.is_symmetric:
        zeros = torch.full(scales.shape, 1 << (packing.bits - 1), dtype=torch.uint8)
    else:
        words = _numbers_of(parts["weight_zero_point"], packing.bits)
        zeros = words.permute(0, 2, 1).flatten(0, 1)
    return codes, zeros, scales


_READERS: dict[str, Callable[[Packing, Parts], _Read]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
}


def _numbers_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers in int32 words [a, b], the lowest bits first: uint8 [a, b, 32 / bits]."""
    few = words.flatten().view(torch.uint8).view(*words.shape, 4)
    return few if bits == 8 else torch.stack([few & 15, few >> 4], dim=-1).flatten(-2)
