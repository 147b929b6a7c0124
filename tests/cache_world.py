"""Engines over tiny models whose every decision is drawn from a seed, and adapters for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from gemserve.adapters.kinds import load_adapter
from gemserve.config import EngineConfig
from gemserve.engine.core import Core
from gemserve.engine.scheduling.pace import Crowd
from gemserve.engine.scheduling.time_shares import Portion, TenantLoad
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.cores import core_over
from tests.model.test_selection import NoText

UNIT = 2 * 16 * 4  # bytes of one token's keys in one layer of the tiny models
LAYER = 2
HAS_DISK = "cache_dir" in EngineConfig.__slots__
WINDOWED = "qwen2-window"
# of the same shape, so that only the weights tell their keys apart
OTHER_WEIGHTS = {"llama": "llama again", "llama again": "llama"}


class World:
    """Tiny models, and adapters that were loaded one after the other under two names."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_folders = folder, 0
        self._models: dict[str, CausalModel] = {}
        self._adapters: dict[str, dict[str, list[Adapter]]] = {}
        self._cold: dict[tuple[str, int], Core] = {}

    def model(self, name: str) -> CausalModel:
        if name not in self._models:
            self._models[name] = CausalModel(weights_of(name))
        return self._models[name]

    def adapters(self, model_name: str) -> dict[str, list[Adapter]]:
        """By name, the adapters that its folder has held. A reload takes another one of them."""
        if model_name not in self._adapters:
            third = "ntk" if model_name == WINDOWED else "prefix"  # which a window would lose
            kinds = {"style": ("ntk", "ntk", third), "tone": ("lora", "activation")}
            self._adapters[model_name] = {
                name: [self._load(model_name, name, kind, seed) for seed, kind in enumerate(listed)]
                for name, listed in kinds.items()
            }
        return self._adapters[model_name]

    def new_folder(self) -> Path:
        """An empty folder for a document cache."""
        self._num_folders += 1
        made = self._folder / f"cache-{self._num_folders}"
        made.mkdir()
        return made

    def cold(self, model_name: str, tokens: int) -> Core:
        if (model_name, tokens) not in self._cold:
            core = new_core(self.model(model_name), tokens, cache_memory=0.0, rng=None)
            self._cold[model_name, tokens] = core
        return self._cold[model_name, tokens]

    def _load(self, model_name: str, name: str, kind: str, seed: int) -> Adapter:
        model = self.model(model_name)
        folder = self._folder / f"{model_name}-{name}-{seed}"
        if kind == "lora":
            adapters.write_lora(folder, weights_of(model_name), seed, target_modules=["k_proj"])
        else:
            adapters.write(folder, kind, model, seed)
        return load_adapter(name, folder, model, base_of(model), 1 << 24)


def weights_of(name: str) -> Any:
    return models.build(name.removesuffix(" again"), seed=int(name.endswith(" again")))


def new_core(
    model: CausalModel,
    tokens: int,
    *,
    cache_memory: float,
    rng: Random | None,
    folder: Path | None = None,
) -> Core:
    """`rng` None: every pass is one chunk without pauses. `folder`: for documents on disk."""
    core = core_over(
        model,
        NoText(),
        EngineConfig(
            filter_layer=LAYER,
            filter_min_tokens=0,
            kv_memory_bytes=tokens * UNIT,
            cache_memory=cache_memory,
            min_chunk_tokens=32,
            max_chunk_tokens=400 if rng else 4096,
            **({} if folder is None else {"cache_dir": str(folder)}),
        ),
        frozenset(),
    )
    pace: Any = RandomPace(rng, model.shape.layer(0, 1))
    core._pace = pace
    if core._disk is not None:
        core._disk._seconds_per_cost = lambda: pace.seconds_per_cost
    core._runner.memory.rows.zero_()
    return core


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder as it is while another thread writes and removes files in it."""
    for path in source.iterdir():
        with suppress(FileNotFoundError):
            shutil.copy2(path, target / path.name)


def damage_file(folder: Path, rng: Random) -> int:
    """Cut a file off, or change one of its bits. Return the number of files damaged."""
    files = sorted(folder.glob("kv-*.safetensors"))
    if not files:
        return 0
    content = bytearray((path := rng.choice(files)).read_bytes())
    place = rng.randrange(len(content))
    if rng.random() < 0.5:
        del content[place:]
    else:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return 1


class RandomPace:
    """Draws what the engine's pace measures, so that a seed alone decides about a trace."""

    seconds_per_cost = 1.0  # to compute takes so long that loading always pays

    def __init__(self, rng: Random | None, token_cost: float) -> None:
        self._rng, self._token_cost = rng, token_cost
        self._pauses = rng.choice((0.0, 0.1, 0.5)) if rng else 0.0

    def is_decode_due(self, crowd: Crowd) -> bool:
        return self._rng is None or self._rng.random() < 0.5

    def slice_s(self, crowd: Crowd) -> float:
        """Either a pass pauses at every chance, or it does not pause."""
        is_paused = self._rng is not None and self._rng.random() < self._pauses
        return 0.0 if is_paused else float("inf")

    def piece_cost(self, crowd: Crowd) -> float:
        num_tokens = 4096 if self._rng is None else self._rng.choice((1, 100, 200, 400))
        return self._token_cost * num_tokens

    def divide(self, loads: Sequence[TenantLoad]) -> Portion:
        """Some of the sequences are left out of a step."""
        return Portion(4 if self._rng is None else self._rng.choice((1, 2, 8)), None)

    def observe_decode(
        self, seconds: float, num_rows: int = 1, portion: Portion | None = None
    ) -> None: ...

    def observe_slice(self, seconds: float, portion: Portion | None = None) -> None: ...

    def observe_pass(self, seconds: float, cost: float) -> None: ...
