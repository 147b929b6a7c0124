"""Copies a tree of modules without copying its weights."""

from __future__ import annotations

import copy
from typing import Any


def shared_tree(module: Any) -> Any:
    """A copy of a tree of modules over the same parameters.

    Replacing a module in the copy does not change the original.
    """
    clone = copy.copy(module)
    clone._modules = {
        name: None if child is None else shared_tree(child)
        for name, child in module._modules.items()
    }
    clone._parameters = dict(module._parameters)
    clone._buffers = dict(module._buffers)
    return clone
