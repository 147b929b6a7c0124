"""What the turns of an agent's loop cost as it grows, filtered and read whole, with caches on.

An agent has a system prompt, tools and one request. In every turn it calls a tool, and the result
is added behind all that was there before; the request stays the last user turn. Each turn is sent
to one server with the default filter and to another with `none`, one after the other, whose caches
are as they come. The table has, by turn, the prompt's tokens, how many came out of a cache, how
many were kept and protected, the times of the filter and of the first token, and the server's
processor time for the answer of two tokens, which tells more where a machine does other work.

    python benchmarks/agents/turns_cost.py --models smollm2,random-64k
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.agents import agent_text
from benchmarks.agents.agent_servers import AgentServer, serving
from benchmarks.agents.prompt_parts import Chat
from benchmarks.agents.tables import print_table
from benchmarks.shared import results
from benchmarks.shared.finished_runs import append_run

FILTERS = ("default", "none")
# Tokens of the system prompt and of each result, and the number of tools. SmolLM2's context of
# 8,192 tokens has room for ten turns only if they are shorter.
SIZES: dict[str, tuple[int, int, int]] = {"smollm2": (1200, 480, 5)}
_DEFAULT_SIZES = (4000, 1500, 10)


def make_turns(server: AgentServer, turns: int, seed: int) -> list[Chat]:
    """The chat as it is sent in each turn. The next one begins with all of this one."""
    system, result, num_tools = SIZES.get(server.model, _DEFAULT_SIZES)
    rng = Random(f"turns {seed}")
    writers = (agent_text.source_file, agent_text.document_file, agent_text.web_page)
    tools = agent_text.make_tools(rng, num_tools)
    instructions = agent_text.instructions(rng, agent_text.chars_of(2 * system))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": cut(server.tokenizer, instructions, system)},
        {"role": "user", "content": agent_text.request(rng)},
    ]
    found: list[Chat] = []
    for turn in range(turns):
        tool = rng.choice(tools)
        given = json.dumps(agent_text.arguments(rng, tool))
        call = {
            "id": f"call_{turn:04}",
            "type": "function",
            "function": {"name": tool["function"]["name"], "arguments": given},
        }
        text = writers[turn % len(writers)](rng, agent_text.chars_of(2 * result))
        messages += [
            {"role": "assistant", "content": agent_text.remark(rng), "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": cut(server.tokenizer, text, result),
            },
        ]
        found.append(Chat(name=f"turn {turn + 1}", messages=list(messages), tools=tools))
    return found


def cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The beginning of a text, that many tokens long."""
    offsets = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    return text if len(offsets) <= tokens else text[: offsets[tokens][0]].rstrip()


def run_turn(server: AgentServer, chat: Chat, name: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": chat.messages,
        "tools": chat.tools,
        "temperature": 0,
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
    }
    if name != "default":
        body["filter"] = {"method": name}
    report, _ = server.stream(body)
    return {
        "prompt_tokens": report["prompt_tokens"],
        "cached_tokens": report["cached_tokens"],
        "kept_tokens": report["kept_tokens"],
        "protected_tokens": report.get("protected_tokens"),
        "reason": report["reason"],
        "filter_ms": report["filter_ms"],
        "ttft_s": report["ttft_s"],
        "cpu_s": report["cpu_s"],
    }


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All turns of a model and filter together, and the last one."""
    found: list[dict[str, Any]] = []
    for model, name in dict.fromkeys((row["model"], row["filter"]) for row in rows):
        own = [row for row in rows if (row["model"], row["filter"]) == (model, name)]
        found.append(
            {
                "model": model,
                "filter": name,
                "turns": len(own),
                "total_ttft_s": sum(row["ttft_s"] for row in own),
                "median_ttft_s": statistics.median(row["ttft_s"] for row in own),
                "last_ttft_s": own[-1]["ttft_s"],
                "total_cpu_s": sum(row["cpu_s"] for row in own),
                "last_cpu_s": own[-1]["cpu_s"],
                "cached_share": sum(row["cached_tokens"] for row in own)
                / sum(row["prompt_tokens"] for row in own),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="smollm2,random-64k")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the turns as they end")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        for name in FILTERS:
            with serving(model) as server:
                for chat in make_turns(server, arguments.turns, arguments.seed):
                    results.note(f"{model} {name} {chat.name}")
                    labels = {"model": model, "filter": name, "turn": chat.name.split()[1]}
                    rows.append({**labels, **run_turn(server, chat, name)})
                    if arguments.out is not None:
                        append_run(arguments.out, rows[-1])
    results.note("")
    if not arguments.json:
        print_table(rows)
        print_table(summarize(rows))
    results.finish("turns_cost", "cpu", rows, quiet=True)


if __name__ == "__main__":
    main()
