"""Copies modules without copying their weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


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


def with_modules(module: Any, replacements: Mapping[str, nn.Module]) -> Any:
    """A shallow copy of `module` with some children replaced; the original is untouched."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **replacements}
    return clone


def replaced(module: Any, path: Sequence[str], replacements: Mapping[str, nn.Module]) -> Any:
    """A copy of `module` with some children of the module at `path` below it replaced."""
    if not path:
        return with_modules(module, replacements)
    inner = replaced(getattr(module, path[0]), path[1:], replacements)
    return with_modules(module, {path[0]: inner})
