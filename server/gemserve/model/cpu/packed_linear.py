"""Linear layers whose bfloat16 weights are laid out once for the CPU's matrix instructions.

oneDNN otherwise rearranges the weights in every call. For a few rows, as in decoding, that takes
longer than the product itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemserve.model.shared_tree import shared_tree
from gemserve_kernels.blocks import BlockWeight


class PackedLinear(nn.Linear):
    """A linear layer in oneDNN's own layout. It cannot be trained.

    It is still an `nn.Linear`, because PEFT wraps nothing else, and its parameter has the same name
    and shape. `weight` is a copy of it in the ordinary layout, [out_features, in_features].
    `packed` is what products read.
    """

    def __init__(self, linear: nn.Linear, *, is_tied: bool = False) -> None:
        """`is_tied`: the embedding has the same weight, which must stay as it is."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        packed = nn.Parameter(self.packed, requires_grad=False)
        self._parameters["weight"] = linear._parameters["weight"] if is_tied else packed

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        weight = self._parameters["weight"]
        assert weight is not None
        return weight.to_dense() if weight.is_mkldnn else weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, self.bias, "none", [], ""
        )
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing pays: in float32, one row takes longer than without it."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def with_packed_linears(model: Any) -> Any:
    """The same model with linear layers packed, but those whose weights are in blocks.

    The original stays as it is.
    """
    tree = shared_tree(model)
    embedding = tree.get_input_embeddings().weight
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not isinstance(child.weight, BlockWeight):
                module._modules[name] = PackedLinear(child, is_tied=child.weight is embedding)
    return tree
