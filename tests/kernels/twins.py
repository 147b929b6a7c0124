"""How Triton's kernels are tested: against their references, in memory that tells, and by mutants.

Without a GPU they run in Triton's interpreter (tests/conftest.py asks for it), on a GPU compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# three products in tf32 stand for one in float32 on a GPU
CLOSE = 3e-6 if DEVICE.type == "cpu" else 3e-5
_GUARD = 4096  # elements on either side


def twin(name: str) -> ModuleType:
    """A module of Triton kernels; where triton is not installed, the importing one is skipped."""
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module(f"gemserve_kernels.{name}")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal, in memory that is NaN around it."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    view = amid(shape, torch.nan, dtype)[0]
    return view.copy_(torch.randn(*shape, generator=generator))


def amid(
    shape: Sequence[int], fill: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of `fill`, and the memory around it, that too: a mutant may reach for it."""
    count = math.prod(shape)
    whole = torch.full((count + 2 * _GUARD,), fill, dtype=dtype, device=DEVICE)
    return whole[_GUARD : _GUARD + count].view(shape), whole


def wide(tensor: torch.Tensor, dim: int, more: int = 5) -> torch.Tensor:
    """The same values as a view of memory with NaN behind them in `dim`."""
    shape = list(tensor.shape)
    shape[dim] += more
    view = amid(shape, torch.nan, tensor.dtype)[0].narrow(dim, 0, tensor.shape[dim])
    return view.copy_(tensor)


@contextmanager
def guarded() -> Iterator[None]:
    """Within, `torch.empty` yields NaN, and at the end nothing around it may have been written."""
    made: list[torch.Tensor] = []

    def empty(*size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape: Sequence[int] = size[0] if isinstance(size[0], Sequence) else size
        assert device.type == DEVICE.type
        view, whole = amid(shape, torch.nan, dtype)
        made.append(whole)
        return view

    with mock.patch.object(torch, "empty", empty):
        yield
    for whole in made:
        assert bool(whole[:_GUARD].isnan().all()), "written before its start"
        assert bool(whole[-_GUARD:].isnan().all()), "written beyond its end"


def mutant(
    module: ModuleType, folder: Path, old: str, new: str, *, nth: int | None = None, **names: Any
) -> ModuleType:
    """A copy of `module` in which `old` is `new`: its one occurrence, or the nth, from 0.

    `names` are put in place of what the module has imported.
    """
    assert module.__file__ is not None
    pieces = Path(module.__file__).read_text().split(old)
    expected = len(pieces) == 2 if nth is None else nth + 1 < len(pieces)
    assert expected, f"{old!r} does not say what to mutate"
    at = (nth or 0) + 1
    path = folder / f"mutant_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(old.join(pieces[:at]) + new + old.join(pieces[at:]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # where dataclasses look for their module
    spec.loader.exec_module(made)
    for name, value in names.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def assert_caught(made: ModuleType, check: Callable[[ModuleType, Any], None], cases: Any) -> None:
    """Some case's comparison fails for the mutant."""
    with pytest.raises(AssertionError):  # noqa: PT012
        for case in cases:
            check(made, case)
