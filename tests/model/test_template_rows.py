"""Chat templates of the families on models of their shapes: whose rows look, and in which layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble, calibration_for
from gemserve.engine.core import Core
from gemserve.errors import RequestError
from gemserve.filtering.sieve import Sieve
from gemserve.model.loading.loader import BUILTIN_PATH, LoadedModel
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.prompt import Prompt, chat_prompt
from tests import models
from tests.chat_templates import shaped_like
from tests.cores import core_over

WINDOW = 64
# Template, and the shape of the models that have it.
SHAPES = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
ASKED = "Where is the violin of the captain kept?"
DOCUMENT = "\n\n".join(f"Paragraph {i} speaks of the river and of the bridge." for i in range(60))


def gemma3() -> Any:
    """Six layers, of which the last sees everything, as one in six of the published models."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{**models.SIZES, "num_hidden_layers": 6},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@cache
def served(family: str) -> Core:
    from transformers import AutoTokenizer

    shape = SHAPES[family]
    hf = gemma3() if shape == "gemma3" else models.build(shape)
    tokenizer = shaped_like(AutoTokenizer.from_pretrained(BUILTIN_PATH), family)
    hf.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    loaded = LoadedModel(
        model=CausalModel(hf),
        tokenizer=tokenizer,
        eos_ids=frozenset(),
        source="/nowhere",
        name="/nowhere",
    )
    config = EngineConfig(
        kv_memory_bytes=64 << 20, filter_min_tokens=0, calibrate="off", max_chunk_tokens=256
    )
    guessed = calibration_for(loaded, config)
    return assemble(loaded, config, replace(guessed, ends_with=False))


def request_of(core: Core, prompt: Prompt, **options: Any) -> Request:
    given = {"keep": 128, "return_selection": True, **options}
    return Request(
        request_id="r",
        prompt_ids=prompt.ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        filter=core.planner.resolve(FilterOptions(**given)),
        protected=prompt.protected,
        breaks=prompt.breaks,
        question=prompt.question,
    )


def chat(core: Core, *turns: tuple[str, str]) -> Prompt:
    return chat_prompt(core.tokenizer, [{"role": role, "content": text} for role, text in turns])


def report_of(core: Core, request: Request) -> FilterReport:
    (report,) = [e.report for e in core.run_alone(request) if isinstance(e, Filtered)]
    core.check_integrity()
    return report


CHATS: dict[str, tuple[tuple[str, str], ...]] = {
    "at the end": (("user", f"{DOCUMENT}\n\n{ASKED}"),),
    "in front": (("user", f"{ASKED}\n\n{DOCUMENT}"),),
    "in a later turn": (
        ("user", f"{DOCUMENT}\n\nWho wrote it?"),
        ("assistant", "Ann wrote it."),
        ("user", ASKED),
    ),
}


@pytest.mark.parametrize("where", CHATS)
@pytest.mark.parametrize("family", SHAPES)
def test_the_rows_that_look_are_the_question(family: str, where: str) -> None:
    """They were the template's last tokens, which say nothing, or a reply's first ones."""
    core = served(family)
    prompt = chat(core, *CHATS[where])
    request = request_of(core, prompt)
    plan = core.planner.plan(request)
    read = [*prompt.ids, *plan.repeated]
    looking = str(core.tokenizer.decode([read[row] for row in plan.rows]))
    assert looking.strip() == ASKED
    assert bool(plan.repeated) == (where == "in front")
    if plan.repeated:
        assert plan.rows == tuple(range(len(prompt.ids), len(read)))
    assert plan.layer == core.config.filter_layer
    report = report_of(core, request)
    assert report.applied
    chosen = report.kept_tokens - report.protected_tokens
    assert 128 - Sieve().passage_limit(128) < chosen <= 128
    assert report.protected_tokens > len(ASKED.split())
    assert len(prompt.ids) > report.kept_tokens
    assert report.selection is not None
    kept = [prompt.ids[p] for start, stop in report.selection for p in range(start, stop)]
    assert ASKED in str(core.tokenizer.decode(kept))


@pytest.mark.parametrize("family", SHAPES)
def test_the_layer_that_filters_sees_everything(family: str) -> None:
    """40% of the depth of Gemma-3 is a layer that sees a window: the start was never found."""
    core = served(family)
    layer = core.config.filter_layer
    assert layer is not None
    assert core.model.sliding_windows[layer] is None
    if SHAPES[family] != "gemma3":
        assert set(core.model.sliding_windows) == {None}
        return
    assert core.model.sliding_windows == (*[WINDOW] * 5, None)
    prompt = chat(core, *CHATS["at the end"])
    request = request_of(core, prompt, layer=2)
    with pytest.raises(RequestError, match=rf"filter\.layer=2: .* only the last {WINDOW} tokens"):
        core.planner.check_layer_sees(request.filter, prompt.protected, len(prompt.ids))


@pytest.mark.parametrize("family", SHAPES)
def test_what_is_chosen_does_not_depend_on_chunks(family: str) -> None:
    """Windows below the filter layer, and a question that is read again, cut anywhere."""
    core = served(family)
    seen = []
    for size in (17, 4096):
        config = EngineConfig(
            kv_memory_bytes=64 << 20,
            filter_min_tokens=0,
            filter_layer=core.config.filter_layer,
            min_chunk_tokens=size,
            max_chunk_tokens=size,
        )
        other = core_over(core.model, core.tokenizer, config, frozenset(), core.calibration)
        prompt = chat(other, *CHATS["in front"])
        seen.append(report_of(other, request_of(other, prompt)).selection)
    assert seen[0] == seen[1]
