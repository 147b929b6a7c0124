"""LiteLLM, with this server as an `openai/` model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.fakes import FakeCore, kept_of
from tests.guide import examples, run_example

TEXT = "Héllo 🌍!"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices when imported
CODE = """
import asyncio, litellm

place = {"model": "openai/builtin", "api_base": "http://127.0.0.1:8000/v1", "api_key": "none"}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
reply = litellm.completion(**place, messages=messages, max_tokens=7, stop=["x"], seed=3)
assert reply.choices[0].message.content == TEXT
assert reply.usage.completion_tokens == 4
options = {"stream": True, "stream_options": {"include_usage": True}}
chunks = list(litellm.completion(**place, messages=messages, **options))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
assert chunks[0].filter["reason"] == "short_prompt"
assert chunks[-1].usage.completion_tokens == 4
reply = asyncio.run(litellm.acompletion(**place, messages=messages))
assert reply.choices[0].message.content == TEXT
text = litellm.text_completion(
    **{**place, "model": "text-completion-openai/builtin"}, prompt="Hi", max_tokens=7
)
assert text.choices[0].text == TEXT
try:
    litellm.completion(**place, messages=messages, extra_body={"filter": {"keep": 3}})
except litellm.BadRequestError as error:
    assert "filter.keep=3" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.capability("LiteLLM", "filter")
def test_the_guide(url: str, folder: Path, core: FakeCore) -> None:
    (code,) = examples("LiteLLM", "python")
    interpreter = python_of("litellm")
    printed = run_example(
        code, "python", url=url, folder=folder, interpreter=interpreter, environment=OFFLINE
    )
    kept = kept_of(core.requests[0])
    assert printed == f"{TEXT}\n{kept} tokens kept\n{TEXT}"
    assert [(r.filter.method, r.filter.keep) for r in core.requests] == [("sieve", 512)] * 2


@pytest.mark.capability("LiteLLM", "chat", "stream", "errors")
def test_what_else_it_sends(url: str, folder: Path, core: FakeCore) -> None:
    code = f"TEXT = {TEXT!r}\n{CODE}"
    interpreter = python_of("litellm")
    run_example(
        code, "python", url=url, folder=folder, interpreter=interpreter, environment=OFFLINE
    )
    sampling = core.requests[0].sampling
    assert (sampling.max_tokens, sampling.stop, sampling.seed) == (7, ("x",), 3)
