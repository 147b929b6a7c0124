"""Which backend is chosen, what a missing one says, and that all do the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gemserve.config import ATTENTION_BACKENDS
from gemserve_kernels import Backend, KVTable, Partial, attention_backends, backends, select_backend
from gemserve_kernels.attention_backends import ATTENTION, Cudnn, Reference
from gemserve_kernels.native_library import CannotCompile
from tests.kernels.twins import CLOSE, DEVICE, random

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BY_NAME = {attention.name: attention for attention in ATTENTION}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make it seem that this is another one."""

    def pretend(
        *installed: str,
        capability: tuple[int, int] = (9, 0),
        has_cudnn: bool = True,
        has_bfloat16: bool = False,
        has_amx: bool = False,
        has_triton: bool = find_spec("triton") is not None,
    ) -> None:
        monkeypatch.setattr(
            attention_backends, "is_installed", lambda package: package in installed
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: has_cudnn)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
        monkeypatch.setattr(backends, "find_spec", lambda _: has_triton or None)

    return pretend


def test_the_server_s_option_names_all_of_them() -> None:
    assert ("auto", *(attention.name for attention in ATTENTION)) == ATTENTION_BACKENDS


HOPPER, AMPERE = (9, 0), (8, 6)
HALF = {"dtype": torch.bfloat16, "head_dim": 128}
CHOICES: list[tuple[torch.device, tuple[int, int], dict[str, Any], tuple[str, ...], str]] = [
    (CPU, HOPPER, {}, (), "aten-cpu"),
    (CUDA, HOPPER, {}, (), "cudnn"),
    (CUDA, HOPPER, HALF, ("flash-attn",), "cudnn"),
    (CUDA, HOPPER, {"dtype": torch.float32}, ("flash-attn",), "efficient"),
    (CUDA, HOPPER, {"head_dim": 36}, ("flash-attn",), "efficient"),
    (CUDA, HOPPER, {"head_dim": 256}, (), "flash"),
    (CUDA, HOPPER, {"head_dim": 512}, (), "efficient"),
    (CUDA, AMPERE, HALF, (), "flash"),
    (CUDA, AMPERE, HALF, ("flash-attn",), "flash-attn"),
    (CUDA, AMPERE, {}, ("flash-attn-4",), "flash"),  # a pre-release is asked for by name
]


@pytest.mark.parametrize(("device", "capability", "known", "installed", "name"), CHOICES)
def test_auto_takes_the_first_that_can(
    device: torch.device,
    capability: tuple[int, int],
    known: dict[str, Any],
    installed: tuple[str, ...],
    name: str,
    machine: Callable[..., None],
) -> None:
    machine(*installed, capability=capability)
    for choice in (None, "auto"):
        assert select_backend(device, name=choice, **known).name == name


@pytest.mark.parametrize(
    ("dtype", "is_compiled", "name"),
    [
        (torch.bfloat16, True, "native-cpu"),
        (torch.bfloat16, False, "aten-cpu"),
        (torch.float32, True, "aten-cpu"),
        (None, True, "aten-cpu"),
    ],
)
def test_a_cpu_with_the_instructions_has_its_own(
    dtype: torch.dtype | None,
    is_compiled: bool,
    name: str,
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a compiler torch's kernel serves, as before."""

    def open_reading() -> None:
        if not is_compiled:
            raise CannotCompile("no compiler")

    machine(has_bfloat16=True)
    monkeypatch.setattr(attention_backends, "open_reading", open_reading)
    assert select_backend(CPU, dtype=dtype, head_dim=64).name == name


@needs_triton
def test_what_runs_beside_attention(machine: Callable[..., None]) -> None:
    machine()
    assert select_backend(CPU).kernels == "torch"
    found = select_backend(CUDA)
    assert (found.kernels, found.is_recordable) == ("triton", True)
    reference = select_backend(CUDA, name="reference")
    assert (reference.kernels, reference.is_recordable) == ("torch", False)
    machine(has_triton=False)
    assert select_backend(CUDA).kernels == "torch"


@pytest.mark.parametrize("name", [n for n in BY_NAME if not n.endswith("-cpu")])
def test_each_can_be_had_by_name(name: str, machine: Callable[..., None]) -> None:
    machine("flash-attn", "flash-attn-4")
    backend = select_backend(CUDA, name=name, dtype=torch.bfloat16, head_dim=64)
    assert backend.name == name


REFUSALS: list[tuple[str, torch.device, dict[str, Any], dict[str, Any], str]] = [
    ("cudnn", CPU, {}, {}, "runs on cuda only, not on cpu"),
    ("aten-cpu", CUDA, {}, {}, "runs on cpu only, not on cuda"),
    ("native-cpu", CPU, {}, {}, "needs a processor with AVX-512's bfloat16 instructions"),
    ("native-cpu", CPU, {}, {"has_bfloat16": True, "has_amx": True}, "needs a processor with"),
    ("native-cpu", CPU, {"dtype": torch.float32}, {"has_bfloat16": True}, "takes bfloat16, not"),
    ("native-cpu", CPU, {"head_dim": 72}, {"has_bfloat16": True}, "takes a head_dim that is a mul"),
    ("native-cpu", CPU, {"head_dim": 512}, {"has_bfloat16": True}, "takes a head_dim that is a"),
    ("flash-attn", CUDA, {}, {}, r"needs flash-attn: pip install 'gemserve\[flash\]'"),
    ("flash-attn-4", CUDA, {}, {}, r"needs flash-attn-4: pip install 'gemserve\[flash4\]'"),
    ("cudnn", CUDA, {}, {"has_cudnn": False}, "needs a torch that is built with cuDNN"),
    ("cudnn", CUDA, {}, {"capability": (8, 6)}, "needs compute capability 9.0, this GPU has 8.6"),
    ("flash", CUDA, {"dtype": torch.float32}, {}, "takes float16 and bfloat16, not float32"),
    ("cudnn", CUDA, {"head_dim": 256}, {}, "takes a head_dim of at most 128, not 256"),
    ("flash", CUDA, {"head_dim": 36}, {}, "takes a head_dim that is a multiple of 8, not 36"),
    (
        "triton",
        CUDA,
        {},
        {},
        "must be one of auto, native-cpu, aten-cpu, cudnn, flash-attn, flash, ",
    ),
]


@pytest.mark.parametrize(("name", "device", "known", "pretended", "said"), REFUSALS)
def test_one_that_cannot_be_used_is_refused_with_the_reason(
    name: str,
    device: torch.device,
    known: dict[str, Any],
    pretended: dict[str, Any],
    said: str,
    machine: Callable[..., None],
) -> None:
    machine(**pretended)
    with pytest.raises(ValueError, match=f"attention_backend={name}: {said}"):
        select_backend(device, name=name, **known)


def test_an_old_gpu_is_told_from_a_new_one(machine: Callable[..., None]) -> None:
    machine("flash-attn-4", capability=(8, 6))
    with pytest.raises(ValueError, match=r"needs compute capability 9\.0, this GPU has 8\.6"):
        select_backend(CUDA, name="flash-attn-4")


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device=meta: no attention backend; use cpu or cuda"):
        select_backend(torch.device("meta"))


def test_the_packages_share_a_module_and_are_told_apart() -> None:
    assert attention_backends.is_installed("torch")
    assert not attention_backends.is_installed("flash-attn-4-of-which-there-is-none")


# Shapes of outputs, found on the meta device, where torch checks arguments and computes nothing.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_torch_s_ops_take_what_they_are_given(name: str, is_causal: bool) -> None:
    queries, keys = (7, 7) if is_causal else (7, 33)
    like: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    query = torch.empty(8, queries, 64, **like)
    key, value = torch.empty(2, 2, keys, 64, **like)
    part = BY_NAME[name].part(query, key, value, scale=0.1, is_causal=is_causal)
    assert part.out.shape == query.shape
    assert (part.lse.shape, part.lse.dtype) == ((8, queries), torch.float32)


def stand_in(query: Any, key: Any, value: Any, scale: float, is_causal: bool) -> Partial:
    """Of operands and results in the packages' layout, [1, tokens, heads, head_dim]."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    part = Reference().part(q, k, v, scale=scale, is_causal=is_causal)
    return Partial(part.out.transpose(0, 1)[None], part.lse[None])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-4"])
def test_packages_get_and_give_their_own_layout(
    name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(
        q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, return_attn_probs: bool
    ) -> Any:
        assert return_attn_probs
        part = stand_in(q, k, v, softmax_scale, causal)
        return part.out, part.lse, None

    def fourth(
        q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, return_lse: bool
    ) -> Any:
        assert return_lse
        part = stand_in(q, k, v, softmax_scale, causal)
        return part.out, part.lse

    package: Any = ModuleType("flash_attn")
    package.flash_attn_func = second
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(
        sys.modules,
        "flash_attn.cute",
        SimpleNamespace(flash_attn_func=fourth),  # type: ignore[arg-type]
    )
    queries, keys = (9, 9) if is_causal else (5, 9)
    query, key = torch.randn(6, queries, 32), torch.randn(3, keys, 32)
    ours = BY_NAME[name].part(query, key, key + 1, scale=0.2, is_causal=is_causal)
    theirs = Reference().part(query, key, key + 1, scale=0.2, is_causal=is_causal)
    torch.testing.assert_close(ours.out, theirs.out)
    torch.testing.assert_close(ours.lse, theirs.lse)


class CutCudnn(Cudnn):
    """Notes the sizes that would need plans, and computes with the reference."""

    step, blocks, rest = 4, (16, 8), Reference()

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, bool]] = []

    def planned(
        self, query: Any, key: Any, value: Any, *, scale: float, is_causal: bool
    ) -> Partial:
        self.sizes.append((query.shape[1], key.shape[1], is_causal))
        return Reference().part(query, key, value, scale=scale, is_causal=is_causal)


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "sizes"),
    [
        (8, 8, True, [(8, 8, True)]),
        (6, 6, True, []),
        (8, 40, False, [(8, 16, False), (8, 16, False), (8, 8, False)]),
        (6, 29, False, [(4, 16, False), (4, 8, False)]),
        (6, 7, False, []),
        (3, 40, False, []),
    ],
)
def test_cudnn_gets_few_sizes(
    queries: int, keys: int, is_causal: bool, sizes: list[tuple[int, int, bool]]
) -> None:
    """A plan for every new length would take longer than the attention."""
    query, key = torch.randn(6, queries, 32), torch.randn(3, keys, 32)
    cut = CutCudnn()
    ours = cut.part(query, key, key + 1, scale=0.2, is_causal=is_causal)
    theirs = Reference().part(query, key, key + 1, scale=0.2, is_causal=is_causal)
    torch.testing.assert_close(ours.out, theirs.out)
    torch.testing.assert_close(ours.lse, theirs.lse)
    assert cut.sizes == sizes


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_kernel_with_as_many_key_heads_gets_them(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the past's keys are not repeated for it: a group's heads become rows."""

    def efficient(
        q: Any, k: Any, v: Any, bias: Any, has_lse: bool, dropout: float, causal: bool, scale: float
    ) -> Any:
        assert (bias, has_lse, dropout) == (None, True, 0.0)
        assert q.shape[1] == k.shape[1] == (6 if is_causal else 3)
        part = Reference().part(q[0], k[0], v[0], scale=scale, is_causal=causal)
        padded = torch.cat([part.lse, torch.full((len(part.lse), 3), torch.nan)], 1)
        return part.out[None], padded[None], None, None

    ops = SimpleNamespace(_scaled_dot_product_efficient_attention=efficient)
    monkeypatch.setattr(torch.ops, "aten", ops)
    query, key = torch.randn(6, 9, 32), torch.randn(3, 9, 32)
    ours = BY_NAME["efficient"].part(query, key, key + 1, scale=0.2, is_causal=is_causal)
    theirs = Reference().part(query, key, key + 1, scale=0.2, is_causal=is_causal)
    torch.testing.assert_close(ours.out, theirs.out)
    torch.testing.assert_close(ours.lse, theirs.lse)


# Triton's operations by way of the backend: the kernels have tests of their own.


@needs_triton
def test_triton_s_operations_equal_the_plain_ones() -> None:
    from gemserve_kernels.triton_backend import TritonBackend

    ours, plain = TritonBackend(Reference()), Backend(Reference())
    query, key = random(4, 6, 32), random(2, 40, 32, seed=1)
    for softcap in (None, 3.0):
        options = {"scale": 0.2, "softcap": softcap}
        rows = torch.tensor([3, 11, 12, 20, 38, 39], device=DEVICE)
        close(
            ours.largest_attention(query, key, rows, **options),
            plain.largest_attention(query, key, rows, **options),
        )
        votes = plain.grouped_probabilities(query, key, **options)
        close(ours.grouped_probabilities(query, key, **options), votes)
        close(ours.pooled(votes, kind="max", width=7), plain.pooled(votes, kind="max", width=7))
    pieces = [
        plain.part(query, key[:, low:high], key[:, low:high], scale=0.2, is_causal=False)
        for low, high in ((0, 13), (13, 40))
    ]
    term = (random(4, 32, 4, seed=2), random(4, 4, 32, seed=3), random(4, 32, seed=4).abs())
    close(ours.merge_ntk(pieces, query, *term), plain.merge_ntk(pieces, query, *term))
    chosen = torch.tensor([[[3, 30], [0, 39]]], device=DEVICE)
    results = []
    for backend in (ours, plain):
        source = torch.stack([key, key + 1])[None]
        target = torch.zeros(1, 2, 2, 2, 32, device=DEVICE)
        backend.gather(source, target, chosen)
        results.append(target)
    close(*results)


@needs_triton
@pytest.mark.parametrize("window", [None, 5])
def test_triton_s_decode_step_equals_the_plain_one(window: int | None) -> None:
    """Filled up with an empty sequence, and with a bound on lengths that none reaches."""
    from gemserve_kernels.triton_backend import TritonBackend

    results = []
    for backend in (TritonBackend(Reference()), Backend(Reference())):
        table = torch.tensor([[0, 9, 18, 36, 7], [72, 4, 8, 16, 4], [0] * 5], device=DEVICE)
        spans = KVTable(rows=random(104, 32), table=table, kv_heads=2, longest=64)
        backend.write(spans, random(2, 3, 32, seed=1), random(2, 3, 32, seed=2), layer=1)
        part = backend.decode(random(3, 4, 32, seed=3), spans, layer=1, scale=0.2, window=window)
        results.append((spans.rows, part.out, part.lse))
    for ours, plain in zip(*results, strict=True):
        close(ours, plain)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)


# What only a GPU can tell.


def usable(dtype: torch.dtype) -> list[str]:
    return [a.name for a in ATTENTION if a.find_obstacle(CUDA, dtype, 64) is None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "is_causal"),
    [(5, 1031, False), (257, 257, True), (1500, 12_500, False), (2048, 2048, True)],
)
def test_every_kernel_that_is_there_equals_the_reference(
    queries: int, keys: int, is_causal: bool, dtype: torch.dtype
) -> None:
    query = random(8, queries, 64).to(dtype)
    key, value = random(2, 2, keys, 64, seed=1).to(dtype)
    theirs = Reference().part(query, key, value, scale=0.125, is_causal=is_causal)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for name in usable(dtype):
        ours = BY_NAME[name].part(query, key, value, scale=0.125, is_causal=is_causal)
        for one, other in ((ours.out, theirs.out), (ours.lse, theirs.lse)):
            torch.testing.assert_close(
                one, other, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_many_keys_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing takes as much memory as the keys themselves, in each layer."""
    plain, seen = Reference(), list[int]()

    def part(query: Any, key: Any, value: Any, **options: Any) -> Partial:
        seen.append(key.shape[1])
        return plain.part(query, key, value, **options)

    monkeypatch.setattr(attention_backends, "open_reading", lambda: SimpleNamespace(part=part))
    monkeypatch.setattr(attention_backends, "_MOST_PACKED", 100)
    query, key, value = (random(2, count, 16) for count in (3, 250, 250))
    got = BY_NAME["native-cpu"].part(query, key, value, scale=0.3, is_causal=False)
    assert seen == [100, 100, 50]
    expected = plain.part(query, key, value, scale=0.3, is_causal=False)
    torch.testing.assert_close(got.out, expected.out, atol=CLOSE, rtol=0)
    torch.testing.assert_close(got.lse, expected.lse, atol=CLOSE, rtol=0)
