"""Makes the layers of some families do what gemserve's passes need of all layers.

A layer's class is replaced by a subclass of its own class, so copies of a layer, and the names of
its weights, are as before.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from gemserve.model.families.selective_scan import continuing, has_scan
from gemserve.model.shared_tree import with_modules

# they drop the keyword arguments that their attention function needs
_DROPPING = ("NemotronDecoderLayer", "StableLmDecoderLayer")


def prepare(layers: nn.ModuleList) -> None:
    """Change what is needed in a decoder's layers. Idempotent."""
    for index, layer in enumerate(layers):
        _prepare_layer(layer)
        for module in layer.modules():
            _prepare_part(module, index)


def _prepare_layer(layer: Any) -> None:
    kind: Any = type(layer)  # type checkers do not know that classes of modules are hashable
    if kind.__name__ in _DROPPING and not hasattr(layer, "hands_on"):
        layer.__class__ = _handing_on(kind)


def _prepare_part(module: Any, index: int) -> None:
    # Zamba's attention gets its layer's number with each call
    if getattr(module, "layer_idx", index) in (None, -1):
        module.layer_idx = index
    kind: Any = type(module)
    if has_scan(module):
        module.__class__ = continuing(kind)


@cache
def _handing_on(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of layers whose forward hands all keyword arguments on to its attention module."""
    known = inspect.signature(kind.forward).parameters

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        dropped = {name: value for name, value in keywords.items() if name not in known}
        attention = _With(self.self_attn, dropped)
        return kind.forward(with_modules(self, {"self_attn": attention}), *arguments, **keywords)

    return type(kind.__name__, (kind,), {"forward": forward, "hands_on": True})


class _With(nn.Module):
    """A module that gets further keyword arguments."""

    def __init__(self, module: nn.Module, keywords: dict[str, Any]) -> None:
        super().__init__()
        self._module, self._keywords = module, keywords

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._module(*arguments, **keywords, **self._keywords)
