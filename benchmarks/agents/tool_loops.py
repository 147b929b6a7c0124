"""Tool loops: is a fact found in a file that a tool has returned, filtered and read whole?

In each loop a user asks for a fact that a file holds. The assistant must call `read_file` for that
file (`tool_choice`), and it is checked whether the call is right. Then the file comes as the tool's
result: 3K to 7K tokens of prose with the fact among others of its form, in wordings that nothing
was calibrated on. The answer is asked for twice: with the result as the last message, as agents do
it, and with a further turn of the user that repeats the question. Each time the default filter
answers and then `none`, which reads everything. Loops are appended to a file, from which a stopped
run goes on. The server has no document cache: every time to first token is that of a cold prompt.
`cpu_s` is the server's processor time for a whole answer, for machines that do other work.

    python benchmarks/agents/tool_loops.py --model smollm2 --loops 40 --out loops.jsonl
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

from benchmarks.agents.agent_servers import AgentServer, serving
from benchmarks.agents.prompt_parts import (
    KEPT_WHOLE,
    Chat,
    count_kept,
    find_parts,
    find_text,
    load_tokenizer,
    render,
)
from benchmarks.agents.tables import print_table
from benchmarks.shared import results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from gemserve.calibration.search.example import Example, ExampleDraw, contains, recall
from gemserve.synthetic.natural_facts import KINDS
from gemserve_lab.compare import compare
from gemserve_lab.run import Outcome
from gemserve_lab.tasks.natural import natural_maker
from gemserve_lab.tasks.needle import SUBTASKS

LENGTHS = (3000, 4000, 5000, 6000, 6800)
ENDS = ("result", "question")
FILTERS = ("default", "none")
_ARGUMENTS_TOKENS = 48
_SYSTEM = (
    "You answer questions about the files of a project. Read a file with a tool before you speak "
    "about it. When you have read it, answer in one sentence and call nothing further."
)
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    field: {"type": "string", "maxLength": 60, "description": said}
                    for field, said in fields.items()
                },
                "required": list(fields),
                "additionalProperties": False,
            },
        },
    }
    for name, description, fields in (
        ("read_file", "Returns the text of a file.", {"path": "The file's path."}),
        ("list_files", "Returns the names in a folder.", {"folder": "The folder's path."}),
        ("find_text", "Returns the lines that have a text.", {"text": "What to look for."}),
    )
]
_FOLDERS = ("notes", "archive", "reports", "docs", "minutes")
_NAMES = ("spring", "harbour", "museum", "council", "garden", "expedition", "inventory", "visitors")


def make_loop(tokenizer: Any, facts: str, index: int, loops: int, seed: int) -> dict[str, Any]:
    """One loop: its file and its question. Kinds of facts, lengths and depths take turns."""
    draw = ExampleDraw(
        seed=seed, num_tokens=LENGTHS[index % len(LENGTHS)], index=index, samples=max(loops, 2)
    )
    if facts == "natural":
        make = natural_maker("evaluation", KINDS[(index // len(LENGTHS)) % len(KINDS)])
    else:
        make = SUBTASKS[facts]
    example = make(tokenizer, draw)
    offsets = example.prompt.offsets
    gold = [
        example.prompt.text[offsets[first][0] : offsets[last - 1][1]].strip()
        for first, last in example.gold
    ]
    rng = Random(f"tool loop {seed} {index}")
    path = f"{rng.choice(_FOLDERS)}/{rng.choice(_NAMES)}_{rng.randrange(10, 99)}.txt"
    return {"example": example, "gold": gold, "path": path}


def opening(loop: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked = f"Read the file {loop['path']} and answer this question: {loop['example'].question}"
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]


def ask_call(server: AgentServer, loop: Mapping[str, Any]) -> dict[str, Any]:
    """The forced call, and what is right about it."""
    reply = server.post(
        "/v1/chat/completions",
        {
            "messages": opening(loop),
            "tools": _TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "read_file"}},
            "temperature": 0,
            "max_tokens": _ARGUMENTS_TOKENS,
        },
    )
    calls = reply["choices"][0]["message"].get("tool_calls") or []
    function: dict[str, Any] = calls[0]["function"] if calls else {"name": None, "arguments": ""}
    try:
        given = json.loads(function["arguments"])
    except ValueError:
        given = None
    path = given.get("path") if isinstance(given, dict) else None
    return {
        "is_named": len(calls) == 1 and function["name"] == "read_file",
        "is_parsed": isinstance(path, str),
        "has_path": path == loop["path"],
        "has_name": isinstance(path, str) and Path(path).name == Path(loop["path"]).name,
        "arguments": function["arguments"],
    }


def closing(loop: Mapping[str, Any], ends_with: str) -> Chat:
    """The chat when the file has been read; the call in it is the right one."""
    function = {"name": "read_file", "arguments": json.dumps({"path": loop["path"]})}
    call = {"id": "call_0001", "type": "function", "function": function}
    example: Example = loop["example"]
    messages = [
        *opening(loop),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0001", "content": example.document},
    ]
    if ends_with == "question":
        messages.append({"role": "user", "content": example.question})
    return Chat(name=ends_with, messages=messages, tools=_TOOLS)


def ask_answer(
    server: AgentServer, loop: Mapping[str, Any], ends_with: str, name: str
) -> dict[str, Any]:
    """A greedy streamed answer under a filter: is it right, and what was read for it?"""
    chat, example = closing(loop, ends_with), loop["example"]
    prompt = render(server.tokenizer, chat)
    options: dict[str, Any] = {"return_selection": True}
    if name != "default":
        options["method"] = name
    body = {
        "messages": chat.messages,
        "tools": _TOOLS,
        "filter": options,
        "temperature": 0,
        "max_tokens": example.max_tokens,
    }
    report, chunks = server.stream(body)
    assert report["prompt_tokens"] == len(prompt.ids), "the server reads another prompt"
    kept = report["selection"] or [(0, len(prompt.ids))]
    low = prompt.text.index(example.document)
    gold = [find_text(prompt, text, low) for text in loop["gold"]]
    parts = find_parts(server.tokenizer, chat, prompt)
    counts = count_kept(parts, [(start, stop) for start, stop in kept])
    deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices") or ()]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return {
        "ends": ends_with,
        "filter": name,
        "score": contains(text, example),
        "calls_again": any(delta.get("tool_calls") for delta in deltas),
        "recall": recall(gold, kept),
        "lost": sum(
            part.stop - part.start - count
            for part, count in zip(parts, counts, strict=True)
            if part.role in KEPT_WHOLE
        ),
        "ttft_s": report["ttft_s"],
        "cpu_s": report["cpu_s"],
        "prompt_tokens": report["prompt_tokens"],
        "kept_tokens": report["kept_tokens"],
        "protected_tokens": report.get("protected_tokens"),
        "applied": report["applied"],
        "reason": report["reason"],
        "text": text,
    }


def run_loop(
    server: AgentServer, arguments: argparse.Namespace, index: int, done: list[dict[str, Any]]
) -> dict[str, Any]:
    """A loop's call and answers, or what an earlier run has stored of them."""
    key = {
        "model": server.model,
        "facts": arguments.facts,
        "loops": arguments.loops,
        "seed": arguments.seed,
        "ends_with": arguments.ends,
        "index": index,
    }
    found = find_run(done, key)
    if found is not None:
        return found
    loop = make_loop(server.tokenizer, arguments.facts, index, arguments.loops, seed=arguments.seed)
    answers = [
        ask_answer(server, loop, ends_with, name)
        for ends_with in arguments.ends.split(",")
        for name in FILTERS
    ]
    example: Example = loop["example"]
    run = {
        **key,
        "tokens": example.num_tokens,
        "question": example.question,
        "expected": list(example.answers),
        "call": ask_call(server, loop),
        "answers": answers,
    }
    if arguments.out is not None:
        append_run(arguments.out, run)
    return run


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each ending and filter: right answers, needed tokens kept, and times to first token."""
    found: list[dict[str, Any]] = []
    answers = [answer for run in runs for answer in run["answers"]]
    for ends_with in dict.fromkeys(answer["ends"] for answer in answers):
        for name in FILTERS:
            own = [a for a in answers if (a["ends"], a["filter"]) == (ends_with, name)]
            found.append(
                {
                    "ends_with": ends_with,
                    "filter": name,
                    "n": len(own),
                    "score": statistics.mean(a["score"] for a in own),
                    "recall": statistics.mean(a["recall"] for a in own),
                    "lost": sum(a["lost"] for a in own),
                    "applied": sum(a["applied"] for a in own),
                    "fallbacks": sum(a["reason"] in ("diffuse_attention", "widened") for a in own),
                    "calls_again": sum(a["calls_again"] for a in own),
                    "prompt": statistics.mean(a["prompt_tokens"] for a in own),
                    "kept": statistics.mean(a["kept_tokens"] for a in own),
                    "ttft_s": statistics.median(a["ttft_s"] for a in own),
                    "cpu_s": statistics.median(a["cpu_s"] or 0.0 for a in own),
                }
            )
    return found


def compare_filters(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Right answers of the default filter minus those of `none`, with 95% intervals."""
    found: list[dict[str, Any]] = []
    for ends_with in dict.fromkeys(a["ends"] for run in runs for a in run["answers"]):
        outcomes = [
            Outcome(
                subtask="tool loop",
                prompt_tokens=run["tokens"],
                samples=run["loops"],
                index=run["index"],
                method=a["filter"],
                keep=16,
                score=a["score"],
                recall=a["recall"],
                kept_tokens=a["kept_tokens"],
                depth=None,
                text=a["text"],
            )
            for run in runs
            for a in run["answers"]
            if a["ends"] == ends_with
        ]
        c = compare(outcomes, "default", "none")
        row = {"ends_with": ends_with, "difference": c.difference, "low": c.low, "high": c.high}
        found.append({**row, "n": c.n})
    return found


def count_calls(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many calls name the function, have arguments by its schema, and name the file."""
    calls = [run["call"] for run in runs]
    names = ("is_named", "is_parsed", "has_path", "has_name")
    return {"calls": len(calls), **{name: sum(call[name] for call in calls) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a running server of that model, without a cache")
    parser.add_argument("--loops", type=int, default=40, help="default: %(default)s")
    parser.add_argument(
        "--facts",
        choices=("natural", "single", "multikey"),
        default="natural",
        help="natural facts, or codes and numbers as the built-in model knows them",
    )
    parser.add_argument("--ends", default=",".join(ENDS), help="what the last message is")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a file for finished loops, to go on from")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    done = [] if arguments.out is None else read_runs(arguments.out)
    runs: list[dict[str, Any]] = []

    def run_all(server: AgentServer) -> None:
        for index in range(arguments.loops):
            results.note(f"loop {index + 1} of {arguments.loops}")
            runs.append(run_loop(server, arguments, index, done))

    if arguments.url is None:
        with serving(arguments.model, "--cache-memory", "0") as server:
            run_all(server)
    else:
        tokenizer = load_tokenizer(arguments.model)
        with AgentServer(arguments.url, arguments.model, tokenizer) as server:
            run_all(server)
    results.note("")
    rows = [{"model": arguments.model, "facts": arguments.facts, **row} for row in summarize(runs)]
    pairs, calls = compare_filters(runs), count_calls(runs)
    if not arguments.json:
        print_table(rows)
        print_table(pairs)
        print_table([calls])
    of_pairs = [{"pair": "default − none", **pair} for pair in pairs]
    results.finish("tool_loops", "cpu", [*rows, *of_pairs, calls], quiet=True)


if __name__ == "__main__":
    main()
