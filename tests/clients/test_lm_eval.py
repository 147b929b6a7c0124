"""lm-evaluation-harness measures through the server what it measures in transformers."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve.model.loading.loader import BUILTIN_PATH
from tests.clients.environments import python_of, script_of
from tests.fakes import live_server, parse_metrics, wait_for
from tests.guide import examples, run_example

KEY = "of-the-harness"
WINDOW = 2400  # tokens at once: the default filter would shorten as many
FILLER = "The river runs past the houses, they say; nobody counts them. "
THINGS = ("lantern", "anchor", "kettle", "ladder", "compass", "violin", "hammer", "basket")
CODES = [str(10007 + 8123 * number) for number in range(len(THINGS))]
FACTS = [
    {
        "context": f"{FILLER * (number % 5)}The code for the {thing} is {CODES[number]}. {FILLER}"
        f"\nWhat is the code for the {thing}?",
        "choices": [CODES[(number + shift) % len(CODES)] for shift in range(4)],
        "right": 0,
    }
    for number, thing in enumerate(THINGS)
]
FACTS.append({"context": "", "choices": ["Zoë 🌍", "the river", "a"], "right": 1})
TEXTS = [{"text": text} for text in ("a", "Zoë says: 🌍", FILLER * 3, FILLER * 200)]
TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}} ",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}
CODE = """
import json
import lm_eval
from lm_eval.tasks import TaskManager

manager = TaskManager(include_path=".", include_defaults=False)
found = {}
for name, options in RUNS.items():
    options = {"tasks": TASKS, "batch_size": 4, **options}
    done = lm_eval.simple_evaluate(**options, task_manager=manager, bootstrap_iters=0)
    found[name] = {
        task: {
            "metrics": {
                metric: float(value)
                for metric, value in done["results"][task].items()
                if metric.endswith(",none") and "stderr" not in metric
            },
            "replies": [
                [reply[0] for reply in sample["resps"]]
                for sample in sorted(samples, key=lambda sample: sample["doc_id"])
            ],
        }
        for task, samples in done["samples"].items()
    }
print()
print(json.dumps(found))
"""


OFFLINE = {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`gemserve serve` with the built-in model, its default filter and one key."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(KEY, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gemserve.cli.main", "serve", "--model", "builtin"]
    command += ["--device", "cpu", "--port", str(port), "--api-key-file", "keys"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: server.poll() is not None or is_ready(address), 120)
        assert server.poll() is None, (folder / "log").read_text()
        yield address
    finally:
        server.terminate()
        server.wait(30)


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ready").is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def found(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By run and task: the metrics and, of each document, the replies."""
    interpreter = python_of("lm-eval")
    folder = tmp_path_factory.mktemp("tasks")
    for task, fields in TASKS.items():
        rows = TEXTS if task == "read" else FACTS
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")
        data = {"test_split": "test", "dataset_kwargs": {"data_files": {"test": f"{task}.jsonl"}}}
        described = {"task": task, "dataset_path": "json", **data, **fields}
        # JSON is YAML
        (folder / f"{task}.yaml").write_text(json.dumps(described), encoding="utf-8")
    printed = run_example(
        f"RUNS = {runs(url)!r}\nTASKS = {list(TASKS)!r}\n{CODE}",
        "python",
        url=url,
        folder=folder,
        interpreter=interpreter,
        environment={**OFFLINE, "OPENAI_API_KEY": KEY, "HF_HOME": str(folder / "home")},
    )
    results: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return results


def runs(url: str) -> dict[str, dict[str, Any]]:
    """Arguments of `lm_eval.simple_evaluate`, by the run's name."""
    checkpoint = str(BUILTIN_PATH)
    here = {"pretrained": checkpoint, "device": "cpu", "dtype": "float32", "max_length": WINDOW}
    # of what the harness calls the length it keeps two tokens free
    there = {"model": "builtin", "max_length": WINDOW + 2, "auth_token": KEY}
    texts = {**there, "base_url": f"{url}/v1/completions"}
    remote = {**texts, "tokenizer_backend": "remote"}
    local = {**texts, "tokenizer_backend": "huggingface", "tokenizer": checkpoint}
    chats = {**there, "base_url": f"{url}/v1/chat/completions", "num_concurrent": 2}
    chat = {"tasks": ["answer"], "batch_size": 1, "apply_chat_template": True, "num_fewshot": 1}
    chat["system_instruction"] = "Be brief."
    return {
        "here": {"model": "hf", "model_args": {**here, "add_bos_token": False}},
        "remote tokenizer": {"model": "local-completions", "model_args": remote},
        "concurrent": {"model": "local-completions", "model_args": {**remote, "num_concurrent": 4}},
        "bos here": {"model": "hf", "model_args": {**here, "add_bos_token": True}},
        "bos": {"model": "local-completions", "model_args": {**local, "add_bos_token": True}},
        "chat here": {"model": "hf", "model_args": {**here, "add_bos_token": False}, **chat},
        "chat": {"model": "local-chat-completions", "model_args": chats, **chat},
    }


def is_same(reply: Any, expected: Any) -> bool:
    if isinstance(expected, str):  # generated
        return bool(reply == expected)
    if isinstance(expected, list):  # a choice: its log-probability, and is it the likeliest?
        return is_same(reply[0], expected[0]) and reply[1] == expected[1]
    # the harness adds up a text's log-probabilities in float32: thousands of them, to 1e-7 or so
    return math.isclose(reply, expected, rel_tol=1e-6, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("run", "reference"),
    [
        ("remote tokenizer", "here"),
        ("concurrent", "here"),
        ("bos", "bos here"),
        ("chat", "chat here"),
    ],
)
def test_scores_are_those_of_transformers(found: Any, run: str, reference: str) -> None:
    assert found[run].keys() == found[reference].keys()
    for task, expected in found[reference].items():
        own = found[run][task]
        assert own["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
        assert len(own["replies"]) == len(expected["replies"]) > 0
        for replies, others in zip(own["replies"], expected["replies"], strict=True):
            assert all(map(is_same, replies, others)), (task, replies, others)


def test_there_is_something_to_compare(found: Any) -> None:
    """Choices at random, or answers all alike, would agree by chance."""
    own = found["remote tokenizer"]
    assert own["choose"]["metrics"]["acc,none"] > 0.5
    assert len({text for (text,) in own["answer"]["replies"]}) > len(FACTS) / 2


def test_the_guide(tmp_path: Path) -> None:
    scripts = Path(script_of("lm-eval", "lm-eval")).parent
    environment = {**OFFLINE, "PATH": f"{scripts}:{os.environ['PATH']}"}
    environment["HF_HOME"] = str(tmp_path / "home")
    generated, chosen = examples("lm-evaluation-harness", "sh")
    (document,) = examples("", "sh")
    run_example(document, "sh", url="", folder=tmp_path)
    core = build_core(ModelConfig(device="cpu"), EngineConfig(kv_memory_bytes=1 << 28))
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    with live_server(serving) as url:
        printed = run_example(generated, "sh", url=url, folder=tmp_path, environment=environment)
        assert re.search(r"exact_match *\|↑ *\| *1\|", printed), printed
        counts = parse_metrics(httpx.get(f"{url}/metrics").text)
        # whole passages, of 96 tokens at most, as many as fit; and what is always read
        assert 512 - 96 < counts["kept_prompt_tokens_total"] < 512 + 256
        printed = run_example(chosen, "sh", url=url, folder=tmp_path, environment=environment)
        assert re.search(r"acc *\|↑ *\| *1\|", printed), printed
