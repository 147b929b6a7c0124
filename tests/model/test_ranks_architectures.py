"""Models of other architectures whose heads two processes share give the logits of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemserve.calibration.search.calibrated_core import build_ranked_core
from gemserve.config import ModelConfig
from gemserve.engine.build import build_core
from gemserve.engine.ranks.group import leave_group
from gemserve.engine.ranks.ranks import Ranks
from tests import models
from tests.model.test_ranks import ENGINE, Cores, compare, ids_of, request

# biases of the projections, norms of queries and keys, sliding windows
NAMES = ["qwen2", "qwen3", "mistral-window", "llama-dynamic"]


@pytest.fixture(params=NAMES)
def cores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cores]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = models.save(request.param, tmp_path)
    model = ModelConfig(model=str(folder), device="cpu", dtype="float32")
    engine = ENGINE
    if request.param == "mistral-window":  # which has no layer that could filter
        engine = replace(ENGINE, filter_method="none")
    ranks = Ranks(model, 2)
    try:
        yield Cores(build_core(model, engine), build_ranked_core(engine, ranks), ranks)
    finally:
        ranks.stop()
        leave_group()
        torch.set_num_threads(before)


def test_answers_are_those_of_one_process(cores: Cores) -> None:
    compare(cores, request("none", ids_of(1, 150)))
    if cores.two.config.filter_method != "none":
        compare(cores, request("sieve", ids_of(2, 200)))
