"""A checkpoint on disk, served over HTTP, against transformers' own generate."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig, Switch
from gemserve.engine.build import build_core
from tests import models
from tests.compiled_step import needs_compiler


@pytest.mark.anyio
@pytest.mark.parametrize("cpu_step", [pytest.param("on", marks=needs_compiler), "off"])
@pytest.mark.parametrize("method", ["gemfilter", "sieve", "none"])
async def test_same_greedy_tokens_as_generate_on_the_kept_ids(
    method: str, cpu_step: Switch, tmp_path: Path
) -> None:
    directory = models.save("llama", tmp_path)
    engine = EngineConfig(filter_min_tokens=64, kv_memory_bytes=1 << 22, cpu_step=cpu_step)
    core = build_core(ModelConfig(model=str(directory), device="cpu"), engine)
    serving = build_serving(core, model_name="tiny", config=ServerConfig())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rng = random.Random(0)
    without_lines = [i for i in range(6, models.VOCAB) if "\n" not in tokenizer.decode([i])]
    prompt = rng.choices(without_lines, k=700)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 24,
        "filter": {"method": method, "keep": 96, "return_selection": True},
    }
    transport = httpx.ASGITransport(create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = (await client.post("/v1/completions", json=body, timeout=60)).json()
    serving.engine.stop()

    report = reply["filter"]
    assert report["applied"] == (method != "none")
    always = report["protected_tokens"]  # at the prompt's end, by sieve
    assert (always > 0) == (method == "sieve")
    separator = tokenizer.encode("a\n\n", add_special_tokens=False)[1:] if always else []
    read: list[int] = []
    for start, stop in report["selection"]:
        if read and start < 700 - always:  # another passage, and no neighbour
            read += separator
        read += prompt[start:stop]
    assert sum(stop - start for start, stop in report["selection"]) == report["kept_tokens"]
    assert len(read) == report["kept_tokens"] + report["added_tokens"]
    if method == "sieve":  # whole passages of at most 32 tokens, and what separates them
        assert report["added_tokens"] >= 2 * len(separator) > 0
        assert 96 - 32 < len(read) - always <= 96
    else:
        assert len(read) == (700 if method == "none" else 96)
    assert reply["usage"]["prompt_tokens"] == report["prompt_tokens"] == 700

    theirs = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([read])
    with torch.no_grad():
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert reply["choices"][0]["text"] == expected.rstrip("�")


@needs_compiler
def test_these_tests_decode_with_the_compiled_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Users' servers had it, and no test of a server did."""
    checkpoint = ModelConfig(model=str(models.save("llama", tmp_path)), device="cpu")
    with caplog.at_level(logging.INFO, logger="gemserve.model"):
        build_core(checkpoint, EngineConfig(kv_memory_bytes=1 << 22, calibrate="off"))
    assert "a decode step is one call of compiled code" in caplog.text
