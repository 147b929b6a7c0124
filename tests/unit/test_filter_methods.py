"""The table of filter methods, and the two that choose without looking at the prompt."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

import gemserve
from gemserve.config import EngineConfig
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.errors import ConfigError
from gemserve.filtering.controls import BlindSelector, Position, Uniform
from gemserve.filtering.methods import METHODS, SERVED_METHODS
from gemserve.filtering.protected_budget import always_read, count_always_read, reserve
from gemserve.llm import LLM

SERVER = Path(gemserve.__file__).parent
NAMING = {
    "filtering/methods.py",  # the table
    "config.py",  # the default
    "calibration/search/choose_layer.py",  # calibrates for one method
    "calibration/search/choose_segment.py",  # the same
    "calibration/search/choose_keep.py",  # the same
}


def test_methods_are_named_in_their_table_alone() -> None:
    """A new method had to be entered in five files, and code that tested names forgot it."""
    names = {*METHODS} - {"none", "position", "random"}  # these are other things' names, too
    naming = set()
    for path in SERVER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in names:
                naming.add(path.relative_to(SERVER).as_posix())
    assert naming == NAMING


def test_requests_may_name_these() -> None:
    """Names that clients use must not go."""
    names = ("none", "gemfilter", "sieve", "snapkv", "position", "random")
    assert {*names} <= {*SERVED_METHODS}
    assert not {"fastkv", "claa"} & {*SERVED_METHODS}


def test_a_default_that_does_not_exist_is_found_before_loading() -> None:
    with pytest.raises(ConfigError, match=r"filter_method='best': must be one of none, "):
        LLM("/nowhere", EngineConfig(filter_method="best"))


def draws() -> list[tuple[int, list[ProtectedRange], int]]:
    """Lengths, protected ranges and budgets of prompts."""
    rng = random.Random(0)
    prompts = []
    for _ in range(300):
        num_tokens = rng.randrange(17, 300)
        starts = [rng.randrange(num_tokens) for _ in range(rng.randrange(5))]
        protected = [
            ProtectedRange(start, start + rng.randrange(30), Priority(rng.randrange(8)))
            for start in starts
        ]
        prompts.append((num_tokens, protected, rng.randrange(16, num_tokens)))
    return prompts


@pytest.mark.parametrize("selector", [Position(), Uniform()])
def test_exactly_the_budget_is_kept(selector: BlindSelector) -> None:
    """Beside what is always read, whatever the seed; the whole prompt if it has no more."""
    for number, (num_tokens, protected, keep) in enumerate(draws()):
        seed = number - (1 << 63)
        kept = selector.select(num_tokens, protected, keep, seed)
        assert len(kept) == min(num_tokens, keep + count_always_read(protected, num_tokens))
        assert list(kept) == sorted(set(kept))
        assert kept[0] >= 0
        assert kept[-1] < num_tokens
        reserved = reserve(protected, num_tokens, keep)
        assert set(always_read(protected, num_tokens)) == set(reserved.firm)
        assert set(reserved.positions) <= set(kept)
        assert len(reserved.rest) <= keep // 4
        assert selector.select(num_tokens, protected, keep, seed) == kept


def test_position_keeps_the_ends() -> None:
    """Both ends, the first token before the last one."""
    for num_tokens, protected, keep in draws():
        reserved = reserve(protected, num_tokens, keep)
        chosen = dict.fromkeys(reserved.positions)
        for position in sorted(range(num_tokens), key=lambda p: min(p, num_tokens - 1 - p)):
            if len(chosen) < keep + len(reserved.firm):
                chosen.setdefault(position)
        assert Position().select(num_tokens, protected, keep, 0) == tuple(sorted(chosen))


def test_random_follows_its_seed() -> None:
    """All tokens are equally likely, and another seed keeps others."""
    counts = [0] * 40
    for seed in range(400):
        for position in Uniform().select(40, (), 20, seed):
            counts[position] += 1
    assert min(counts) > 150
    assert max(counts) < 250
    assert len({Uniform().select(40, (), 20, seed) for seed in range(400)}) == 400
