"""The tensor operations of one kind of machine, in one object that is chosen once.

`Backend` lists all operations. Each name below is a function whose docstring is its contract. A
backend for another kind of machine replaces the functions that it does better.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from gemserve_kernels import attention_scores, kv_copy, ntk
from gemserve_kernels.attention_backends import ATTENTION, AtenCpu, Attention, Reference
from gemserve_kernels.decode import decode_attention, fused_decode_attention


class Backend:
    """Plain torch, for any device.

    `name`, `part`, `several`: the attention kernel's. `kernels` names what computes the other
    operations. If `is_recordable`, `write` and `decode` never wait for the device, so that a CUDA
    graph can record them.
    """

    kernels = "torch"
    is_recordable = False

    decode = staticmethod(decode_attention)
    write = staticmethod(kv_copy.write_tokens)
    gather = staticmethod(kv_copy.gather_tokens)
    merge_ntk = staticmethod(ntk.merge_ntk)
    largest_attention = staticmethod(attention_scores.largest_attention)
    attention_beside_sinks = staticmethod(attention_scores.attention_beside_sinks)
    grouped_probabilities = staticmethod(attention_scores.grouped_probabilities)
    pooled = staticmethod(attention_scores.pooled)

    def __init__(self, attention: Attention) -> None:
        self.name = attention.name
        self.part, self.several = attention.part, attention.several


class CpuBackend(Backend):
    """Decodes one sequence after the other with torch's fused kernel, the fastest on a CPU."""

    decode = staticmethod(fused_decode_attention)


def select_backend(
    device: torch.device,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
) -> Backend:
    """Return the backend for `device` whose attention kernel is called `name`.

    None or "auto" takes the first kernel that can run. "reference" is plain torch for every
    operation. With any other kernel on CUDA, Triton computes the other operations where triton is
    installed. `dtype` and `head_dim` are those of keys and values, if they are known already.

    Raises `ValueError` with the reason if no kernel can be used.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: no attention backend; use cpu or cuda")
    by_name = {attention.name: attention for attention in ATTENTION}
    if name in (None, "auto"):
        known = (a for a in ATTENTION if dtype is not None or not a.is_for_known_dtype)
        chosen = next(a for a in known if a.find_obstacle(device, dtype, head_dim) is None)
    else:
        if name not in by_name:
            raise ValueError(f"attention_backend={name}: must be one of auto, {', '.join(by_name)}")
        chosen = by_name[name]
        obstacle = chosen.find_obstacle(device, dtype, head_dim)
        if obstacle is not None:
            raise ValueError(f"attention_backend={name}: {obstacle}")
    if isinstance(chosen, Reference):
        return Backend(chosen)
    if isinstance(chosen, AtenCpu):
        return CpuBackend(chosen)
    if find_spec("triton") is None:
        return Backend(chosen)
    from gemserve_kernels.triton_backend import TritonBackend

    return TritonBackend(chosen)
