"""The attention kernels: one small class for each, with its requirements.

All of them return log-sum-exps. RoPE has already been applied to queries and keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

import torch
from torch import Tensor

from gemserve_kernels.attention import Partial, join, reference_attention
from gemserve_kernels.native_library import CannotCompile
from gemserve_kernels.reading import MOST_DIM, open_reading

_HALF = (torch.float16, torch.bfloat16)
_MOST_PACKED = 1 << 14  # keys that `NativeCpu` packs at once: 64 MiB with 8 key heads of 128


class Attention(ABC):
    """One attention kernel and its requirements. None means that there is no such requirement.

    `device` is the only device type it runs on. `package` must be installed, which `extra` of
    gemserve does. `capability` is the lowest compute capability of a GPU.
    """

    name: str
    device: str | None = None
    package: str | None = None
    extra: str | None = None
    capability: tuple[int, int] | None = None
    is_half_only: bool = False
    # "auto" takes it only for a data type that is known
    is_for_known_dtype: bool = False
    # the largest head_dim; with a limit, head_dim must also be a multiple of 8
    most_dim: int | None = None

    def find_obstacle(
        self, device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> str | None:
        """Return why the kernel cannot be used, or None if it can.

        A `dtype` or `head_dim` of None is not known yet and is not checked.
        """
        if self.device not in (None, device.type):
            return f"runs on {self.device} only, not on {device.type}"
        if self.package is not None and not is_installed(self.package):
            return f"needs {self.package}: pip install 'gemserve[{self.extra}]'"
        if self.capability is not None:
            found = torch.cuda.get_device_capability(device)
            if found < self.capability:
                needed, has = (".".join(map(str, pair)) for pair in (self.capability, found))
                return f"needs compute capability {needed}, this GPU has {has}"
        if self.is_half_only and dtype not in (None, *_HALF):
            return f"takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
        if self.most_dim is not None and head_dim is not None:
            if head_dim > self.most_dim:
                return f"takes a head_dim of at most {self.most_dim}, not {head_dim}"
            if head_dim % 8:
                return f"takes a head_dim that is a multiple of 8, not {head_dim}"
        return None

    @abstractmethod
    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        """Attend `query` [heads, queries, head_dim] to `key`, `value` [kv_heads, keys, head_dim].

        There is at least one key. `is_causal` requires as many queries as keys, and query i then
        sees keys 0..i.
        """

    def several(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: tuple[int, ...],
        keys: tuple[int, ...],
        *,
        scale: float,
    ) -> Partial:
        """Several sequences, one behind the other; none sees another.

        `query` [heads, sum of `queries`, head_dim]; `key`, `value` [kv_heads, sum of `keys`,
        head_dim]. A sequence's queries are those of its last keys, and see no later ones.
        """
        parts: list[Partial] = []
        each = query.split(queries, 1), key.split(keys, 1), value.split(keys, 1)
        for q, k, v in zip(*each, strict=True):
            past = k.shape[1] - q.shape[1]
            own = self.part(q, k[:, past:], v[:, past:], scale=scale, is_causal=True)
            if past:
                before = self.part(q, k[:, :past], v[:, :past], scale=scale, is_causal=False)
                own = join([before, own])
            parts.append(own)
        outs, lses = zip(*((part.out, part.lse) for part in parts), strict=True)
        return Partial(torch.cat(outs, 1), torch.cat(lses, 1))


class Reference(Attention):
    """Plain torch on any device. The tests compare the other kernels with it."""

    name = "reference"

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        mask = None
        if is_causal:
            mask = torch.ones(
                query.shape[1], key.shape[1], dtype=torch.bool, device=query.device
            ).tril()
        return reference_attention(query, key, value, scale=scale, mask=mask)


class AtenCpu(Attention):
    """torch's fused CPU kernel."""

    name = "aten-cpu"
    device = "cpu"

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        # with zero keys this kernel kills the process (SIGFPE) instead of raising
        _check(query, key, is_causal)
        heads, queries, head_dim = query.shape
        # the heads of a group share their key head through a stride of 0, without a copy
        if is_causal:
            kv_heads = key.shape[0]
            group = heads // kv_heads
            q = query.reshape(kv_heads, group, queries, head_dim)
            k, v = (t.unsqueeze(1).expand(-1, group, -1, -1) for t in (key, value))
        else:
            q, k, v = _rows_of_groups(query, key), key.unsqueeze(0), value.unsqueeze(0)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return Partial(out.reshape(heads, queries, head_dim), lse.reshape(heads, queries))


class NativeCpu(AtenCpu):
    """A kernel in C++, for processors with AVX-512's bfloat16 instructions and without AMX."""

    name = "native-cpu"
    is_for_known_dtype = True

    def find_obstacle(
        self, device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> str | None:
        found = super().find_obstacle(device, dtype, head_dim)
        if found is not None:
            return found
        if dtype not in (None, torch.bfloat16):
            return f"takes bfloat16, not {str(dtype).removeprefix('torch.')}"
        if head_dim is not None and (head_dim > MOST_DIM or head_dim % 16):
            return f"takes a head_dim that is a multiple of 16 up to {MOST_DIM}, not {head_dim}"
        if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():
            return "needs a processor with AVX-512's bfloat16 instructions and without AMX"
        if dtype is None:
            return None  # nothing is compiled for a model that may not be able to use it
        try:
            open_reading()
        except CannotCompile as error:
            return f"cannot be compiled: {error}"
        return None

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        _check(query, key, is_causal)
        part = open_reading().part
        if is_causal or key.shape[1] <= _MOST_PACKED:
            return part(query, key, value, scale=scale, is_causal=is_causal)
        # all keys would be packed at once, which takes as much memory as they have themselves
        pieces = zip(key.split(_MOST_PACKED, 1), value.split(_MOST_PACKED, 1), strict=True)
        return join([part(query, k, v, scale=scale, is_causal=False) for k, v in pieces])


class Flash(Attention):
    """torch's own build of FlashAttention 2, which takes fewer key heads than query heads."""

    name = "flash"
    device = "cuda"
    is_half_only = True
    most_dim = 256

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        _check(query, key, is_causal)
        q, k, v = (t.unsqueeze(0) for t in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return _unbatched(out, lse, query)

    def several(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: tuple[int, ...],
        keys: tuple[int, ...],
        *,
        scale: float,
    ) -> Partial:
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        bounds = (_bounds(counts, query.device) for counts in (queries, keys))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, max(queries), max(keys), 0.0, True, False, scale=scale
        )
        return Partial(out.transpose(0, 1), lse)


class Cudnn(Flash):
    """cuDNN's kernel, through torch. It takes fewer key heads than query heads.

    Each new size costs it a plan, a third of a second. So it gets a few, and `rest` the others;
    `several` is FlashAttention's, because sizes of several sequences rarely come again.
    """

    name = "cudnn"
    capability = (9, 0)  # not compared with the others on older GPUs
    most_dim = 128
    step = 1024  # it gets a multiple of as many queries
    blocks = (1 << 16, 1 << 15, 1 << 14, 1 << 13, 1 << 12)  # of keys
    rest: Attention = Flash()

    def find_obstacle(
        self, device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> str | None:
        found = super().find_obstacle(device, dtype, head_dim)
        if found is None and not torch.backends.cudnn.is_available():
            return "needs a torch that is built with cuDNN"
        return found

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        _check(query, key, is_causal)
        whole = query.shape[1] // self.step * self.step
        if is_causal and whole == query.shape[1]:
            return self.planned(query, key, value, scale=scale, is_causal=True)
        if is_causal or whole == 0:
            return self.rest.part(query, key, value, scale=scale, is_causal=is_causal)
        first = self._beside_blocks(query[:, :whole], key, value, scale)
        if whole == query.shape[1]:
            return first
        last = self.rest.part(query[:, whole:], key, value, scale=scale, is_causal=False)
        return Partial(torch.cat([first.out, last.out], 1), torch.cat([first.lse, last.lse], 1))

    def _beside_blocks(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
        """Attention to all keys, block by block."""
        parts, start = [], 0
        for size in self.blocks:
            while key.shape[1] - start >= size:
                k, v = (t[:, start : start + size] for t in (key, value))
                parts.append(self.planned(query, k, v, scale=scale, is_causal=False))
                start += size
        if start < key.shape[1]:
            rest = (t[:, start:] for t in (key, value))
            parts.append(self.rest.part(query, *rest, scale=scale, is_causal=False))
        return join(parts)

    def planned(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        """One call of the kernel, for sizes that come again. Copies have the same strides."""
        q, k, v = (t.contiguous().unsqueeze(0) for t in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return _unbatched(out, lse, query)


class Efficient(Attention):
    """torch's memory-efficient kernel. It takes any dtype, and one key head per query head."""

    name = "efficient"
    device = "cuda"

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        _check(query, key, is_causal)
        heads, queries, head_dim = query.shape
        # only a chunk's own keys are repeated; they are few beside the past, which never is
        if is_causal:
            group = heads // key.shape[0]
            q = query.unsqueeze(0)
            k, v = (t.repeat_interleave(group, dim=0).unsqueeze(0) for t in (key, value))
        else:
            q, k, v = _rows_of_groups(query, key), key.unsqueeze(0), value.unsqueeze(0)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        # the kernel pads the rows of its log-sum-exp
        lse = lse[..., : q.shape[2]]
        return Partial(out.reshape(heads, queries, head_dim), lse.reshape(heads, queries))


class FlashAttn2(Attention):
    """The package flash-attn."""

    name = "flash-attn"
    device = "cuda"
    package, extra = "flash-attn", "flash"
    is_half_only = True
    most_dim = 256

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        from flash_attn import flash_attn_func

        _check(query, key, is_causal)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        out, lse, _ = flash_attn_func(
            q, k, v, softmax_scale=scale, causal=is_causal, return_attn_probs=True
        )
        return _unbatched(out.transpose(1, 2), lse, query)


class FlashAttn4(Attention):
    """The package flash-attn-4. It is a pre-release and is used only when it is named."""

    name = "flash-attn-4"
    device = "cuda"
    package, extra = "flash-attn-4", "flash4"
    capability = (9, 0)
    is_half_only = True
    most_dim = 128

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
    ) -> Partial:
        from flash_attn.cute import flash_attn_func

        _check(query, key, is_causal)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        out, lse = flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal, return_lse=True)
        return _unbatched(out.transpose(1, 2), lse, query)


# "auto" takes the first kernel that can be used. Kernels after the reference must be named.
ATTENTION: tuple[Attention, ...] = (
    NativeCpu(),
    AtenCpu(),
    Cudnn(),
    FlashAttn2(),
    Flash(),
    Efficient(),
    Reference(),
    FlashAttn4(),
)


def is_installed(package: str) -> bool:
    """Look a package up by its own name: flash-attn and flash-attn-4 share a module name."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


@lru_cache(maxsize=64)
def _bounds(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each of several sequences begins, and where the last one ends: int32, on `device`.

    Every layer of a pass asks for the same.
    """
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def _check(query: Tensor, key: Tensor, is_causal: bool) -> None:
    assert key.shape[1] > 0
    assert not is_causal or query.shape[1] == key.shape[1]


def _rows_of_groups(query: Tensor, key: Tensor) -> Tensor:
    """The heads of a group as rows of one product, so that each key is read once.

    `query`: [heads, queries, head_dim]. Returns [1, kv_heads, group · queries, head_dim].
    """
    return query.reshape(1, key.shape[0], -1, query.shape[-1])


def _unbatched(out: Tensor, lse: Tensor, query: Tensor) -> Partial:
    """Drop the batch dimension, rows beyond `queries`, and a last dimension of size 1."""
    heads, queries, _ = query.shape
    return Partial(out[0], lse.reshape(heads, -1)[:, :queries])
