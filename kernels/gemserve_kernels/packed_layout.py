"""How oneDNN packs weights in bfloat16: [outs / 64][ins / 2][64][2] numbers, if sizes suit it."""

from __future__ import annotations

import ctypes

import torch

PACKED_BLOCK = (64, 32)  # outputs and inputs of a block


def check_layout(weight: torch.Tensor, outs: int, ins: int) -> None:
    """Raise `ValueError` unless a packed weight is in blocks as compiled code reads them.

    oneDNN chooses the layout by shape and processor, so one weight of each shape is enough.
    """
    if outs % PACKED_BLOCK[0] or ins % PACKED_BLOCK[1] or weight.dtype != torch.bfloat16:
        raise ValueError(f"a packed weight [{outs}, {ins}] of {weight.dtype}")
    address = torch.ops.mkldnn.data_ptr(weight)
    found = (ctypes.c_int16 * (outs * ins)).from_address(address)
    numbers = torch.frombuffer(found, dtype=torch.bfloat16).view(outs // 64, ins // 2, 64, 2)
    plain = weight.to_dense().view(outs // 64, 64, ins // 2, 2)
    if not torch.equal(numbers.transpose(1, 2), plain):
        raise ValueError("packed weights in another layout")
