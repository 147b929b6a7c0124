"""Servers for the measurements of agents' requests, and what they say about a filter's choice."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agents.prompt_parts import Chat, load_tokenizer
from benchmarks.shared.server_process import ServeProcess
from benchmarks.shared.streamed_chat import stream_chat

_START_S = 180
_STOP_S = 20
_TIMEOUT_S = 1800
# A filter reads prompts beyond the model's context: only what it keeps must fit.
LONG_PROMPTS = ("--max-prompt-tokens", "262144")
# Random weights know nothing, but the choice of what is read can be measured on them: "random" is
# tiny and reads 256K tokens with SmolLM2's tokenizer; "random-64k" is the default model of
# benchmarks/ttft.py with a context of 64K tokens and the built-in model's tokenizer.
RANDOM_MODELS = ("random", "random-64k")
_TINY: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
# ChatML with tools and calls as JSON in tags, as several families write them
_TEMPLATE = """
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if has_system -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- 'Functions that can be called, one in each line:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and has_system and loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class Refused(Exception):
    """The server's own words for why it does not read a request."""


@contextmanager
def serving(model: str, *options: str) -> Iterator[AgentServer]:
    """`gemserve serve` with a model by its name here, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        source = str(save_random(model, Path(folder))) if model in RANDOM_MODELS else model
        given = ["--model", source, "--served-model-name", model, *options]
        if model in RANDOM_MODELS:
            given += ["--calibrate", "off", "--filter-layer", str(_filter_layer(model))]
        process = ServeProcess(given, Path(folder) / "server.log")
        try:
            process.wait_until_ready(_START_S)
            tokenizer = load_tokenizer(source)
            with AgentServer(process.url, model, tokenizer, process.process.pid) as server:
                yield server
        finally:
            process.stop(_STOP_S)


class AgentServer:
    """A running server, seen by an agent. `pid`: its process, if this script has started it."""

    def __init__(self, url: str, model: str, tokenizer: Any, pid: int | None = None) -> None:
        self.http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self.model, self.tokenizer = model, tokenizer
        self._pid = pid
        self._filter_takes_tools: bool | None = None

    def __enter__(self) -> AgentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def cpu_s(self) -> float | None:
        """Processor time that the server has used, which other processes delay much less."""
        if self._pid is None:
            return None
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stream(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Chat, and return the filter's report with the times beside it, and the chunks.

        `ttft_s`: seconds to the first text. `cpu_s`: processor time for the whole answer.
        """
        before_s = self.cpu_s()
        ttft_s, chunks = stream_chat(self.http, {"model": self.model, **body})
        after_s = self.cpu_s()
        report = next(chunk["filter"] for chunk in chunks if chunk.get("filter"))
        used_s = None if after_s is None or before_s is None else after_s - before_s
        return {**report, "ttft_s": ttft_s, "cpu_s": used_s}, chunks

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply's body. Raises `Refused` for a status of 4xx, `httpx.HTTPError` for others."""
        reply = self.http.post(path, json={"model": self.model, **body})
        if 400 <= reply.status_code < 500:
            raise Refused(reply.json()["error"]["message"])
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def ask_filter(self, chat: Chat, options: Mapping[str, Any]) -> dict[str, Any]:
        """The filter's report on a chat, with its selection. Raises `Refused`.

        A server whose /v1/filter takes no tools is asked for an answer of one token instead.
        """
        body: dict[str, Any] = {
            "messages": chat.messages,
            "filter": {**options, "return_selection": True},
        }
        if chat.tools:
            body["tools"] = chat.tools
        if chat.tools and self._filter_takes_tools is None:
            self._filter_takes_tools = self._try_tools()
        if chat.tools and not self._filter_takes_tools:
            reply = self.post("/v1/chat/completions", {**body, "max_tokens": 1})
        else:
            reply = self.post("/v1/filter", body)
        report: dict[str, Any] = reply["filter"]
        return report

    def send_recorded(self, chat: Chat, options: Mapping[str, Any]) -> dict[str, Any]:
        """The filter's report on a request as an agent has sent it. Raises `Refused`.

        Only the model, the length of the answer and streaming are changed.
        """
        assert chat.recorded is not None
        path, recorded = chat.recorded
        left_out = ("max_tokens", "max_completion_tokens", "stream_options")
        body = {name: value for name, value in recorded.items() if name not in left_out}
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body |= {"model": self.model, "stream": False, limit: 1}
        reply = self.post(path, {**body, "filter": {**options, "return_selection": True}})
        report: dict[str, Any] = reply["filter"]
        return report

    def _try_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
        body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool]}
        try:
            self.post("/v1/filter", body)
        except Refused as error:
            if "tools" not in str(error):
                raise
            return False
        return True


def save_random(model: str, folder: Path) -> Path:
    """Write a model of random weights with its tokenizer, as a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from benchmarks.shared import harness

    torch.manual_seed(0)
    if model == "random":
        tokenizer = load_tokenizer("smollm2")
        tokenizer.chat_template = _TEMPLATE
        hf = AutoModelForCausalLM.from_config(LlamaConfig(**_TINY), dtype=torch.float32)
        with torch.no_grad():  # attention far from uniform, as that of a trained model
            for parameter in hf.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3)
    else:
        tokenizer = load_tokenizer("builtin")
        config = {**harness.SHAPES["small"].config, "max_position_embeddings": 65536}
        hf = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.float32)
    hf.config.bos_token_id = tokenizer.bos_token_id
    hf.config.eos_token_id = tokenizer.eos_token_id
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _filter_layer(model: str) -> int:
    from benchmarks.shared import harness

    return 2 if model == "random" else harness.FILTER_LAYER
