"""Trees of modules that share their weights."""

from __future__ import annotations

import copy
from typing import Any


def shared_tree(module: Any) -> Any:
    """A tree of modules of its own over the same parameters: replacing a module here is not seen
    there."""
    clone = copy.copy(module)
    clone._modules = {
        name: None if child is None else shared_tree(child)
        for name, child in module._modules.items()
    }
    clone._parameters = dict(module._parameters)
    clone._buffers = dict(module._buffers)
    return clone
